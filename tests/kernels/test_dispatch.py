"""Implementations are chosen by argument or by the tuning table, and never silently."""

import dataclasses

import pytest

from tpurec.errors import ConfigError
from tpurec.kernels import dispatch
from tpurec.kernels.dispatch import IMPLEMENTATIONS, KernelLimit, Shape, choose, explain, tuning_table
from tpurec.kernels.embedding_bag_sparsecore import Config
from tpurec.kernels.storage import Storage
from tpurec.topology.chips import CHIPS, chip

SHAPE = Shape(Storage(1000, 64), num_bags=128, num_ids=1280)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("v5e", "tensorcore"), ("v5p", "sparsecore"), ("v6e", "sparsecore"), ("7x", "sparsecore")],
)
def test_each_chip_has_its_kernel(name, implementation):
    assert choose("embedding_bag", SHAPE, chip(name)).implementation == implementation
    assert f"embedding_bag: {implementation}, because" in explain("embedding_bag", SHAPE, chip(name))


def test_without_a_tpu_it_is_plain_jax():
    assert explain("embedding_bag", SHAPE, None).startswith("embedding_bag: plain, because no TPU is targeted")


def test_a_name_wins_over_the_table():
    assert choose("embedding_bag", SHAPE, chip("7x"), "plain").reason == "asked for by name"


def test_a_kernel_asked_for_by_name_names_its_limit():
    with pytest.raises(KernelLimit, match=r"v5e has no SparseCore\. Use implementation='plain'"):
        choose("embedding_bag", SHAPE, chip("v5e"), "sparsecore")
    with pytest.raises(KernelLimit, match="at most 128"):
        choose("embedding_bag", SHAPE, chip("7x"), "sparsecore", Config(chunk_rows=256))
    with pytest.raises(KernelLimit, match=r"needs \d+ bytes of a subcore's 262144"):
        choose("embedding_bag", SHAPE, chip("v6e"), "sparsecore", Config(block_bags=2048))


def test_a_shape_beyond_the_limit_goes_to_plain_and_says_so():
    many = dataclasses.replace(SHAPE, num_bags=1_000_000, num_ids=1_000_000)
    said = explain("embedding_bag", many, chip("v5e"))
    assert said.startswith("embedding_bag: plain, because tensorcore cannot take it: the accumulators of 1000000 bags")


def test_every_dim_fits_a_subcore_of_every_chip():
    for name in ("v5p", "v6e", "7x"):
        for dim in range(8, 1281, 8):
            for dtype in ("float32", "bfloat16"):
                for pooling in ("sum", "mean"):
                    shape = Shape(Storage(1000, dim, dtype), 4096, 4096 * 20, weighted=True, pooling=pooling)
                    assert choose("embedding_bag", shape, chip(name)).implementation == "sparsecore", (name, dim)


@pytest.mark.parametrize(("op", "name"), [("embedding", None), ("embedding_bag", "cuda")])
def test_unknown_names_are_refused_with_the_known_ones(op, name):
    with pytest.raises(ConfigError, match=r"Known ops: embedding_bag|There are: plain, sparsecore, tensorcore"):
        choose(op, SHAPE, None, name)


def test_the_tuning_table_names_what_exists():
    for op, entries in tuning_table().items():
        assert op in IMPLEMENTATIONS
        for entry in entries:
            assert set(entry["when"].get("chips", CHIPS)) <= set(CHIPS)


def test_a_wrong_tuning_table_is_refused(monkeypatch, tmp_path):
    (tmp_path / "tuning.toml").write_text('[[embedding_bag]]\nimplementation = "plain"\nwhy = "x"\nwhen = {rows = 3}\n')
    monkeypatch.setattr(dispatch, "files", lambda package: tmp_path)
    tuning_table.cache_clear()
    try:
        with pytest.raises(ConfigError, match="unknown or missing keys: rows"):
            tuning_table()
    finally:
        tuning_table.cache_clear()

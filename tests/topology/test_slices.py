"""Slice names, shapes, ranks and coordinates agree with what Google documents."""

import pytest

from tpurec.errors import ConfigError
from tpurec.topology.slices import SliceTopology, larger, offered

parse = SliceTopology.parse


@pytest.mark.parametrize(
    ("text", "dims", "chips", "ranks", "hosts"),
    [
        ("v6e-1", (1, 1), 1, 1, 1),
        ("v6e-8", (2, 4), 8, 8, 1),
        ("v6e-64", (8, 8), 64, 64, 16),
        ("v5e-16", (4, 4), 16, 16, 4),
        ("v5litepod-256", (16, 16), 256, 256, 64),
        ("v5p-8", (2, 2, 1), 4, 4, 1),
        ("v5p-32", (2, 2, 4), 16, 16, 4),
        ("v5p-128", (4, 4, 4), 64, 64, 16),
        ("v5p-2048", (8, 8, 16), 1024, 1024, 256),
        ("v5p-12288", (16, 16, 24), 6144, 6144, 1536),
        ("tpu7x:1x1x1", (1, 1, 1), 1, 2, 1),
        ("tpu7x:4x4x4", (4, 4, 4), 64, 128, 16),
        ("tpu7x-128", (4, 4, 4), 64, 128, 16),
        ("cpu-4", (4,), 4, 4, 1),
    ],
)
def test_names_give_chips_hosts_and_ranks(text, dims, chips, ranks, hosts):
    slice_ = parse(text)
    assert (slice_.dims, slice_.num_chips, slice_.num_ranks, slice_.num_hosts) == (dims, chips, ranks, hosts)


def test_v5p_numbers_mean_the_documented_shapes():
    # v5p-N counts TensorCores; shapes of google/xpk's table, a sample across its range
    documented = {
        16: "2x2x2", 64: "2x4x4", 256: "4x4x8", 384: "4x4x12", 640: "4x4x20", 768: "4x8x12", 1024: "8x8x8",
        1152: "4x12x12", 1536: "8x8x12", 1920: "4x12x20", 3072: "8x12x16", 3456: "12x12x12", 4224: "4x12x44",
        4480: "4x20x28", 5888: "4x8x92", 6912: "12x12x24", 7552: "4x4x236", 8960: "8x20x28", 10368: "12x12x36",
        11904: "4x12x124",
    }  # fmt: skip
    assert {n: parse(f"v5p-{n}").shape for n in documented} == documented


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("v6e-64", (False, False)),  # no wraparound below 16 chips
        ("v6e-128", (False, True)),
        ("v6e-256", (True, True)),
        ("v5p-64", (False, False, False)),  # part of a cube, although two dimensions are 4
        ("v5p-128", (True, True, True)),
        ("tpu7x:4x4x8", (True, True, True)),
    ],
)
def test_wraparound_is_only_where_it_exists(text, closed):
    assert parse(text).wraparound == closed


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("v6e-48", "v6e-32, v6e-64"),
        ("v6e:4x16", "v6e-64"),
        ("v5p-100", "v5p-64, v5p-128"),
        ("v5p-17920", "v5p-12288"),  # the pod is larger than any slice of it
        ("tpu7x:4x4x6", "tpu7x:4x4x4, tpu7x:4x4x8"),
    ],
)
def test_other_shapes_are_refused_with_the_nearest_named(text, nearest):
    with pytest.raises(ConfigError, match="Google offers no") as caught:
        parse(text)
    assert f"The nearest: {nearest}." in str(caught.value)


@pytest.mark.parametrize("text", ["", "v6e", "v6e-", "v6e-0", "v4-8", "cpu-0", "cpu-9999", "cpu:2x2", "v6e-64x"])
def test_nonsense_is_refused(text):
    with pytest.raises(ConfigError):
        parse(text)


@pytest.mark.parametrize("generation", ["v5e", "v5p", "v6e", "7x"])
def test_every_offered_name_reads_back_to_itself(generation):
    names = offered(generation)
    assert len(names) == len(set(names)) >= 8
    assert [parse(name).name for name in names] == names


@pytest.mark.parametrize("text", ["v6e-8", "v6e-64", "v5p-128", "tpu7x:2x2x2", "tpu7x:4x4x4", "cpu-3"])
def test_ranks_fill_the_torus_once_per_device_and_hosts_are_blocks(text):
    slice_ = parse(text)
    at = [slice_.coordinates(rank) for rank in range(slice_.num_ranks)]
    assert all(at.count(c) == slice_.ranks_per_chip for c in set(at)) and len(set(at)) == slice_.num_chips
    for host in range(slice_.num_hosts):
        mine = [at[rank] for rank in range(slice_.num_ranks) if slice_.host(rank) == host]
        spans = [max(c) - min(c) + 1 for c in zip(*mine, strict=True)]
        assert spans == list(slice_.host_dims)
    if slice_.ranks_per_chip == 2:
        assert at[0] == at[1] != at[2]
    with pytest.raises(ConfigError, match="has ranks 0 to"):
        slice_.coordinates(slice_.num_ranks)


def test_lines_cover_all_ranks_in_order_of_the_torus():
    slice_ = parse("v5p-256")
    lines = slice_.lines(2)
    assert sorted(rank for line in lines for rank in line) == list(range(slice_.num_ranks))
    assert [slice_.coordinates(rank)[2] for rank in lines[5]] == list(range(8))


def test_larger_slices_at_least_double():
    assert [s.name for s in larger(parse("v6e-64"))] == ["v6e-128", "v6e-256"]
    assert [s.name for s in larger(parse("v5p-64"))] == ["v5p-128", "v5p-256", "v5p-512"]
    assert [s.name for s in larger(parse("cpu-4"), 2)] == ["cpu-8", "cpu-16"]
    assert larger(parse("v6e-256")) == []

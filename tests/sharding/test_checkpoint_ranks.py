"""Checkpoints that several ranks write together and any number of ranks loads: exact, complete or absent."""

import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.synthetic_shards import (
    SHARDINGS,
    STATE,
    WEIGHT,
    cut,
    on_ranks,
    placed,
    plan_of,
    plans,
    table_shapes,
    whole_state,
)
from tpurec.sharding import checkpoint, checkpoint_part, safetensors_storage
from tpurec.sharding.checkpoint import (
    MANIFEST,
    Checkpointer,
    CheckpointError,
    load_checkpoint,
    read_manifest,
    verify_checkpoint,
)
from tpurec.sharding.checkpoint_manifest import sealed
from tpurec.sharding.pieces import TensorPiece

SHAPES = [("a", 37, 8, "row_wise_adagrad"), ("b", 20, 6, "adagrad"), ("c", 3, 4, "row_wise_adagrad")]
DENSE = {"model.over.bias": torch.arange(5.0), "rng.torch": torch.arange(11, dtype=torch.uint8)}


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch):
    monkeypatch.setattr(checkpoint, "Ranks", lambda group: group)


def checkpointer(folder, ranks, **more):
    return Checkpointer(Path(folder), keep_last=2, process_group=ranks, **more)


def save(folder, plan, tensors, dense=DENSE, change=lambda rank, pieces: pieces, step=7):
    world_size = plan.topology.num_ranks

    def action(ranks):
        pieces = change(ranks.rank, cut(plan, ranks.rank, tensors))
        mine = dense if ranks.rank == 0 else {name: tensor * 0 for name, tensor in dense.items()}
        return checkpointer(folder, ranks).save(step, mine, {"epoch": 1, "rank": ranks.rank}, 0.5, pieces=pieces)

    return on_ranks(world_size, action)


def saved(folder, plan, tensors, **more):
    results = save(folder, plan, tensors, **more)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert len(set(results)) == 1
    return results[0]


def check_load(folder, plan, tensors):
    """Load under a plan, each rank alone, and compare every piece, the copies included."""
    for rank in range(plan.topology.num_ranks):
        dense = {name: torch.zeros_like(tensor) for name, tensor in DENSE.items()}
        pieces = cut(plan, rank, tensors, fill=-1.0)
        manifest = load_checkpoint(folder, dense, pieces=pieces)
        assert manifest.state == {"epoch": 1, "rank": 0}
        assert all(torch.equal(dense[name], DENSE[name]) for name in DENSE)
        for piece, expected in zip(pieces, cut(plan, rank, tensors), strict=True):
            assert torch.equal(piece.tensor, expected.tensor), (rank, piece.name, piece.region)


def check_load_unsharded(folder, tensors):
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in (tensors | DENSE).items()}
    load_checkpoint(folder, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in (tensors | DENSE).items())


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_plan_loads_under_any_other_on_any_world_size_bit_for_bit(data):
    shapes = data.draw(table_shapes())
    tensors = whole_state(shapes)
    before = data.draw(plans(shapes, data.draw(st.sampled_from([1, 2, 3, 4, 8]))))
    after = data.draw(plans(shapes, data.draw(st.sampled_from([1, 2, 3, 4, 8]))))
    block_bytes = data.draw(st.sampled_from([1, 64, 16 << 20]))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_storage, "BLOCK_BYTES", block_bytes)
        path = saved(folder, before, tensors)
        check_load(path, after, tensors)
        check_load_unsharded(path, tensors)
        verify_checkpoint(path)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_four_ranks_to_one_two_and_eight_from_every_sharding_to_every_other(tmp_path, sharding, world_size):
    tensors = whole_state(SHAPES)
    path = saved(tmp_path, plan_of([placed(*shape, sharding, 4, 1) for shape in SHAPES], 4), tensors)
    for other in SHARDINGS:
        plan = plan_of([placed(*shape, other, world_size, world_size - 1) for shape in SHAPES], world_size)
        check_load(path, plan, tensors)
    check_load_unsharded(path, tensors)


def test_names_depend_on_neither_plan_nor_world_size_and_one_copy_is_written(tmp_path):
    tensors = whole_state(SHAPES)
    names, sizes = [], []
    for number, (sharding, world_size) in enumerate([("data_parallel", 4), ("column_wise", 3), ("row_wise", 2)]):
        plan = plan_of([placed(*shape, sharding, world_size) for shape in SHAPES], world_size)
        path = saved(tmp_path / str(number), plan, tensors)
        manifest = read_manifest(path)
        names.append(sorted(manifest.tensors))
        sizes.append(sum(piece.region.size for entry in manifest.tensors.values() for piece in entry.pieces))
        assert manifest.world_size == world_size
    assert names[0] == names[1] == names[2] == sorted(tensors | DENSE)
    assert set(sizes) == {sum(tensor.numel() for tensor in (tensors | DENSE).values())}


def test_a_file_is_plain_safetensors_with_the_slice_in_the_names_of_its_pieces(tmp_path):
    from safetensors import safe_open

    tensors = whole_state(SHAPES)
    path = saved(tmp_path, plan_of([placed(*shape, "row_wise", 4) for shape in SHAPES], 4), tensors)
    with safe_open(path / "rank-00001.safetensors", framework="pt") as stream:
        rows = stream.get_tensor(WEIGHT.format("a") + "[1:34:4, 0:8]")
        sums = stream.get_tensor(STATE.format("a") + "[1:34:4]")
    assert torch.equal(rows, tensors[WEIGHT.format("a")][1::4])
    assert torch.equal(sums, tensors[STATE.format("a")][1::4])


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_if_one_rank_cannot_write_all_fail_with_the_cause_and_nothing_is_left(tmp_path, monkeypatch, failing, error):
    plan = plan_of([placed(*shape, "row_wise", 4) for shape in SHAPES], 4)
    tensors = whole_state(SHAPES)
    saved(tmp_path, plan, tensors, step=1)
    original = checkpoint_part.write_file

    def write(path, *more):
        if path.name == f"rank-{failing:05d}.safetensors":
            raise error
        return original(path, *more)

    monkeypatch.setattr(checkpoint_part, "write_file", write)
    results = save(tmp_path, plan, tensors, step=2)
    cause = "interrupted" if isinstance(error, KeyboardInterrupt) else "No space left"
    for rank, result in enumerate(results):
        if rank == failing and isinstance(error, KeyboardInterrupt):
            assert result is error
        else:
            assert isinstance(result, CheckpointError)
            assert f"rank {failing}: " in str(result) and cause in str(result)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    monkeypatch.setattr(checkpoint_part, "write_file", original)
    check_load(saved(tmp_path, plan, tensors, step=2), plan, tensors)


def test_rows_that_no_rank_or_two_ranks_write_are_named_before_anything_is_written(tmp_path, monkeypatch):
    plan = plan_of([placed(*shape, "row_wise", 4) for shape in SHAPES], 4)
    tensors = whole_state(SHAPES)

    def without(rank, pieces):
        return pieces if rank != 2 else [p for p in pieces if p.name != STATE.format("a")]

    def twice(rank, pieces):
        if rank != 3:
            return pieces
        return [*pieces, TensorPiece(WEIGHT.format("b"), (20, 6), 5, 1, (2, 3), torch.zeros(1, 1))]

    def other_shape(rank, pieces):
        return pieces if rank else [*pieces[1:], TensorPiece(pieces[0].name, (38, 8), 0, 4, None, torch.zeros(10, 8))]

    monkeypatch.setattr(checkpoint_part, "write_file", None)
    cases = [
        (without, rf"'{STATE.format('a')}': rows 2, 6, 10, 14, 18 and 4 more of columns 0 to 1 are in no piece"),
        (twice, rf"'{WEIGHT.format('b')}': row 5 of columns 2 to 3 is in more than one piece"),
        (other_shape, rf"'{WEIGHT.format('a')}' is float32 \[37, 8\] on rank 1 and float32 \[38, 8\] on another"),
    ]
    for change, message in cases:
        for result in save(tmp_path, plan, tensors, change=change):
            with pytest.raises(CheckpointError, match=message):
                raise result
    results = on_ranks(2, lambda ranks: checkpointer(tmp_path, ranks).save(5 + ranks.rank, DENSE, {}))
    assert all("the ranks are at different steps, [5, 6]" in str(result) for result in results)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_given_in_two_ways_fails_on_every_rank(tmp_path):
    plan = plan_of([placed(*shape, "row_wise", 2) for shape in SHAPES], 2)
    tensors = whole_state(SHAPES)
    both = DENSE | {WEIGHT.format("a"): tensors[WEIGHT.format("a")]}
    for result in save(tmp_path, plan, tensors, dense=both):
        assert "is given both as a whole tensor and as a piece" in str(result)
    complex_ = {"model.c": torch.zeros(3, dtype=torch.complex64)}
    for result in save(tmp_path, plan, tensors, dense=complex_):
        assert "'model.c': torch.complex64 cannot be saved" in str(result)


def row_wise_checkpoint(tmp_path):
    plan = plan_of([placed(*shape, "row_wise", 4) for shape in SHAPES], 4)
    tensors = whole_state(SHAPES)
    return saved(tmp_path, plan, tensors), plan, tensors


def test_pieces_missing_from_the_manifest_or_there_twice_are_named_and_nothing_is_loaded(tmp_path):
    path, _, tensors = row_wise_checkpoint(tmp_path)
    good = json.loads((path / MANIFEST).read_text())
    name = WEIGHT.format("a")
    cases = [
        (lambda pieces: pieces.pop(1), rf"'{name}': rows 1, 5, 9, 13, 17 and 4 more of columns 0 to 8 are in no piece"),
        (lambda pieces: pieces.append(pieces[1]), "row 1 of columns 0 to 8 is in more than one piece"),
        (lambda pieces: pieces[1]["columns"].reverse(), "a piece holds"),
        (lambda pieces: pieces[1]["rows"].__setitem__(0, -3), "a piece holds"),
        (lambda pieces: pieces[1]["sha256"].clear(), r"manifest\.json: damaged"),
    ]
    for change, message in cases:
        values = json.loads(json.dumps(good))
        change(values["tensors"][name]["pieces"])
        (path / MANIFEST).write_text(sealed(json.dumps(values)[:-1]))
        loaded = {key: torch.full_like(tensor, -1) for key, tensor in (tensors | DENSE).items() if key != "rng.torch"}
        loaded["rng.torch"] = torch.zeros_like(DENSE["rng.torch"])
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, loaded)
        assert all((tensor == -1).all() for key, tensor in loaded.items() if key != "rng.torch")


def test_a_swap_of_rows_between_two_pieces_of_the_manifest_is_noticed(tmp_path):
    path, _, tensors = row_wise_checkpoint(tmp_path)
    values = json.loads((path / MANIFEST).read_text())
    pieces = values["tensors"][WEIGHT.format("b")]["pieces"]
    pieces[0]["rows"], pieces[1]["rows"] = pieces[1]["rows"], pieces[0]["rows"]
    (path / MANIFEST).write_text(sealed(json.dumps(values)[:-1]))
    with pytest.raises(CheckpointError, match=r"rank-0000[01]\.safetensors: it (holds|lacks) 'model\.ebc"):
        load_checkpoint(path, {name: torch.zeros_like(tensor) for name, tensor in (tensors | DENSE).items()})


def test_files_too_many_too_few_or_with_more_in_them_are_named(tmp_path):
    path, _, tensors = row_wise_checkpoint(tmp_path)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in (tensors | DENSE).items()}
    stray = path / "rank-00009.safetensors"
    stray.write_bytes((path / "rank-00001.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"rank-00009\.safetensors: not in the checkpoint's manifest"):
        load_checkpoint(path, loaded)
    stray.rename(path / "rank-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-00002\.safetensors: it holds '.*\[1:"):
        load_checkpoint(path, loaded)
    (path / "rank-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00002\.safetensors: missing"):
        load_checkpoint(path, loaded)


def test_a_rank_verifies_what_it_reads_and_nothing_else(tmp_path):
    plan = plan_of([placed(*SHAPES[0], "table_wise", 2, 0), placed(*SHAPES[1], "table_wise", 2, 1)], 2)
    tensors = whole_state(SHAPES[:2])
    path = saved(tmp_path, plan, tensors)
    data = bytearray((path / "rank-00001.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "rank-00001.safetensors").write_bytes(data)
    load_checkpoint(path, dict(DENSE), pieces=cut(plan, 0, tensors, fill=-1.0))
    problem = r"rank-00001\.safetensors: its contents changed since it was written: rows 0 to 20 of '.*\.b\."
    with pytest.raises(CheckpointError, match=problem):
        load_checkpoint(path, dict(DENSE), pieces=cut(plan, 1, tensors, fill=-1.0))
    with pytest.raises(CheckpointError, match=problem):
        verify_checkpoint(path)
    with pytest.raises(CheckpointError, match=problem):
        check_load_unsharded(path, tensors)
    load_checkpoint(path, dict(DENSE), pieces=cut(plan, 1, tensors, fill=-1.0), verify=False)


def test_every_flipped_byte_of_a_file_is_noticed(tmp_path):
    plan = plan_of([placed("a", 3, 2, "row_wise_adagrad", "row_wise", 2)], 2)
    tensors = whole_state([("a", 3, 2, "row_wise_adagrad")])
    path = saved(tmp_path, plan, tensors, dense={})
    file = path / "rank-00000.safetensors"
    data = file.read_bytes()
    for place in range(len(data)):
        file.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: "):
            verify_checkpoint(path)


def test_every_flipped_byte_of_a_manifest_is_noticed(tmp_path):
    plan = plan_of([placed("a", 3, 2, "row_wise_adagrad", "row_wise", 2)], 2)
    path = saved(tmp_path, plan, whole_state([("a", 3, 2, "row_wise_adagrad")]), dense={})
    data = (path / MANIFEST).read_bytes()
    for place in range(len(data)):
        (path / MANIFEST).write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json: (damaged|format version)"):
            read_manifest(path)


def places(value, path=()):
    """Every place in a JSON value."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def test_whatever_a_manifest_says_it_is_an_error_or_changes_no_value(tmp_path):
    """Sealed anew, as one made up by somebody would be."""
    plan = plan_of([placed("a", 3, 2, "row_wise_adagrad", "row_wise", 2)], 2)
    tensors = whole_state([("a", 3, 2, "row_wise_adagrad")])
    path = saved(tmp_path, plan, tensors, dense={})
    good = json.loads((path / MANIFEST).read_text())
    del good["sha256"]
    refused = 0
    for place in places(good):
        for odd in (None, -1, 1, 10**18, 1.5, 1e308, "x", "", [], {}, True, "rank-00001.safetensors", "/etc/passwd"):
            values = inner = json.loads(json.dumps(good))
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = odd
            (path / MANIFEST).write_text(sealed(json.dumps(values)[:-1]))
            loaded = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
            try:
                load_checkpoint(path, loaded)
                verify_checkpoint(path)
            except CheckpointError:
                refused += 1
            else:
                assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items()), (place, odd)
    assert refused > 400


def test_pieces_that_are_views_of_a_wider_storage_are_written_and_filled_in_place(tmp_path):
    storage = torch.arange(60.0).view(10, 6)
    piece = TensorPiece("t", (20, 5), 1, 2, (1, 4), storage[:, 2:5])
    rest = [
        TensorPiece("t", (20, 5), 1, 2, (0, 1), torch.zeros(10, 1)),
        TensorPiece("t", (20, 5), 1, 2, (4, 5), torch.zeros(10, 1)),
        TensorPiece("t", (20, 5), 0, 2, None, torch.zeros(5, 10).t()),
    ]
    (path,) = on_ranks(1, lambda ranks: checkpointer(tmp_path, ranks).save(1, {}, {}, pieces=[piece, *rest]))
    other = torch.full((12, 9), -1.0)
    taken = TensorPiece("t", (20, 5), 1, 2, (1, 4), other[1:11].t()[3:6].t())
    load_checkpoint(path, {}, pieces=[taken])
    assert torch.equal(other[1:11, 3:6], storage[:, 2:5])
    other[1:11, 3:6] = -1
    assert (other == -1).all(), "nothing around it was touched"


def test_a_rank_reads_only_the_blocks_that_hold_rows_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_storage, "BLOCK_BYTES", 8 * 4 * 10)  # ten rows of table `a`
    shape = ("a", 1000, 8, "sgd")
    tensors = whole_state([shape])
    path = saved(tmp_path, plan_of([placed(*shape, "row_wise", 4)], 4), tensors)
    read = []
    original = safetensors_storage.SafetensorsFile.block
    monkeypatch.setattr(
        safetensors_storage.SafetensorsFile,
        "block",
        lambda self, key, dtype, shape, first, stop, digest: (
            read.append(stop - first) or original(self, key, dtype, shape, first, stop, digest)
        ),
    )
    piece = TensorPiece(WEIGHT.format("a"), (1000, 8), 2, 4, None, torch.zeros(250, 8))
    load_checkpoint(path, {}, pieces=[piece], only="model.ebc")
    assert sum(read) == 250, "one file's rows, each once"
    read.clear()
    few = TensorPiece(WEIGHT.format("a"), (1000, 8), 400, 1, None, torch.zeros(5, 8))
    load_checkpoint(path, {}, pieces=[few], only="model.ebc")
    assert torch.equal(few.tensor, tensors[WEIGHT.format("a")][400:405])
    assert sum(read) == 40, "one block of each file"


def test_every_name_must_be_asked_for_and_an_empty_piece_asks(tmp_path):
    path, plan, tensors = row_wise_checkpoint(tmp_path)
    pieces = cut(plan, 0, tensors, fill=-1.0)
    with pytest.raises(CheckpointError, match=r"has 'model\.ebc\.embedding_bags\.b\.weight', which nothing here takes"):
        load_checkpoint(path, dict(DENSE), pieces=[p for p in pieces if p.name != WEIGHT.format("b")])
    empty = TensorPiece(WEIGHT.format("b"), (20, 6), 0, 1, None, torch.zeros(0, 6))
    load_checkpoint(path, dict(DENSE), pieces=[*(p for p in pieces if p.name != WEIGHT.format("b")), empty])
    wrong = TensorPiece(WEIGHT.format("b"), (21, 6), 0, 1, None, torch.zeros(0, 6))
    with pytest.raises(CheckpointError, match=r"is float32 \[20, 6\], here it is float32 \[21, 6\]"):
        load_checkpoint(path, dict(DENSE), pieces=[*(p for p in pieces if p.name != WEIGHT.format("b")), wrong])


def test_a_full_disk_is_named_before_anything_is_written(tmp_path, monkeypatch):
    plan = plan_of([placed(*shape, "row_wise", 4) for shape in SHAPES], 4)
    usage = checkpoint.shutil.disk_usage(tmp_path)._replace(free=2000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(checkpoint_part, "write_file", None)
    for result in save(tmp_path, plan, whole_state(SHAPES)):
        message = r"step-00000007: cannot be written: it needs 0\.00\d GB, and 0\.000 GB are free\. Free some space"
        with pytest.raises(CheckpointError, match=message):
            raise result
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_not_all_ranks_see_is_named(tmp_path):
    plan = plan_of([placed(*shape, "row_wise", 2) for shape in SHAPES], 2)
    tensors = whole_state(SHAPES)
    results = on_ranks(
        2,
        lambda ranks: checkpointer(tmp_path / str(ranks.rank), ranks).save(
            1, DENSE, {}, pieces=cut(plan, ranks.rank, tensors)
        ),
    )
    assert all("rank 1: " in str(result) and "that all ranks share" in str(result) for result in results)


def test_a_plain_torchrec_collection_and_a_fused_one_take_what_four_ranks_saved(tmp_path):
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    from tpurec.embeddings import FusedEmbeddingBagCollection, RowWiseAdagrad

    shapes = [("a", 37, 8, "row_wise_adagrad"), ("c", 3, 4, "row_wise_adagrad")]
    tensors = whole_state(shapes)
    tables = [placed(*shapes[0], "column_wise", 4, 1), placed(*shapes[1], "table_row_wise", 4, 3)]
    path = saved(tmp_path, plan_of(tables, 4), tensors)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name, rows, dim, _ in shapes
    ]
    plain = EmbeddingBagCollection(tables=configs)
    load_checkpoint(path, plain.state_dict(), prefix="model.ebc.")
    fused = FusedEmbeddingBagCollection(configs, RowWiseAdagrad(lr=0.1))
    load_checkpoint(path, fused.state_dict(), prefix="model.ebc.")
    load_checkpoint(path, fused.optimizer_state_dict(), prefix="optimizer.ebc.")
    for name, *_ in shapes:
        for module in (plain, fused):
            assert torch.equal(module.embedding_bags[name].weight, tensors[WEIGHT.format(name)])
        assert torch.equal(fused.optimizer_state_dict()[f"embedding_bags.{name}.sum"], tensors[STATE.format(name)])
    with pytest.raises(CheckpointError, match="has 'optimizer"):
        load_checkpoint(path, {}, prefix="optimizer.")
    load_checkpoint(path, {}, prefix="optimizer.", partial=True)


@pytest.mark.parametrize("agree", [True, False])
def test_tables_of_one_storage_take_one_number_of_updates_and_not_the_last_of_several(tmp_path, agree):
    from torchrec import EmbeddingBagConfig

    from tpurec.embeddings import Adam, FusedEmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=5, embedding_dim=4, feature_names=[name]) for name in ("a", "b")
    ]
    fused = FusedEmbeddingBagCollection(configs, Adam(lr=0.1))
    state = {f"optimizer.ebc.{name}": tensor.clone() + 1 for name, tensor in fused.optimizer_state_dict().items()}
    state["optimizer.ebc.embedding_bags.a.step"] = torch.tensor(7, dtype=torch.int32)
    state["optimizer.ebc.embedding_bags.b.step"] = torch.tensor(7 if agree else 0, dtype=torch.int32)
    (path,) = on_ranks(1, lambda ranks: checkpointer(tmp_path, ranks).save(1, state, {}))
    if agree:
        load_checkpoint(path, fused.optimizer_state_dict(), prefix="optimizer.ebc.")
        assert fused.optimizer_state_dict()["embedding_bags.a.step"] == 7
        return
    with pytest.raises(CheckpointError, match=r"a\.step' is 7 and .*b\.step' is 0; here they are one number"):
        load_checkpoint(path, fused.optimizer_state_dict(), prefix="optimizer.ebc.")
    assert not any(tensor.any() for tensor in fused.optimizer_state_dict().values()), "nothing was loaded"


def test_the_example_of_the_docs_loads_what_four_ranks_saved(tmp_path):
    from torchrec import EmbeddingBagConfig

    name = "model.sparse_arch.embedding_bag_collection.embedding_bags.user.weight"
    table = torch.randn(10, 4)
    (folder, *_) = on_ranks(
        4,
        lambda ranks: checkpointer(tmp_path, ranks).save(
            1, {}, {}, pieces=[TensorPiece(name, (10, 4), ranks.rank, 4, None, table[ranks.rank :: 4])]
        ),
    )
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    config = EmbeddingBagConfig(name="user", num_embeddings=10, embedding_dim=4, feature_names=["user"])
    names = {"folder": folder, "tables": [config]}
    exec(example, names)
    assert torch.equal(names["collection"].embedding_bags["user"].weight, table)


def test_a_checkpoint_of_version_1_loads_whole_and_in_pieces():
    """The folder was written by the code of that version."""
    folder = Path(__file__).parent / "version_1" / "step-00000012"
    weight = torch.arange(60, dtype=torch.float32).view(15, 4) / 7
    sums = torch.arange(15, dtype=torch.float64) / 3
    loaded = {
        "model.half": torch.zeros(6, dtype=torch.bfloat16),
        "optimizer.step": torch.zeros(()),
        "rng.torch": torch.zeros(11, dtype=torch.uint8),
        "model.empty": torch.zeros(0, 4),
    }
    whole = {"model.table.weight": torch.zeros(15, 4), "optimizer.table.sum": torch.zeros(15, dtype=torch.float64)}
    manifest = load_checkpoint(folder, loaded | whole)
    assert (manifest.version, manifest.step, manifest.state) == (1, 12, {"epoch": 1, "loss": 0.1 + 0.2})
    assert torch.equal(whole["model.table.weight"], weight) and torch.equal(whole["optimizer.table.sum"], sums)
    assert torch.equal(loaded["model.half"], torch.arange(6).bfloat16()) and loaded["optimizer.step"] == 7
    pieces = [
        TensorPiece("model.table.weight", (15, 4), 1, 3, (1, 3), torch.zeros(5, 2)),
        TensorPiece("optimizer.table.sum", (15,), 2, 3, None, torch.zeros(5, dtype=torch.float64)),
    ]
    load_checkpoint(folder, loaded, pieces=pieces)
    assert torch.equal(pieces[0].tensor, weight[1::3, 1:3]) and torch.equal(pieces[1].tensor, sums[2::3])
    verify_checkpoint(folder)


def test_a_damaged_checkpoint_of_version_1_is_named(tmp_path):
    source = Path(__file__).parent / "version_1" / "step-00000012"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = bytearray((tmp_path / "rank-00000.safetensors").read_bytes())
    data[-5] ^= 1
    (tmp_path / "rank-00000.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: its contents changed"):
        verify_checkpoint(tmp_path)

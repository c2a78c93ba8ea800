"""Checkpoints by real processes over gloo: all succeed or all fail, whoever dies; and what a load costs in memory."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.sharding.synthetic_shards import WEIGHT, cut, placed, plan_of, whole_state
from tpurec.sharding.checkpoint import Checkpointer, list_checkpoints, load_checkpoint
from tpurec.sharding.pieces import TensorPiece

pytestmark = pytest.mark.multiprocess
SHAPES = [("a", 37, 8, "row_wise_adagrad"), ("b", 20, 6, "adagrad"), ("c", 3, 4, "row_wise_adagrad")]
KINDS = ["row_wise", "column_wise", "data_parallel"]


def plan_for(world_size, first=0):
    kinds = KINDS[first:] + KINDS[:first]
    return plan_of([placed(*shape, kind, world_size, 1) for shape, kind in zip(SHAPES, kinds, strict=True)], world_size)


def run(rank, world_size, folder, action, results):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/../rendezvous-{world_size}", rank=rank, world_size=world_size
    )
    try:
        results.put((rank, action(rank, world_size, Path(folder))))
    except BaseException as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
    results.close()
    results.join_thread()
    os._exit(0)  # a peer may be dead: nothing more to say to it


def on_processes(world_size, folder, action, dead=()):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=run, args=(rank, world_size, str(folder), action, results)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in range(world_size - len(dead)))
    for process in processes:
        process.join(60)
    return found


def save_asynchronously(rank, world_size, folder):
    import torch.distributed as dist

    tensors = whole_state(SHAPES)
    dense = {"model.bias": torch.arange(5.0)}
    with Checkpointer(folder, 2, process_group=dist.group.WORLD, asynchronous=True) as checkpointer:
        for step in (1, 2, 3):
            pieces = cut(plan_for(world_size), rank, tensors)
            checkpointer.save(step, dense, {"step": step}, pieces=pieces)
            for piece in pieces:
                piece.tensor.fill_(-7)
            # What training does meanwhile: its own collectives, which must not meet the checkpoint's.
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert (total == world_size).all()
    return "saved"


def load_and_compare(rank, world_size, folder):
    tensors = whole_state(SHAPES)
    pieces = cut(plan_for(world_size, first=1), rank, tensors, fill=-1.0)
    load_checkpoint(folder / "step-00000003", {"model.bias": torch.zeros(5)}, pieces=pieces)
    expected = cut(plan_for(world_size, first=1), rank, tensors)
    assert all(torch.equal(piece.tensor, other.tensor) for piece, other in zip(pieces, expected, strict=True))
    return "equal"


def test_four_processes_save_and_two_and_one_load(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    assert set(on_processes(4, folder, save_asynchronously).values()) == {"saved"}
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000002", "step-00000003"]
    assert set(on_processes(2, folder, load_and_compare).values()) == {"equal"}
    tensors = whole_state(SHAPES)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_checkpoint(folder / "step-00000003", loaded | {"model.bias": torch.zeros(5)})
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def save_while_one_dies(rank, world_size, folder):
    import torch.distributed as dist

    from tpurec.sharding import checkpoint_part

    tensors = whole_state(SHAPES)
    pieces = cut(plan_for(world_size), rank, tensors)
    checkpointer = Checkpointer(folder, 2, process_group=dist.group.WORLD)
    checkpointer.save(1, {}, {}, pieces=pieces)
    victim = int(os.environ["TEST_VICTIM"])
    original = checkpoint_part.write_file

    def write(path, *more):
        if rank == victim:
            path.write_bytes(b"half a file")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(path, *more)

    checkpoint_part.write_file = write
    checkpointer.save(2, {}, {}, pieces=pieces)


@pytest.mark.parametrize("victim", [0, 2])
def test_if_a_rank_is_killed_while_it_writes_the_others_fail_and_nothing_looks_complete(tmp_path, monkeypatch, victim):
    """case 24, with several ranks"""
    monkeypatch.setenv("TEST_VICTIM", str(victim))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    results = on_processes(4, folder, save_while_one_dies, dead=[victim])
    assert sorted(results) == [rank for rank in range(4) if rank != victim]
    for text in results.values():
        assert text.startswith("CheckpointError: ") and "step-00000002: cannot be written: another rank is gone" in text
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000001"]
    Checkpointer(folder, 2)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"], "what a killed rank 0 left is removed"


LARGE = (1_000_000, 64)  # 256 MB


def _load_a_part_and_report_peak(folder, num_ranks, result):
    import resource

    torch.set_num_threads(1)
    piece = TensorPiece(
        WEIGHT.format("t"), LARGE, 1, num_ranks, (0, 32), torch.ones(len(range(1, LARGE[0], num_ranks)), 32)
    )
    load_checkpoint(Path(folder).parents[1] / "small" / "step-00000001", {"x": torch.zeros(10)})  # warm up
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load_checkpoint(Path(folder), {}, pieces=[piece])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    right = all(piece.tensor[row, 0] == 1 + row * num_ranks for row in (0, 1, 1000, piece.tensor.shape[0] - 1))
    result.put((grown, right))


def test_loading_every_third_row_of_a_table_needs_blocks_and_not_the_table(tmp_path):
    table = torch.arange(LARGE[0], dtype=torch.float32)[:, None].expand(LARGE)
    path = Checkpointer(tmp_path / "large", 1).save(1, {WEIGHT.format("t"): table}, {})
    Checkpointer(tmp_path / "small", 1).save(1, {"x": torch.ones(10)}, {})
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=_load_a_part_and_report_peak, args=(str(path), 3, result))
    process.start()
    grown, right = result.get(timeout=120)
    process.join()
    assert right
    assert grown < 40_000_000, f"peak memory grew by {grown / 1e6:.0f} MB while a third of 256 MB was loaded"

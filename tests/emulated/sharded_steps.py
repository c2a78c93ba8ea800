"""What a rank does for `test_sharded.py`: train a sharded model whose tables are on the emulated TPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.sharding.exchange_cases import Case, batches_of, build, cut, loss_sum, plan_of
from tpurec.sharding.batch_router import BatchRouter
from tpurec.sharding.checkpoint import Checkpointer, load_checkpoint
from tpurec.sharding.dense_parallel import dense_gradient_reducer
from tpurec.sharding.modules import checkpoint_pieces, exchange_of, shard
from tpurec.sharding.pieces import TensorPiece, whole_tensors


def start() -> None:
    """Make the device in this process, and let gloo, which knows no TPU, carry its tensors by way of the host."""
    import tests.emulated.runtime  # noqa: F401  starts it

    all_to_all, all_reduce = dist.all_to_all_single, dist.all_reduce

    def all_to_all_by_host(received: Tensor, sent: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if sent.device.type == "cpu":
            return all_to_all(received, sent, group=group, async_op=async_op)
        arrived = torch.empty(received.shape, dtype=received.dtype)
        all_to_all(arrived, sent.cpu(), group=group)
        received.copy_(arrived)
        return None

    def all_reduce_by_host(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        if tensor.device.type == "cpu":
            return all_reduce(tensor, *arguments, **more)
        summed = tensor.cpu()
        all_reduce(summed, *arguments, **more)
        tensor.copy_(summed)
        return None

    dist.all_to_all_single, dist.all_reduce = all_to_all_by_host, all_reduce_by_host


def ready(rank: int) -> None:
    """Start the device."""
    start()


def model_of(case: Case, max_tensor_bytes: int) -> nn.Module:
    """The case's model, sharded, all of it on the device; tables lie in tensors of that size."""
    plan = plan_of(case, dist.get_world_size())
    plan = replace(plan, assumptions=replace(plan.assumptions, max_tensor_bytes=max_tensor_bytes))
    model = build(case)
    model.hidden.to("tpu")
    model.out.to("tpu")
    return shard(model, plan, device="tpu")


def train(rank: int, case: Case, max_tensor_bytes: int, folder: str) -> dict[str, Any]:
    """Losses, tables and state after the case's steps; how many tensors each stack has; and a checkpoint, loaded again.

    Every rank returns what it holds.
    """
    num_ranks = dist.get_world_size()
    model = model_of(case, max_tensor_bytes)
    router, reducer = BatchRouter(model), dense_gradient_reducer(model)
    dense, losses = torch.optim.SGD([*model.hidden.parameters(), *model.out.parameters()], lr=0.1), []
    for batch in batches_of(case):
        mine = batch.part(*cut(case, rank, num_ranks))
        inputs, labels, valid = (torch.from_numpy(array).to("tpu") for array in (mine.dense, mine.labels, mine.valid))
        features = router.prepare(mine.jagged(case.weighted)).features
        total = loss_sum(model, inputs, features, labels, valid) / max(int(batch.valid.sum()), 1)
        dense.zero_grad()
        total.backward()
        reducer.reduce()
        dense.step()
        loss = total.detach().cpu()
        dist.all_reduce(loss)
        losses.append(loss.item())
    pieces = checkpoint_pieces(model)
    with Checkpointer(Path(folder), 1, process_group=dist.group.WORLD) as checkpointer:
        saved = checkpointer.save(case.steps, whole_of(model), {}, pieces=pieces)
    again = model_of(replace(case, seed=case.seed + 1), max_tensor_bytes)
    load_checkpoint(saved, whole_of(again), pieces=checkpoint_pieces(again))
    storages = exchange_of(model).storages
    return {
        "losses": losses,
        "pieces": [shown(piece) for piece in pieces],
        "loaded": [shown(piece) for piece in checkpoint_pieces(again)],
        "parts": [len(storage.parts) for storage in storages],
        "states": [len(storage.state) for storage in storages],
        "folder": str(saved),
    }


def whole_of(model: nn.Module) -> dict[str, Tensor]:
    """What is alike on every rank, on the host."""
    return {f"model.{name}": tensor.cpu() for name, tensor in whole_tensors(model).items()}


def shown(piece: TensorPiece) -> tuple[Any, ...]:
    """A piece as plain values and a tensor of the host."""
    region = (piece.row_start, piece.row_step, piece.columns, piece.writes)
    return piece.name, piece.global_shape, *region, piece.tensor.cpu()

"""TorchRec's DistributedModelParallel beside ours: the same tables, placed the same way, and what it sends counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def distribute(model: Any, path: str, sharding: str, optimizer: str, lr: float) -> Any:
    """Shard a model's collection with TorchRec, fused kernels on the CPU.

    Args:
        model: with an `EmbeddingBagCollection`.
        path: of the collection.
        sharding: `table_wise` (tables dealt in turn), `row_wise` or `column_wise` (over all ranks).
        optimizer: `sgd`, `adagrad` or `rowwise_adagrad`; FBGEMM's CPU kernels have no other.
        lr: learning rate of the tables.

    Returns:
        The DistributedModelParallel.
    """
    import torch
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    kinds = {
        "sgd": EmbOptimType.EXACT_SGD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": kinds[optimizer], "learning_rate": lr})
    collection, num_ranks = model.get_submodule(path), dist.get_world_size()
    names = [config.name for config in collection.embedding_bag_configs()]
    shardings = {
        "table_wise": lambda number: table_wise(rank=number % num_ranks, compute_kernel="fused"),
        "row_wise": lambda number: row_wise(compute_kernel="fused"),
        "column_wise": lambda number: column_wise(ranks=list(range(num_ranks)), compute_kernel="fused"),
    }
    placed = {name: shardings[sharding](number) for number, name in enumerate(names)}
    plan = construct_module_sharding_plan(
        collection, placed, sharder, local_size=num_ranks, world_size=num_ranks, device_type="cpu"
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({path: plan}),
        sharders=[sharder],
    )


class SentBytes:
    """What left this rank through the collectives that TorchRec's exchange calls.

    Attributes:
        bytes: so far.
        calls: of collectives.
    """

    def __init__(self) -> None:
        self.bytes, self.calls = 0.0, 0


@contextmanager
def counted() -> Iterator[SentBytes]:
    """Count collectives called through `torch.distributed`; DDP's all-reduce of the dense part is not among them.

    Yields:
        The counts.
    """
    import torch.distributed as dist

    sent, ranks, rank = SentBytes(), dist.get_world_size(), dist.get_rank()
    originals: dict[str, Any] = {}

    def wrap(name: str, size: Any) -> None:
        original = originals[name] = getattr(dist, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            sent.bytes += size(*args, **kwargs)
            sent.calls += 1
            return original(*args, **kwargs)

        setattr(dist, name, called)

    def uneven(
        output: Any, input: Any, output_splits: Any = None, input_splits: Any = None, *_: Any, **more: Any
    ) -> float:
        input_splits = more.get("input_split_sizes", input_splits)
        if not input_splits:
            return input.nbytes * (ranks - 1) / ranks
        per_line = input.nbytes / max(input.shape[0], 1)
        return per_line * sum(size for number, size in enumerate(input_splits) if number != rank)

    def scattered(output: Any, inputs: Sequence[Any], *_: Any, **more: Any) -> float:
        return float(sum(tensor.nbytes for number, tensor in enumerate(inputs) if number != rank))

    wrap("all_to_all_single", uneven)
    wrap("reduce_scatter", scattered)
    wrap("reduce_scatter_tensor", lambda output, input, *_, **more: input.nbytes * (ranks - 1) / ranks)
    wrap("all_gather", lambda outputs, tensor, *_, **more: tensor.nbytes * (ranks - 1))
    wrap("all_gather_into_tensor", lambda output, tensor, *_, **more: tensor.nbytes * (ranks - 1))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)

"""A training loop of one's own over sharded tables, whole, on drawn data.

TORCH_DEVICE_BACKEND_AUTOLOAD=0 torchrun --nproc-per-node 2 -m examples.sharded_loop

Every rank draws the whole batch and takes its own part of it, so that any number of ranks prints the same losses.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from tpurec.embeddings import RowWiseAdagrad, deferred_tables, dense_parameters, fuse
from tpurec.sharding.batch_router import BatchRouter
from tpurec.sharding.dense_parallel import dense_gradient_reducer
from tpurec.sharding.modules import shard
from tpurec.sharding.planner import plan
from tpurec.sharding.tables import FeatureSpec, TableSpec

ROWS = {"user": 20_000, "item": 5_000}
DIM, NUM_DENSE, BATCH_SIZE, STEPS, EVERY = 16, 4, 1_024, 60, 20


def draw_part(step: int, rank: int, num_ranks: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """One rank's part of a batch, in which a click depends on the item and on a dense feature.

    Args:
        step: seeds the batch.
        rank: whose part.
        num_ranks: that share the batch.

    Returns:
        Dense features float32 `[B, 4]`, one id an example for `user_id` and `item_id`, labels float32 `[B]`; B is
        `BATCH_SIZE / num_ranks`.
    """
    random = torch.Generator().manual_seed(step)
    size = BATCH_SIZE // num_ranks
    mine = slice(rank * size, (rank + 1) * size)
    dense = torch.rand(BATCH_SIZE, NUM_DENSE, generator=random)
    # Squared, so that few rows are hot, as real ids are.
    ids = {name: (torch.rand(BATCH_SIZE, generator=random) ** 2 * rows).long() for name, rows in ROWS.items()}
    chance = torch.sigmoid(3.0 * dense[:, 0] + 2.0 * (ids["item"] % 2) - 2.5)
    labels = torch.bernoulli(chance, generator=random)
    features = KeyedJaggedTensor(
        keys=[f"{name}_id" for name in ROWS],
        values=torch.cat([of_table[mine] for of_table in ids.values()]),
        lengths=torch.ones(len(ROWS) * size, dtype=torch.int32),
    )
    return dense[mine], features, labels[mine]


def main() -> None:
    """Plan, shard, train; rank 0 prints the loss of the whole batch."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    # The plan is the same on every rank: it depends on nothing but these arguments.
    specs = [
        TableSpec(name, rows, DIM, (FeatureSpec(f"{name}_id"),), optimizer="row_wise_adagrad")
        for name, rows in ROWS.items()
    ]
    found = plan(specs, f"cpu-{num_ranks}", BATCH_SIZE)
    if not found.fits:
        raise SystemExit("\n".join(problem.message for problem in found.problems))
    if rank == 0:
        print(", ".join(f"{table.name}: {table.sharding}" for table in found.tables))

    torch.manual_seed(0)  # the dense part must be the same on every rank
    with deferred_tables():  # no rank holds a table it does not own, not even for a moment
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[f"{name}_id"])
            for name, rows in ROWS.items()
        ]
        model = fuse(DLRM(EmbeddingBagCollection(tables), NUM_DENSE, [32, DIM], [32, 1]), RowWiseAdagrad(lr=0.05))
    model = shard(model, found)
    router, reducer = BatchRouter(model), dense_gradient_reducer(model)
    dense_optimizer = torch.optim.Adam(dense_parameters(model), lr=1e-2)

    for step in range(1, STEPS + 1):
        dense, features, labels = draw_part(step, rank, num_ranks)
        routed = router.prepare(features)
        logits = model(dense, routed.features).squeeze(1)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        loss = losses / routed.num_labelled_global  # this rank's part of the mean over the whole batch
        dense_optimizer.zero_grad()
        loss.backward()  # the rows that were looked up have taken their step
        reducer.reduce()
        dense_optimizer.step()
        if step == 1 or step % EVERY == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step:3d}  loss {total.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

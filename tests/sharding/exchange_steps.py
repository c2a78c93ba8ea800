"""What ranks do for `test_exchange_step.py`."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from tests.sharding.exchange_cases import (
    Case,
    Table,
    batches_of,
    build,
    configs_of,
    cut,
    gathered,
    loss_sum,
    plan_of,
)
from tpurec.embeddings import SGD, FusedEmbeddingBagCollection, deferred_tables, dense_gradients
from tpurec.embeddings.fuse import fused_optimizer_state_dict
from tpurec.errors import TpurecError
from tpurec.sharding.batch_router import BatchRouter
from tpurec.sharding.dense_parallel import dense_gradient_reducer
from tpurec.sharding.modules import exchange_stats, shard

READS_VALUES = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal", "item")


class Recorder(TorchDispatchMode):
    """Every op of a step, with the shapes and dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = tuple(
            (tuple(leaf.shape), str(leaf.dtype))
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs or {}))
            if isinstance(leaf, torch.Tensor)
        )
        if "aten.empty" not in str(func):  # a receive buffer is allocated when its size is new, and then kept
            self.ops.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def record_steps(rank: int, case: Case) -> dict:
    """Run a case under a recorder."""
    num_ranks = dist.get_world_size()
    model = shard(build(case), plan_of(case, num_ranks))
    router, reducer = BatchRouter(model), dense_gradient_reducer(model)
    signatures, collectives, reads = [], [], []
    for batch in batches_of(case):
        mine = batch.part(*cut(case, rank, num_ranks))
        routed = router.prepare(mine.packed(case.weighted, len(mine.labels)))
        with Recorder() as recorder:
            total = loss_sum(model, routed.dense, routed.features, routed.labels, routed.valid)
            loss = total / routed.num_labelled_global
            model.zero_grad(set_to_none=True)
            loss.backward()
            reducer.reduce()
        signatures.append(tuple(recorder.ops))
        names = [name for name, _ in recorder.ops]
        collectives.append(sum(name.startswith("c10d.") for name in names))
        reads += [name for name in names if any(word in name for word in READS_VALUES)]
    return {
        "signatures": [str(signature) for signature in signatures],
        "names": [[name for name, _ in signature] for signature in signatures],
        "distinct": len(set(signatures)),
        "programs": router.stats.programs,
        "collectives": collectives,
        "reads": sorted(set(reads)),
        "stats": exchange_stats(model),
        "padding_share": router.stats.padding_share,
        "unique_share": router.stats.unique_share,
    }


def initial_tensors(rank: int, case: Case) -> dict:
    """A model whose tables were deferred."""
    with deferred_tables():
        model = build(case)
    model = shard(model, plan_of(case, dist.get_world_size()))
    tensors = gathered(model)
    tensors |= {f"model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return tensors


def trained_then_sharded(rank: int, case: Case) -> dict:
    """Shard a model that was trained unsharded: weights and optimizer state must come along."""
    model = build(case)
    for batch in batches_of(case):
        loss_sum(
            model,
            torch.from_numpy(batch.dense),
            batch.jagged(case.weighted),
            torch.from_numpy(batch.labels),
            torch.from_numpy(batch.valid),
        ).backward()
    wanted = {f"model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    wanted |= {f"optimizer.{name}": tensor.clone() for name, tensor in fused_optimizer_state_dict(model).items()}
    tensors = gathered(shard(model, plan_of(case, dist.get_world_size())))
    return {name: bool(torch.equal(tensor, wanted[name].double())) for name, tensor in tensors.items()}


class TwoCollections(nn.Module):
    """Two collections, of which the second reads what the first does not."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, features):
        return torch.cat([self.first(features).values(), self.second(features).values()], dim=1)


def two_collections(rank: int, case: Case, inline: bool) -> dict:
    """Train two collections with optimizers and learning rates of their own."""
    configs = configs_of(case)

    def make() -> TwoCollections:
        torch.manual_seed(3)
        first = FusedEmbeddingBagCollection(configs[::2], SGD(lr=0.1))
        return TwoCollections(first, FusedEmbeddingBagCollection(configs[1::2], SGD(lr=0.5))).double()

    num_ranks = dist.get_world_size()
    alone, model = make(), shard(make(), plan_of(case, num_ranks))
    router, reducer = BatchRouter(model), dense_gradient_reducer(model)
    for batch in batches_of(case):
        (alone(batch.jagged(False)) ** 2).sum().backward()
        mine = batch.part(*cut(case, rank, num_ranks)).jagged(False)
        features = mine if inline else router.prepare(mine).features
        (model(features) ** 2).sum().backward()
        reducer.reduce()
    wanted = {f"model.{name}": tensor for name, tensor in alone.state_dict().items()}
    found = gathered(model)
    worst = max((found[name] - wanted[name]).abs().max().item() for name in wanted)
    return {"worst": worst, "collectives": exchange_stats(model)["collectives_per_step"]}


def dlrm(rank: int) -> float:
    """TorchRec's DLRM, unchanged, passes routed features through."""
    configs = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=40, embedding_dim=8, feature_names=[f"f{n}_0"])
        for n in range(3)
    ]
    case = Case(tuple(Table(40, 8, kind) for kind in ("table_wise", "unique_rows", "data_parallel")), batch_size=8)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return DLRM(FusedEmbeddingBagCollection(configs, SGD(lr=0.1)), 3, [16, 8], [16, 1])

    num_ranks = dist.get_world_size()
    alone, model = make(), shard(make(), plan_of(case, num_ranks))
    router = BatchRouter(model)
    batch = batches_of(case)[0]
    begin, end = cut(case, rank, num_ranks)
    wanted = alone(torch.from_numpy(batch.dense), batch.jagged(False))[begin:end]
    mine = batch.part(begin, end)
    found = model(torch.from_numpy(mine.dense), router.prepare(mine.jagged(False)).features)
    return (found - wanted).abs().max().item()


def refused(rank: int, case: Case) -> dict[str, str]:
    """What a user does wrong, and what is said; every rank must be able to go on."""
    num_ranks = dist.get_world_size()
    model = shard(build(case), plan_of(case, num_ranks))
    router = BatchRouter(model)
    said = {}

    def try_it(name: str, action) -> None:
        try:
            action()
            said[name] = "nothing"
        except TpurecError as error:
            said[name] = str(error)

    def jagged(ids: list[int], keys=("f0_0",), **more) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(list(keys), torch.tensor(ids), lengths=torch.tensor([len(ids)]), **more)

    rows = case.tables[0].rows
    try_it("too large", lambda: router.prepare(jagged([0, rows])))
    try_it("negative", lambda: router.prepare(jagged([-2])))
    try_it("beyond 32 bits", lambda: router.prepare(jagged([2**33])))
    try_it("no such feature", lambda: router.prepare(jagged([0], keys=("other",))))
    try_it("weights", lambda: router.prepare(jagged([0], weights=torch.ones(1))))
    try_it("other world", lambda: shard(build(case), plan_of(case, num_ranks + 1)))
    with_moments = build(dataclasses.replace(case, optimizer="rowwise_adam"))
    try_it("more state", lambda: shard(with_moments, plan_of(case, num_ranks, "row_wise_adagrad")))
    try_it("less state", lambda: shard(build(case), plan_of(case, num_ranks, "row_wise_adagrad")))
    try_it("wire", lambda: shard(build(case), plan_of(case, num_ranks), wire_dtype=torch.float16))
    try_it("moved", lambda: model.to(torch.float64))
    try_it("nothing fused", lambda: shard(nn.Linear(1, 1), plan_of(case, num_ranks)))
    return said


def one_bad_rank(rank: int, case: Case) -> list[str]:
    """Rank 1 gets an id that is no row; then all get a good batch."""
    num_ranks = dist.get_world_size()
    router = BatchRouter(shard(build(case), plan_of(case, num_ranks)))
    said = []
    for bad in (True, False):
        ids = torch.tensor([case.tables[0].rows if bad and rank == 1 else 0])
        try:
            router.prepare(KeyedJaggedTensor(["f0_0"], ids, lengths=torch.tensor([1])))
            said.append("nothing")
        except TpurecError as error:
            said.append(str(error))
    return said


def forgotten_reduction(rank: int, case: Case) -> str:
    """Two steps without adding up the gradients of data-parallel tables."""
    num_ranks = dist.get_world_size()
    model = shard(build(case), plan_of(case, num_ranks))
    router = BatchRouter(model)
    batch = batches_of(case)[0].part(*cut(case, rank, num_ranks)).jagged(False)
    model.embeddings(router.prepare(batch).features).values().sum().backward()
    routed = router.prepare(batch)
    try:
        model.embeddings(routed.features)
    except TpurecError as error:
        return str(error)
    return "nothing"


def skipped_ids(rank: int, case: Case) -> float:
    """Ids of -1 anywhere, with their weights, change nothing."""
    num_ranks = dist.get_world_size()
    model = shard(build(case), plan_of(case, num_ranks))
    router = BatchRouter(model)
    mine = batches_of(case)[0].part(*cut(case, rank, num_ranks))
    plain = model.embeddings(router.prepare(mine.jagged(True)).features).values()
    rng = np.random.default_rng(0)
    for name, bags in mine.ids.items():
        for number, bag in enumerate(bags):
            at = rng.integers(0, len(bag) + 1, rng.integers(0, 3))
            bags[number] = np.insert(bag, at, -1)
            mine.weights[name][number] = np.insert(mine.weights[name][number], at, np.float32(7))
    holes = model.embeddings(router.prepare(mine.jagged(True)).features).values()
    return (plain - holes).abs().max().item()


def ahead(rank: int, case: Case) -> bool:
    """The ids of the next batch travel before this one's step; the result is the same to the bit."""
    results = []
    for early in (False, True):
        num_ranks = dist.get_world_size()
        model = shard(build(case), plan_of(case, num_ranks))
        router, reducer = BatchRouter(model), dense_gradient_reducer(model)
        batches = [batch.part(*cut(case, rank, num_ranks)).jagged(case.weighted) for batch in batches_of(case)]
        routed = [router.prepare(batch) for batch in batches]
        for number, one in enumerate(routed):
            out = model.embeddings(one.features).values()
            if early and number + 1 < len(routed):
                routed[number + 1].start_id_exchange()
            (out**2).sum().backward()
            reducer.reduce()
        results.append(gathered(model))
    return all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def growing_batches(rank: int, case: Case) -> tuple[float, int]:
    """Batches routed all at once: small, large, empty and small, each of another size on every rank."""
    num_ranks = dist.get_world_size()
    model, alone = shard(build(case), plan_of(case, num_ranks)), build(case)
    router, jagged = BatchRouter(model), []
    for number, (examples, most) in enumerate(((3, 1), (200 + 7 * rank, 60), (0, 1), (7 - rank, 3))):
        rng = np.random.default_rng((number, rank))
        lengths = [rng.integers(0, most + 1, examples) for _ in case.tables]
        values = [rng.integers(0, table.rows, n.sum()) for table, n in zip(case.tables, lengths, strict=True)]
        jagged.append(
            KeyedJaggedTensor(
                [f"f{table}_0" for table in range(len(case.tables))],
                torch.from_numpy(np.concatenate(values)),
                lengths=torch.from_numpy(np.concatenate(lengths)).int(),
                stride=examples,
            )
        )
    worst = 0.0
    for batch, routed in zip(jagged, [router.prepare(batch) for batch in jagged], strict=True):
        with torch.inference_mode():
            found, wanted = model.embeddings(routed.features).values(), alone.embeddings(batch).values()
        assert found.shape == wanted.shape
        worst = max(worst, (found - wanted).abs().max().item() if found.numel() else 0.0)
    return worst, router.stats.programs


def frozen_tables(rank: int, case: Case) -> bool:
    """Tables whose weights require no gradient; whether they keep their bits."""
    unsharded_model = build(case)
    for weight in unsharded_model.embeddings.parameters():
        weight.requires_grad_(False)
    num_ranks = dist.get_world_size()
    model = shard(unsharded_model, plan_of(case, num_ranks))
    router, reducer, before = BatchRouter(model), dense_gradient_reducer(model), gathered(model)
    for batch in batches_of(case):
        routed = router.prepare(batch.part(*cut(case, rank, num_ranks)).jagged(case.weighted))
        (model.embeddings(routed.features).values() ** 2).sum().backward()
        reducer.reduce()
    after = gathered(model)
    return all(torch.equal(before[name], after[name]) for name in before)


def partly_frozen(rank: int, case: Case) -> list[dict[str, torch.Tensor]]:
    """Weights and optimizer state of a model of which every other table is frozen: sharded, and not."""
    num_ranks, found = dist.get_world_size(), []
    for is_sharded in (True, False):
        model = build(case)
        for bag in list(model.embeddings.embedding_bags.values())[::2]:
            bag.weight.requires_grad_(False)
        if is_sharded:
            model = shard(model, plan_of(case, num_ranks))
            router, reducer = BatchRouter(model), dense_gradient_reducer(model)
        for batch in batches_of(case):
            features = batch.jagged(case.weighted)
            if is_sharded:
                features = router.prepare(batch.part(*cut(case, rank, num_ranks)).jagged(case.weighted)).features
            (model.embeddings(features).values() ** 2).sum().backward()
            if is_sharded:
                reducer.reduce()
        if is_sharded:
            found.append(gathered(model))
        else:
            tensors = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
            found.append(
                tensors | {f"optimizer.{n}": tensor for n, tensor in fused_optimizer_state_dict(model).items()}
            )
    return found


def one_batch_twice(rank: int, case: Case) -> float:
    """A routed batch that is trained on twice."""
    num_ranks = dist.get_world_size()
    model, alone = shard(build(case), plan_of(case, num_ranks)), build(case)
    batch = batches_of(case)[0]
    begin, end = cut(case, rank, num_ranks)
    routed = BatchRouter(model).prepare(batch.part(begin, end).jagged(False))
    for _ in range(2):
        (model.embeddings(routed.features).values() ** 2).sum().backward()
        (alone.embeddings(batch.jagged(False)).values() ** 2).sum().backward()
    found = model.embeddings(routed.features).values()
    return (found - alone.embeddings(batch.jagged(False)).values()[begin:end]).abs().max().item()


def by_function(rank: int, case: Case) -> dict:
    """The backward pass as a function, which compiled steps use; what moved, and whether dense gradients came."""
    num_ranks = dist.get_world_size()
    model = shard(build(case), plan_of(case, num_ranks))
    router, reducer, before = BatchRouter(model), dense_gradient_reducer(model), gathered(model)
    for batch in batches_of(case):
        mine = batch.part(*cut(case, rank, num_ranks))
        routed = router.prepare(mine.packed(case.weighted, len(mine.labels)))
        loss = loss_sum(model, routed.dense, routed.features, routed.labels, routed.valid)
        gradients = dense_gradients(loss, model)
        reducer.reduce()
    after = gathered(model)
    return {
        "moved": all(not torch.equal(before[name], after[name]) for name in before),
        "dense": sorted(gradients),
    }

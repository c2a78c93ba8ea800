"""The host's part of the exchange: every id goes to the rank that owns its row, once, and comes back to its bag."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.exchange_cases import Case, Table, batches_of, build, configs_of, loss_sum, plan_of, unsharded
from tpurec.embeddings import (
    SGD,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    RowWiseAdagrad,
    deferred_tables,
)
from tpurec.embeddings.fuse import fused_optimizer_state_dict
from tpurec.errors import ConfigError, DataError
from tpurec.sharding.batch_router import BatchRouter
from tpurec.sharding.dense_parallel import dense_gradient_reducer
from tpurec.sharding.host_batch import read_batch
from tpurec.sharding.modules import shard
from tpurec.sharding.placement import make_stacks, tables_of
from tpurec.sharding.plan import Shard
from tpurec.sharding.routing import Sizes, StackRouter, rung

KINDS = ("table_wise", "column_wise:2", "unique_rows", "partial_pools", "group_pools", "data_parallel")


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    num_ranks=st.integers(2, 9),
    weighted=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_every_id_reaches_the_owner_of_its_row_once(
    kinds: list[str], num_ranks: int, weighted: bool, seed: int
) -> None:
    """Case 19."""
    rng = np.random.default_rng(seed)
    tables = tuple(
        Table(int(rng.integers(1, 40)), 8, kind, tuple(rng.integers(1, 5, rng.integers(1, 3)).tolist()))
        for kind in kinds
    )
    case = Case(tables, batch_size=6, seed=seed, steps=1, weighted=weighted)
    configs = configs_of(case)
    placed = tables_of(plan_of(case, num_ranks), [(configs, [torch.float32] * len(configs), [False] * len(configs))])
    host = read_batch(
        batches_of(case)[0].jagged(weighted), {name: weighted for c in configs for name in c.feature_names}
    )
    for stack in make_stacks(placed, [build(case).embeddings.optimizer], num_ranks):
        router = StackRouter(stack, placed, num_ranks, weighted)
        routing = router.route(host)
        sizes = Sizes(*(rung(need) for need in routing.needs))
        route = routing.fill(sizes, 8)
        held = rows_of_ranks(stack, placed, num_ranks)
        _check_bags(stack, placed, host, sizes, route, held, weighted)
        _check_rows(stack, placed, host, sizes, route, held, num_ranks)


def rows_of_ranks(stack, placed, num_ranks: int) -> list[dict[int, tuple[int, int]]]:
    """For every rank its storage rows: which row of which place each is, computed row by row from the plan."""
    held: list[dict[int, tuple[int, int]]] = [{} for _ in range(num_ranks)]
    for number, place in enumerate(stack.places):
        num_embeddings = placed[place.table].config.num_embeddings
        for rank, start in zip(place.shard.ranks, place.row_starts, strict=True):
            rows = range(num_embeddings)
            if place.shard.rule == "modulo":
                rows = [row for row in rows if place.shard.owner(row) == rank]
            for local, row in enumerate(rows):
                assert start + local not in held[rank], "two rows in one place"
                held[rank][start + local] = (number, row)
    assert max(max(rows, default=0) for rows in held) < stack.num_rows
    return held


def _check_bags(stack, placed, host, sizes, route, held, weighted: bool) -> None:
    found: dict[tuple[str, int, int], list] = {}
    for rank, message in enumerate(route.message):
        lengths = message[sizes.rows : sizes.rows + stack.num_answers * 8].reshape(stack.num_answers, 8)
        ids = message[sizes.rows + lengths.size :][: sizes.bag_ids]
        bits = message[sizes.rows + lengths.size + sizes.bag_ids :].copy().view(np.float32)
        at = 0
        for answer, bags in enumerate(lengths):
            asked = [slot for slot in stack.bag_slots if (rank, answer) in zip(slot.owners, slot.answers, strict=True)]
            for example, length in enumerate(bags):
                for position in range(at, at + length):
                    number, row = held[rank][int(ids[position])]
                    assert number == asked[0].place
                    key = (asked[0].feature, number, example)
                    found.setdefault(key, []).append((row, float(bits[position]) if weighted else 1.0))
                at += length
        assert (ids[at:] == -1).all()
    for slot in stack.bag_slots:
        first = 0
        for example, length in enumerate(host.lengths[slot.feature]):
            part = slice(first, first + length)
            weights = host.weights[slot.feature][part] if weighted else np.ones(length)
            wanted = sorted(zip(host.values[slot.feature][part].tolist(), weights.tolist(), strict=True))
            assert sorted(found.get((slot.feature, slot.place, example), [])) == wanted
            first += length


def _check_rows(stack, placed, host, sizes, route, held, num_ranks: int) -> None:
    lines = [held[rank].get(int(row)) for rank in range(num_ranks) for row in route.message[rank, : sizes.rows]]
    lines += [held[0].get(int(row)) for row in route.replicated]
    known = [line for line in lines if line is not None]
    assert len(known) == len(set(known)), "a row travels twice"
    for number, slot in enumerate(stack.local_slots):
        offsets = route.offsets[number * 8 : number * 8 + 9]
        got = [lines[line] for line in route.index[offsets[0] : offsets[-1]]]
        assert got == [(slot.place, row) for row in host.values[slot.feature]]
        assert np.array_equal(np.diff(offsets)[:6], host.lengths[slot.feature])
    # Backward: the same pairs of line and bag, grouped by line.
    slots = len(stack.local_slots)
    forward = sorted(
        (int(route.index[position]), example * slots + slot)
        for slot in range(slots)
        for example in range(8)
        for position in range(route.offsets[slot * 8 + example], route.offsets[slot * 8 + example + 1])
    )
    backward = [
        (line, int(route.lines[position]))
        for line in range(len(lines))
        for position in range(route.line_offsets[line], route.line_offsets[line + 1])
    ]
    assert sorted(backward) == forward


def test_deferred_tables_hold_nothing_until_they_are_sharded() -> None:
    with deferred_tables():
        model = build(Case((Table(50, 8, "table_wise"), Table(9, 8, "data_parallel"))))
    assert all(weight.device.type == "meta" for weight in model.embeddings.parameters())


BAGS = (Table(53, 8, "table_wise"), Table(31, 8, "table_wise", (4, 3), "mean"), Table(5, 16, "table_wise", (2,)))
SEQUENCES = (Table(53, 8, "table_wise", (2,), "none"), Table(31, 8, "table_wise", (4, 3), "none"))


@pytest.mark.parametrize("tables", [BAGS, SEQUENCES])
def test_one_rank_trains_to_the_bit_as_unsharded(tables: tuple[Table, ...]) -> None:
    case = Case(tables, "rowwise_adagrad", weighted=True)
    with deferred_tables():
        model = build(case)
    model = shard(model, plan_of(case, 1))
    assert isinstance(model.embeddings, FusedEmbeddingBagCollection if tables is BAGS else FusedEmbeddingCollection)
    router, reducer = BatchRouter(model), dense_gradient_reducer(model)
    dense = torch.optim.SGD([*model.hidden.parameters(), *model.out.parameters()], lr=0.1)
    losses = []
    for batch in batches_of(case):
        routed = router.prepare(batch.packed(True, case.batch_size))
        total = loss_sum(model, routed.dense, routed.features, routed.labels, routed.valid)
        loss = total / routed.num_labelled_global
        dense.zero_grad()
        loss.backward()
        reducer.reduce()
        dense.step()
        losses.append(loss.item())
    wanted = unsharded(case)
    assert losses == wanted["losses"]
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    found |= {f"optimizer.{name}": tensor for name, tensor in fused_optimizer_state_dict(model).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted["tensors"].items())


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 599, 10_000, 65_537, 10**6 + 1])
def test_a_rung_holds_its_count_and_pads_little(count: int) -> None:
    assert count <= rung(count) <= max(count + 7, count * 17 / 16)


def test_few_rungs_occur() -> None:
    assert len({rung(count) for count in range(1024, 2049)}) <= 17


@pytest.mark.parametrize("spread", [Shard((0, 1, 2), "replicated", (4, 8)), Shard((2, 0), "modulo", (4, 8))])
def test_columns_that_own_other_rows_are_refused_where_a_step_needs_whole_rows(spread: Shard) -> None:
    """Such a plan, edited by hand, trained to other numbers without a word: squares of other rows were added."""
    case = Case((Table(10, 8, "column_wise:2"),))
    plan = plan_of(case, 3)
    plan = replace(plan, tables=(replace(plan.tables[0], shards=(plan.tables[0].shards[0], spread)),))
    placed = tables_of(plan, [(configs_of(case), [torch.float32], [False])])
    with pytest.raises(ConfigError, match=r"table 't0': columns 4 to 8 have the row rule '\w+', and RowWiseAdagrad"):
        make_stacks(placed, [RowWiseAdagrad(lr=0.1)], 3)
    assert make_stacks(placed, [SGD(lr=0.1)], 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("packed", [False, True])
def test_a_weight_that_is_not_finite_is_refused_as_it_is_unsharded(bad: float, packed: bool) -> None:
    examples = batches_of(Case((Table(20, 8, "table_wise", (3,)),), batch_size=6, steps=1))[0]
    batch = examples.packed(True, 6) if packed else examples.jagged(True)
    weights = batch.sparse["f0_0"].weights if packed else batch.weights()
    weights[1] = bad
    with pytest.raises(DataError, match=rf"feature 'f0_0': the weight {bad} \(value 1 of the feature; 1 in all\)"):
        read_batch(batch, {"f0_0": True})

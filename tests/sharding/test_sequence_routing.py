"""The host's part of the exchange of sequences: every id finds its row, and its gradient the way back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor, PoolingType

from tests.sharding.exchange_cases import Case, Table, batches_of, build, configs_of, plan_of
from tests.sharding.test_routing import KINDS, rows_of_ranks
from tpurec.errors import DataError
from tpurec.sharding.host_batch import read_batch
from tpurec.sharding.placement import make_stacks, tables_of
from tpurec.sharding.routing import StackRouter, rung, sizes_of


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    num_ranks=st.integers(2, 9),
    skipped=st.sampled_from((0.0, 0.3, 1.0)),
    seed=st.integers(0, 10_000),
)
def test_every_place_of_a_sequence_gets_the_row_of_its_id(
    kinds: list[str], num_ranks: int, skipped: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tables = tuple(
        Table(int(rng.integers(1, 40)), 8, kind, tuple(rng.integers(1, 5, rng.integers(1, 3)).tolist()), "none")
        for kind in kinds
    )
    case = Case(tables, batch_size=6, seed=seed, steps=1, skipped=skipped)
    configs = configs_of(case)
    for config in configs:
        config.pooling = PoolingType.NONE
    placed = tables_of(plan_of(case, num_ranks), [(configs, [torch.float32] * len(configs), [False] * len(configs))])
    batch = batches_of(case)[0].jagged(False)
    host = read_batch(batch, dict.fromkeys(batch.keys()))
    sequences = {name: batch[name].values().numpy() for name in batch.keys()}  # noqa: SIM118 - no mapping
    for stack in make_stacks(placed, [build(case).embeddings.optimizer], num_ranks):
        assert stack.unpooled and not stack.bag_slots
        router = StackRouter(stack, placed, num_ranks, False)
        routing = router.route(host)
        (sizes,) = sizes_of([router], np.array([rung(need) for need in routing.needs]))
        route = routing.fill(sizes, 8)
        held = rows_of_ranks(stack, placed, num_ranks)
        assert route.message.shape == (num_ranks, sizes.rows)
        lines = [held[rank].get(int(row)) for rank in range(num_ranks) for row in route.message[rank]]
        lines += [held[0].get(int(row)) for row in route.replicated]
        known = [line for line in lines if line is not None]
        assert len(known) == len(set(known)), "a row travels twice"
        line_of_gradient = np.full(len(route.index), len(lines))
        for line, (begin, end) in enumerate(zip(route.line_offsets, route.line_offsets[1:], strict=False)):
            assert (line_of_gradient[route.lines[begin:end]] == len(lines)).all(), "a gradient is added twice"
            line_of_gradient[route.lines[begin:end]] = line
        assert np.array_equal(line_of_gradient, route.index)
        start = 0
        for slot, capacity in zip(stack.local_slots, sizes.sequences, strict=True):
            got = route.index[start : start + capacity]
            wanted = sequences[slot.feature]
            for place, line in enumerate(got):
                is_row = place < len(wanted) and wanted[place] >= 0
                assert ((slot.place, wanted[place]) == lines[line]) if is_row else line == len(lines)
            start += capacity
        assert start == len(route.index)


def test_weights_that_nobody_asks_for_are_let_pass_and_others_are_not() -> None:
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([1, -1, 2]), torch.ones(3), lengths=torch.tensor([2, 1]))
    host = read_batch(batch, {"a": None, "b": None})
    assert host.values["a"].tolist() == [1] and host.lengths["a"].tolist() == [1]
    ids, lengths = host.sequence("a")
    assert ids.tolist() == [1, -1] and lengths.tolist() == [2]
    assert host.sequence("b")[0].tolist() == [2]
    with pytest.raises(DataError, match="weights"):
        read_batch(batch, {"a": None, "b": False})
    assert read_batch(batch, {"a": None, "b": True}).weights["b"].tolist() == [1.0]

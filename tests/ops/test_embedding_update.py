"""The CPU update against the specification in `tpurec/kernels/embedding_update.py`.

Tolerance 2e-6 after one step from rows of size 1: both add up a few dozen float32 products, in another order. Adagrad
divides a gradient by its own size: of one that cancels by chance the step is known no better than the cancelled sum, so
1e-4 of the learning rate is allowed there, and weights are not of both signs.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.ops import jagged_cases as cases
from tpurec.kernels.embedding_update import reference
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.ops import embedding_update_

LR = 0.1


def _reference(table, state, grads, ids, offsets, weights, optimizer, pooling):
    # Not jitted: its operations are then compiled once per shape, not once per combination of arguments.
    return reference(table, state, grads, ids, offsets, weights, jnp.float32(LR), optimizer, pooling)


def _update(case, table, state, grad, weights, optimizer, pooling, eps=1e-8, weight_decay=0.0, tables=(0, 1)):
    embedding_update_(
        [table],
        [] if state is None else [state],
        grad,
        cases.tensor(case.ids),
        cases.tensor(case.offsets),
        weights,
        torch.tensor(LR),
        optimizer,
        eps,
        weight_decay,
        pooling,
        list(tables),
        *table.shape,
    )


def _compare(kind, dim, optimizer, pooling, weighted, weight_decay=0.0, initial=0.0):
    case = cases.make(kind)
    before, grad = cases.table(dim), cases.gradient(case.batch_size, dim)
    weights = case.weights(pooling if optimizer == "sgd" else "mean") if weighted else None
    state = cases.state(optimizer, dim, initial)
    rule = RowOptimizer(optimizer, 1e-8, weight_decay)
    expected, expected_state = _reference(
        before, state, cases.to_bags(grad), case.ids, case.offsets, weights, rule, pooling
    )
    table, sums = cases.tensor(before), cases.tensor(state)
    _update(case, table, sums, cases.tensor(grad), cases.tensor(weights), optimizer, pooling, 1e-8, weight_decay)
    tolerance = 2e-6 if optimizer == "sgd" else 1e-4 * LR
    np.testing.assert_allclose(table.numpy(), expected, rtol=2e-6, atol=tolerance, err_msg=kind)
    if state is not None:
        np.testing.assert_allclose(sums.numpy(), expected_state, rtol=1e-5, atol=1e-6, err_msg=kind)
    used = case.ids[case.offsets[0] : case.offsets[-1]]
    untouched = np.setdiff1d(np.arange(cases.NUM_ROWS), used)
    assert np.array_equal(table.numpy()[untouched], before[untouched]), "rows that do not occur have changed"
    if state is not None:
        assert np.array_equal(sums.numpy()[untouched], state[untouched])


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
@pytest.mark.parametrize("dim", cases.DIMS)
def test_equals_the_reference(dim, optimizer):
    """Cases 01, 03, 05 to 08, 11, 12, 14, 15 (accumulators start from 0) and 16, in every dim."""
    for number, kind in enumerate(cases.KINDS):
        weighted = (number + cases.DIMS.index(dim)) % 2 == 1
        _compare(kind, dim, optimizer, ("sum", "mean")[number // 2 % 2], weighted)


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01], ids=["", "decay"])
@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_every_pooling_weighting_and_decay(optimizer, weight_decay, pooling, weighted):
    """The kinds of cases 03, 05 to 08, 12 and 16 with every combination of the switches."""
    for kind in cases.KINDS:
        _compare(kind, 24, optimizer, pooling, weighted, weight_decay, initial=0.1)


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_one_row_in_two_features_takes_one_step(optimizer):
    """Case 12: ids [7, 7, 7] in one bag, and row 7 in another feature of the same table."""
    case = cases.Case(np.array([7, 7, 7, 7, 9], np.int32), np.array([0, 3, 5], np.int32), batch_size=1)
    before, grad = cases.table(16), cases.gradient(1, 16)
    state = cases.state(optimizer, 16)
    expected, expected_state = _reference(
        before, state, cases.to_bags(grad), case.ids, case.offsets, None, RowOptimizer(optimizer), "sum"
    )
    table, sums = cases.tensor(before), cases.tensor(state)
    _update(case, table, sums, cases.tensor(grad), None, optimizer, "sum", tables=(0, 0))
    np.testing.assert_allclose(table.numpy(), expected, rtol=2e-6, atol=2e-6)
    if optimizer == "rowwise_adagrad":
        combined = 3 * grad[0, :16] + grad[0, 16:]
        np.testing.assert_allclose(sums[7].item(), (combined**2).mean(), rtol=1e-5)
        np.testing.assert_allclose(sums.numpy(), expected_state, rtol=1e-5)


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_features_of_one_table_that_are_not_neighbours_are_still_combined(optimizer):
    ids = np.array([7, 40, 7], np.int32)
    case = cases.Case(ids, np.arange(4, dtype=np.int32), batch_size=1)
    before = cases.table(8)
    grad = np.random.default_rng(0).normal(size=(1, 24)).astype(np.float32)
    state = cases.state(optimizer, 8)
    bags = cases.to_bags(grad, 3)
    expected, _ = _reference(before, state, bags, ids, case.offsets, None, RowOptimizer(optimizer), "sum")
    table = cases.tensor(before)
    _update(case, table, cases.tensor(state), cases.tensor(grad), None, optimizer, "sum", tables=(0, 1, 0))
    np.testing.assert_allclose(table.numpy(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
def test_first_step_from_accumulators_of_zero_is_finite(optimizer):
    """Case 15, also where the gradient itself is 0."""
    case, table, sums = cases.make("mixed"), cases.tensor(cases.table(8)), cases.tensor(cases.state(optimizer, 8))
    grad = cases.tensor(cases.gradient(case.batch_size, 8))
    grad[:3] = 0
    _update(case, table, sums, grad, None, optimizer, "sum")
    assert table.isfinite().all() and sums.isfinite().all()


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_tables_are_updated_in_float32_and_rounded_once(dtype, optimizer):
    case, grad = cases.make("repeated_in_bag"), cases.tensor(cases.gradient(cases.BATCH_SIZE, 16))
    table, sums = cases.tensor(cases.table(16)).to(dtype), cases.tensor(cases.state(optimizer, 16))
    exact, exact_sums = table.float(), cases.tensor(cases.state(optimizer, 16))
    _update(case, table, sums, grad, None, optimizer, "sum", weight_decay=0.01)
    _update(case, exact, exact_sums, grad, None, optimizer, "sum", weight_decay=0.01)
    assert torch.equal(table, exact.to(dtype))


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_is_deterministic_with_several_threads(optimizer):
    """50,000 occurrences of 300 rows, four threads: the same bits three times."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (50_000,), generator=generator, dtype=torch.int32)
    offsets = torch.arange(0, 50_001, 5, dtype=torch.int32)
    grad = torch.randn(5_000, 2 * 64, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        results = []
        for _ in range(3):
            table = torch.ones(300, 64)
            state = [] if optimizer == "sgd" else [torch.zeros(300, 64) if optimizer == "adagrad" else torch.zeros(300)]
            lr = torch.tensor(LR)
            embedding_update_(
                [table], state, grad, ids, offsets, None, lr, optimizer, 1e-8, 0.0, "sum", [0, 0], 300, 64
            )
            results.append(table)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_rows_beyond_two_to_the_31_values_are_found(optimizer):
    """18 GB of address space, of which a few pages are touched: offsets of rows are 64-bit on every path."""
    num_rows, dim = 2**25 + 8, 128
    table = torch.empty(num_rows, dim)
    state = [] if optimizer == "sgd" else [torch.empty(num_rows, *([dim] if optimizer == "adagrad" else []))]
    ids = torch.tensor([num_rows - 1, 3], dtype=torch.int32)
    table[ids.long()] = 1
    for tensor in state:
        tensor[ids.long()] = 0
    grad = torch.full((1, 2 * dim), 0.5)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    lr = torch.tensor(LR)
    embedding_update_([table], state, grad, ids, offsets, None, lr, optimizer, 1e-8, 0.0, "sum", [0, 0], num_rows, dim)
    step = LR * 0.5 if optimizer == "sgd" else LR
    torch.testing.assert_close(table[ids.long()], torch.full((2, dim), 1 - step))


def test_nothing_grows_with_the_number_of_rows():
    """100 rows used of a 2 GB table: the op allocates less than 2 MB."""
    num_rows, dim = 4_000_000, 128
    table, sums = torch.empty(num_rows, dim), torch.empty(num_rows)
    ids = torch.arange(100, dtype=torch.int32) * 1000
    table[ids.long()] = 1
    sums[ids.long()] = 0
    grad, offsets = torch.ones(50, 2 * dim), torch.arange(101, dtype=torch.int32)
    for optimizer, state in (("sgd", []), ("rowwise_adagrad", [sums])):
        with torch.profiler.profile(profile_memory=True) as profile:
            embedding_update_(
                [table],
                state,
                grad,
                ids,
                offsets,
                None,
                torch.tensor(LR),
                optimizer,
                1e-8,
                0.0,
                "sum",
                [0, 1],
                num_rows,
                dim,
            )
        allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
        assert 0 < allocated < 2e6


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_opcheck(optimizer):
    case, table = cases.make("skipped_inside"), cases.tensor(cases.table(8))
    state = cases.state(optimizer, 8)
    arguments = (
        [table],
        [] if state is None else [cases.tensor(state)],
        cases.tensor(cases.gradient(case.batch_size, 8)),
        cases.tensor(case.ids),
        cases.tensor(case.offsets),
        cases.tensor(case.weights()),
        torch.tensor(LR),
        optimizer,
        1e-8,
        0.01,
        "mean",
        [0, 1],
        *table.shape,
    )
    torch.library.opcheck(embedding_update_, arguments)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break_and_changes_the_table(backend):
    case = cases.make("mixed")
    grad = cases.tensor(cases.gradient(case.batch_size, 8))

    def step(table, sums, grad, lr):
        embedding_update_(
            [table],
            [sums],
            grad * 2,
            cases_ids,
            cases_offsets,
            None,
            lr,
            "rowwise_adagrad",
            1e-8,
            0.0,
            "sum",
            [0, 1],
            *table.shape,
        )
        return table.sum()

    cases_ids, cases_offsets = cases.tensor(case.ids), cases.tensor(case.offsets)
    results = []
    for function in (step, torch.compile(step, backend=backend, fullgraph=True)):
        table, sums = cases.tensor(cases.table(8)), torch.zeros(cases.NUM_ROWS)
        total = function(table, sums, grad, torch.tensor(LR))
        results.append((table, sums, total))
    torch.testing.assert_close(results[0], results[1])
    assert not torch.equal(results[1][0], torch.from_numpy(cases.table(8)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "lamb"}, "optimizer: 'lamb'"),
        ({"state": []}, "state: 0 tensors; rowwise_adagrad needs 1"),
        ({"state": [torch.zeros(4, 8)]}, r"\[4, 8\]; on the CPU float32 \[4\]"),
        ({"optimizer": "adam", "eps": 0.0}, "eps: 0.0; adam needs one above 0"),
        ({"optimizer": "rowwise_adam"}, "rowwise_adam needs 3"),
        ({"max_gradient_norm": -1.0}, "max_gradient_norm: -1.0"),
        ({"rounding_seed": 2**31}, "rounding_seed: 2147483648"),
        ({"grad": torch.zeros(2, 8)}, r"grad: \[2, 8\]; \[1, 16\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, message):
    arguments = dict(
        parts=[torch.zeros(4, 8)],
        state=[torch.zeros(4)],
        grad=torch.zeros(1, 16),
        ids=torch.tensor([0, 1]),
        offsets=torch.tensor([0, 1, 2]),
        weights=None,
        lr=torch.tensor(LR),
        optimizer="rowwise_adagrad",
        eps=1e-8,
        weight_decay=0.0,
        pooling="sum",
        feature_tables=[0, 1],
        num_rows=4,
        dim=8,
    )
    embedding_update_(**arguments)
    with pytest.raises(ValueError, match=message):
        embedding_update_(**{**arguments, **changes})

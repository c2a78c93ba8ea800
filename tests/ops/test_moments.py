"""Adam, decoupled weight decay, clipping and stochastic rounding of the CPU update.

The oracles are dense float64 NumPy, written from the formulas, and torch's own optimizers.
"""

import numpy as np
import pytest
import torch

from tests.ops import jagged_cases as cases
from tpurec.ops import embedding_update_

NUM_ROWS, DIM, STEPS = 40, 12, 20
ADAM, LR, DECAY = {"beta1": 0.8, "beta2": 0.95}, 0.125, 0.03
OPTIONS = {
    "plain": {},
    "l2": {"weight_decay": DECAY},
    "decoupled": {"weight_decay": DECAY, "decoupled_weight_decay": True},
    "clipped": {"max_gradient_norm": 0.7},
    "all": {"weight_decay": DECAY, "decoupled_weight_decay": True, "max_gradient_norm": 0.7},
}
STATES = {"sgd": "", "adagrad": "e", "rowwise_adagrad": "r", "adam": "ee", "rowwise_adam": "er"}


def make_state(optimizer, dtype, num_rows=NUM_ROWS, dim=DIM, rounding=False):
    state = [torch.zeros(num_rows, *([dim] if kind == "e" else []), dtype=dtype) for kind in STATES[optimizer]]
    return [*state, torch.zeros((), dtype=torch.int32)] if rounding or optimizer.endswith("adam") else state


def update(table, state, grad, ids, offsets, optimizer, weight_decay=0.0, lr=LR, **options):
    num_rows, dim = table.shape
    embedding_update_(
        [table], state, grad, ids, offsets, None, torch.tensor(lr), optimizer, 1e-8, weight_decay, "sum", [0],
        num_rows, dim, **options,
    )  # fmt: skip


def dense_step(rows, moments, grads, touched, step, optimizer, options):
    """Formulas of docs/embeddings.md, on all rows at once; those not touched are put back."""
    kept = [rows.copy(), *(one.copy() for one in moments)]
    norm = np.sqrt((grads**2).sum(1, keepdims=True))
    if "max_gradient_norm" in options:
        grads = grads * np.minimum(1, options["max_gradient_norm"] / np.where(norm == 0, 1, norm))
    decay = options.get("weight_decay", 0.0)
    if options.get("decoupled_weight_decay"):
        rows = rows * (1 - LR * decay)
    else:
        grads = grads + decay * rows
    squares = grads**2 if not optimizer.startswith("rowwise") else (grads**2).mean(1)
    column = (lambda x: x[:, None]) if optimizer.startswith("rowwise") else (lambda x: x)
    if optimizer == "sgd":
        new = [rows - LR * grads]
    elif optimizer.endswith("adagrad"):
        grown = moments[0] + squares
        new = [rows - LR * grads / (np.sqrt(column(grown)) + 1e-8), grown]
    else:
        first = ADAM["beta1"] * moments[0] + (1 - ADAM["beta1"]) * grads
        second = ADAM["beta2"] * moments[1] + (1 - ADAM["beta2"]) * squares
        root = np.sqrt(column(second) / (1 - ADAM["beta2"] ** step)) + 1e-8
        new = [rows - LR * first / (1 - ADAM["beta1"] ** step) / root, first, second]
    for one, old in zip(new, kept, strict=True):
        one[~touched] = old[~touched]
    return new[0], new[1:]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("optimizer", STATES)
def test_twenty_steps_equal_dense_float64(optimizer, options):
    """Within 1e-10 on touched rows, to the bit on others, also in the moments; rows come and go, ids repeat."""
    generator = np.random.default_rng(0)
    table = torch.from_numpy(generator.normal(size=(NUM_ROWS, DIM)))
    state = make_state(optimizer, torch.float64)
    rows, moments = table.numpy().copy(), [one.numpy().copy() for one in state if one.dim()]
    ever = np.zeros(NUM_ROWS, bool)
    first = table.numpy().copy()
    for step in range(1, STEPS + 1):
        ids = generator.integers(0, NUM_ROWS - 5, 18).astype(np.int32)
        ids[::6] = -1
        offsets = np.array([0, 3, 3, 10, 18], np.int32)
        grad = generator.normal(size=(4, DIM))
        touched, grads = np.zeros(NUM_ROWS, bool), np.zeros((NUM_ROWS, DIM))
        for bag in range(4):
            for row in ids[offsets[bag] : offsets[bag + 1]]:
                if row >= 0:
                    touched[row] = True
                    grads[row] += grad[bag]
        before = [one.clone() for one in (table, *state) if one.dim()]
        chosen = OPTIONS[options] | (ADAM if optimizer.endswith("adam") else {})
        arguments = (torch.from_numpy(grad), torch.from_numpy(ids), torch.from_numpy(offsets))
        update(table, state, *arguments, optimizer, **chosen)
        rows, moments = dense_step(rows, moments, grads, touched, step, optimizer, OPTIONS[options])
        after = [one for one in (table, *state) if one.dim()]
        for found, want, old in zip(after, (rows, *moments), before, strict=True):
            np.testing.assert_allclose(found.numpy(), want, rtol=1e-10, atol=1e-10)
            assert torch.equal(found[torch.from_numpy(~touched)], old[torch.from_numpy(~touched)])
        ever |= touched
    assert np.array_equal(table.numpy()[~ever], first[~ever]) and 5 <= (~ever).sum() < NUM_ROWS
    if optimizer.endswith("adam"):
        assert state[-1].item() == STEPS


@pytest.mark.parametrize(("decoupled", "kind"), [(False, torch.optim.Adam), (True, torch.optim.AdamW)])
def test_adam_on_rows_that_every_batch_touches_is_torchs(decoupled, kind):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(table.clone())
    theirs = kind([parameter], lr=LR, betas=(0.8, 0.95), eps=1e-8, weight_decay=DECAY)
    state = make_state("adam", torch.float64, 6, 8)
    for _ in range(STEPS):
        parameter.grad = torch.randn(6, 8, generator=generator, dtype=torch.float64)
        ids, offsets = torch.arange(6, dtype=torch.int32), torch.arange(7, dtype=torch.int32)
        update(table, state, parameter.grad, ids, offsets, "adam", DECAY, decoupled_weight_decay=decoupled, **ADAM)
        theirs.step()
    torch.testing.assert_close(table, parameter.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(state[0], theirs.state[parameter]["exp_avg"], rtol=0, atol=1e-12)
    torch.testing.assert_close(state[1], theirs.state[parameter]["exp_avg_sq"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam"])
def test_a_step_without_ids_counts_and_moves_nothing(optimizer):
    """Global step: the next touched row is corrected for the steps that it was not in."""
    state = make_state(optimizer, torch.float32)
    table = torch.ones(NUM_ROWS, DIM)
    nothing = torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    update(table, state, torch.ones(1, DIM), *nothing, optimizer)
    update(table, state, torch.ones(1, DIM), torch.tensor([-1]), torch.tensor([0, 1]), optimizer)
    assert torch.equal(table, torch.ones(NUM_ROWS, DIM)) and state[-1].item() == 2
    update(table, state, torch.ones(1, DIM), torch.tensor([3]), torch.tensor([0, 1]), optimizer)
    first, second = 0.1 / (1 - 0.9**3), 0.001 / (1 - 0.999**3)
    torch.testing.assert_close(table[3], torch.full((DIM,), 1 - LR * first / second**0.5))


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moments_of_low_precision_tables_are_float32(dtype, optimizer):
    case, grad = cases.make("repeated_in_bag"), cases.tensor(cases.gradient(2 * cases.BATCH_SIZE, 8))[:, :16]
    ids, offsets = cases.tensor(case.ids), cases.tensor(case.offsets)
    table = cases.tensor(cases.table(16)).to(dtype)
    exact, states = table.double(), [make_state(optimizer, kind, cases.NUM_ROWS, 16) for kind in (torch.float32,) * 2]
    states[1] = [one.double() if one.dim() else one for one in states[1]]
    update(table, states[0], grad, ids, offsets, optimizer)
    update(exact, states[1], grad.double(), ids, offsets, optimizer)
    torch.testing.assert_close(table.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def constant_gradient_run(optimizer, seed, num_steps, step_size, value=1.0, num_rows=512, dim=32):
    table = torch.full((num_rows, dim), value, dtype=torch.bfloat16)
    state = make_state(optimizer, torch.float32, num_rows, dim, rounding=seed >= 0)
    ids, offsets = torch.arange(num_rows, dtype=torch.int32), torch.arange(num_rows + 1, dtype=torch.int32)
    for _ in range(num_steps):
        update(table, state, torch.ones(num_rows, dim), ids, offsets, optimizer, lr=step_size, rounding_seed=seed)
    return table


def test_stochastic_rounding_is_unbiased_where_rounding_to_nearest_stalls():
    """100 steps of 1/2560 from 1.5, where bfloat16 has 1/128 between neighbours: to nearest nothing ever moves.

    A step is rounded up or down with a variance of at most (1/128)^2 / 4, so the mean over 16,384 independent elements
    after 100 steps lies within 5 standard deviations, 5 * (1/128) / 2 * sqrt(100 / 16384) = 0.0015.
    """
    step = 1 / 2560
    stalled = constant_gradient_run("sgd", -1, 100, step, value=1.5)
    assert torch.equal(stalled, torch.full_like(stalled, 1.5))
    found = constant_gradient_run("sgd", 3, 100, step, value=1.5).double()
    bound = 5 * (1 / 128) / 2 * (100 / found.numel()) ** 0.5
    assert abs(found.mean().item() - (1.5 - 100 * step)) < bound
    assert found.std().item() > 1 / 512, "elements go their own ways"
    for axis in (0, 1):  # neither a row nor a column has a bias of its own
        means = found.mean(axis)
        assert (means - (1.5 - 100 * step)).abs().max() < 6 * (1 / 128) / 2 * (100 / found.shape[axis]) ** 0.5


def test_stochastic_rounding_goes_up_as_often_as_the_place_between_the_neighbours():
    """One step to each of 7 places: shares of the upper neighbour within 5 standard deviations; negative, too."""
    for sign in (1.0, -1.0):
        for eighth in range(1, 8):
            place = eighth / 8 / 128
            table = constant_gradient_run("sgd", 11, 1, -sign * place, value=sign)
            share = (table.double().abs() > 1).double().mean().item()
            sigma = (eighth / 8 * (1 - eighth / 8) / table.numel()) ** 0.5
            assert set(table.abs().flatten().tolist()) == {1.0, 1.0 + 1 / 128}
            assert abs(share - eighth / 8) < 5 * sigma


def test_stochastic_rounding_depends_on_the_seed_and_the_step_and_repeats_to_the_bit():
    first, again, other = (constant_gradient_run("adam", seed, 3, 1e-3) for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    one_step = [constant_gradient_run("sgd", 5, steps, 1 / 512, value=1.5) - 1.5 for steps in (1, 2)]
    assert not torch.equal(one_step[0], one_step[1])


def test_stochastic_rounding_keeps_what_is_not_finite():
    table = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0] * 2], dtype=torch.bfloat16)
    state = [torch.zeros((), dtype=torch.int32)]
    ids, offsets = torch.tensor([0]), torch.tensor([0, 1])
    update(table, state, torch.zeros(1, 8), ids, offsets, "sgd", rounding_seed=0)
    assert table[0, :4].tolist()[:2] == [torch.inf, -torch.inf] and table[0, 2].isnan() and table[0, 3] == 1


def test_opcheck_of_the_new_arguments():
    for optimizer in ("adam", "rowwise_adam"):
        arguments = (
            [torch.ones(8, 8)], make_state(optimizer, torch.float32, 8, 8), torch.ones(1, 8),
            torch.tensor([1, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32), None, torch.tensor(0.1),
            optimizer, 1e-8, 0.0, "sum", [0], 8, 8, 0.9, 0.99, True, 1.0, 4,
        )  # fmt: skip
        torch.library.opcheck(embedding_update_, arguments)

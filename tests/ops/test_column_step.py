"""Steps of some columns of rows: the specification, plain JAX on packed storage in parts, and the CPU op agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpurec.errors import ConfigError
from tpurec.kernels.column_step import column_step, reference
from tpurec.kernels.embedding_update import reference as whole_rows
from tpurec.kernels.optimizer_state import pack_state, unpack_state
from tpurec.kernels.optimizers import RowOptimizer, flat, like
from tpurec.kernels.storage import Storage, pack, unpack
from tpurec.ops.column_step import column_step_

NUM_ROWS, DIM, LR = 300, 8, 0.125
RULES = {
    "sgd": RowOptimizer("sgd", weight_decay=0.02),
    "adagrad": RowOptimizer("adagrad", 1e-6),
    "rowwise_adagrad": RowOptimizer("rowwise_adagrad", 1e-6, 0.02),
    "adam": RowOptimizer("adam", 1e-6, 0.02, decoupled=True),
    "rowwise_adam": RowOptimizer("rowwise_adam", 1e-6, 0.02, 0.8, 0.95),
    "rounded": RowOptimizer("rowwise_adagrad", 1e-6, rounding_seed=7),
}


def rows_and_gradients(seed):
    """40 rows of which each fourth is none, the first and the last of the table among them."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(np.arange(1, NUM_ROWS - 1))[:40].astype(np.int32)
    rows[:2] = 0, NUM_ROWS - 1
    rows[3::4] = -1
    return rows, rng.normal(size=(40, DIM)).astype(np.float32), rng.random(40).astype(np.float32)


def plain_state(rule):
    return like(tuple(jnp.zeros(s, jnp.float32 if s else jnp.int32) for s in rule.state_shapes(NUM_ROWS, DIM)))


def on_cpu(rule, table, state, rows, grads, squares):
    column_step_(
        [table], state, torch.from_numpy(rows), torch.from_numpy(grads), torch.from_numpy(squares), torch.tensor(LR),
        rule.name, rule.eps, rule.weight_decay, NUM_ROWS, DIM, rule.beta1, rule.beta2, rule.decoupled,
        rule.rounding_seed,
    )  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_all_agree_over_three_steps_and_other_rows_keep_their_bits(name):
    rule = RULES[name]
    dtype = "bfloat16" if name == "rounded" else "float32"
    width = 16 if name == "rounded" else DIM
    storage = Storage(NUM_ROWS, width, dtype, max_part_bytes=4096)
    assert storage.num_parts > 1
    before = np.random.default_rng(0).normal(size=(NUM_ROWS, width)).astype(np.float32)
    specified, spec_state = (
        jnp.asarray(before, dtype),
        like(tuple(jnp.zeros(s, jnp.float32 if s else jnp.int32) for s in rule.state_shapes(NUM_ROWS, width))),
    )
    parts, state = pack(specified, storage), pack_state(rule, spec_state, storage)
    cpu = torch.tensor(before).to(getattr(torch, dtype))
    cpu_state = [torch.from_numpy(np.array(one)) for one in flat(spec_state)]
    step = jax.jit(column_step, static_argnames=("storage", "optimizer"))
    touched = np.zeros(NUM_ROWS, bool)
    for seed in range(3):
        rows, grads, squares = rows_and_gradients(seed)
        grads = np.resize(grads, (40, width))
        specified, spec_state = jax.jit(reference, static_argnames="optimizer")(
            specified, spec_state, rows, grads, squares, jnp.float32(LR), optimizer=rule
        )
        parts, state = step(parts, state, rows, grads, squares, jnp.float32(LR), storage=storage, optimizer=rule)
        column_step_(
            [cpu], cpu_state, torch.from_numpy(rows), torch.from_numpy(grads), torch.from_numpy(squares),
            torch.tensor(LR), rule.name, rule.eps, rule.weight_decay, NUM_ROWS, width, rule.beta1, rule.beta2,
            rule.decoupled, rule.rounding_seed,
        )  # fmt: skip
        touched[rows[rows >= 0]] = True
    packed = (unpack(parts, storage), *flat(unpack_state(rule, state, storage)))
    for found in (packed, (cpu.float().numpy(), *(one.numpy() for one in cpu_state))):
        for one, want in zip(found, (specified, *flat(spec_state)), strict=True):
            tolerance = 2**-7 if name == "rounded" and np.ndim(want) == 2 else 2e-6  # a rounding that fell otherwise
            np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(want, np.float32), 2e-5, tolerance)
        unmoved = np.asarray(jnp.asarray(before, dtype), np.float32)[~touched]
        assert np.array_equal(np.asarray(found[0], np.float32)[~touched], unmoved)
    assert not np.allclose(np.asarray(specified, np.float32)[touched], before[touched])


@pytest.mark.parametrize("name", ["rowwise_adagrad", "rowwise_adam"])
def test_two_halves_of_rows_step_as_the_whole_rows(name):
    """With the mean square of whole rows, after L2 decay, the halves are what the update of whole rows makes."""
    rule = RULES[name]
    rng = np.random.default_rng(1)
    table = rng.normal(size=(NUM_ROWS, 2 * DIM)).astype(np.float32)
    rows = np.arange(5, 45, dtype=np.int32)
    grads = rng.normal(size=(40, 2 * DIM)).astype(np.float32)
    shapes = rule.state_shapes(NUM_ROWS, 2 * DIM)
    state = like(tuple(jnp.zeros(shape, jnp.float32 if shape else jnp.int32) for shape in shapes))
    want, want_state = whole_rows(
        jnp.asarray(table), state, grads, rows, np.arange(41, dtype=np.int32), None, jnp.float32(LR), optimizer=rule
    )
    squares = np.square(grads + rule.weight_decay * table[rows]).mean(1)
    for half in (slice(0, DIM), slice(DIM, None)):
        found, found_state = reference(
            jnp.asarray(table[:, half]), plain_state(rule), rows, grads[:, half], squares, jnp.float32(LR), rule
        )
        np.testing.assert_allclose(found, want[:, half], rtol=1e-6, atol=1e-7)
        for one, other in zip(flat(found_state), flat(want_state), strict=True):
            np.testing.assert_allclose(one, other[:, half] if np.ndim(other) == 2 else other, rtol=1e-5, atol=1e-8)


def test_no_rows_move_nothing_but_the_count():
    rule = RULES["rowwise_adam"]
    storage = Storage(NUM_ROWS, DIM)
    parts, state = pack(jnp.ones((NUM_ROWS, DIM)), storage), pack_state(rule, plain_state(rule), storage)
    for count in (0, 3):
        arrays = np.full(count, -1, np.int32), np.ones((count, DIM), np.float32), np.ones(count, np.float32)
        new, new_state = column_step(parts, state, *map(jnp.asarray, arrays), LR, storage=storage, optimizer=rule)
        assert jnp.array_equal(new[0], parts[0]) and [int(one.sum()) for one in new_state] == [0, 0, 1]
        table, cpu_state = torch.ones(NUM_ROWS, DIM), [torch.zeros(s) for s in ((NUM_ROWS, DIM), (NUM_ROWS,))]
        cpu_state.append(torch.zeros((), dtype=torch.int32))
        on_cpu(rule, table, cpu_state, *arrays)
        assert table.eq(1).all() and [int(one.sum()) for one in cpu_state] == [0, 0, 1]


def test_what_does_not_fit_is_named():
    table, rows = torch.ones(NUM_ROWS, DIM), torch.zeros(4, dtype=torch.int32)
    good = {"rows": rows, "grads": torch.ones(4, DIM), "squares": torch.ones(4)}
    for change, words in (
        ({"rows": rows.long()}, r"rows: torch\.int64 \[4\]; int32 \[count\]"),
        ({"grads": torch.ones(4, 2)}, r"grad_rows: \[4, 2\]; \[4, 8\]"),
        ({"squares": torch.ones(3)}, r"mean_squares: \[3\]; \[4\]"),
    ):
        given = good | change
        with pytest.raises(ValueError, match=words):
            column_step_([table], [], *given.values(), torch.tensor(LR), "sgd", 0.0, 0.0, NUM_ROWS, DIM)
    with pytest.raises(ValueError, match="state: 0 tensors; rowwise_adagrad needs 1"):
        column_step_([table], [], *good.values(), torch.tensor(LR), "rowwise_adagrad", 0.0, 0.0, NUM_ROWS, DIM)
    clipped = RowOptimizer("sgd", max_norm=1.0)
    with pytest.raises(ConfigError, match="norm of whole rows"):
        column_step((), (), jnp.zeros(1), jnp.zeros((1, 8)), jnp.zeros(1), LR, storage=Storage(8, 8), optimizer=clipped)


def test_opcheck():
    torch.library.opcheck(
        column_step_,
        (
            [torch.ones(NUM_ROWS, DIM)],
            [torch.zeros(NUM_ROWS)],
            torch.arange(4, dtype=torch.int32),
            torch.ones(4, DIM),
            torch.ones(4),
            torch.tensor(LR),
            "rowwise_adagrad",
            1e-8,
            0.0,
            NUM_ROWS,
            DIM,
        ),
    )

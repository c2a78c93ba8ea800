"""Adam, clipping, decoupled decay and stochastic rounding in JAX: plain, the reference and the CPU op agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpurec.kernels import dispatch
from tpurec.kernels.ahead_of_time import target
from tpurec.kernels.embedding_update import reference
from tpurec.kernels.optimizer_state import pack_state
from tpurec.kernels.optimizers import ACCUMULATORS, RowOptimizer
from tpurec.kernels.storage import Storage, pack
from tpurec.ops import embedding_update_
from tpurec.topology.chips import CHIPS

from .tools.programs import update as update_program
from .tools.update_cases import run_update

# Compiled whole, not operation by operation.
specified_step = jax.jit(reference, static_argnames=("optimizer", "pooling"))
plain_step = jax.jit(run_update, static_argnames=("optimizer", "pooling", "storage", "lr"))

NUM_ROWS, DIM = 100, 16
LR = 0.125
RULES = {
    "adam": RowOptimizer("adam", 1e-8, 0.02, decoupled=True, max_norm=0.7),
    "rowwise_adam": RowOptimizer("rowwise_adam", 1e-8, 0.02, 0.8, 0.95),
}


def batch(seed, num_rows=NUM_ROWS):
    """20 ids in 4 bags, and 4 of capacity; row 3 in two bags."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, num_rows - 5, 24).astype(np.int32)
    ids[::7] = -1
    offsets = np.array([0, 3, 3, 10, 20], np.int32)  # 4 ids of capacity
    return ids, offsets, generator.normal(size=(4, DIM)).astype(np.float32)


def plain_state(rule, num_rows=NUM_ROWS):
    found = tuple(jnp.zeros(shape, jnp.float32 if shape else jnp.int32) for shape in rule.state_shapes(num_rows, DIM))
    return None if not found else found[0] if len(found) == 1 and found[0].ndim else found


def on_cpu(rule, table, state, ids, offsets, grads):
    embedding_update_(
        [table], state, torch.from_numpy(grads), torch.from_numpy(ids), torch.from_numpy(offsets), None,
        torch.tensor(LR), rule.name, rule.eps, rule.weight_decay, "sum", [0], *table.shape,
        rule.beta1, rule.beta2, rule.decoupled, rule.max_norm, rule.rounding_seed,
    )  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_plain_and_reference_and_cpu_agree_over_three_steps(rule):
    """In parts, too, as above 16 GiB. Rows that no batch touched keep their bits everywhere."""
    rule = RULES[rule]
    storage = Storage(NUM_ROWS, DIM, max_part_bytes=4096)
    assert storage.num_parts > 1
    table = np.random.default_rng(0).normal(size=(NUM_ROWS, DIM)).astype(np.float32)
    specified, spec_state = jnp.asarray(table), plain_state(rule)
    plain, state = table, plain_state(rule)
    cpu = torch.from_numpy(table.copy())
    cpu_state = [torch.from_numpy(np.array(one)) for one in jax.tree.leaves(state)]
    touched = np.zeros(NUM_ROWS, bool)
    for seed in range(3):
        ids, offsets, grads = batch(seed)
        specified, spec_state = specified_step(
            specified, spec_state, grads, ids, offsets, None, jnp.float32(LR), optimizer=rule
        )
        plain, state = plain_step(
            plain, state, grads, ids, offsets, None, optimizer=rule, pooling="sum", storage=storage, lr=LR
        )
        on_cpu(rule, cpu, cpu_state, ids, offsets, grads)
        touched[ids[:20][ids[:20] >= 0]] = True
    for found in ((plain, *jax.tree.leaves(state)), (cpu.numpy(), *(one.numpy() for one in cpu_state))):
        for one, want in zip(found, (specified, *jax.tree.leaves(spec_state)), strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(want), rtol=2e-5, atol=2e-6)
            if np.ndim(one) and one is found[0]:
                assert np.array_equal(np.asarray(one)[~touched], table[~touched])
            elif np.ndim(one):
                assert not np.asarray(one)[~touched].any()
    assert touched.sum() > 10


def test_stochastic_rounding_is_the_same_on_the_cpu_and_in_jax_to_the_bit():
    """SGD with numbers that float32 adds exactly, so that only the rounding could differ; three steps."""
    rule = RowOptimizer("sgd", rounding_seed=77)
    storage = Storage(NUM_ROWS, DIM, "bfloat16")
    table = (np.arange(NUM_ROWS * DIM) % 64 / 64 + 1).reshape(NUM_ROWS, DIM).astype(jnp.bfloat16)
    specified, plain = jnp.asarray(table), table
    spec_state = state = plain_state(rule)
    cpu = torch.from_numpy(table.astype(np.float32)).to(torch.bfloat16)
    cpu_state = [torch.zeros((), dtype=torch.int32)]
    for seed in range(3):
        ids, offsets, _ = batch(seed)
        grads = np.full((4, DIM), 2.0**-8, np.float32)
        plain, state = plain_step(
            plain, state, grads, ids, offsets, None, optimizer=rule, pooling="sum", storage=storage, lr=LR
        )
        specified, spec_state = specified_step(
            specified, spec_state, grads, ids, offsets, None, jnp.float32(LR), optimizer=rule
        )
        on_cpu(rule, cpu, cpu_state, ids, offsets, grads)
    assert np.array_equal(np.asarray(plain).astype(np.float32), cpu.float().numpy())
    assert np.array_equal(np.asarray(specified).astype(np.float32), cpu.float().numpy())
    assert (cpu.float().numpy() != table.astype(np.float32)).any() and int(state[0]) == 3


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize(
    "rule",
    [RowOptimizer("sgd", max_norm=1.0), RowOptimizer("adam", rounding_seed=0)],
    ids=lambda rule: rule.beyond_kernels.replace(" ", "_"),
)  # fmt: skip
def test_what_has_no_kernel_runs_in_plain_jax_and_says_so(rule, chip):
    shape = dispatch.Shape(Storage(1000, 64), 64, 256, False, "sum", rule.name, rule.beyond_kernels)
    explained = dispatch.explain("embedding_update", shape, CHIPS[chip])
    assert explained.startswith("embedding_update: plain") and f"{rule.beyond_kernels}: in plain JAX only" in explained
    with pytest.raises(dispatch.KernelLimit, match="in plain JAX only"):
        dispatch.choose("embedding_update", shape, CHIPS[chip], "sparsecore" if chip == "v6e" else "tensorcore")


def test_an_update_without_ids_counts_a_step():
    for name in ACCUMULATORS:
        rule, storage = RowOptimizer(name, rounding_seed=1), Storage(8, DIM)
        state = pack_state(rule, plain_state(rule, 8), storage)
        nothing = np.zeros(0, np.int32), np.zeros(1, np.int32)
        from tpurec.kernels.embedding_update import update

        parts = pack(jnp.ones((8, DIM)), storage)
        grads = jnp.zeros((0, DIM))
        _, new = update(parts, state, grads, *nothing, None, jnp.float32(1), storage=storage, optimizer=rule)
        assert int(new[-1]) == 1


@pytest.mark.compile
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("name", ["adam", "rowwise_adam"])
def test_plain_jax_compiles_in_place_with_temporaries_of_the_ids_alone(name, chip):
    """Table and moments are aliased; temporaries: at most 6 x `[ids, dim]` float32, also with 8 times the rows."""
    device, sizes = target(chip), set()
    for num_rows in (1 << 17, 1 << 20) if chip == "v6e" else (1 << 20,):
        function, inputs, donate = update_program(
            device, num_rows=num_rows, dim=128, num_bags=4096, ids_per_bag=1, optimizer=name, implementation="plain"
        )
        memory = device.memory(function, *inputs, donate=donate)
        storage = Storage(num_rows, 128)
        assert memory.alias_bytes >= storage.num_bytes + RowOptimizer(name).state_bytes(storage)
        sizes.add(memory.temp_bytes)
    assert max(sizes) <= 6 * 4096 * 128 * 4

"""What one fused update must do to a table: by loops in float64, with the error that float32 may make."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from tests.kernels.tools.cases import Bags
from tpurec.kernels.embedding_update import update
from tpurec.kernels.optimizer_state import pack_state, unpack_state
from tpurec.kernels.storage import pack, unpack

LR = 0.25


def make_state(optimizer, num_rows, dim, seed=0):
    """Accumulators of at least 0.1: an Adagrad step from 0 is a sign, which float32 cannot judge."""
    shape = optimizer.state_shape(num_rows, dim)
    return None if shape is None else np.random.default_rng(seed).random(shape, dtype=np.float32) + np.float32(0.1)


def brute_force_update(table, state, grads, bags: Bags, optimizer, pooling, weighted, lr=LR):
    """One loop over the ids, then one over the touched rows, in float64.

    Returns new table and state, and how far float32 arithmetic in any order may be from them. A gradient that is the
    sum of n products errs by (n + 4) eps times the sum of their magnitudes (Higham, 4.2; the factor of a mean carries
    the error of its weights' sum, at most (ids + 4) eps, as the weights of these cases are positive). That error goes
    through the rule by its derivatives; a bfloat16 row adds half a unit in its last place.
    """
    eps = np.finfo(np.float32).eps
    num_rows, dim = table.shape
    counts, factors = bags.counts(), np.zeros(len(bags.ids))
    bag_of = np.zeros(len(bags.ids), int)
    bag_of[counts] = bags.bag_of()
    factors[counts] = bags.weights[counts] if weighted else 1.0
    if pooling == "mean":
        sums = np.bincount(bag_of[counts], factors[counts], len(bags.offsets))
        factors[counts] /= np.where(sums == 0, np.inf, sums)[bag_of[counts]]
    gradient, bound = np.zeros((num_rows, dim)), np.zeros((num_rows, dim))
    uses = np.bincount(bags.ids[counts], minlength=num_rows)
    slack = len(bags.ids) + 4 if pooling == "mean" else 0
    for position in np.flatnonzero(counts):
        row, part = bags.ids[position], factors[position] * grads[bag_of[position]].astype(np.float64)
        gradient[row] += part
        bound[row] += (uses[row] + 4 + slack) * eps * np.abs(part)
    new, new_state = table.astype(np.float64), None if state is None else state.astype(np.float64)
    tolerance, state_tolerance = np.zeros_like(new), None if state is None else np.zeros_like(new_state)
    for row in np.flatnonzero(uses):
        old = new[row].copy()
        g, dg = gradient[row] + optimizer.weight_decay * old, bound[row] + 2 * eps * optimizer.weight_decay * abs(old)
        if optimizer.name == "sgd":
            step, dstep = lr * g, lr * dg
        else:
            square, dsquare = g * g, 2 * np.abs(g) * dg + eps * g * g
            if optimizer.name == "rowwise_adagrad":
                square, dsquare = square.mean(), dsquare.mean() + dim * eps * square.mean()
            s = new_state[row] + square
            ds = dsquare + 2 * eps * s
            new_state[row], state_tolerance[row] = s, ds
            root = np.sqrt(s) + optimizer.eps
            step = lr * g / root
            dstep = lr * (dg / root + np.abs(g) * (ds / (2 * np.sqrt(s)) + 3 * eps * root) / root**2)
        new[row] = old - step
        tolerance[row] = dstep + 4 * eps * (np.abs(old) + np.abs(step))
        if table.dtype != np.float32:
            tolerance[row] += (np.abs(new[row]) + tolerance[row]) * 2.0**-8
    return new, new_state, tolerance, state_tolerance


def check_update(found, table, state, grads, bags, optimizer, pooling, weighted):
    """Within the derived tolerance on the rows that occur; the same bits on all others (case 16)."""
    new, new_state = (None if one is None else np.asarray(one) for one in found)
    want, want_state, tolerance, state_tolerance = brute_force_update(
        table, state, grads, bags, optimizer, pooling, weighted
    )
    assert new.dtype == table.dtype
    assert np.all(np.abs(new.astype(np.float64) - want) <= tolerance)
    untouched = np.setdiff1d(np.arange(len(table)), bags.ids[bags.counts()])
    assert new[untouched].tobytes() == table[untouched].tobytes()
    if state is not None:
        assert np.all(np.abs(new_state.astype(np.float64) - want_state) <= state_tolerance)
        assert new_state[untouched].tobytes() == state[untouched].tobytes()


def positive(bags: Bags) -> Bags:
    """Weights that cannot cancel, so that a mean is well conditioned; NaN stays behind the last offset."""
    return dataclasses.replace(bags, weights=np.abs(bags.weights) + np.float32(0.1))


def run_update(table, state, grads, ids, offsets, weights, optimizer, pooling, storage, lr=LR, **how):
    """`update` on plain arrays."""
    parts, packed = pack(jnp.asarray(table), storage), pack_state(optimizer, state, storage)
    parts, packed = update(
        parts,
        packed,
        grads,
        ids,
        offsets,
        weights,
        jnp.float32(lr),
        storage=storage,
        optimizer=optimizer,
        pooling=pooling,
        **how,
    )
    return unpack(parts, storage), unpack_state(optimizer, packed, storage)

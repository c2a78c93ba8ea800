"""How the interpreter executes each SparseCore primitive that jax's own interpreter does not know.

A rule takes the equation, a function that reads its inputs, the interpreter's context, its ordering token and the
interpreter itself (for loop bodies); it returns the new token and the results, or None to leave the equation to jax.
Memory goes through the interpreter's own `get`/`store`, so that its race detector sees every access; an indirect DMA
reads its index list when the DMA runs, not when it is started, so that overwriting the list too early is seen.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback
from jax._src.interpreters import partial_eval
from jax._src.pallas.mosaic import core as mosaic_core
from jax._src.pallas.mosaic import primitives as mosaic_primitives
from jax._src.pallas.mosaic import sc_core
from jax._src.pallas.mosaic import sc_primitives as sc
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as ipc
from jax._src.pallas.mosaic.interpret import vector_clock
from jax._src.state import discharge, indexing
from jax._src.state import types as state_types

RULES: dict[Any, Callable] = {}
TOKEN = ipc.TOKEN_SHAPE_DTYPE


class Machine:
    """What the rules need to know about the kernel being interpreted."""

    num_subcores = 1
    reverse_parallel_loops = True
    barriers: dict[Any, threading.Barrier] = {}  # noqa: RUF012  one machine, cleared per kernel
    lock = threading.Lock()


def _rule(primitive: Any) -> Callable:
    def register(function: Callable) -> Callable:
        RULES[primitive] = function
        return function

    return register


def _pure(primitive: Any) -> Callable:
    """A rule that is a function of values only."""

    def register(function: Callable) -> Callable:
        def rule(eqn, read_inputs, context, token, interpret):
            result = function(*read_inputs(), **eqn.params)
            return token, (list(result) if primitive.multiple_results else result)

        RULES[primitive] = rule
        return function

    return register


def _memory_space(aval: Any) -> int:
    space = getattr(aval, "memory_space", None)
    space = ipc._forward_any_to_hbm(getattr(space, "memory_space", space))
    return ipc.TPU_MEMORY_SPACE_IDXS[mosaic_core.MemorySpace.HBM if space is None else space]


def _read(context, token, ref, transforms, ref_aval, out_shape, source_info):
    return callback.io_callback(
        lambda *arguments: ipc.get(*arguments, source_info=source_info),
        (TOKEN, out_shape),
        token,
        context.device_id,
        context.local_core_id,
        _memory_space(ref_aval),
        ref,
        transforms,
    )


def _write(context, token, ref, transforms, ref_aval, value, source_info):
    return callback.io_callback(
        lambda *arguments: ipc.store(*arguments, source_info=source_info),
        TOKEN,
        token,
        context.device_id,
        context.local_core_id,
        _memory_space(ref_aval),
        ref,
        transforms,
        value,
    )


def _transformed(aval: Any, transforms: Any) -> jax.ShapeDtypeStruct:
    out = state_types.transform_type(transforms, aval) if transforms else aval
    return jax.ShapeDtypeStruct(out.shape, out.dtype)


# ---- values ----


@_pure(sc.masked_cumsum_p)
def _cumsum(x, mask):
    return jnp.cumsum(jnp.where(mask, x, 0)).astype(x.dtype)


def _cumulative(function, worst):
    def rule(x, mask):
        running = function(jnp.where(mask, x, jnp.array(worst(x.dtype), x.dtype)))
        return jnp.where(jnp.cumsum(mask) > 0, running, x)

    return rule


def _lowest(dtype):
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype):
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


_pure(sc.masked_cummax_p)(_cumulative(lax.cummax, _lowest))
_pure(sc.masked_cummin_p)(_cumulative(lax.cummin, _highest))


@_pure(sc.all_reduce_population_count_p)
def _population_count(x, reduce):
    if reduce == 1:
        return jnp.full((x.size,), x.sum(), jnp.int32)
    return x.reshape(-1, reduce).sum(1).astype(jnp.int32)


@_pure(sc.all_reduce_ffs_p)
def _find_first_set(x, reduce):
    assert reduce == 1
    return jnp.full(x.shape, jnp.where(x.any(), jnp.argmax(x), x.size), jnp.int32)


@_pure(sc.bitcast_p)
def _bitcast(x, dtype):
    old, new = x.dtype.itemsize, jnp.dtype(dtype).itemsize
    if old == new:
        return lax.bitcast_convert_type(x, dtype)
    if old < new:
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, new // old), dtype)
    return lax.bitcast_convert_type(x, dtype).reshape(*x.shape[:-1], -1)


# ---- vector memory ----


@_rule(sc.gather_p)
def _load_gather(eqn, read_inputs, context, token, interpret):
    ref, transforms, indices, mask = eqn.params["tree"].unflatten(read_inputs())
    ref_aval, transforms_aval, *_ = eqn.params["tree"].unflatten([v.aval for v in eqn.invars])
    whole_shape = _transformed(ref_aval, transforms_aval)
    token, whole = _read(context, token, ref, transforms, ref_aval, whole_shape, eqn.source_info)
    found = whole[tuple(indices)]
    return token, found if mask is None else jnp.where(mask, found, 0)


@_rule(sc.scatter_p)
def _store_scatter(eqn, read_inputs, context, token, interpret):
    ref, transforms, indices, x, mask = eqn.params["tree"].unflatten(read_inputs())
    ref_aval, transforms_aval, *_ = eqn.params["tree"].unflatten([v.aval for v in eqn.invars])
    whole_shape = _transformed(ref_aval, transforms_aval)
    token, whole = _read(context, token, ref, transforms, ref_aval, whole_shape, eqn.source_info)
    indices = tuple(indices)
    if mask is not None:
        indices = (jnp.where(mask, indices[0], whole.shape[0]), *indices[1:])
    target = whole.at[indices]
    new = target.add(x, mode="drop") if eqn.params["add"] else target.set(x, mode="drop")
    return _write(context, token, ref, transforms, ref_aval, new, eqn.source_info), []


@_rule(sc.swap_p)
def _store(eqn, read_inputs, context, token, interpret):
    """`addupdate`, `store_compressed`, `addupdate_compressed`."""
    ref, x, *rest = read_inputs()
    mask = rest.pop() if eqn.params["has_mask"] else None
    transforms = jax.tree.unflatten(eqn.params["tree"], rest)
    ref_aval = eqn.invars[0].aval
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    token, old = _read(context, token, ref, transforms, ref_aval, shape, eqn.source_info)
    if mask is None:
        new = old + x if eqn.params["add"] else x
    else:
        position = jnp.where(mask, jnp.cumsum(mask) - 1, x.size)
        new = old.at[position].add(x, mode="drop") if eqn.params["add"] else old.at[position].set(x, mode="drop")
    return _write(context, token, ref, transforms, ref_aval, new, eqn.source_info), x


@_rule(sc.load_p)
def _load_expanded(eqn, read_inputs, context, token, interpret):
    ref, *rest = read_inputs()
    mask = rest.pop() if eqn.params["has_mask"] else None
    transforms = jax.tree.unflatten(eqn.params["tree"], rest)
    out = eqn.outvars[0].aval
    shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
    token, value = _read(context, token, ref, transforms, eqn.invars[0].aval, shape, eqn.source_info)
    if mask is not None:
        value = jnp.where(mask, value[jnp.maximum(jnp.cumsum(mask) - 1, 0)], 0)
    return token, value


@_rule(sc.parallel_loop_p)
def _parallel_loop(eqn, read_inputs, context, token, interpret):
    """Backwards when nothing is carried: the iterations must not depend on their order."""
    lower, upper, step, consts, carry = eqn.params["tree"].unflatten(read_inputs())
    body_jaxpr = partial_eval.convert_constvars_jaxpr(eqn.params["jaxpr"])
    lower, upper, step = (jnp.asarray(value, jnp.int32) for value in (lower, upper, step))
    count = jnp.maximum((upper - lower + step - 1) // step, 0)
    backwards = Machine.reverse_parallel_loops and not jax.tree.leaves(carry)

    def body(state):
        i, token, carried = state
        k = (count - 1 - i) if backwards else i
        token, carried = interpret(body_jaxpr, *consts, lower + k * step, *carried, token=token)
        return i + 1, token, list(carried)

    _, token, carried = lax.while_loop(lambda state: state[0] < count, body, (jnp.int32(0), token, list(carry)))
    return token, carried


# ---- synchronisation ----


def _barrier_callback(token, device_id, core):
    memory = ipc._get_shared_memory()
    device_id, core, subcores = int(device_id), int(core), Machine.num_subcores
    key = (id(memory), device_id, core // subcores)
    with Machine.lock:
        if key not in Machine.barriers:
            first = memory.get_global_core_id(device_id, core // subcores * subcores)

            def join_clocks():
                if memory.detect_races:
                    memory.update_clocks(first, first + subcores)

            Machine.barriers[key] = threading.Barrier(subcores, action=join_clocks)
    Machine.barriers[key].wait(timeout=120)
    return token


@_rule(sc.barrier_p)
def _barrier(eqn, read_inputs, context, token, interpret):
    run = ipc.fail_on_exception(_barrier_callback)
    return callback.io_callback(run, TOKEN, token, context.device_id, context.local_core_id), []


# ---- indirect DMA ----


class _Major:
    """A transform that picks entry n along the first dimension, whatever the rest of the shape."""

    def __init__(self, n: int) -> None:
        self.indices = (n,)


jax.tree_util.register_pytree_node(_Major, lambda major: ((), major.indices), lambda aux, _: _Major(aux[0]))


def _split_indirect(ref: Any, aval: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Base ref, transforms before the list, (list, its aval, ignored value) or None, other indices, indexed shape."""
    base, transforms = mosaic_primitives._get_ref_and_transforms(ref)
    _, transforms_aval = mosaic_primitives._get_ref_and_transforms(aval)
    for k, (transform, transform_aval) in enumerate(zip(transforms, transforms_aval, strict=True)):
        if not (isinstance(transform_aval, indexing.NDIndexer) and transform_aval.indices):
            continue
        first, first_aval, ignored = transform.indices[0], transform_aval.indices[0], None
        if isinstance(first_aval, sc_core.Indices):
            ignored, first, first_aval = first_aval.ignored_value, first.values, first_aval.values
        elif isinstance(first_aval, indexing.Slice) or getattr(first_aval, "shape", ()) == ():
            continue
        assert k == len(transforms) - 1, "nothing may follow the indices of an indirect DMA"
        return base, transforms[:k], (first, first_aval, ignored), transform.indices[1:], transform.shape
    return base, transforms, None, None, None


def _pieces_of_row(row: int, base_shape: tuple[int, ...], indexed_shape: tuple[int, ...]) -> list[Any]:
    """Where a row of a reshaped two-dimensional buffer lies: jax's interpreter does not know reshaped buffers."""
    width, lanes = indexed_shape[1], base_shape[1]
    pieces, start, end = [], row * width, (row + 1) * width
    while start < end:
        line, column = divmod(start, lanes)
        size = min(lanes - column, end - start)
        pieces.append((indexing.NDIndexer((line, indexing.Slice(column, size)), base_shape, ()),))
        start += size
    return pieces


def _start_callback(
    token, device_id, core, gather, source, destination, before, rest, index_list, values, semaphore, num_bytes,
    *, base_shape, indexed_shape, ignored, source_info,
):  # fmt: skip
    memory = ipc._get_shared_memory()
    device, core, gather = int(device_id), int(core), bool(gather)
    global_core = memory.get_global_core_id(device, core)
    source, destination, before, rest, index_list, semaphore, num_bytes = jax.tree.map(
        int, (source, destination, before, rest, index_list, semaphore, num_bytes)
    )
    values = None if values is None else np.array(values)
    (found,), clock = memory.get_semaphores_and_increment_clock((semaphore,), global_core)
    dma = ipc.dma_id_counter.get_next()
    engine = memory.get_random_virtual_device_id()

    def tick():
        if found.detect_races:
            vector_clock.inc_vector_clock(clock, engine)
            return vector_clock.copy_vector_clock(clock)
        return None

    def how():
        return dict(clock=tick(), src_device_id=dma, src_local_core_id=0, source_info=source_info)

    def read(place, transforms):
        return ipc.get.__wrapped__(None, device, core, place[0], place[1], transforms, **how())[1]

    def write(place, transforms, data):
        ipc.store.__wrapped__(None, device, core, place[0], place[1], transforms, data, **how())

    def run():
        rows = read(index_list, index_list[2]) if values is None else values
        for n, row in enumerate(np.asarray(rows).tolist()):
            if ignored is not None and row == ignored:
                continue
            if not 0 <= row < indexed_shape[0]:
                raise IndexError(f"index {row} of an indirect DMA is outside of [0, {indexed_shape[0]})")
            if before and isinstance(before[0], state_types.ReshapeTransform):
                pieces = _pieces_of_row(row, base_shape, indexed_shape)
            else:
                pieces = [(*before, indexing.NDIndexer((row, *rest), indexed_shape, ()))]
            if gather:
                found_pieces = [read(source, piece) for piece in pieces]
                data = found_pieces[0] if len(pieces) == 1 else np.concatenate(found_pieces)
                write(destination, (*destination[2], _Major(n)), data)
            else:
                data, done = read(source, (*source[2], _Major(n))), 0
                for piece in pieces:
                    size = piece[-1].indices[-1].size if len(pieces) > 1 else None
                    write(destination, piece, data if size is None else data[done : done + size])
                    done += size or 0
        tick()
        found.signal(num_bytes, global_core, clock=clock, logging_info=None)

    if memory.dma_execution_mode == "on_wait":
        memory.append_semaphore_task(semaphore, global_core, run)
    else:
        run()
    return token


@_rule(mosaic_primitives.dma_start_p)
def _dma_start(eqn, read_inputs, context, token, interpret):
    values = read_inputs()
    source, destination, semaphore, *_ = jax.tree.unflatten(eqn.params["tree"], values)
    avals = jax.tree.unflatten(eqn.params["tree"], [v.aval for v in eqn.invars])
    source_aval, destination_aval = avals[:2]
    split_source = _split_indirect(source, source_aval)
    split_destination = _split_indirect(destination, destination_aval)
    if eqn.params["add"]:
        raise NotImplementedError("an adding DMA is not interpreted; libtpu 0.0.52 refuses it into HBM")
    if split_source[2] is None and split_destination[2] is None:
        return None
    gather = split_source[2] is not None
    listed, other, other_aval = (
        (split_source, split_destination, destination_aval)
        if gather
        else (split_destination, split_source, source_aval)
    )
    base, before, (index_values, index_aval, ignored), rest, indexed_shape = listed
    other_base_aval, other_transforms = mosaic_primitives._get_ref_and_transforms(other_aval)
    moved = _transformed(other_base_aval, other_transforms)
    if isinstance(index_aval, (state_types.AbstractRef, state_types.TransformedRef)):
        index_ref, index_transforms = mosaic_primitives._get_ref_and_transforms(index_values)
        index_base_aval, _ = mosaic_primitives._get_ref_and_transforms(index_aval)
        index_list, constant = (_memory_space(index_base_aval), index_ref, tuple(index_transforms)), None
    else:
        index_list, constant = (0, 0, ()), index_values
    listed_aval, _ = mosaic_primitives._get_ref_and_transforms(source_aval if gather else destination_aval)
    listed_place = (_memory_space(listed_aval), base, ())
    other_place = (_memory_space(other_base_aval), other[0], tuple(other[1]))
    semaphore, semaphore_transforms = mosaic_primitives._get_ref_and_transforms(semaphore)
    run = functools.partial(
        _start_callback,
        base_shape=listed_aval.shape,
        indexed_shape=indexed_shape,
        ignored=ignored,
        source_info=eqn.source_info,
    )
    token = callback.io_callback(
        ipc.fail_on_exception(run),
        TOKEN,
        token,
        context.device_id,
        context.local_core_id,
        gather,
        listed_place if gather else other_place,
        other_place if gather else listed_place,
        tuple(before),
        tuple(rest),
        index_list,
        constant,
        discharge.transform_array(semaphore, semaphore_transforms),
        math.prod(moved.shape) * moved.dtype.itemsize,
    )
    return token, []


@_rule(mosaic_primitives.dma_wait_p)
def _dma_wait(eqn, read_inputs, context, token, interpret):
    source, destination, semaphore, *_ = jax.tree.unflatten(eqn.params["tree"], read_inputs())
    avals = jax.tree.unflatten(eqn.params["tree"], [v.aval for v in eqn.invars])
    gather = _split_indirect(source, avals[0])[2] is not None
    if not gather and _split_indirect(destination, avals[1])[2] is None:
        return None
    moved = _transformed(*mosaic_primitives._get_ref_and_transforms(avals[1] if gather else avals[0]))
    semaphore, semaphore_transforms = mosaic_primitives._get_ref_and_transforms(semaphore)
    token = callback.io_callback(
        lambda *arguments: ipc.dma_wait(*arguments, source_info=eqn.source_info),
        TOKEN,
        token,
        context.device_id,
        context.local_core_id,
        discharge.transform_array(semaphore, semaphore_transforms),
        math.prod(moved.shape) * moved.dtype.itemsize,
    )
    return token, []

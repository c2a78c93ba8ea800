"""XLA's own SparseCore embedding ops, `SparseDenseMatmul*`, as JAX primitives, for `benchmarks.kernels` to compile.

They take ids that the host has cut into partitions, one for each pair of SparseCores, each sorted, made unique and
padded to `max_ids_per_partition`; jax-tpu-embedding's input preprocessing does that on the host. Here are only the
programs for the device: no mini-batches, one device, Adagrad with an accumulator per element as in its
`sparse_dense_matmul_grad_with_adagrad` (it has no row-wise one). Operands and backend config are those of
jax-tpu-embedding 0.1.0, `lib/core/primitives`.
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

SLACK = 1.25  # of a partition over its mean: room for ids that do not spread evenly
_PADDING = 2**31 - 1
_POINTERS = 8  # row pointers of a SparseCore, at least


def program(device: Any, op: str, num_rows: int, dim: int, num_bags: int, ids_per_bag: int) -> tuple:
    """One program.

    Args:
        device: a `tpurec.kernels.ahead_of_time.Target` with SparseCores.
        op: `embedding_bag` or `embedding_update`.
        num_rows: rows of the table.
        dim: its columns.
        num_bags: bags, float32 results.
        ids_per_bag: ids of each.

    Returns:
        The function, its abstract arguments and the donated positions.
    """
    import jax.numpy as jnp

    cores = device.chip.sparse_core.num_cores
    most = math.ceil(num_bags * ids_per_bag / cores**2 * SLACK / 8) * 8
    ids = device.array((most * cores**2,), jnp.int32)
    gains = device.array((most * cores**2,), jnp.float32)
    table, bags = device.array((num_rows, dim), jnp.float32), device.array((num_bags, dim), jnp.float32)
    pointers = device.array((max(_POINTERS, cores) * cores,), jnp.int32)
    forward, backward = _primitives()
    if op == "embedding_bag":

        def lookup(*operands):
            return forward.bind(*operands, jnp.zeros((num_bags, dim), jnp.float32), most=most)

        return lookup, (pointers, ids, ids, gains, table), ()

    def update(*operands):
        return backward.bind(*operands, most=most)

    return update, (pointers, ids, ids, gains, bags, table, table, device.array((), jnp.float32)), (5, 6)


@cache
def _primitives() -> tuple[Any, Any]:
    import jax.extend as jex
    from jax.interpreters import mlir

    forward, backward = jex.core.Primitive("sparse_dense_matmul"), jex.core.Primitive("sparse_dense_matmul_grad")
    backward.multiple_results = True
    forward.def_abstract_eval(lambda *operands, most: operands[5])
    backward.def_abstract_eval(lambda *operands, most: [operands[5], operands[6]])
    mlir.register_lowering(forward, _lower_forward)
    mlir.register_lowering(backward, _lower_backward)
    return forward, backward


def _config(most: int, **more: int) -> str:
    matmul = {"max_ids_per_partition": most, "max_unique_ids_per_partition": most, "pad_value": _PADDING}
    matmul |= {"sharding_strategy": 1, **more}  # 1: row r lies on SparseCore r mod cores
    return json.dumps({"sparse_dense_matmul_config": matmul, "device_type": "DEVICE_TYPE_SPARSECORE"})


def _lower_forward(ctx: Any, *operands: Any, most: int) -> Any:
    import jax
    from jax.interpreters import mlir

    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    call = jax.ffi.ffi_lowering(
        "SparseDenseMatmulOp", result_types=types, api_version=1, backend_config=_config(most),
        skip_ffi_layout_processing=True,
    )  # fmt: skip
    return call(ctx, *operands)


def _lower_backward(ctx: Any, *operands: Any, most: int) -> Any:
    import jax
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import func, hlo
    from jax.interpreters import mlir

    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    row = ir.RankedTensorType.get([1, ctx.avals_out[0].shape[1]], ir.F32Type.get())
    # What the SparseCore does to one row: (gradient, row, accumulator, rate) -> (row, accumulator).
    rule = func.FuncOp(
        "adagrad_rule", ([row] * 4, [ir.TupleType.get_tuple([row, row])]), ip=ctx.module_context.ip,
        visibility="private",
    )  # fmt: skip
    with ir.InsertionPoint(rule.add_entry_block()):
        gradient, old, state, rate = rule.arguments
        grown = hlo.add(state, hlo.multiply(gradient, gradient))
        step = hlo.divide(hlo.multiply(rate, gradient), hlo.sqrt(grown))
        func.ReturnOp([hlo.tuple([hlo.subtract(old, step), grown])])
    call = jax.ffi.ffi_lowering(
        "SparseDenseMatmulGradOpWithOptimizerUpdate", result_types=[ir.TupleType.get_tuple(types)], api_version=1,
        backend_config=_config(most, num_slot_variables=1, num_hyperparameters=1),
        called_computations=["adagrad_rule"], skip_ffi_layout_processing=True,
    )  # fmt: skip
    both, results = call(ctx, *operands), []
    for index in range(2):
        element = hlo.GetTupleElementOp(both, index)
        sparse = {"_xla_compute_type": ir.StringAttr.get("sparse")}
        element.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(sparse)
        results.append(element.results)
    return results

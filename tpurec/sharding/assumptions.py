"""Everything the planner assumes, in one place: value, unit, meaning, source. Override any of it in the table list.

`docs/planner.md` shows this table; a test keeps the two equal.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from tpurec.errors import ConfigError
from tpurec.kernels.limits import MAX_TENSOR_BYTES
from tpurec.topology import collectives
from tpurec.topology.slices import SliceTopology

GIB = 1 << 30


def _assume(default: Any, unit: str, meaning: str, source: str) -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning, "source": source})


@dataclass(frozen=True)
class Assumptions:
    """What the cost model takes for granted; `None` means "as the slice's chip has it".

    Every field's unit, meaning and source are in its metadata, which `rows_of_table` lists.

    Raises:
        ConfigError: a value is not positive where it has to be, or a share is not between 0 and 1.
    """

    hbm_bytes: int | None = _assume(
        None, "byte/rank", "memory that a program may use", "libtpu's report per generation; CPU ranks: 8 GiB, assumed"
    )
    hbm_bytes_per_second: float | None = _assume(
        None, "byte/s/rank", "memory bandwidth", "Cloud TPU documentation; CPU ranks: 10 GB/s, assumed"
    )
    link_bytes_per_second: float | None = _assume(
        None,
        "byte/s",
        "one inter-chip link, one direction",
        "Cloud TPU documentation; CPU ranks: 2 GB/s over loopback, assumed",
    )
    hop_seconds: float | None = _assume(
        None, "s", "latency of one link", "jax-ml scaling book: 1 us; CPU ranks: 50 us a message, assumed"
    )
    launch_seconds: float | None = _assume(None, "s", "fixed cost of one collective", "assumed: 2 us; CPU ranks: 50 us")
    matmul_flops_per_second: float | None = _assume(
        None, "flop/s/rank", "peak of the dense part", "Cloud TPU documentation (bf16); CPU ranks: 50 GFLOP/s, assumed"
    )
    matmul_efficiency: float = _assume(0.4, "share", "of that peak which the dense part reaches", "assumed")
    gather_efficiency: float = _assume(
        0.6, "share", "of memory bandwidth that reading or writing single rows reaches", "assumed"
    )
    stream_efficiency: float = _assume(
        0.85, "share", "of memory bandwidth that reading or writing in order reaches", "assumed"
    )
    sparse_core_hertz: float = _assume(1.5e9, "1/s", "instruction bundles per second of one subcore", "assumed")
    row_bundles: float = _assume(
        0.8,
        "bundle/row",
        "of an inner loop beside its bundles for each of dim / lanes vectors (one, to load it, in the lookup)",
        "compiled kernel: 16.7 at dim 128 and 8 lanes (v5p, v6e), 8.8 at 16 lanes (7x)",
    )
    combine_bundles: float = _assume(
        1.05,
        "bundle/vector",
        "to combine duplicates, per dim / lanes vector of each id",
        "compiled kernel: 17.25 a row at dim 128 and 8 lanes, 9.75 at 16",
    )
    optimizer_bundles: float = _assume(
        8.0, "bundle/vector", "of the optimizer step, per dim / lanes vector of each row touched", "assumed"
    )
    tensor_core_hertz: float = _assume(1.5e9, "1/s", "TensorCore cycles", "assumed")
    sort_cycles: float = _assume(
        1.0, "cycle/id", "to sort ids before duplicates are combined", "compiled lax.sort: 82k cycles for 81,920 pairs"
    )
    zipf_exponent: float = _assume(
        1.05, "", "skew of ids where a table gives no statistics", "the skew of the wire-traffic simulations"
    )
    id_bytes: int = _assume(4, "byte", "one id on the wire", "int32 local rows")
    bag_bytes: int = _assume(4, "byte", "the bag number that travels with an id whose bag is pooled in parts", "int32")
    vector_bytes: int = _assume(4, "byte/element", "rows, pooled vectors and gradients on the wire", "float32")
    rung_padding: float = _assume(
        1.1, "ratio", "capacity of a rung over the mean number of ids", "assumed: ladder steps of about 20%"
    )
    input_buffers: int = _assume(2, "", "batches of input on the device", "packing runs one batch ahead")
    dense_input_bytes: int = _assume(56, "byte/example", "dense features, label and mask", "13 float32, label, mask")
    dense_parameters: int = _assume(
        16_000_000, "", "parameters of the dense model", "MLPerf DLRM-v2: two MLPs and three low-rank cross layers"
    )
    dense_state_bytes: int = _assume(
        16, "byte/parameter", "weight, gradient and two optimizer moments", "float32, Adam; replicated on every rank"
    )
    dense_flops: float | None = _assume(
        None, "flop/example", "forward and backward of the dense part", "6 per parameter"
    )
    activation_copies: float = _assume(
        6.0, "", "copies of the pooled vectors of a rank's examples that live at once", "assumed: values, gradients"
    )
    activation_bytes: int = _assume(
        40_000, "byte/example", "other activations of the dense part", "assumed: MLP layers kept for backward"
    )
    max_tensor_bytes: int = _assume(
        MAX_TENSOR_BYTES,
        "byte",
        "largest tensor that a SparseCore kernel takes; larger stacks are cut, but no table on a single TPU",
        "ran: libtpu 0.0.52",
    )
    row_alignment: int = _assume(8, "row", "shards are padded to this many rows", "(8, 128) tiles of float32")
    workspace_bytes: int = _assume(
        2 << 20, "byte/stack", "temporary memory of the lookup and the update", "compiled prototype: 1.1 to 2.4 MiB"
    )
    program_bytes: int = _assume(256 << 20, "byte/rank", "compiled programs, runtime and small tensors", "assumed")
    reserve_share: float = _assume(0.05, "share", "of the memory that stays free, for fragmentation", "assumed")

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value is None:
                continue
            if not value >= 0 or value == float("inf"):
                raise ConfigError(f"assumption {spec.name} = {value!r}: must be a finite number, 0 or more.")
            if spec.metadata["unit"] == "share" and value > 1:
                raise ConfigError(f"assumption {spec.name} = {value!r}: is a share, at most 1.")
            if value == 0 and spec.name in _POSITIVE:
                raise ConfigError(f"assumption {spec.name} = 0: must be greater than 0.")

    def on(self, slice_: SliceTopology) -> Assumptions:
        """Fill what is None from a slice.

        Args:
            slice_: the slice.

        Returns:
            The same assumptions with no None left.
        """
        links = collectives.Links.of(slice_)
        facts = slice_.chip
        found = {
            "hbm_bytes": facts.usable_hbm_bytes if facts else 8 * GIB,
            "hbm_bytes_per_second": facts.hbm_bytes_per_second_per_device if facts else 1e10,
            "link_bytes_per_second": links.bytes_per_second,
            "hop_seconds": links.hop_seconds,
            "launch_seconds": links.launch_seconds,
            "matmul_flops_per_second": facts.bf16_flops_per_second_per_device if facts else 5e10,
            "dense_flops": 6.0 * self.dense_parameters,
        }
        return dataclasses.replace(self, **{key: val for key, val in found.items() if getattr(self, key) is None})

    def links(self) -> collectives.Links:
        """The wires, once `on` a slice.

        Returns:
            What the collective costs take.
        """
        return collectives.Links(self.link_bytes_per_second, self.hop_seconds, self.launch_seconds)


_POSITIVE = {
    "hbm_bytes", "hbm_bytes_per_second", "link_bytes_per_second", "matmul_flops_per_second", "matmul_efficiency",
    "gather_efficiency", "stream_efficiency", "sparse_core_hertz", "tensor_core_hertz", "id_bytes", "vector_bytes",
    "rung_padding", "max_tensor_bytes", "row_alignment",
}  # fmt: skip


def rows_of_table() -> list[tuple[str, str, str, str, str]]:
    """The assumptions as text.

    Returns:
        Per assumption: name, default, unit, meaning, source.
    """
    rows = []
    for spec in dataclasses.fields(Assumptions):
        default = "as the chip" if spec.default is None else f"{spec.default:g}"
        if spec.name == "dense_flops":
            default = "6 a parameter"
        meta = spec.metadata
        rows.append((spec.name, default, meta["unit"], meta["meaning"], meta["source"]))
    return rows

"""What one TPU chip of each generation is: memory, bandwidth, cores.

The published table is per chip; a program runs on a torch device (a rank's device). They are the same thing except on
7x, whose chip is two torch devices, and v5p, whose two TensorCores work as one device (megacore). Fields say which of
the two they describe; properties ending in `_per_device` divide where that is due.

Sources, named in the comments below:
    docs     Cloud TPU documentation, pages v5e, v5p, v6e, tpu7x (read 2026-11-30)
    libtpu   libtpu 0.0.52: the HBM limit in its out-of-memory report, compiled for one device of each generation
    jax      jax 0.10.2, jax/_src/pallas/mosaic/tpu_info.py (its numbers are per TensorCore)
    xpk      google/xpk system_characteristics.py
"""

from __future__ import annotations

from dataclasses import dataclass

from tpurec.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB, TB, TFLOP = 10**9, 10**12, 10**12


@dataclass(frozen=True)
class SparseCore:
    """The SparseCores that one torch device can use.

    Args:
        num_cores: SparseCores per torch device.
        num_subcores: vector subcores (tiles) per SparseCore.
        num_lanes: 32-bit lanes of one vector register.
        vmem_bytes: private memory of one vector subcore.
        dma_granule_bytes: smallest piece that a DMA moves; smaller rows cost this much of HBM traffic.
    """

    num_cores: int
    num_subcores: int
    num_lanes: int
    vmem_bytes: int
    dma_granule_bytes: int

    @property
    def num_workers(self) -> int:
        """Vector subcores of one torch device, which is how many workers a kernel launch has."""
        return self.num_cores * self.num_subcores


@dataclass(frozen=True)
class Chip:
    """Facts about one generation; see the module's text for `per chip` and `per torch device`.

    Args:
        name: how the generation is called here and in slice names (`v6e-64`).
        libtpu_name: how libtpu's topology descriptions call it (`tpu7x:2x2x1`).
        device_kind: `device_kind` of its jax devices.
        num_devices: torch devices (ranks) per chip.
        num_tensor_cores: TensorCores per chip.
        num_sparse_cores: SparseCores per chip; 0 if it has none.
        hbm_bytes: documented HBM per chip.
        usable_hbm_bytes: what a program may use per torch device, as libtpu reports it. Plan with this one.
        hbm_bytes_per_second: HBM bandwidth per chip.
        bf16_flops_per_second: peak per chip.
        ici_bytes_per_second: inter-chip bandwidth per chip, both directions of all its links together.
        torus_dims: 2 or 3.
        wraparound_multiple: a slice dimension has a wraparound link if it is a multiple of this many chips.
        name_counts_cores: slice names count TensorCores instead of chips (`v5p-128`, `tpu7x-128` are 64 chips).
        tensor_core_vmem_bytes: vector memory of one TensorCore.
        tensor_core_smem_bytes: scalar memory of one TensorCore.
        sparse_core: the SparseCores of one torch device; None if the chip has none.
    """

    name: str
    libtpu_name: str
    device_kind: str
    num_devices: int
    num_tensor_cores: int
    num_sparse_cores: int
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bytes_per_second: float
    bf16_flops_per_second: float
    ici_bytes_per_second: float
    torus_dims: int
    wraparound_multiple: int
    name_counts_cores: bool
    tensor_core_vmem_bytes: int
    tensor_core_smem_bytes: int
    sparse_core: SparseCore | None

    @property
    def hbm_bytes_per_second_per_device(self) -> float:
        """HBM bandwidth of one torch device."""
        return self.hbm_bytes_per_second / self.num_devices

    @property
    def bf16_flops_per_second_per_device(self) -> float:
        """bf16 peak of one torch device."""
        return self.bf16_flops_per_second / self.num_devices

    @property
    def num_ici_links(self) -> int:
        """Links to neighbouring chips: one each way along each torus dimension."""
        return 2 * self.torus_dims

    @property
    def ici_link_bytes_per_second(self) -> float:
        """One link, one direction: the documented figure counts both directions of all links."""
        return self.ici_bytes_per_second / (2 * self.num_ici_links)


V5E = Chip(
    name="v5e",
    libtpu_name="v5e",
    device_kind="TPU v5 lite",  # jax
    num_devices=1,
    num_tensor_cores=1,  # docs
    num_sparse_cores=0,  # docs
    hbm_bytes=16 * GB,  # docs
    usable_hbm_bytes=int(15.75 * GIB),  # libtpu
    hbm_bytes_per_second=819 * GB,  # docs
    bf16_flops_per_second=197 * TFLOP,  # docs
    ici_bytes_per_second=400 * GB,  # docs
    torus_dims=2,  # docs
    wraparound_multiple=16,  # docs: only the 16 x 16 pod closes its rings
    name_counts_cores=False,  # docs
    tensor_core_vmem_bytes=128 * MIB,  # jax
    tensor_core_smem_bytes=1 * MIB,  # jax
    sparse_core=None,
)

V5P = Chip(
    name="v5p",
    libtpu_name="v5p",
    device_kind="TPU v5",  # jax
    num_devices=1,  # docs: both TensorCores are one device (megacore)
    num_tensor_cores=2,  # docs
    num_sparse_cores=4,  # docs
    hbm_bytes=95 * GB,  # docs
    usable_hbm_bytes=int(95.73 * GIB),  # libtpu
    hbm_bytes_per_second=2765 * GB,  # docs
    bf16_flops_per_second=459 * TFLOP,  # docs
    ici_bytes_per_second=1200 * GB,  # docs
    torus_dims=3,  # docs
    wraparound_multiple=4,  # docs: slices are built of 4 x 4 x 4 cubes, larger ones are full tori
    name_counts_cores=True,  # docs
    tensor_core_vmem_bytes=64 * MIB,  # jax
    tensor_core_smem_bytes=1 * MIB,  # jax
    sparse_core=SparseCore(4, 16, 8, 512 * KIB, 32),  # jax
)

V6E = Chip(
    name="v6e",
    libtpu_name="v6e",
    device_kind="TPU v6 lite",  # jax
    num_devices=1,
    num_tensor_cores=1,  # docs
    num_sparse_cores=2,  # docs
    hbm_bytes=32 * GB,  # docs
    usable_hbm_bytes=int(31.24 * GIB),  # libtpu
    hbm_bytes_per_second=1638 * GB,  # docs
    bf16_flops_per_second=918 * TFLOP,  # docs
    ici_bytes_per_second=800 * GB,  # docs
    torus_dims=2,  # docs
    wraparound_multiple=16,  # docs
    name_counts_cores=False,  # docs
    tensor_core_vmem_bytes=128 * MIB,  # jax
    tensor_core_smem_bytes=1 * MIB,  # jax
    sparse_core=SparseCore(2, 16, 8, 256 * KIB, 32),  # jax
)

TPU7X = Chip(
    name="7x",
    libtpu_name="tpu7x",
    device_kind="TPU7x",  # jax
    num_devices=2,  # docs: each TensorCore is a device of its own, with half of the HBM
    num_tensor_cores=2,  # docs
    num_sparse_cores=4,  # docs
    hbm_bytes=192 * GIB,  # docs
    usable_hbm_bytes=int(94.74 * GIB),  # libtpu, one of the two devices
    hbm_bytes_per_second=7.4 * TB,  # docs
    bf16_flops_per_second=2307 * TFLOP,  # docs
    ici_bytes_per_second=1200 * GB,  # docs
    torus_dims=3,  # docs
    wraparound_multiple=4,  # docs
    name_counts_cores=True,  # xpk
    tensor_core_vmem_bytes=64 * MIB,  # jax
    tensor_core_smem_bytes=1 * MIB,  # jax
    sparse_core=SparseCore(2, 16, 16, 512 * KIB, 32),  # jax: SparseCores per device, half of the chip's
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (V5E, V5P, V6E, TPU7X)}


def chip(name: str) -> Chip:
    """Find a generation by its name.

    Args:
        name: `v5e`, `v5p`, `v6e` or `7x`; `tpu7x`, `v7x` and capitals are understood too.

    Returns:
        Its facts.

    Raises:
        ConfigError: there is no such generation here.

    >>> chip("tpu7x").sparse_core.num_lanes
    16
    """
    key = name.lower().removeprefix("tpu").lstrip("-")
    found = CHIPS.get("7x" if key == "v7x" else key)
    if found is None:
        raise ConfigError(f"chip {name!r} is not known.", f"Known chips: {', '.join(CHIPS)}.")
    return found

"""The chip table is consistent in itself, and agrees with the compiler's stack where that states the same fact."""

import subprocess
import sys

import pytest

from tpurec.errors import ConfigError
from tpurec.topology.chips import CHIPS, GIB, chip


@pytest.mark.parametrize("name", CHIPS)
def test_devices_share_what_a_chip_has(name):
    facts = chip(name)
    assert facts.num_tensor_cores % facts.num_devices == 0
    per_device = facts.sparse_core.num_cores if facts.sparse_core else 0
    assert per_device * facts.num_devices == facts.num_sparse_cores
    # A program may use nearly all of the documented memory, and no more than it (docs give GB or GiB; allow that gap).
    assert 0.97 < facts.usable_hbm_bytes * facts.num_devices / facts.hbm_bytes < 1.09
    assert facts.hbm_bytes_per_second_per_device * facts.num_devices == facts.hbm_bytes_per_second
    assert facts.ici_link_bytes_per_second * facts.num_ici_links * 2 == facts.ici_bytes_per_second


def test_7x_is_two_devices_and_v5p_is_one():
    assert (chip("7x").num_devices, chip("v5p").num_devices) == (2, 1)
    assert chip("7x").usable_hbm_bytes < 96 * GIB  # a device has half of the chip's 192 GiB


@pytest.mark.parametrize("name", CHIPS)
def test_agrees_with_jax(name):
    from jax._src.pallas.mosaic import tpu_info

    facts = chip(name)
    version = tpu_info.chip_version_from_device_kind(facts.device_kind)
    assert version.num_physical_tensor_cores_per_chip == facts.num_tensor_cores
    cores_per_device = facts.num_tensor_cores // facts.num_devices
    info = tpu_info.get_tpu_info_for_chip(version, cores_per_device)
    assert info.vmem_capacity_bytes == facts.tensor_core_vmem_bytes
    assert info.smem_capacity_bytes == facts.tensor_core_smem_bytes
    assert info.bf16_ops_per_second * facts.num_tensor_cores == pytest.approx(facts.bf16_flops_per_second, rel=0.01)
    if name != "v5p":  # jax has 2,460 GB/s for v5p, the documentation 2,765
        bandwidth = info.mem_bw_bytes_per_second * facts.num_tensor_cores
        assert bandwidth == pytest.approx(facts.hbm_bytes_per_second, rel=0.01)
    if facts.sparse_core is None:
        assert info.sparse_core is None
    else:
        mine, theirs = facts.sparse_core, info.sparse_core
        assert (mine.num_cores, mine.num_subcores, mine.num_lanes) == (
            theirs.num_cores,
            theirs.num_subcores,
            theirs.num_lanes,
        )
        assert mine.vmem_bytes == theirs.vmem_capacity_bytes
        assert mine.dma_granule_bytes == theirs.dma_granule_size_bytes


@pytest.mark.parametrize(("alias", "name"), [("tpu7x", "7x"), ("v7x", "7x"), ("V6E", "v6e"), ("TPU-V5P", "v5p")])
def test_other_spellings(alias, name):
    assert chip(alias).name == name


def test_unknown_chip_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"'v9z' is not known\..*v5e, v5p, v6e, 7x"):
        chip("v9z")


def test_loads_neither_jax_nor_torch():
    code = "import sys, tpurec.topology.chips; sys.exit(any(m in sys.modules for m in ('jax', 'torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The recipe's section [device]: what goes together, what does not, and that a missing TPU is said at once."""

import os
import time

import pytest

from pipelines.device import EXECUTIONS, DeviceConfig
from pipelines.recipe import read_recipe
from pipelines.run import Run
from pipelines.tpu import EAGER_MODES, attached_chips, check_tables, require_device
from tests.pipelines.conftest import SCHEMA
from tpurec.config import from_mapping, to_toml
from tpurec.errors import ConfigError
from tpurec.models import TablesConfig, table_specs


def test_0_threads_leaves_cores_to_the_readers_and_one_to_the_step(monkeypatch):
    for cores, readers, expected in [(2, 1, 1), (8, 1, 7), (8, 3, 5), (1, 1, 1), (2, 4, 1)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert DeviceConfig().num_threads(readers) == expected
    assert DeviceConfig(threads=3).num_threads(1) == 3


def test_the_execution_is_by_default_that_of_the_kind_and_a_resolved_recipe_says_it():
    assert DeviceConfig().execution == "eager"
    assert DeviceConfig("tpu").execution == "compile"
    for kind in EXECUTIONS:
        assert f'execution = "{EXECUTIONS[kind][0]}"' in to_toml({"device": DeviceConfig(kind).__dict__})
    assert set(EAGER_MODES) == set(EXECUTIONS["tpu"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"execution": "strict"}, "execution = 'strict' is not for device.kind = 'cpu': it is a mode of torch_tpu"),
        ({"execution": "compile"}, "'compile' is not for device.kind = 'cpu'.*FBGEMM"),
        ({"kind": "tpu", "execution": "eager"}, "'eager' is not for device.kind = 'tpu'.*Use 'compile' or 'strict'"),
        ({"on_recompile": "error"}, "on_recompile = 'error' needs execution = 'compile'"),
        ({"kind": "tpu", "execution": "debug", "on_recompile": "error"}, "needs execution = 'compile': under 'debug'"),
        ({"kind": "tpu", "execution": "fast"}, r"execution = 'fast'"),
        ({"kind": "gpu"}, r"kind = 'gpu'"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_way_out(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(DeviceConfig, values, "recipe.toml [device]")


def test_chips_are_counted_from_the_pci_bus(tmp_path):
    for slot, vendor, device in (
        ("00:01", "0x1ae0", "0x006f"),
        ("00:02", "0x1ae0", "0x006f"),
        ("00:03", "0x8086", "0x1"),
    ):
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "vendor").write_text(vendor + "\n")
        (tmp_path / slot / "device").write_text(device + "\n")
    (tmp_path / "00:04").mkdir()  # a device whose files cannot be read
    assert attached_chips(tmp_path) == ["v6e", "v6e"]
    assert attached_chips(tmp_path / "absent") == []


@pytest.mark.skipif(bool(attached_chips()), reason="a TPU is attached")
def test_without_a_chip_a_recipe_for_a_tpu_fails_at_once_and_libtpu_is_not_asked(recipe_file, tmp_path):
    """Asked, libtpu looks for a TPU through the cloud's metadata service, for minutes."""
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"no TPU chip is attached to this host\. Set device\.kind=cpu"):
        require_device(read_recipe(recipe_file, ["device.kind=tpu"]).device)
    assert time.monotonic() - started < 30
    require_device(DeviceConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embedding_dim": 12}, r"device\.kind = 'tpu': table 'user': embedding_dim 12: .*of 8 .*Use 8 or 16"),
        ({"embedding_dim": 24, "dtype": "bfloat16"}, r"'tpu': table 'user': embedding_dim 24: .*of 16 .*Use 16 or 32"),
        ({"dtype": "float16"}, r"'tpu': table 'user': dtype 'float16': tables are float32 or bfloat16"),
    ],
)
def test_tables_that_a_tpu_cannot_take_are_refused_by_name(settings, message):
    check_tables(table_specs(TablesConfig(embedding_dim=24), SCHEMA))
    check_tables(table_specs(TablesConfig(embedding_dim=32, dtype="bfloat16"), SCHEMA))
    with pytest.raises(ConfigError, match=message):
        check_tables(table_specs(TablesConfig(**settings), SCHEMA))


def test_a_run_may_change_its_device_and_execution_but_not_its_threads(recipe_file, tmp_path):
    run = Run(tmp_path / "run")
    run.path.mkdir()
    run.recipe_file.write_text(to_toml(read_recipe(recipe_file)))
    for overrides in (
        ["device.kind=tpu"],
        ["device.kind=tpu", "device.execution=debug"],
        ["device.kind=tpu", "device.on_recompile=error"],
        ["device.check=true"],
    ):
        run.check_recipe(read_recipe(recipe_file, overrides))
    with pytest.raises(ConfigError, match=r"device\.threads was 1, now 2"):
        run.check_recipe(read_recipe(recipe_file, ["device.threads=2"]))

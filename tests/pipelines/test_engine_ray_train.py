"""Ray Train on a slice that is none: raylets of this machine that say they have TPUs; gloo runs on their CPUs."""

import json
import os
import signal
import threading
import time

import pytest

from pipelines.engine_local import LocalSource
from pipelines.engine_ray_train import train_ray_workers
from pipelines.metrics_log import read_metrics
from pipelines.planning import choose_plan
from pipelines.ray_slice import POD_TYPE, SLICE_NAME, TOPOLOGY, WORKER_ID
from pipelines.recipe import read_recipe
from pipelines.run import Run, load_run
from pipelines.source import find_data
from pipelines.training import train_run
from tests.pipelines.conftest import RECIPE
from tpurec.errors import ConfigError, TpurecError
from tpurec.reporting import Reporter
from tpurec.sharding.checkpoint import list_checkpoints

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]  # sixteen processes start

SLICE, HOSTS, DEVICES = "v5p-16", 2, 4
SHORT = ("train.epochs=1", "train.batch_size=256", "train.evaluate_every_steps=0", "checkpoint.every_steps=4")


@pytest.fixture(scope="module")
def fake_slice():
    """A cluster with a head and the two hosts of a v5p-16, the second host first."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_NAME", "fake")  # Ray asks the node for the slice's name, and Google's metadata server else
        patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        for host in reversed(range(HOSTS)):
            labels = {SLICE_NAME: "fake", WORKER_ID: str(host), POD_TYPE: SLICE, TOPOLOGY: "2x2x2"}
            head = {f"TPU-{SLICE}-head": 1} if host == 0 else {}
            resources = {"TPU": DEVICES, "fake": 1, "accelerator_type:TPU-V5P": 1, **head}
            cluster.add_node(num_cpus=DEVICES, resources=resources, labels=labels)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def recipe_file(clicks, tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE.format(data=clicks))
    return path


@pytest.fixture(scope="module")
def alone(recipe_file, tmp_path_factory):
    recipe = read_recipe(recipe_file, SHORT)
    run, data = Run(tmp_path_factory.mktemp("alone") / "run"), find_data(recipe)
    with run.locked():
        run.begin(recipe, data.schema, data.train, data.test)
        return train_run(run, LocalSource(recipe, data))


def train(run: Run, recipe_file, *overrides: str, restarts: int = 2) -> dict:
    recipe = read_recipe(recipe_file, list(overrides))
    data = find_data(recipe)
    with run.locked():
        run.begin(recipe, data.schema, data.train, data.test)
        plan = choose_plan(run, recipe, data.schema)
        return train_ray_workers(run, recipe, data, plan, Reporter(), restarts)


def kill_one_worker(run: Run, killed: list[int]) -> None:
    import psutil

    while not list_checkpoints(run.checkpoints):
        time.sleep(0.005)
    for process in psutil.Process().children(recursive=True):
        if "RayTrainWorker" in " ".join(process.cmdline()):  # Ray names a worker after its class
            process.send_signal(signal.SIGKILL)
            killed.append(process.pid)
            return


def test_eight_workers_on_a_slice_lose_one_and_end_with_the_numbers_of_one_process(
    fake_slice, recipe_file, alone, tmp_path
):
    """cases 13 and 25: one worker a device, ranked by place; resumed at the exact batch."""
    run, killed = Run(tmp_path / "run"), []
    killer = threading.Thread(target=kill_one_worker, args=(run, killed), daemon=True)
    killer.start()
    result = train(run, recipe_file, *SHORT, f"sharding.slice={SLICE}")
    killer.join(timeout=1)
    assert len(killed) == 1 and result["restarts"] == 1
    assert result["world_size"] == HOSTS * DEVICES
    assert (result["rows_seen"], result["steps"]) == (alone["rows_seen"], alone["steps"])
    for key in ("auc", "log_loss", "calibration"):
        assert result[key] == pytest.approx(alone[key], abs=2e-4)
    lines = [line["step"] for line in read_metrics(run.metrics_file) if line["kind"] == "train"]
    assert lines == sorted(set(lines))
    assert json.loads(run.plan_file.read_text())["slice"] == SLICE
    assert load_run(run.path).checkpoint.step == result["best_step"]


def test_a_worker_says_where_it_runs(fake_slice):
    import ray

    from pipelines.slice_backend import whereabouts

    where = ray.remote(num_cpus=0, resources={"TPU": 1})(whereabouts)
    found = ray.get([where.options(label_selector={WORKER_ID: str(host)}).remote() for host in range(HOSTS)])
    assert [place["host"] for place in found] == [0, 1]
    assert all(0 <= place["device"] < DEVICES for place in found)
    assert found[0]["node"] != found[1]["node"]


def test_a_cluster_that_lacks_the_slice_is_refused_at_once_with_what_it_has(fake_slice, recipe_file, tmp_path):
    begun = time.monotonic()
    with pytest.raises(TpurecError, match=r"lacks the slice v6e-16: .* it has slice 'fake' \(v5p-16, 2x2x2\): 2 nodes"):
        train(Run(tmp_path / "run"), recipe_file, "sharding.slice=v6e-16")
    assert time.monotonic() - begun < 60


def test_a_failure_with_a_known_cause_ends_the_run_with_its_line(fake_slice, clicks, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f'data.train = "{clicks}/train"\ntables.learning_rate = 1e30\ntrain.learning_rate = 1e30\n')
    with pytest.raises(TpurecError, match=r"the loss is .* Lower train\.learning_rate"):
        train(Run(tmp_path / "run"), path, "sharding.num_workers=2")


def test_a_tpu_needs_a_slice(recipe_file, tmp_path):
    with pytest.raises(ConfigError, match=r"on which slice\? Set sharding\.slice"):
        train(Run(tmp_path / "run"), recipe_file, "sharding.num_workers=2", "device.kind=tpu")


PLACE = {
    "rank": 6,
    "num_ranks": 8,
    "slice": SLICE,
    "host": 1,
    "device": 2,
    "hosts": ["10.0.0.1", "10.0.0.2"],
}


def test_the_environment_of_torch_tpu_is_set_and_another_value_is_refused(monkeypatch):
    from pipelines.slice_backend import launch_environment, set_environment

    wanted = launch_environment(PLACE)
    assert wanted["TORCH_TPU_TOPOLOGY"] == "2,2,2" and wanted["RANK"] == "6" and wanted["LOCAL_RANK"] == "2"
    addresses = wanted["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    assert len(addresses) == 8 and addresses[6] == "10.0.0.2:8072"
    for name in wanted:
        monkeypatch.delenv(name, raising=False)
    set_environment(PLACE)
    assert {name: os.environ[name] for name in wanted} == wanted
    monkeypatch.setenv("TORCH_TPU_TOPOLOGY", "4,4,1")
    with pytest.raises(TpurecError, match=r"host 1, device 2: TORCH_TPU_TOPOLOGY = '4,4,1', '2,2,2' is needed"):
        set_environment(PLACE)
    for name in wanted:
        monkeypatch.delenv(name)

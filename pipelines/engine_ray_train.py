"""`--engine ray` with workers: Ray Train places one worker on each torch device, and replaces what is lost.

Each worker reads its own share of every batch in threads; the RUN and the data lie where all workers see them under
the same path. What a worker fails of with a known cause ends the run: it leaves the cause in the RUN, because Ray would
only start all workers again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pipelines.engine_local import LocalSource
from pipelines.engine_ray import absolute_data, fit, follow
from pipelines.planning import keep_plan
from pipelines.ray_session import ray_session
from pipelines.ray_slice import SliceRequest, check_cluster, check_devices_per_chip
from pipelines.recipe import Recipe
from pipelines.run import Run
from pipelines.shares import Share
from pipelines.slice_ranks import on_devices
from pipelines.source import RunData
from pipelines.worker import lost_a_peer
from pipelines.world import current_world
from tpurec import atomic
from tpurec.errors import ConfigError, TpurecError
from tpurec.extras import require
from tpurec.reporting import Reporter
from tpurec.sharding.plan import Plan

PROBLEM, STARTS = ".ray-problem.json", ".ray-starts"


def check_ray_workers(recipe: Recipe) -> None:
    """Refuse a recipe that does not say where its TPUs are.

    Args:
        recipe: the resolved recipe, with workers.

    Raises:
        ConfigError: a TPU without a slice.
    """
    if recipe.device.kind == "tpu" and recipe.sharding.topology.chip is None:
        raise ConfigError(
            "device.kind = 'tpu' with workers: on which slice?", "Set sharding.slice, such as sharding.slice=v6e-16."
        )


def train_ray_workers(
    run: Run, recipe: Recipe, data: RunData, plan: Plan, reporter: Reporter, max_restarts: int
) -> dict[str, Any]:
    """Train in workers of Ray Train: on the slice that the recipe names, or on this machine's CPUs.

    Args:
        run: prepared and locked; on a file system that all workers see under the same absolute path.
        recipe: the resolved recipe.
        data: schema and manifests; the files, too, are seen by all workers.
        plan: for as many ranks as the recipe says.
        reporter: where progress goes.
        max_restarts: so often workers are started again after one was lost.

    Returns:
        The result of `pipelines.training.train_run`, and `restarts`.

    Raises:
        MissingExtra: Ray is not installed.
        ConfigError: a TPU without a slice.
        TpurecError: the cluster lacks the slice, or what a worker raised.
    """
    require("ray.train", "--engine ray")
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from pipelines.slice_backend import SliceConfig

    check_ray_workers(recipe)
    topology = recipe.sharding.topology
    on_slice = topology.chip is not None
    source = LocalSource(recipe, data)  # refuses data that cannot be trained on, before Ray starts
    keep_plan(run, plan, reporter.log)
    problem, starts = run.path / PROBLEM, run.path / STARTS
    for left in (problem, starts):
        left.unlink(missing_ok=True)
    scaling: dict[str, Any] = {"num_workers": topology.num_ranks, "resources_per_worker": {"CPU": 1}}
    with (
        ray_session(topology.num_ranks, cluster=on_slice),
        reporter.progress("train", source.total_rows) as advance,
        follow(run, advance),
    ):
        if on_slice:
            from ray._private.accelerators.tpu import get_tpu_resource_per_chip

            request = SliceRequest(topology)
            check_devices_per_chip(topology, get_tpu_resource_per_chip())
            check_cluster(request, ray.nodes())
            scaling = request.scaling()
        trainer = TorchTrainer(
            _work,
            train_loop_config={"run": str(run.path.absolute()), "recipe": recipe, "data": absolute_data(data)},
            scaling_config=ScalingConfig(**scaling),
            torch_config=SliceConfig(
                backend="tpu_dist" if recipe.device.kind == "tpu" else "gloo", slice=topology.name if on_slice else None
            ),
            run_config=RunConfig(
                name="ray",
                storage_path=str(run.path.absolute()),
                failure_config=FailureConfig(max_failures=max_restarts),
            ),
        )
        try:
            answer = fit(trainer, lambda: _told(problem))
        except TpurecError:
            raise
        except Exception as error:
            told = _told(problem)
            if told is not None:
                raise TpurecError(*told) from None
            reason = " ".join(str(error).split())[:300]
            raise TpurecError(
                f"Ray Train gave up after {max_restarts} restarts: {reason}.",
                f"The same command with --out {run.path} goes on from the last checkpoint.",
            ) from error
    return {**answer, "restarts": max(0, _count(starts) - 1)}


def _told(problem: Path) -> list[str] | None:
    return json.loads(problem.read_text(encoding="utf-8")) if problem.exists() else None


def _count(starts: Path) -> int:
    return int(starts.read_text(encoding="utf-8")) if starts.exists() else 0


def _work(config: dict[str, Any]) -> dict[str, Any]:
    """Run in every worker."""
    from pipelines.training import train_run

    run = Run(Path(config["run"]))
    recipe: Recipe = config["recipe"]
    if not run.recipe_file.exists():
        import ray

        raise RuntimeError(
            f"{run.path} is not there on node {ray.util.get_node_ip_address()}: --out must be a folder that all nodes "
            "see under the same path, such as on NFS or a mounted bucket"
        )
    world = current_world(int(os.environ["LOCAL_WORLD_SIZE"]))
    if world.is_first:
        starts = run.path / STARTS
        atomic.write_text(starts, str(_count(starts) + 1))
    source = LocalSource(recipe, config["data"], Share(world.rank, world.size))
    plan = on_devices(Plan.load(run.plan_file))
    try:
        return train_run(run, source, world=world, plan=plan)
    except TpurecError as error:
        if not lost_a_peer(error):
            atomic.write_text(run.path / PROBLEM, json.dumps([error.problem, error.remedy]))
        raise

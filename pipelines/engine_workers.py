"""`--workers N`: N processes on this host, over gloo, each with its share of every batch and of the tables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engine_local import LocalSource
from pipelines.planning import keep_plan
from pipelines.recipe import Recipe, read_recipe
from pipelines.run import Run
from pipelines.shares import Share
from pipelines.source import find_data
from pipelines.training import train_run
from pipelines.workers import MAX_RESTARTS, Job, Progress, run_workers
from pipelines.world import joined
from tpurec.errors import ConfigError
from tpurec.reporting import Reporter
from tpurec.sharding.plan import Plan

if TYPE_CHECKING:
    from pipelines.worker import Channel

MAX_WORKERS_PER_CPU = 16


def check_workers(recipe: Recipe) -> None:
    """Refuse a recipe that workers of this host cannot train.

    Args:
        recipe: the resolved recipe, with workers.

    Raises:
        ConfigError: its slice is not one of CPUs, or there are far more workers than CPUs.
    """
    config = recipe.sharding
    if config.topology.chip is not None or recipe.device.kind != "cpu":
        raise ConfigError(
            f"the recipe is for {config.topology.name} (device.kind = {recipe.device.kind!r}); workers of this host "
            "run on CPUs.",
            "Train with --engine ray on a cluster that has the slice, or leave out sharding.slice and device.kind.",
        )
    num_cpus = len(os.sched_getaffinity(0))
    most = MAX_WORKERS_PER_CPU * num_cpus
    if config.num_ranks > most:
        raise ConfigError(
            f"{config.num_ranks} workers on a host with {num_cpus} CPUs for this process: at most {most} are started "
            f"({MAX_WORKERS_PER_CPU} a CPU), each a process with torch.",
            f"Use --workers {num_cpus}: more are slower here. Many small processes go to --engine ray on a cluster.",
        )


def train_workers(
    run: Run, source: LocalSource, plan: Plan, reporter: Reporter, lock: int, max_restarts: int = MAX_RESTARTS
) -> dict[str, Any]:
    """Train in worker processes of this host; start them again from the last checkpoint when one is lost.

    Args:
        run: prepared and locked.
        source: of the whole batches; says how many rows there are.
        plan: for as many ranks as the recipe says.
        reporter: where progress goes.
        lock: file descriptor of the RUN's lock: workers that outlive this process for a moment still hold it.
        max_restarts: so often.

    Returns:
        The result of `train_run`, and `restarts`.

    Raises:
        ConfigError: the recipe's slice is not one of CPUs.
        TpurecError: what a worker raised, or workers were lost too often.
    """
    check_workers(source.recipe)
    keep_plan(run, plan, reporter.log)
    job = Job("train", {"run": str(run.path)}, plan.topology.num_ranks, (lock,))
    with reporter.progress("train", source.total_rows) as advance:
        result, restarts = run_workers(job, reporter, Progress(advance), max_restarts)
    return {**result, "restarts": restarts}


def train_as_worker(order: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Train as one of the workers.

    Args:
        order: `rank`, `num_workers`, `init_method`, and the option `run`: the RUN folder, prepared.
        channel: where rank 0 tells how it goes.

    Returns:
        The result of `train_run`.
    """
    run = Run(Path(order["options"]["run"]))
    recipe = read_recipe(run.recipe_file)
    rank, num_workers = order["rank"], order["num_workers"]
    source = LocalSource(recipe, find_data(recipe), Share(rank, num_workers))
    with joined(rank, num_workers, order["init_method"], processes_here=num_workers) as world:
        if not world.is_first:
            return train_run(run, source, world=world, plan=Plan.load(run.plan_file))
        return train_run(
            run,
            source,
            world=world,
            plan=Plan.load(run.plan_file),
            log=lambda line: channel.send("log", line),
            progress=lambda rows, loss: channel.send("progress", [rows, loss]),
        )

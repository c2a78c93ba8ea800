"""`tpurec train`: train by a recipe into a RUN folder; goes on where the folder stands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tpurec import atomic
from tpurec.errors import ConfigError, Interrupted
from tpurec.reporting import JsonOption, Reporter

if TYPE_CHECKING:
    from rich.console import Console

    from pipelines.recipe import Recipe
    from pipelines.run import Run
    from pipelines.source import RunData


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe TOML, such as pipelines/recipes/demo.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe value; repeatable.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="RUN", help="RUN folder; one that exists is resumed. Default: a fresh runs/..."),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Who reads and trains: this process, or Ray Data and Ray Train.")
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Shard the tables over N processes (recipe: sharding.num_workers)."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Plan file of `tpurec plan --out`; by default one is made.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Start again from the last checkpoint so often when a worker is lost.")
    ] = 3,
    as_json: JsonOption = False,
) -> None:
    """Train a model, evaluate it on the test data, and checkpoint it in a RUN folder.

    A RUN that exists is resumed from its last checkpoint; a finished one gives its result again.
    """
    from pipelines.labels import check_labels
    from pipelines.recipe import read_recipe
    from pipelines.run import Run
    from pipelines.source import find_data
    from pipelines.tpu import check_tables, require_device
    from tpurec.models import table_specs

    reporter = Reporter(as_json)
    overrides = list(overrides or [])
    if workers is not None:
        overrides.append(f"sharding.num_workers={workers}")
    if plan is not None:
        overrides.append(f"sharding.plan={json.dumps(str(plan))}")
    resolved = read_recipe(recipe, overrides)
    if plan is not None and not resolved.sharding.num_ranks:
        raise typer.BadParameter("--plan goes with --workers")
    run = Run(out or _fresh(recipe))
    run.check_recipe(resolved)
    result = run.result()
    if result is None:
        if not resolved.sharding.num_ranks:  # workers may run elsewhere
            require_device(resolved.device)
        data = find_data(resolved)  # before the folder is made: a mistyped path leaves nothing behind
        check_labels(data.train, data.schema)
        if resolved.device.kind == "tpu" and resolved.sharding.num_ranks < 2:
            check_tables(table_specs(resolved.tables, data.schema))
        train_as = _engine(run, resolved, data, engine, reporter, max_restarts)
        try:
            with run.locked() as lock:
                result = run.result() or _train(run, resolved, data, engine, reporter, partial(train_as, lock))
        except KeyboardInterrupt:
            words = _words(recipe, overrides, run, engine, max_restarts, as_json)
            raise Interrupted("interrupted.", f"Go on from the last checkpoint: {shlex.join(words)}") from None
    else:
        reporter.log(f"{run.path}: this RUN is finished; its result is printed again.")
    for warning in result["warnings"]:
        reporter.warn(warning)
    reporter.result(result, lambda console: _summary(console, result))


def _words(recipe: Path, overrides: list[str], run: Run, engine: str, max_restarts: int, as_json: bool) -> list[str]:
    """The command that goes on with a run, also one whose folder was not named."""
    words = ["tpurec", "train", str(recipe), *(word for override in overrides for word in ("--set", override))]
    words += ["--out", str(run.path), "--engine", engine, "--max-restarts", str(max_restarts)]
    return [*words, "--json"] if as_json else words


def _engine(
    run: Run, recipe: Recipe, data: RunData, engine: str, reporter: Reporter, max_restarts: int
) -> Callable[[int], dict[str, Any]]:
    """Give what trains; takes the RUN's lock. What can be refused is refused here, before there is a folder."""
    if recipe.sharding.num_ranks:
        from pipelines.planning import choose_plan

        if recipe.device.check and recipe.sharding.num_ranks > 1:
            raise ConfigError(
                "device.check = true looks at tables that are whole, and workers spread them.",
                "Check with one process: leave out --workers, or device.check.",
            )

        if engine == "ray":
            from pipelines.engine_ray_train import check_ray_workers, train_ray_workers

            check_ray_workers(recipe)
            plan = choose_plan(run, recipe, data.schema)
            return lambda lock: train_ray_workers(run, recipe, data, plan, reporter, max_restarts)
        from pipelines.engine_local import LocalSource
        from pipelines.engine_workers import check_workers, train_workers

        check_workers(recipe)
        plan = choose_plan(run, recipe, data.schema)
        return lambda lock: train_workers(run, LocalSource(recipe, data), plan, reporter, lock, max_restarts)
    if engine == "ray":
        from pipelines.engine_ray import train_ray

        return lambda lock: train_ray(run, recipe, data, reporter)
    from pipelines.engine_local import LocalSource, train_local

    return lambda lock: train_local(run, LocalSource(recipe, data), reporter)


def _train(
    run: Run,
    recipe: Recipe,
    data: RunData,
    engine: str,
    reporter: Reporter,
    train_as: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    run.begin(recipe, data.schema, data.train, data.test)
    reporter.log(f"RUN {run.path}: {data.train.num_rows:,} training rows in {len(data.train.files)} files")
    result = train_as()
    result = {**result, "run": str(run.path), "engine": engine, "warnings": [*data.warnings(), *result["warnings"]]}
    atomic.write_text(run.result_file, json.dumps(result, indent=1, allow_nan=False))
    return result


def _fresh(recipe: Path) -> Path:
    stem = f"{recipe.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (f"{stem}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())


def _summary(console: Console, result: dict[str, Any]) -> None:
    def shown(key: str) -> str:
        return "undefined" if result[key] is None else f"{result[key]:.5f}"

    where = f"{result['evaluated_on']}, {result['eval_rows']:,} rows" if result["evaluated_on"] else "not evaluated"
    console.print(
        f"AUC {shown('auc')}  normalized entropy {shown('normalized_entropy')}  log loss {shown('log_loss')}  "
        f"calibration {shown('calibration')}  ({where})",
        markup=False,
        soft_wrap=True,
    )
    best = f", the best at step {result['best_step']:,}" if result["best_step"] is not None else ""
    early = ", stopped early" if result["stopped_early"] else ""
    console.print(
        f"{result['rows_seen']:,} rows in {result['steps']:,} steps{best}{early}; "
        f"{result['rows_per_second']:,.0f} rows/s\nRUN {result['run']}",
        markup=False,
        soft_wrap=True,
    )

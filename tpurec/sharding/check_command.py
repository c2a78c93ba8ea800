"""`tpurec check`: compile the embedding part of a training step for a slice, without a TPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpurec.reporting import JsonOption, Reporter

if TYPE_CHECKING:
    from rich.console import Console

    from tpurec.embeddings.optimizers import EmbeddingOptimizer
    from tpurec.kernels.compile_process import Compiled, KernelProgram
    from tpurec.sharding.check import StackPrograms
    from tpurec.sharding.plan import Plan
    from tpurec.sharding.tables import TableList
    from tpurec.topology.slices import SliceTopology


def check(
    tables: Annotated[
        str,
        typer.Argument(
            metavar="TABLES",
            help="Table list (.toml, .json), recipe, RUN, checkpoint, Parquet data set or TorchRec module:factory.",
        ),
    ],
    slice_: Annotated[str, typer.Option("--slice", help="TPU slice: v6e-64, v5p-128, tpu7x:4x4x4, ...")],
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Global examples per step; by default what the plan or TABLES says.")
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Plan, as `tpurec plan --out` writes it; by default plan here."),
    ] = None,
    embedding_dim: Annotated[
        int | None, typer.Option(min=1, help="Columns of the tables when TABLES is a Parquet data set.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe or list."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile the embedding lookups and updates of a training step for a slice: legal, and how much HBM they need.

    Compiled with libtpu for the slice's chips, ahead of time; needs no TPU, and nothing runs. Dense model, activations
    and inputs are the planner's estimates (docs/check.md). Exits with 1 if a program is not legal or HBM does not
    suffice.
    """
    from tpurec.errors import ConfigError
    from tpurec.extras import require
    from tpurec.sharding.sources import read_source
    from tpurec.topology.slices import SliceTopology

    reporter = Reporter(as_json)
    topology = SliceTopology.parse(slice_)
    if topology.chip is None:
        raise ConfigError(
            f"slice {topology.name}: CPU ranks run no compiled kernels, there is nothing to compile.",
            "Name a TPU slice such as v6e-8; tpurec plan estimates the memory of CPU ranks.",
        )
    require("libtpu", "tpurec check")
    source = read_source(tables, set_ or (), embedding_dim)
    plan = _plan(source, topology, batch_size, plan_file)
    optimizer, wire_bytes = _recipe_settings(tables, set_ or ())
    answer = _check(
        reporter, source, plan, batch_size or plan.batch_size, optimizer, wire_bytes or plan.assumptions.vector_bytes
    )
    reporter.result(answer, lambda console: print_check(console, answer))
    if answer["problem"]:
        if not as_json:
            reporter.log(f"error: {answer['problem']} {answer['remedy']}".rstrip())
        raise typer.Exit(1)


def _plan(source: TableList, topology: SliceTopology, batch_size: int | None, plan_file: Path | None) -> Plan:
    from tpurec.errors import ConfigError
    from tpurec.sharding.plan import Plan
    from tpurec.sharding.planner import plan as make_plan

    if plan_file is not None:
        found = Plan.load(plan_file)
        if found.topology.name != topology.name:
            raise ConfigError(
                f"{plan_file}: is a plan for {found.slice}, not for {topology.name}.", "Name the plan's slice."
            )
        return found
    batch = batch_size or source.batch_size
    if batch is None:
        raise typer.BadParameter("TABLES names no batch size; add --batch-size")
    made = make_plan(source.tables, topology, batch, source.assumptions)
    if not made.fits:
        raise ConfigError(
            f"the tables cannot be planned for {topology.name}: {made.problems[0].message}",
            "tpurec plan shows the ways out.",
        )
    return made


def _recipe_settings(tables: str, overrides: list[str] | tuple[()]) -> tuple[EmbeddingOptimizer | None, int | None]:
    """The tables' optimizer as compiled in, and bytes of an element on the wire; None where there is no recipe."""
    from tpurec.config import apply_overrides, from_mapping, read_toml
    from tpurec.models.build import table_optimizer
    from tpurec.models.config import TablesConfig
    from tpurec.sharding.config import ShardingConfig
    from tpurec.sharding.sources import recipe_path

    path = recipe_path(tables)
    if path is None:
        return None, None
    mapping = apply_overrides(read_toml(path), list(overrides))
    section = from_mapping(TablesConfig, mapping.get("tables", {}), f"{path} [tables]")
    sharding = from_mapping(ShardingConfig, mapping.get("sharding", {}), f"{path} [sharding]")
    return table_optimizer(section), 2 if sharding.wire_dtype == "bfloat16" else 4


def _check(
    reporter: Reporter,
    source: TableList,
    plan: Plan,
    batch_size: int,
    optimizer: EmbeddingOptimizer | None,
    wire_bytes: float,
) -> dict[str, Any]:
    from importlib.metadata import version

    from tpurec.kernels.compile_process import CompileProcess
    from tpurec.sharding.check import programs_of, rank_memory, reason_not
    from tpurec.sharding.costs import CostModel
    from tpurec.sharding.step_shapes import step_shapes

    topology = plan.topology
    reporter.log(f"drawing ids of a step of {batch_size:,} examples ...")
    step = step_shapes(source.tables, plan, batch_size, optimizer)
    stacks = programs_of(step, plan.assumptions.max_tensor_bytes)
    programs = list(dict.fromkeys(program for stack in stacks for program in stack.programs.values()))
    answers = {}
    with (
        CompileProcess(topology.chip.name) as compiler,
        reporter.progress("compile", total=len(programs), unit="programs") as advance,
    ):
        for program in programs:
            answers[program] = compiler.compile(program)
            advance(1, f"{program.op}, {program.storage.num_rows:,} x {program.storage.dim}")
    legal = not any(stack.problem for stack in stacks) and not any(answer.error for answer in answers.values())
    memory = None
    if legal:
        estimated = CostModel(topology, batch_size, plan.assumptions).constant_bytes(list(source.tables))
        memory = rank_memory(stacks, answers, estimated, wire_bytes, topology.chip.usable_hbm_bytes)
    problem, remedy = reason_not(stacks, answers, memory)
    return {
        "slice": topology.name,
        "chip": topology.chip.name,
        "num_chips": topology.num_chips,
        "num_ranks": topology.num_ranks,
        "ranks_per_chip": topology.chip.num_devices,
        "batch_size": batch_size,
        "batch_size_per_rank": step.batch_size,
        "compiler": f"libtpu {version('libtpu')}",
        "ran_on_hardware": False,
        "sizes": f"ids drawn by the tables' statistics for {step.ranks_drawn} of {topology.num_ranks} ranks, routed",
        "legal": legal,
        "fits": None if memory is None else memory.fits,
        "problem": problem,
        "remedy": remedy,
        "stacks": [_stack_values(stack, answers) for stack in stacks],
        "hbm_per_rank": None
        if memory is None
        else {
            "usable_bytes": memory.usable_bytes,
            "needed_bytes": memory.needed_bytes,
            "free_bytes": memory.free_bytes,
            "compiled": dict(memory.compiled),
            "counted": dict(memory.counted),
            "estimated": dict(memory.estimated),
        },
        "hbm_needed_bytes_per_chip": None if memory is None else memory.needed_bytes * topology.chip.num_devices,
    }


def _stack_values(stack: StackPrograms, answers: Mapping[KernelProgram, Compiled]) -> dict[str, Any]:
    import dataclasses

    layout = stack.shapes.stack
    return {
        "tables": list(stack.shapes.tables),
        "rows": layout.num_rows,
        "width": layout.width,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "optimizer": layout.optimizer.kind,
        "problem": stack.problem,
        "remedy": stack.remedy,
        "table_bytes": stack.table_bytes,
        "state_bytes": stack.state_bytes,
        "programs": [
            {
                "program": name,
                "op": program.op,
                "num_bags": program.num_bags,
                "num_ids": program.num_ids,
                "weighted": program.weighted,
                "legal": not answers[program].error,
                **dataclasses.asdict(answers[program]),
            }
            for name, program in stack.programs.items()
        ],
    }


def print_check(console: Console, found: dict[str, Any]) -> None:
    """Print the answer for people.

    Args:
        console: where.
        found: as `--json` prints it.
    """
    from rich.table import Table
    from rich.text import Text

    from tpurec.sharding.summary import size

    good = not found["problem"]
    words = "legal and fits" if good else ("legal, but does not fit" if found["legal"] else "not legal")
    head = Text(f"{found['slice']}  ", style="bold")
    head.append(words, style="bold green" if good else "bold red")
    head.append(f"  batch {found['batch_size']:,} on {found['num_ranks']:,} ranks; compiled with {found['compiler']}")
    console.print(head)
    for number, stack in enumerate(found["stacks"]):
        names = ", ".join(stack["tables"][:4]) + (f", ... ({len(stack['tables'])})" if len(stack["tables"]) > 4 else "")
        about = f"{stack['rows']:,} rows x {stack['width']} {stack['dtype']}, {stack['optimizer']}"
        console.print(f"stack {number}: {about}: {names}", markup=False)
        if stack["problem"]:
            console.print(f"  {stack['problem']} {stack['remedy']}".rstrip(), markup=False)
            continue
        table = Table(box=None, padding=(0, 2, 0, 2))
        for column in ("program", "by", "ids", "bags", "arguments", "aliased", "temporary", "code"):
            table.add_column(column, justify="left" if column in ("program", "by") else "right")
        for program in stack["programs"]:
            numbers = (f"{program[key]:,}" for key in ("num_ids", "num_bags"))
            keys = ("argument_bytes", "alias_bytes", "temp_bytes", "code_bytes")
            table.add_row(
                program["program"],
                program["implementation"],
                *numbers,
                *(size(program[key]) if program["legal"] else "-" for key in keys),
            )
        console.print(table)
        for program in stack["programs"]:
            if not program["legal"]:
                console.print(f"  {program['program']}: {program['error']}", markup=False)
            elif program["implementation"] == "plain":
                console.print(f"  {program['program']}: plain JAX, because {program['reason']}", markup=False)
    memory = found["hbm_per_rank"]
    if memory is not None:
        table = Table(title="HBM of one rank", title_justify="left", box=None, padding=(0, 2, 0, 2), show_header=False)
        for kind in ("compiled", "counted", "estimated"):
            uses = memory[kind]
            shown = ", ".join(f"{name.replace('_', ' ')} {size(value)}" for name, value in uses.items() if value)
            table.add_row(kind, size(sum(uses.values())), shown)
        table.add_row("needed", size(memory["needed_bytes"]), f"of {size(memory['usable_bytes'])} usable")
        left = memory["free_bytes"]
        table.add_row("free" if left >= 0 else "missing", size(abs(left)), "")
        console.print(table)
        if found["ranks_per_chip"] > 1:
            chip = size(found["hbm_needed_bytes_per_chip"])
            console.print(f"A chip is {found['ranks_per_chip']} ranks: {chip} needed.")
    console.print(
        f"Compiled: lookups and updates of the tables, for one {found['chip']} device. Counted: from the step's shapes "
        f"({found['sizes']}). Estimated: by the planner's model. Nothing ran on hardware.",
        style="dim",
    )

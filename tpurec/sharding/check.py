"""Whether the embedding part of a training step is legal on a slice, and what memory it needs: programs and sums.

Every rank of a slice runs the same programs, so one rank stands for all. What the compiler says of a stack's programs
is joined with what is counted from the step's static shapes and with the planner's estimates of the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpurec.kernels.compile_process import Compiled, KernelProgram
from tpurec.kernels.limits import MAX_TENSOR_BYTES, problem_of_rows
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.storage import Storage
from tpurec.sharding.step_shapes import StackShapes, StepShapes


@dataclass(frozen=True)
class StackPrograms:
    """What a rank runs on one stack.

    Args:
        shapes: the stack in one step.
        programs: `lookup`, `update` and, of rows that every rank has, `replicated update`; those that have ids.
        table_bytes: of the weights as they are stored.
        state_bytes: of the optimizer state.
        problem: why a TPU cannot hold or train it at all; empty if it can. Then there are no programs.
        remedy: what to do about it.
    """

    shapes: StackShapes
    programs: Mapping[str, KernelProgram]
    table_bytes: int = 0
    state_bytes: int = 0
    problem: str = ""
    remedy: str = ""


def stack_programs(shapes: StackShapes, max_tensor_bytes: int = MAX_TENSOR_BYTES) -> StackPrograms:
    """Find the programs of a stack.

    Args:
        shapes: the stack in one step.
        max_tensor_bytes: larger stacks are cut into several tensors, which the programs take together.

    Returns:
        The programs, or why there are none.
    """
    stack, dtype = shapes.stack, str(shapes.stack.dtype).removeprefix("torch.")
    refused = problem_of_rows(stack.width, dtype)
    if refused is not None:
        return StackPrograms(shapes, {}, problem=f"stack of width {stack.width}: {refused[0]}", remedy=refused[1])
    storage = Storage(stack.num_rows, stack.width, dtype, max_tensor_bytes)
    rule = _rule(shapes)
    programs = {}
    for name, (ids, bags), weighted, optimizer in (
        ("lookup", shapes.request, shapes.weighted, None),
        ("update", shapes.gradients, shapes.weighted, rule),
        ("replicated update", (stack.num_replicated,) * 2, False, rule),
    ):
        if ids and bags:
            columns = stack.squares and name == "update"  # gradients are combined and clipped before
            step = dataclasses.replace(rule, max_norm=0.0) if columns else optimizer
            programs[name] = KernelProgram(storage, bags, ids, weighted and not columns, step, columns)
    return StackPrograms(shapes, programs, storage.num_bytes, rule.state_bytes(storage))


def _rule(shapes: StackShapes) -> RowOptimizer:
    optimizer = shapes.stack.optimizer
    more = optimizer.arguments()
    return RowOptimizer(
        optimizer.kind,
        optimizer.eps,
        optimizer.weight_decay,
        more["beta1"],
        more["beta2"],
        more["decoupled_weight_decay"],
        more["max_gradient_norm"],
        more["rounding_seed"],
    )


def working_bytes(stack: StackPrograms, program: KernelProgram, compiled: Compiled) -> int:
    """Memory that a program needs while it runs, beside tables and state.

    Args:
        stack: the program's.
        program: what was compiled.
        compiled: what the compiler said of it.

    Returns:
        Its other arguments (ids, and of an update the gradients), results that alias no argument, and temporaries.
    """
    held = stack.table_bytes + (stack.state_bytes if program.optimizer else 0)
    own_arguments = max(0, compiled.argument_bytes - held)
    return own_arguments + compiled.output_bytes - compiled.alias_bytes + compiled.temp_bytes


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank in one step, as if everything lived at once.

    Args:
        compiled: bytes by use, from the compiler's reports: tables, optimizer_state, largest_program (what the program
            that needs most needs while it runs), code.
        counted: bytes by use, from the static shapes: requests, ids_exchange, vectors_exchange, routes, local_rows,
            column_gradients, replicated_gradients.
        estimated: bytes by use, by the planner's model: dense_model, activations, inputs, program.
        usable_bytes: what libtpu lets a program use on one device.
    """

    compiled: Mapping[str, int]
    counted: Mapping[str, int]
    estimated: Mapping[str, int]
    usable_bytes: int

    @property
    def needed_bytes(self) -> int:
        """The sum."""
        return sum(sum(part.values()) for part in (self.compiled, self.counted, self.estimated))

    @property
    def free_bytes(self) -> int:
        """What is left; below 0 if it does not fit."""
        return self.usable_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether anything is left."""
        return self.free_bytes >= 0


def rank_memory(
    stacks: Sequence[StackPrograms],
    answers: Mapping[KernelProgram, Compiled],
    estimated: Mapping[str, float],
    wire_bytes: float,
    usable_bytes: int,
) -> RankMemory:
    """Add up what a rank needs.

    Args:
        stacks: all stacks; every one can be held.
        answers: what the compiler said of each program; all are legal.
        estimated: bytes by use, of `CostModel.constant_bytes`.
        wire_bytes: of an element of vectors and gradients between ranks.
        usable_bytes: what libtpu lets a program use.

    Returns:
        The sums.
    """
    programs = [(stack, program, answers[program]) for stack in stacks for program in stack.programs.values()]
    code = {program: compiled.code_bytes for _, program, compiled in programs}
    shapes = [stack.shapes for stack in stacks]
    elements = sum(one.vector_elements for one in shapes)
    return RankMemory(
        {
            "tables": sum(stack.table_bytes for stack in stacks),
            "optimizer_state": sum(stack.state_bytes for stack in stacks),
            "largest_program": max((working_bytes(*one) for one in programs), default=0),
            "code": sum(code.values()),
        },
        {
            "requests": sum(one.request_bytes for one in shapes),
            "ids_exchange": sum(one.message_bytes for one in shapes),
            # Vectors received and gradients received stay from step to step; what is sent is made in between, and was
            # or becomes one float32 array of all stacks.
            "vectors_exchange": round(elements * (3 * wire_bytes + 4)),
            "routes": sum(one.route_bytes for one in shapes),
            "local_rows": max((one.gathered_bytes for one in shapes), default=0),
            # Column shards whose steps need whole rows: gradients by id, and combined, until the squares are added up.
            "column_gradients": sum(8 * one.gradients[0] * one.stack.width for one in shapes if one.stack.squares),
            "replicated_gradients": sum(one.replicated_bytes for one in shapes),
        },
        {name: round(size) for name, size in estimated.items()},
        usable_bytes,
    )


def reason_not(
    stacks: Sequence[StackPrograms], answers: Mapping[KernelProgram, Compiled], memory: RankMemory | None
) -> tuple[str, str]:
    """Say what is in the way.

    Args:
        stacks: all stacks.
        answers: what the compiler said of each program.
        memory: of a rank; None if a stack or program is not legal.

    Returns:
        Problem and remedy, a line each; both empty if it is legal and fits.
    """
    found = []
    for stack in stacks:
        if stack.problem:
            found.append((f"{_tables(stack)}: {stack.problem}", stack.remedy))
        for name, program in stack.programs.items():
            error = answers[program].error
            if error:
                found.append((f"{_tables(stack)}: its {name} does not compile: {error}", remedy_of(error)))
    if found:
        problem, remedy = found[0]
        return (f"{problem} (And {len(found) - 1} more, listed by stack.)" if found[1:] else problem), remedy
    if memory is not None and not memory.fits:
        return (
            f"a rank needs {memory.needed_bytes / 2**30:.2f} GiB of HBM, {memory.usable_bytes / 2**30:.2f} GiB are "
            f"usable: {-memory.free_bytes / 2**30:.2f} GiB too much.",
            "Use a larger slice, a smaller batch, or smaller tables.",
        )
    return "", ""


def remedy_of(error: str) -> str:
    """What to do about a compiler's error.

    Args:
        error: its text.

    Returns:
        One line.
    """
    if "out of memory" in error.lower() and "hbm" in error.lower():
        return "Use a larger slice, a smaller batch, or smaller tables."
    if "vmem" in error.lower():
        return "Use a smaller batch, or more ranks."
    return "Change these tables' embedding_dim, dtype or optimizer."


def _tables(stack: StackPrograms) -> str:
    names = stack.shapes.tables
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"table{'s' if len(names) > 1 else ''} {shown}{more}"


def programs_of(step: StepShapes, max_tensor_bytes: int = MAX_TENSOR_BYTES) -> tuple[StackPrograms, ...]:
    """The programs of all stacks.

    Args:
        step: the shapes.
        max_tensor_bytes: as of `stack_programs`.

    Returns:
        One entry a stack.
    """
    return tuple(stack_programs(shapes, max_tensor_bytes) for shapes in step.stacks)

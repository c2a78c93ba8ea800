"""Bytes that an optimised TPU program moves between HBM and the core, from its text.

XLA's cost analysis does not look at where an array lies: an operand in VMEM counts like one in HBM, and a gather counts
a tile of memory for every word or row. In the text each array has its memory space: none is HBM, `S(1)` is VMEM. What
counts here is every HBM array that an instruction reads or writes, whole, also if it is a slice that is read;
instructions in loops and branches once. The smaller of both counts is nearer to what is moved.
"""

from __future__ import annotations

import math
import re

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8,
}  # fmt: skip
_ARRAY = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\](\{[^{}]*\})?")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)$")
_MOVES_NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "copy-done", "slice-done",
    "async-done", "async-update", "opt-barrier",
}  # fmt: skip
_TILE = re.compile(r"T\((\d+),(\d+)\)")


def hbm_bytes(text: str) -> int:
    """Count them.

    Args:
        text: `as_text()` of a compiled program.

    Returns:
        Bytes read from and written to HBM by the entry computation.

    >>> program = '''
    ... ENTRY %main (a: f32[256]) -> f32[256] {
    ...   %a = f32[256]{0:T(256)} parameter(0)
    ...   %b = f32[256]{0:T(256)S(1)} copy(%a)
    ...   ROOT %c = f32[256]{0:T(256)} negate(%b)
    ... }'''
    >>> hbm_bytes(program)
    2048
    """
    total, results = 0, {}
    for line in text[text.index("\nENTRY") :].splitlines()[2:]:
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        name, result, operation, rest = found.groups()
        results[name] = result
        if operation in _MOVES_NOTHING or 'custom_call_target="ConcatBitcast"' in line:
            continue
        arrays = _hbm_arrays(result)
        if operation in ("copy-start", "slice-start"):
            arrays = arrays[:1] if _ARRAY.search(result) and not _in_vmem(_ARRAY.search(result)) else []
        operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
        total += sum(arrays) + sum(sum(_hbm_arrays(results[one])) for one in operands if one in results)
    return total


def _in_vmem(array: re.Match) -> bool:
    return "S(" in (array.group(3) or "")


def _hbm_arrays(shape: str) -> list[int]:
    """Bytes of each HBM array of a shape, its last two dimensions in whole tiles."""
    sizes = []
    for array in _ARRAY.finditer(shape):
        if _in_vmem(array):
            continue
        dims = [int(size) for size in array.group(2).split(",") if size]
        layout = array.group(3) or ""
        order = [int(one) for one in re.findall(r"\d+", layout.split(":")[0])]
        tile = _TILE.search(layout)
        if tile and len(order) >= 2:
            for position, multiple in zip(order[:2], (int(tile.group(2)), int(tile.group(1))), strict=True):
                dims[position] = -(-dims[position] // multiple) * multiple
        sizes.append(math.prod(dims) * _BYTES[array.group(1)])
    return sizes

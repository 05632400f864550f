"""Where the time of a train step goes: the operations of a trace, by kind."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

MATMULS, BETWEEN, _UNKNOWN = "matmuls", "between operations", "other kernels"
# Beginnings of opcodes that decide the kind, in any scope. The first kind that matches wins.
_OPCODES = {
    "attention": ("attention",),
    "communication": ("all-gather", "all-reduce", "all-to-all", "collective", "reduce-scatter"),
    MATMULS: ("dot", "convolution"),
}
# Patterns of the scopes that decide most other kinds. The first that matches any scope wins.
_SCOPES = {
    "optimizer": "optimizer",
    "dropout": "dropout",
    "softmax": "softmax",
    "normalization": r"\w*norm",
    "activation": "activation",
}
# Patterns of the names that kernels of cuDNN 9.19, `models.dropout_attention` and cuBLAS 13.1 have.
_LIBRARIES = {
    "attention": r"cudnn|^_attention_(for|back)ward",
    MATMULS: r"^nvjet|cublas|cutlass|gemm",
}
# The calls of these in a program for a GPU, and the operations that they stand for.
_CALLS = {'"__cublas$': "dot", '"__cudnn$fmha': "attention", '"__gpu$xla.gpu.triton': "attention"}
_LOOKUPS = {"gather", "scatter", "dynamic-slice", "dynamic-update-slice", "sort"}
_COPIES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy", "transpose"}
_COPIES |= {"reshape", "broadcast", "slice", "concatenate", "pad", "convert", "iota"}
_INLINED = {"fusion", "call"}  # which run a whole computation as one operation
_LOOPS = {"while", "conditional"}  # whose bodies are separate operations in a trace
_PARTS = {"gather", "dynamic-slice", "slice"}  # which read only a part of their first operand
# Which replace a part of their first operand. The number is that of the operand with the new part.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8, "s8": 1, "u8": 1}
_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\(([^)]*)\)(.*)")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")


class Operation(NamedTuple):
    """An operation of a compiled program: its kind, and the bytes that it reads and writes."""

    kind: str
    size: int


class _Instruction(NamedTuple):
    """An instruction of a compiled program."""

    opcode: str
    size: int  # of the result, in bytes
    operands: Sequence[str]
    scopes: str  # "jit(train_step)/…"
    called: Sequence[str]  # the names of computations
    is_root: bool


_Instructions = Mapping[str, _Instruction]  # of a computation, by name


class Interval(NamedTuple):
    """One run of an operation on one thread or stream, from start to end in nanoseconds."""

    name: str
    start: float
    end: float


def operations(program: str) -> dict[str, Operation]:
    """Return every instruction of a compiled program, whose text is given, by its name."""
    current: dict[str, _Instruction] = {}
    computations: dict[str, dict[str, _Instruction]] = {}
    for line in program.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
            current = computations[name] = {}
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, operands, rest = match.groups()
            opcode = next((kind for call, kind in _CALLS.items() if call in rest), opcode)
            scope = _SCOPE.search(rest)
            current[name] = _Instruction(
                opcode=opcode,
                size=_size(shape),
                operands=re.findall(r"%([\w.-]+)", operands),
                scopes=scope[1] if scope else "",
                called=_CALLED.findall(rest),
                is_root=bool(root),
            )

    def opcodes(instruction: _Instruction) -> set[str]:
        inner = (each for name in instruction.called for each in computations[name].values())
        return {instruction.opcode}.union(*map(opcodes, inner))

    found = {}
    for instructions in computations.values():
        for name, each in instructions.items():
            inner = computations[each.called[0]] if each.opcode in _INLINED else None
            size = _moved(name, instructions, inner)
            found[name] = Operation(_kind(opcodes(each), each.scopes), size)
    return found


def _moved(name: str, instructions: _Instructions, inner: _Instructions | None) -> int:
    """Return how many bytes an operation reads and writes; 0 for a loop.

    `inner` has the instructions of a fusion or a call; None for another operation.
    """
    each = instructions[name]
    if each.opcode in _LOOPS:
        return 0
    if inner is None:
        values = {operand: instructions[operand]._replace(operands=()) for operand in each.operands}
        read = sum(_read(operand, {**values, name: each}) for operand in each.operands)
        return read + _written(name, instructions)
    read = sum(_read(n, inner) for n, of in inner.items() if of.opcode == "parameter")
    return read + sum(_written(n, inner) for n, of in inner.items() if of.is_root)


def _read(name: str, instructions: _Instructions) -> int:
    """Return how many bytes of a value are read by the instructions that use it."""
    total = 0
    for user, each in instructions.items():
        if name not in each.operands:
            continue
        if each.opcode == "bitcast":
            total += _read(user, instructions)
        elif name == each.operands[0] and each.opcode in _PARTS:
            total += each.size
        elif name != each.operands[0] or each.opcode not in _UPDATES:
            return instructions[name].size
    return total


def _written(name: str, instructions: _Instructions) -> int:
    """Return how many bytes an instruction writes."""
    each = instructions[name]
    if each.opcode in _UPDATES:
        return instructions[each.operands[_UPDATES[each.opcode]]].size
    if each.opcode in ("bitcast", "tuple"):
        return sum(_written(operand, instructions) for operand in each.operands)
    return each.size


def _size(shape: str) -> int:
    """Return the bytes of an array or a tuple, whose shape is as a program's text has it."""
    return sum(
        math.prod(map(int, filter(None, sizes.split(",")))) * _BYTES.get(kind, 4)
        for kind, sizes in _ARRAY.findall(shape)
    )


def _kind(opcodes: set[str], scopes: str) -> str:
    """Return the kind of an operation that has these opcodes, in these scopes."""
    for kind, telling in _OPCODES.items():
        if any(opcode.startswith(telling) for opcode in opcodes):
            return kind
    named = [re.findall(rf"(?:^|/){scope}(?=/|$)", scopes) for scope in _SCOPES.values()]
    if any(named):
        return next(kind for kind, match in zip(_SCOPES, named, strict=True) if match)
    if opcodes & _LOOKUPS:
        return "lookups"
    inner = opcodes - _INLINED
    return "copies" if inner <= _COPIES else "other elementwise"


def read_trace(folder: Path, operations: Mapping[str, Operation]) -> list[list[Interval]]:
    """Return the runs of operations in the latest trace of a folder, by thread or stream.

    A CPU's threads do other work too. Only what has the name of one of `operations` is returned.
    """
    # A kernel that XLA made for a GPU has its operation's name, with _ for each point.
    names = {name.replace(".", "_"): name for name in operations}
    path = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    of_devices = [plane for plane in planes if plane.name.startswith("/device:")]
    found = []
    for plane in of_devices or planes:
        lines = list(plane.lines)
        # A TPU's trace has the same time in three lines: by step, by module and by operation.
        chosen = [line for line in lines if line.name == "XLA Ops"] or lines
        for line in chosen:
            intervals = []
            for event in line.events:
                # Its `stats` are not read: with JAX 0.12 that ends the process.
                name = str(event.name).lstrip("%").split(" ")[0]
                name = names.get(name.replace(".", "_"), name)
                if of_devices or name in operations:
                    intervals.append(Interval(name, event.start_ns, event.end_ns))
            found.append(sorted(intervals, key=lambda each: (each.start, -each.end)))
    return [each for each in found if each]


def shares(
    threads: Iterable[Sequence[Interval]], operations: Mapping[str, Operation], *, steps: int
) -> dict[str, dict[str, float]]:
    """Return the "share" of the time and the "bytes" a step of each kind, the largest share first.

    The time in which an operation runs is divided among the kinds as their times on all threads
    are. `BETWEEN`, which is last, is the time in which none runs. An operation that waits for a
    core counts as running.
    """
    time, moved = defaultdict[str, float](float), defaultdict[str, float](float)
    every: list[Interval] = []

    def operation_of(name: str) -> Operation:
        # A kernel, such as one of cuBLAS, may have no operation's name.
        kinds = (kind for kind, names in _LIBRARIES.items() if re.search(names, name))
        return operations.get(name) or Operation(next(kinds, _UNKNOWN), 0)

    for intervals in threads:
        every += intervals
        open_intervals: list[Interval] = []  # that enclose the next one, as a loop does its body
        for each in intervals:
            kind, size = operation_of(each.name)
            while open_intervals and open_intervals[-1].end <= each.start:
                open_intervals.pop()
            time[kind] += each.end - each.start
            if open_intervals:  # of a GPU's kernels the ends of two may overlap
                outer = open_intervals[-1]
                time[operation_of(outer.name).kind] -= min(each.end, outer.end) - each.start
            moved[kind] += size
            open_intervals.append(each)
    every.sort(key=lambda each: each.start)
    if not every:
        return {}
    busy, reached = 0.0, every[0].start
    for each in every:
        busy += max(0.0, each.end - max(each.start, reached))
        reached = max(reached, each.end)
    whole, total = reached - every[0].start, sum(time.values())
    rows: dict[str, Any] = {
        kind: {"share": busy / whole * t / total, "bytes": moved[kind] / steps}
        for kind, t in sorted(time.items(), key=lambda pair: -pair[1])
    }
    return rows | {BETWEEN: {"share": 1 - busy / whole, "bytes": 0}}

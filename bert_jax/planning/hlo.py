"""The text of a compiled program, `compiled.as_text()`, as computations of instructions.

The format is XLA's (openxla.org/xla/operation_semantics, `HloInstruction::Print`). It is read no
further than is needed to count: types, operands, which computation calls which, and how often.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

# Bytes of an element, by XLA's name of its type (xla/primitive_util.h).
_BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "c64": 8, "c128": 16},
    **{"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5},
}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
      name: unique in the program.
      opcode: what it does, such as "all-gather" or "fusion".
      type: of its result, such as "bf16[128,1024]{1,0}" or a tuple "(f32[], f32[8])".
      rest: all that follows the opcode: operands, then attributes.
    """

    name: str
    opcode: str
    type: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        inside = self.rest[: _closing(self.rest) + 1]
        return re.findall(r"%([\w.\-]+)", inside)

    def attribute(self, name: str) -> str:
        """Returns an attribute's text up to the next one, or "" without it."""
        found = re.search(rf"\b{name}=(.*?)(?:, (?!device_ids=)\w+=|$)", self.rest)
        return found[1] if found else ""

    @property
    def called(self) -> dict[str, list[str]]:
        """The computations that it calls, by the attribute that names them."""
        found = _CALLED.findall(self.rest)
        return {kind: re.findall(r"[\w.\-]+", names) for kind, names in found}


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, by name in their order; `root` is the one that gives its result."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction, where it stands and how often a run of the program comes to it.

    Attributes:
      instruction: itself.
      computation: that it is in.
      times: how often it runs, or 1 a loop where it is not known.
      is_exact: whether every loop around it has a known number of passes.
      fusion: the instruction that it is fused into, where it is.
    """

    instruction: Instruction
    computation: Computation
    times: int
    is_exact: bool
    fusion: Instruction | None


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, and the name of the one that is run."""

    computations: dict[str, Computation]
    entry: str

    def visits(self) -> Iterator[Visit]:
        """Yields every instruction as often as it is called from a different place."""
        yield from self._visits(self.entry, 1, is_exact=True, fusion=None)

    def _visits(
        self, name: str, times: int, *, is_exact: bool, fusion: Instruction | None
    ) -> Iterator[Visit]:
        computation = self.computations[name]
        for each in computation.instructions.values():
            yield Visit(each, computation, times, is_exact, fusion)
            called = each.called
            if each.opcode.endswith(("-done", "-update")):  # of what its -start has called
                continue
            if each.opcode == "while":
                passes = self.passes(each, computation)
                inner = times * (1 if passes is None else passes)
                exact = is_exact and passes is not None
                yield from self._visits(called["body"][0], inner, is_exact=exact, fusion=fusion)
                continue
            inside = each if each.opcode == "fusion" else fusion
            for kind, computations in called.items():
                if kind == "to_apply" and each.opcode != "call":  # how a reduction adds two numbers
                    continue
                for callee in computations:
                    yield from self._visits(callee, times, is_exact=is_exact, fusion=inside)

    def passes(self, loop: Instruction, computation: Computation) -> int | None:
        """Returns how often a `while` runs its body, or None where the text does not say.

        XLA's CPU and GPU compilers write it down. For a TPU's program it is found from the counter:
        a constant that it begins with, a constant that is added and one that it stays below.
        """
        known = _TRIPS.search(loop.rest)
        if known:
            return int(known[1])
        condition = self.computations[loop.called["condition"][0]]
        body = self.computations[loop.called["body"][0]]
        test = condition.root
        if test.opcode != "compare" or test.attribute("direction") != "LT":
            return None
        counter, limit = (condition.instructions.get(name) for name in test.operands)
        if counter is None or counter.opcode != "get-tuple-element":
            return None
        index = int(counter.attribute("index"))
        begins = computation.instructions[loop.operands[0]]
        ends = body.root
        if begins.opcode != "tuple" or ends.opcode != "tuple":
            return None
        first = _constant(computation, begins.operands[index])
        last = _constant(condition, limit.name if limit else "")
        step = _increment(body, ends.operands[index])
        if first is None or last is None or not step:
            return None
        return max(0, -(-(last - first) // step))


def parse(text: str) -> Program:
    """Returns the program of a compiled computation's text."""
    computations: dict[str, Computation] = {}
    entry, name, lines, root = "", "", {}, ""
    for line in text.splitlines():
        if not line.startswith(" "):
            found = _COMPUTATION.match(line)
            if found:
                name, lines, root = found[2], {}, ""
                entry = name if found[1] else entry
            elif line == "}" and name:
                computations[name] = Computation(name, lines, lines[root])
                name = ""
            continue
        found = _INSTRUCTION.match(line) if name else None
        if found:
            each = _instruction(found[2], found[3])
            lines[each.name] = each
            root = each.name if found[1] or not root else root
    return Program(computations, entry)


def num_bytes(type_: str) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple; padding is not counted."""
    sizes = (
        _BYTES.get(kind, 1 if kind.startswith("f8") else 0)
        * math.prod(int(n) for n in shape.split(",") if n)
        for kind, shape in _ARRAY.findall(_without_layouts(type_))
    )
    return math.ceil(sum(sizes))


def elements(type_: str) -> list[str]:
    """Returns the types in a tuple, or the one of an array."""
    type_ = _without_layouts(type_)
    if not type_.startswith("("):
        return [type_]
    found, depth, start = [], 0, 1
    for place, letter in enumerate(type_):
        depth += (letter in "([") - (letter in ")]")
        if depth == (letter not in ")]") and letter in ",)" and (letter == "," or depth == 0):
            found.append(type_[start:place].strip())
            start = place + 1
    return [each for each in found if each]


def dtype(type_: str) -> str:
    """Returns the type of an array's elements, or of a tuple's first array's."""
    found = _ARRAY.search(_without_layouts(type_))
    return found[1] if found else ""


def _without_layouts(type_: str) -> str:
    return re.sub(r"\{[^}]*\}|/\*.*?\*/", "", type_)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    type_, text = text[:end], text[end:].lstrip()
    opcode, _, _ = text.partition("(")
    return Instruction(name, opcode, type_, text[len(opcode) :])


def _closing(text: str) -> int:
    """Returns the place of the bracket that closes the one that the text begins with."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    raise ValueError(f"an instruction has no end: {text[:80]}")


def _constant(computation: Computation, name: str) -> int | None:
    """Returns the integer that an instruction gives, whatever copies lie between."""
    each = computation.instructions.get(name)
    while each is not None and each.opcode in ("copy", "bitcast", "reshape", "convert"):
        each = computation.instructions.get(each.operands[0])
    found = re.match(r"\((-?\d+)\)", each.rest) if each and each.opcode == "constant" else None
    return int(found[1]) if found else None


def _increment(computation: Computation, name: str) -> int | None:
    """Returns the constant that an addition adds."""
    each = computation.instructions.get(name)
    while each is not None and each.opcode == "copy":
        each = computation.instructions.get(each.operands[0])
    if each is None or each.opcode != "add":
        return None
    values = [_constant(computation, operand) for operand in each.operands]
    return next((value for value in values if value is not None), None)

"""How many bytes a compiled program moves from and to a device's main memory."""

import re

from bert_jax.planning import hlo

# Instructions that only name what is there, or whose work is that of what they call.
_FREE = {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("while", "call", "conditional", "partition-id", "replica-id"),
}
# An array of a type, with its layout: of a TPU, `S(1)` in it says that it lies in the core's own
# memory, which has room for what one operation leaves to the next.
_PLACED = re.compile(r"\b[a-z]\w*\[[\d,]*\](\{[^}]*\})?")


def moved(text: str) -> int:
    """Returns the bytes that each device moves in a run of the program.

    Each instruction reads its operands and writes its results, what is fused into it moving nothing
    besides. Of an array that is only looked up in, what is found counts, and of one that is changed
    in place, what is changed. Loops count as often as they run.
    """
    program, total = hlo.parse(text), 0
    for visit in program.visits():
        each = visit.instruction
        if visit.fusion is None and each.opcode not in _FREE:
            total += visit.times * _of(program, visit.computation, each)
    return total


def _of(program: hlo.Program, computation: hlo.Computation, each: hlo.Instruction) -> int:
    if each.opcode.endswith(("-done", "-update")):
        return 0
    arrays = [found[0] for found in _PLACED.finditer(each.type)]
    if each.opcode.endswith("-start") and len(arrays) > 1:  # the operand's type and the result's
        size = min(hlo.num_bytes(array) for array in arrays[:2])
        return size * sum(_is_far(array) for array in arrays[:2])
    reads = 0
    for number, name in enumerate(each.operands):
        operand = computation.instructions.get(name)
        if operand is not None:
            reads += min(_far(operand.type), _looked_up(program, each, number, operand))
    return reads + _written(program, each)


def _written(program: hlo.Program, each: hlo.Instruction) -> int:
    """Returns the bytes that an instruction writes."""
    root, place = each, None
    if each.opcode == "fusion":
        place = program.computations[each.called["calls"][0]]
        root = place.root
    if root.opcode == "dynamic-update-slice" and place:
        return min(_far(each.type), hlo.num_bytes(place.instructions[root.operands[1]].type))
    return _far(each.type)


def _looked_up(
    program: hlo.Program, each: hlo.Instruction, number: int, operand: hlo.Instruction
) -> int:
    """Returns the bytes that an instruction needs of one operand."""
    if each.opcode != "fusion":
        is_table = each.opcode in ("gather", "dynamic-slice") and number == 0
        return hlo.num_bytes(each.type if is_table else operand.type)
    inside = program.computations[each.called["calls"][0]].instructions.values()
    name = next(
        (x.name for x in inside if x.opcode == "parameter" and x.rest.startswith(f"({number})")),
        None,
    )
    users = [x for x in inside if name in x.operands]
    if not all(user.operands[0] == name for user in users):
        return hlo.num_bytes(operand.type)
    if all(user.opcode in ("gather", "dynamic-slice") for user in users):
        return sum(hlo.num_bytes(user.type) for user in users)
    if all(user.opcode == "dynamic-update-slice" for user in users):
        return 0
    return hlo.num_bytes(operand.type)


def _far(type_: str) -> int:
    """Returns the bytes of those arrays of a type that lie in main memory."""
    arrays = (found[0] for found in _PLACED.finditer(type_))
    return sum(hlo.num_bytes(array) for array in arrays if _is_far(array))


def _is_far(array: str) -> bool:
    return not re.search(r"S\([1-9]", array)

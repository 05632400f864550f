"""The collectives of a compiled program: how many bytes go over which axes of the mesh."""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from bert_jax.planning import hlo

# What each device sends for a payload of one byte, in a ring of n devices, and what the payload is:
# of all-reduce, all-to-all and collective-permute the array that each device has, of all-gather the
# whole result, of reduce-scatter the whole operand. Source: NCCL tests, doc/PERFORMANCE.md.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
}
Groups = Sequence[Sequence[int]]  # of places in the flattened mesh


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of the program.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
      axes: the axes of the mesh over which its groups run; where it runs over part of an axis, all
        of the axis is named.
      devices: of a group.
      dtype: of what is sent, in XLA's names: "f32", "bf16".
      payload: bytes, of one run on one device.
      times: how often a run of the program comes to it.
      is_exact: whether `times` is known, or a lower bound because a loop around it is not.
      source: the operation of JAX that it is part of, as the compiler names it.
      group: one of its groups, as places in the flattened mesh.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    dtype: str
    payload: int
    times: int
    is_exact: bool
    source: str
    group: tuple[int, ...]

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a run of the program, in a ring."""
        return self.times * self.payload * _SENT[self.kind](self.devices)


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Returns the collectives of a compiled program, in the order of its text.

    Each is one that runs: an asynchronous one is counted once, one in a loop as often as the loop
    runs it. One whose groups have one device each sends nothing, and is left out.

    Args:
      text: `compiled.as_text()`.
      mesh: that the program was compiled for; its groups are of places in `mesh.devices.flat`.
    """
    found = []
    for visit in hlo.parse(text).visits():
        each = visit.instruction
        kind = each.opcode.removesuffix("-start")
        if kind not in _SENT:
            continue
        if _is_copy(visit):
            continue
        groups = _groups(each, mesh.size)
        largest = max(groups, key=len)
        if len(largest) < 2:
            continue
        type_ = _result(each)
        # A TPU's fusion of an all-reduce with the slice that each device keeps of it.
        if kind == "all-reduce" and visit.computation.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
            payload = hlo.num_bytes(type_)
        else:
            payload = hlo.num_bytes(type_) * (len(largest) if kind == "reduce-scatter" else 1)
        found.append(
            Collective(
                kind=kind,
                axes=_axes(groups, mesh),
                devices=len(largest),
                dtype=hlo.dtype(type_),
                payload=payload,
                times=visit.times,
                is_exact=visit.is_exact,
                source=_source(visit),
                group=tuple(largest),
            )
        )
    return found


def _result(each: hlo.Instruction) -> str:
    """Returns the type of what a collective gives; some -starts give their operand too."""
    if not each.opcode.endswith("-start") or each.opcode == "all-reduce-start":
        return each.type
    return hlo.elements(each.type)[1]


def _is_copy(visit: hlo.Visit) -> bool:
    """Whether another instruction stands for the same transfer.

    A TPU runs a collective beside fusions: one that starts it, those that run meanwhile and one
    that ends it. Each of them has a copy of it.
    """
    if "async_collective_fusion_config" not in visit.instruction.rest:
        return False
    beside = visit.computation.instructions.values()
    return not any('"AsyncCollectiveStart"' in each.rest for each in beside)


def _source(visit: hlo.Visit) -> str:
    for each in (visit.instruction, visit.fusion):
        found = re.search(r'op_name="([^"]*)"', each.rest) if each else None
        if found:
            return found[1]
    return ""


def _groups(each: hlo.Instruction, size: int) -> Groups:
    """Returns the groups of a collective's devices; of a permutation, the pairs."""
    pairs = each.attribute("source_target_pairs")
    if pairs:
        return [pair for pair in _lists(pairs) if pair[0] != pair[1]] or [[0]]
    text = each.attribute("replica_groups")
    if text.startswith("{"):
        return _lists(text) or [list(range(size))]
    if text.startswith("["):
        shape, _, places = text.partition("<=")
        return _iota(places).reshape(_numbers(shape)).tolist()
    if text.startswith("mesh["):
        return _of_named_axes(text)
    raise ValueError(f"replica groups of an unknown form: {text[:300]}")


def _lists(text: str) -> list[list[int]]:
    return [[int(n) for n in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """Reads `[2,2,2]T(2,1,0)`: 0, 1, … in the shape [2,2,2], transposed, in a row."""
    found = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not found:
        raise ValueError(f"replica groups of an unknown form: {text[:300]}")
    dims = _numbers(found[1])
    places = np.arange(math.prod(dims)).reshape(dims)
    return (places.transpose(_numbers(found[2])) if found[2] else places).reshape(-1)


def _of_named_axes(text: str) -> Groups:
    """Reads `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}`; `'a':(2)2` is part of an axis.

    In `'a':(m)k` the axis is taken as [m, k, rest], of which the k are meant. Source: XLA's
    `hlo/ir/mesh_and_axis.cc`.
    """
    found = re.fullmatch(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{(.*)\}", text)
    if not found:
        raise ValueError(f"replica groups of an unknown form: {text[:300]}")
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", found[1])}
    given = found[2] or f"[{math.prod(sizes.values())}]"
    places = _iota(given) if given.startswith("[") else np.array(_numbers(given))
    chosen = re.findall(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?", found[3])
    shape: list[int] = []
    taken: dict[tuple[str, int], int] = {}  # where each chosen part of an axis is in `shape`
    for name, size in sizes.items():
        parts = sorted((int(pre or 1), int(n or size)) for axis, pre, n in chosen if axis == name)
        done = 1
        for pre, part in parts:
            if pre > done:
                shape.append(pre // done)
            taken[name, pre] = len(shape)
            shape.append(part)
            done = pre * part
        shape.append(size // done)
    last = [taken[name, int(pre or 1)] for name, pre, _ in chosen]
    first = [n for n in range(len(shape)) if n not in last]
    count = math.prod(shape[n] for n in last)
    return places.reshape(shape).transpose(*first, *last).reshape(-1, count).tolist()


def _axes(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """Returns the fewest axes of which the groups vary, in the mesh's order."""
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    names = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            last = [mesh.axis_names.index(name) for name in axes]
            first = [n for n in range(places.ndim) if n not in last]
            lines = places.transpose(*first, *last).reshape(
                -1, math.prod(places.shape[n] for n in last)
            )
            line_of = np.empty(mesh.size, int)
            line_of[lines.reshape(-1)] = np.repeat(np.arange(len(lines)), lines.shape[1])
            if all(len(set(line_of[list(group)])) == 1 for group in groups):
                return axes
    raise ValueError("a collective's groups hold devices that the mesh does not")

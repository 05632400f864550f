"""What the time of a step goes to, by kind of operation, from a profile of some steps."""

import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bert_jax.errors import UserError
from bert_jax.planning import hlo

_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all", "send", "recv")
_MOVES = {"copy", "transpose", "bitcast", "reshape", "slice", "concatenate", "pad", "broadcast"}
_MOVES |= {"dynamic-slice", "dynamic-update-slice", "iota", "constant", "parameter", "tuple"}
_MOVES |= {"get-tuple-element", "reverse", "copy-start", "copy-done"}
_CONTAINERS = {"while", "call", "conditional"}  # what is inside is in the profile too

IDLE = "nothing runs"
OTHER = "other"

# Of kernels that are not an instruction's own, by what the libraries call them.
_KERNELS = {
    "matrix products": r"gemm|cutlass|xmma|nvjet|matmul",
    "sent between devices": r"nccl",
    "copies and reshapes": r"memcpy|memset",
}
Interval = tuple[float, float, str]  # from and to, in nanoseconds, and the kind


def profile(run: Callable[[], None], folder: Path, text: str) -> dict[str, float]:
    """Runs some steps under the profiler and returns each kind's share of their time.

    Args:
      run: takes the steps, and waits for them.
      folder: where the profile is written; XProf and Perfetto show it.
      text: of the program, `compiled.as_text()`.

    Raises:
      UserError: there is no profile, or no operation of the program in it.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # which would slow down what it measures
    try:
        with jax.profiler.trace(str(folder), profiler_options=options):
            run()
        paths = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        if not paths:
            raise ValueError("nothing was written")
        return shares(jax.profiler.ProfileData.from_file(str(paths[-1])), kinds(text))
    except (RuntimeError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"the profile failed: {reason}; leave out --profile") from error


def kinds(text: str) -> dict[str, str]:
    """Returns the kind of every instruction of a program.

    A fusion holds several operations: it counts as the first of the kinds below that one of them
    is of.
    """
    computations = hlo.parse(text).computations

    def inside(each: hlo.Instruction) -> Iterator[hlo.Instruction]:
        yield each
        for name in each.called.get("calls", []):
            for inner in computations[name].instructions.values():
                yield from inside(inner)

    found: dict[str, str] = {}
    for computation in computations.values():
        for each in computation.instructions.values():
            if each.opcode not in _CONTAINERS:
                found[each.name] = _kind(list(inside(each)))
    return found


def _kind(instructions: Sequence[hlo.Instruction]) -> str:
    opcodes = {each.opcode for each in instructions}
    target = " ".join(each.attribute("custom_call_target").lower() for each in instructions)
    if opcodes & {"dot", "convolution"} or re.search("gemm|matmul|dot", target):
        return "matrix products"
    if re.search("fmha|attention|triton|mosaic|tpu_custom_call", target):
        return "attention and other kernels"
    if any(each.startswith(_COLLECTIVES) for each in opcodes):
        return "sent between devices"
    if opcodes & {"sort", "topk"} or "topk" in target:
        return "sorting"
    if opcodes & {"gather", "scatter"}:
        return "gathers and scatters"
    # Generators of random numbers mix bits by both.
    if {"xor", "shift-right-logical"} <= opcodes or opcodes & {"rng", "rng-bit-generator"}:
        return "random numbers"
    if opcodes & {"reduce", "reduce-window"}:
        return "sums and maxima"
    if opcodes - _MOVES - {"fusion", "custom-call"}:
        return "elementwise"
    return OTHER if "custom-call" in opcodes else "copies and reshapes"


def shares(data: Any, kind_of: Mapping[str, str]) -> dict[str, float]:
    """Returns each kind's share of the time of a profile, the largest first; they add up to 1.

    Where several operations run at once they share the time evenly; of several devices it is the
    mean. Time in which none runs is a kind of its own.

    Args:
      data: a `jax.profiler.ProfileData`.
      kind_of: by the name of the instruction, as `kinds` gives it.

    Raises:
      ValueError: no operation of the program is in it.
    """
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    found = [list(_of_device(plane, kind_of)) for plane in devices]
    found += [list(_of_host(plane, kind_of)) for plane in planes if plane.name == "/host:CPU"]
    found = [intervals for intervals in found if intervals]
    if not any(kind != OTHER for intervals in found for _, _, kind in intervals):
        raise ValueError("it has no operation of the step")
    total: dict[str, float] = {}
    for intervals in found:
        for kind, share in _divided(intervals).items():
            total[kind] = total.get(kind, 0.0) + share / len(found)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _of_device(plane: Any, kind_of: Mapping[str, str]) -> Iterator[Interval]:
    """Yields the operations of an accelerator: a TPU's are on a line, a GPU's are its streams'."""
    lines = list(plane.lines)
    chosen = [line for line in lines if line.name == "XLA Ops"]
    # Kernels are named after the instruction, in letters that the language allows.
    kernels = {re.sub(r"\W", "_", name): kind for name, kind in kind_of.items()}
    for line in chosen or [line for line in lines if line.name.startswith("Stream")]:
        for event in line.events:
            name = str(_stats(event).get("hlo_op") or event.name).lstrip("%").split(" ")[0]
            kind = kind_of.get(name) or kernels.get(event.name) or _of_kernel(event.name)
            if name.split(".")[0] not in _CONTAINERS:
                yield event.start_ns, event.start_ns + event.duration_ns, kind


def _of_kernel(name: str) -> str:
    return next((kind for kind, p in _KERNELS.items() if re.search(p, name, re.I)), OTHER)


def _of_host(plane: Any, kind_of: Mapping[str, str]) -> Iterator[Interval]:
    """Yields the operations of a CPU, which are on its threads' lines.

    One that several threads share ends for the thread that began it when its own part is done. Its
    whole end is an event of its own, which says which one it ends.
    """
    begun: list[tuple[Any, float, float, str]] = []
    ends: dict[Any, float] = {}
    for line in plane.lines:
        for event in line.events:
            stats, end = _stats(event), event.start_ns + event.duration_ns
            if stats.get("hlo_op") in kind_of:
                begun.append((stats.get("_p"), event.start_ns, end, kind_of[stats["hlo_op"]]))
            elif event.name.startswith("end: "):
                ends[stats.get("_c")] = end
    for key, start, end, kind in begun:
        yield start, max(end, ends.get(key, end)), kind


def _stats(event: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        # Of JAX 0.12 under Python 3.12, about how a type of its own is made.
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        return dict(event.stats)


def _divided(intervals: Iterable[Interval]) -> dict[str, float]:
    """Returns what share of the time from the first start to the last end each kind has."""
    changes = [(start, 1, kind) for start, _, kind in intervals]
    changes += [(end, -1, kind) for _, end, kind in intervals]
    changes.sort(key=lambda change: change[:2])
    running: dict[str, int] = {}
    total: dict[str, float] = {}
    for (now, change, kind), (then, _, _) in itertools.pairwise(changes):
        running[kind] = running.get(kind, 0) + change
        count = sum(running.values())
        for each, number in running.items() if count else [(IDLE, 1)]:
            total[each] = total.get(each, 0.0) + number / max(count, 1) * (then - now)
    whole = changes[-1][0] - changes[0][0]
    return {kind: time / whole for kind, time in total.items() if time}

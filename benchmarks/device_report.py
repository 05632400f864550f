"""What the parts of device.py have found, as files and as tables."""

import dataclasses
import json
import math
import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import device_cell
import record
from device_cell import Cell

from bert_jax.planning.chips import CHIPS

ROOT = Path(__file__).resolve().parents[1]
FASTER = 1.02  # than plain attention, at every length from some on, for fused to be the default


class Found:
    """The folder of results: of each part how it ended, its log, and its figures."""

    def __init__(self, output: Path, device: Mapping[str, Any]):
        self.output, self.device = output, device

    def read(self, name: str) -> dict[str, Any]:
        """Return how a part ended; {} if it had no turn."""
        path = self.output / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def write(self, name: str, entry: Mapping[str, Any]) -> None:
        """Write how a part ended."""
        path = self.output / f"{name}.json"
        path.with_suffix(".tmp").write_text(json.dumps(entry, indent=1) + "\n")
        path.with_suffix(".tmp").replace(path)

    def figures(self, name: str) -> Path:
        """Return the file of the figures of a part."""
        return self.output / f"{name}.figures"

    def rows(self, cell: Cell) -> list[dict[str, Any]]:
        """Return the measured batches of a cell."""
        return [row for row in device_cell.read(self.figures(cell.name)) if "random" in row]

    def best(self, cell: Cell) -> dict[str, Any] | None:
        """Return the fastest batch of a cell."""
        return max(self.rows(cell), key=lambda row: speed(row), default=None)

    def keep_default(self, workdir: Path) -> None:
        """Keep the metrics of a run as figures, and nothing else of it."""
        if (workdir / "metrics.jsonl").exists():
            shutil.copy(workdir / "metrics.jsonl", self.figures("default"))
        shutil.rmtree(workdir, ignore_errors=True)

    def summary(self, name: str) -> str:
        """Return how a part ended, and after how long."""
        entry = self.read(name)
        if not entry:
            return "no turn yet"
        why = f" ({entry['cause']})" if "cause" in entry else ""
        return f"{entry['status']}, {entry['seconds']:.0f} s{why}"


def speed(row: Mapping[str, Any]) -> float:
    """Return the sequences a second of a measured batch."""
    return row["random"]["sequences_per_second"]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    escaped = ([str(x).replace("|", "\\|") for x in row] for row in [head, *rows])
    lines = [f"| {' | '.join(row)} |" for row in escaped]
    return [lines[0], "|---" * len(head) + "|", *lines[1:], ""] if len(lines) > 1 else []


def write_report(
    found: Found, parts: Sequence[str], cells: Sequence[Cell], missing: Sequence[str]
) -> None:
    """Write README.md: a table of each group, and what should change."""
    device = found.device
    sections = {
        "": lambda: [record.heading(["jax", "jaxlib", "flax"]), *_packages(found, missing)],
        "## The first minute": lambda: _check(found),
        "## Parts": lambda: table(("part", "how it ended"), [(p, found.summary(p)) for p in parts]),
        "## Tests on the device": lambda: _tests(found),
        "## Train steps, at the fastest batch": lambda: _speeds(found, cells),
        "## PyTorch": lambda: _peers(found, parts),
        "## Where the time of the step with the most operations goes": lambda: _kernels(found),
        "## The same step under other settings": lambda: _settings(found, parts),
        "## The default run": lambda: _default(found),
        "## What people do with a small encoder": lambda: _use(found),
        "## Defaults that should change": lambda: _defaults(found, cells),
    }
    lines = [f"# {device['count']} × {device['kind']}"]
    for heading, section in sections.items():
        lines += [heading, *[""] * bool(heading)]
        try:
            lines += section() or ["Nothing yet.", ""]
        except Exception as error:  # such as a file of which a killed process wrote a half
            lines += [f"Cannot be shown: {error!r}", ""]
    (found.output / "README.md").write_text("\n".join(lines).rstrip("\n") + "\n")


def _packages(found: Found, missing: Sequence[str]) -> list[str]:
    lines = [f"JAX's device: {' '.join(found.device['version'].split())}.", ""]
    return lines + ([f"Not installed: {', '.join(missing)}.", ""] if missing else [])


def _defaults(found: Found, cells: Sequence[Cell]) -> list[str]:
    _, words = decide(found, cells)
    return [*(f"- {line}" for line in words), ""]


def _tests(found: Found) -> list[str]:
    path = found.figures("tests")
    if not path.exists() or not path.stat().st_size:
        return []
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    ends = {kind: [c for c in cases if c.find(kind) is not None] for kind in ("failure", "error")}
    skipped = [(c.get("name"), s.get("message")) for c in cases for s in c.findall("skipped")]
    failed = [case for each in ends.values() for case in each]
    passed = len(cases) - len(failed) - len(skipped)
    lines = [f"Tests: {passed} passed, {len(failed)} failed, {len(skipped)} skipped.", ""]
    lines += [f"- failed: `{case.get('name')}`" for case in failed]
    return [*lines, *(f"- skipped: `{name}`: {why}" for name, why in skipped), ""]


def _speeds(found: Found, cells: Sequence[Cell]) -> list[str]:
    rows = []
    for cell in cells:
        if row := found.best(cell):
            step, gib = row["random"], 1 / 2**30
            peak, needed = row["peak_memory_bytes"], row["compiler_memory_bytes_per_device"]
            mfu = "unknown" if step["mfu"] is None else f"{step['mfu']:.1%}"
            rows.append(
                (
                    cell.recipe,
                    cell.length,
                    cell.form,
                    row["batch_size"],
                    f"{1e3 * step['step_seconds']['mean']:.1f}",
                    f"{speed(row):,.1f}",
                    f"{step['tokens_per_second']:,.0f}",
                    mfu,
                    f"{step['mfu_of_matmul']:.1%}",
                    "unknown" if peak is None else f"{peak * gib:.1f}",
                    f"{needed * gib:.1f}",
                    f"{row['compile_seconds']:.0f}",
                )
            )
    head = "recipe", "length", "form", "batch", "step, ms", "sequences/s", "tokens/s", "MFU"
    head += "of a matmul alone", "peak, GiB", "by the compiler", "compilation, s"
    return table(head, rows)


def _peers(found: Found, parts: Sequence[str]) -> list[str]:
    rows = []
    for name in parts:
        path = found.figures(name)
        if not name.startswith("peers-") or not path.exists():
            continue
        figures = json.loads(path.read_text())
        batch = figures["config"]["data"]["batch_size"]
        peers = {each["peer"]: each["seconds_of_a_step"] for each in figures["peers"]}
        for peer, times in peers.items():
            rate = batch / statistics.median(times)
            ratio = record.ratio(times, peers["bert-jax"])
            rows.append((name.removeprefix("peers-"), batch, peer, f"{rate:,.1f}", ratio))
        rows += [
            (name.removeprefix("peers-"), batch, *each, "") for each in figures["failed"].items()
        ]
    return table(("sequences", "batch", "peer", "sequences/s", "ours is faster by"), rows)


def _kernels(found: Found) -> list[str]:
    for row in device_cell.read(found.figures("profile")):
        if row.get("kernels"):
            model = row["config"]["model"]
            what = f"{row['parameters']:,} parameters, {row['batch_size']} × {row['max_length']}"
            what = f"{what}, {model['attention']} attention"
            kinds = (
                (
                    kind,
                    f"{each['share']:.1%}",
                    f"{each['bytes'] / 1e6:,.0f}" if each["bytes"] else "",
                )
                for kind, each in (row["kinds"] or {}).items()
            )
            kernels = [(f"`{name[:80]}`", f"{share:.1%}") for name, share in row["kernels"]]
            return [*table((what, "time", "MB"), kinds), *table(("kernel", "time"), kernels)]
    return []


def _settings(found: Found, parts: Sequence[str]) -> list[str]:
    before, rows = _first(found, "profile"), []
    for name in parts:
        row = _first(found, name) if name.startswith("settings-") else None
        if row and before:
            ratio = f"{speed(row) / speed(before):.3f}"
            rows.append((name.removeprefix("settings-"), f"{speed(row):,.1f}", ratio))
    return table(("setting", "sequences/s", "times as fast as without"), rows)


def _first(found: Found, name: str) -> dict[str, Any] | None:
    rows = device_cell.read(found.figures(name))
    return next((row for row in rows if "random" in row), None)


def _check(found: Found) -> list[str]:
    rows = device_cell.read(found.figures("check"))
    if not rows:
        return []
    rates, *attention = rows
    lines = [
        f"A matmul alone: {rates['matmul_tflops']:,.1f} TFLOP/s; memory: "
        f"{rates['memory_gb_per_second']:,.0f} GB/s.",
        "",
    ]
    cells = (
        (
            f"{row['batch']} × {row['length']}",
            row["form"],
            f"{row['milliseconds']:.2f}" if "milliseconds" in row else "",
            f"{row['error']:.1e}" if "error" in row else "",
            row.get("cause", ""),
        )
        for row in attention
    )
    head = "sequences", "attention of a layer", "forward and backward, ms", "error", "why not"
    return lines + table(head, cells)


def _default(found: Found) -> list[str]:
    rows = device_cell.read(found.figures("default"))
    scores = [row for row in rows if row["split"] != "train"]
    if not scores:
        return []
    last = {k: v for k, v in scores[-1].items() if isinstance(v, int | float)}
    shown = ", ".join(f"{name} {value:.6g}" for name, value in last.items())
    return [
        f"{found.read('default').get('seconds', math.nan):.0f} s in all. Held out: {shown}.",
        "",
    ]


def _use(found: Found) -> list[str]:
    rows = [
        (row["what"], row.get("batch_size", ""), _rate(row), row.get("cause", ""))
        for row in device_cell.read(found.figures("use"))
    ]
    encoded = [
        (row["what"], row["tokens"], f"{row['texts_per_second']:,.0f}", row["ratio"])
        for row in device_cell.read(found.figures("encode"))
    ]
    return [
        *table(("training", "batch", "sequences/s", "why not"), rows),
        *table(("encoding", "tokens", "texts/s", "bert-jax is faster by"), encoded),
    ]


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['sequences_per_second']:,.0f}" if "sequences_per_second" in row else ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What trains fastest on a device."""

    dtype: str = ""
    fused_from: int | None = None  # tokens of a sequence, from which fused attention is faster


def decide(found: Found, cells: Sequence[Cell]) -> tuple[Measured, list[str]]:
    """Return what trains fastest on the device, and what should change in words."""
    kind, best = found.device["kind"], {cell: found.best(cell) for cell in cells}
    words = []
    if not any(kind in chip.device_kinds for chip in CHIPS.values()):
        words.append(f"`bert_jax/planning/chips.py` has no {kind}: MFU is unknown.")
    if found.read("tests").get("status") != "complete":
        why = "the tests on the device have not passed"
        return Measured(), [*words, f"Nothing becomes a default: {why}."]
    entry, ratios = Measured(), {}
    for cell, row in best.items():
        exact = dataclasses.replace(cell, dtype="float32")
        plain = dataclasses.replace(cell, attention="plain")
        if row and cell != exact and (other := best.get(exact)):
            ratio = speed(row) / speed(other)
            entry = dataclasses.replace(entry, dtype="bfloat16" if ratio > 1 else "float32")
            said = f"`model.dtype=auto` is {entry.dtype}"
            words.append(f"{said}: bfloat16 has {ratio:.2f} times the speed of float32.")
        if row and cell != plain and (other := best.get(plain)):
            ratios.setdefault(cell.length, []).append(speed(row) / speed(other))
    for length in sorted(ratios, reverse=True):
        if min(ratios[length]) < FASTER:
            break
        entry = dataclasses.replace(entry, fused_from=length)
    each = "; ".join(
        f"at {length}: {', '.join(f'{ratio:.2f}' for ratio in ratios[length])}"
        for length in sorted(ratios)
    )
    start = entry.fused_from
    said = f"should be fused from {start} tokens on, where it can serve" if start else "stays plain"
    why = f"times the speed of plain attention, {each}" if ratios else "no other form was measured"
    words.append(f"`model.attention=auto` {said}: {why}.")
    return entry, words

"""The curves of one run, or of several in one picture."""

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COUNTERS = ("step", "epoch", "sequences", "tokens", "seconds")
_NOT_DRAWN = {*COUNTERS, "split", "token_share", "sequences_per_second", "tokens_per_second"}
_OF_OPTIMIZER = ("learning_rate", "gradient_norm")
BASELINE = "_baseline"  # the end of the name of a metric's baseline that changes during a run
_SHARES = re.compile(r"(accuracy|f1|exact(_match)?|precision|recall)$")
_MAX_SCORES = 5
_LONGEST_NAME = 60


class Run(NamedTuple):
    """The records of a run in `metrics.jsonl`, and the scores that need no model."""

    name: str
    records: Sequence[Mapping[str, Any]]
    baselines: Mapping[str, float]


def title(metric: str) -> str:
    """Return the name of a metric in words, such as "MLM loss (nats)"."""
    unit = " (nats)" if metric in ("mlm_loss", "nsp_loss", "rtd_loss") else ""
    words = re.sub("^(mlm|nsp|rtd)_", lambda match: f"{match[1].upper()} ", metric)
    return words.replace("_", " ") + unit


def table(scores: Mapping[str, Any], baselines: Mapping[str, float]) -> str:
    """Return held-out scores beside their baselines, as Markdown."""

    def cell(name: str, values: Mapping[str, Any]) -> str:
        form = "z.1%" if _SHARES.search(name) else "z.3f"
        return format(values[name], form) if name in values else ""

    hidden = _NOT_DRAWN | ({"loss"} if "mlm_loss" in scores else set())  # it is a sum of losses
    names = [name for name in scores if name not in hidden and not name.endswith(BASELINE)]
    rows = [f"| {title(n)} | {cell(n, scores)} | {cell(n, baselines)} |" for n in names]
    return "\n".join(["| held-out | model | baseline |", "|---|---:|---:|", *rows])


def _metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics that are drawn, by importance; the first one is the loss."""
    records = sorted((r for run in runs for r in run.records), key=lambda r: r["split"])
    every = dict.fromkeys(name for record in records for name in record)
    names = {n: None for n in every if n not in _NOT_DRAWN and not n.endswith(BASELINE)}
    names = {n: None for n in names if "/" not in n}  # of a text of a mixture
    if all(any("mlm_loss" in record for record in run.records) for run in runs):
        names.pop("loss", None)  # the sum of their losses
    losses = [name for name in ("mlm_loss", "loss") if name in names]
    scores = [name for name in names if name not in (*losses, *_OF_OPTIMIZER)]
    scores.sort(key=lambda name: not any(name in run.baselines for run in runs))
    return [*losses, *scores[:_MAX_SCORES], *(n for n in _OF_OPTIMIZER if n in names)]


def _panels(figure: Any, count: int) -> Iterator[Any]:
    """Yield the axes of a large panel, then of small ones to its right and below it."""
    small = count - 1
    right = small if small <= 3 else 2
    height, below = max(1, right), [min(3, small - i) for i in range(right, small, 3)]
    figure.set_size_inches(12, max(5, 2.4 * (height + len(below)) + 0.6))
    grid = figure.add_gridspec(height + len(below), 6)
    yield figure.add_subplot(grid[:height, : 4 if right else 6])
    for row in range(right):
        yield figure.add_subplot(grid[row, 4:])
    for row, number in enumerate(below, height):
        width = 6 // number
        for left in range(0, 6, width):
            yield figure.add_subplot(grid[row, left : left + width])


def draw(path: Path, runs: Sequence[Run], by: str = "step") -> None:
    """Draw runs by one of COUNTERS into a file, whose suffix is its format."""
    # Imported late: it takes longer than a small run's first step.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, PercentFormatter

    is_alone, figure, drawn = len(runs) == 1, Figure(layout="constrained"), set()
    palette = matplotlib.colormaps["tab10" if len(runs) <= 10 else "turbo"]
    colors = [palette(i if len(runs) <= 10 else i / len(runs)) for i in range(len(runs))]
    colored = list(zip(runs, colors, strict=True))
    styles: dict[str, dict[str, Any]] = {
        "training": {"lw": 1.2, "alpha": 1 if is_alone else 0.4},
        "held-out": {"lw": 1.6, "marker": "o", "ms": 3.5},
        "without a model": {"lw": 1, "ls": "--"},
    }
    if is_alone:
        styles["training"]["color"], styles["held-out"]["color"] = "C0", "C1"
    metrics = _metrics(runs)
    for metric, axes in zip(metrics, _panels(figure, len(metrics)), strict=True):
        for run, color in colored:
            for split, style, name in (
                ("train", "training", metric),
                ("eval", "held-out", metric),
                ("train", "without a model", metric + BASELINE),
            ):
                kept = [r for r in run.records if r["split"] == split and {name, by} <= r.keys()]
                if kept and not (split == "eval" and metric in _OF_OPTIMIZER):
                    x, y = ([record[key] for record in kept] for key in (by, name))
                    axes.plot(x, y, **{"color": color, **styles[style]})
                    drawn.add(style)
        levels = {r.baselines[metric]: color for r, color in colored if metric in r.baselines}
        for level, color in levels.items():
            axes.axhline(level, color="0.4" if len(levels) == 1 else color, lw=1, ls="--")
            drawn.add("without a model")
        low, high = axes.dataLim.intervaly
        if metric == "gradient_norm" and high > 10 * low > 0:
            axes.set_yscale("log")  # as a few are far larger than the others
        axes.set_title(title(metric), fontsize="medium")
        axes.sharex(figure.axes[0])
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel(by)
        axes.grid(alpha=0.3)
        if _SHARES.search(metric):
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        if by in ("step", "sequences", "tokens"):
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    legend = {label: {"color": "0.4", **styles[label]} for label in styles if label in drawn}
    entries = [] if is_alone else [(_plain(r.name), {"color": c, "lw": 3}) for r, c in colored]
    entries += legend.items()
    if is_alone:
        figure.suptitle(_plain(runs[0].name))
    columns = max(1, 120 // (max((len(label) for label, _ in entries), default=0) + 8))
    handles = [Line2D([], [], label=label, **style) for label, style in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, 6))
    temporary = path.with_suffix(".tmp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(temporary, format=path.suffix[1:], dpi=120)
    os.replace(temporary, path)


def _plain(name: str) -> str:
    """Return a name that Matplotlib shows as it is."""
    name = "".join(c if c.isprintable() else "?" for c in name).replace("$", r"\$")
    name = name if len(name) <= _LONGEST_NAME else f"…{name[-_LONGEST_NAME:]}"
    return f" {name}" if name.startswith("_") else name  # a legend leaves those out

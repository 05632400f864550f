"""Draw `curves.png` of a run: losses and scores by step, beside scores that need no model."""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.storage import json_files
from bert_jax.training.objective import TOKENS

_COUNTERS = ("step", "epoch", "sequences", "tokens", "seconds")
# Values of a record that are not scores. A warning tells of `hidden_similarity`.
NOT_SCORES = {TOKENS, "sequences_per_second", "tokens_per_second", "hidden_similarity"}
_NOT_DRAWN = {*_COUNTERS, "split", *NOT_SCORES}
_OF_OPTIMIZER = ("learning_rate", "gradient_norm")
BASELINE = "_baseline"  # the end of the name of a metric's baseline that changes during a run
_SHARES = re.compile(r"(accuracy|f1|exact(_match)?|precision|recall)$")
_MAX_SCORES = 5
_COLUMNS = 3  # of panels
_WIDTH = 12.0  # inches
_LONGEST_NAME = 60
_STYLES: dict[str, dict[str, Any]] = {
    "training": {"color": "C0", "lw": 1.2},
    "held-out": {"color": "C1", "lw": 1.6, "marker": "o", "ms": 3.5},
    "without a model": {"color": "0.4", "lw": 1, "ls": "--"},
    "another length": {"color": "0.7", "lw": 1, "ls": ":"},
}
Record = Mapping[str, Any]  # a line of `metrics.jsonl`


def _metrics(
    records: Sequence[Record], baselines: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Return the metrics that are drawn, by importance, and those of the optimizer.

    The first metric is the loss.
    """
    held_out_first = sorted(records, key=lambda record: record["split"])
    every = dict.fromkeys(name for record in held_out_first for name in record)
    hidden = set(_NOT_DRAWN)
    if any(name.endswith("_loss") for name in every):
        hidden.add("loss")  # the sum of the losses of the objective
    names = [
        name
        for name in every
        # A slash is in the names of a mixture's texts.
        if name not in hidden and not name.endswith(BASELINE) and "/" not in name
    ]
    losses = [name for name in names if name.endswith("loss")][:1]
    scores = [name for name in names if name not in (*losses, *_OF_OPTIMIZER)]
    scores.sort(key=lambda name: name not in baselines)
    return [*losses, *scores[:_MAX_SCORES]], [name for name in _OF_OPTIMIZER if name in names]


def draw(
    path: Path,
    name: str,
    records: Sequence[Record],
    baselines: Mapping[str, float],
    titles: Mapping[str, str],
    changes: Sequence[int] = (),
) -> None:
    """Draw the records of a run in `metrics.jsonl`, and scores that need no model, as a PNG.

    `changes` are the steps from which sequences have another length, which changes most scores.
    """
    # Imported late: it takes longer than a small run's first step.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    (metrics, of_optimizer), drawn = _metrics(records, baselines), {}
    rows, small = -(-len(metrics) // _COLUMNS), bool(of_optimizer)
    heights = [3.0] * rows + [1.7] * small
    height = sum(heights) + 0.6
    # Placed by hand: a layout that is found by Matplotlib doubles the time.
    figure = Figure(figsize=(_WIDTH, height))
    grid = figure.add_gridspec(
        rows + small,
        _COLUMNS,
        height_ratios=heights,
        left=0.75 / _WIDTH,
        right=1 - 0.2 / _WIDTH,
        bottom=0.9 / height,
        top=1 - 0.6 / height,
        wspace=0.26,
        hspace=0.42,
    )
    places = dict(zip(metrics, range(len(metrics)), strict=True))
    places |= {metric: rows * _COLUMNS + index for index, metric in enumerate(of_optimizer)}
    steps = [record["step"] for record in records]
    first_step, last_step = min(steps), max(steps)
    for metric, place in places.items():
        axes = figure.add_subplot(grid[divmod(place, _COLUMNS)])
        for split, label, key in (
            ("train", "training", metric),
            ("eval", "held-out", metric),
            ("train", "without a model", metric + BASELINE),
        ):
            kept = [each for each in records if each["split"] == split and key in each]
            if kept and not (split == "eval" and metric in _OF_OPTIMIZER):
                x, y = ([record[axis] for record in kept] for axis in ("step", key))
                style = _STYLES[label] | ({"marker": "o", "ms": 3.5} if len(x) == 1 else {})
                (drawn[label],) = axes.plot(x, y, label=label, **style)
        if metric in baselines:
            label = "without a model"
            drawn[label] = axes.axhline(baselines[metric], label=label, **_STYLES[label])
        for step in changes:
            if first_step < step < last_step:
                label = "another length"
                drawn[label] = axes.axvline(step, label=label, **_STYLES[label])
        low, high = axes.dataLim.intervaly
        if metric == "gradient_norm" and high > 10 * low > 0:
            axes.set_yscale("log")  # as a few are far larger than the others
        axes.set_title(titles.get(metric, metric.replace("_", " ")), fontsize="medium")
        axes.sharex(figure.axes[0])
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if _SHARES.search(metric):
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    figure.suptitle(_printable(name))
    handles = [drawn[label] for label in _STYLES if label in drawn]
    figure.legend(handles=handles, loc="lower center", ncols=len(_STYLES))
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of Matplotlib as a PNG; a letter that the font lacks is drawn as a box."""
    image = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(image, format="png", dpi=120)
    json_files.write_bytes(path, image.getvalue())


def _printable(name: str) -> str:
    """Return a name that Matplotlib shows as it is, at most its last 60 characters."""
    name = "".join(c if c.isprintable() else "?" for c in name).replace("$", r"\$")
    return name if len(name) <= _LONGEST_NAME else f"…{name[-_LONGEST_NAME:]}"

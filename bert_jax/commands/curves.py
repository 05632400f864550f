"""Draw the curves of one run, or of several in one picture.

    bert-jax curves runs/tiny runs/small

The colour is the run, the dots are the held-out text, and dashed lines are scores that need no
model. Runs of unequal batches are compared with `--by=sequences` or `--by=tokens`.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.text.records import file_fault

_BY = ("step", "epoch", "sequences", "tokens", "seconds")
_FORMATS = (".png", ".pdf", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "the workdir of pretraining or of fine-tuning, each seed of which is a run"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=what)
    parser.add_argument("--by", choices=_BY, default="step", help="the horizontal axis (step)")
    what = "the picture, .png, .pdf or .svg; one that is there is replaced (curves.png)"
    parser.add_argument("--output", metavar="FILE", default="curves.png", help=what)


def run(args: argparse.Namespace, _: list[str]) -> None:
    output = Path(args.output)
    if output.suffix not in _FORMATS:
        raise UserError(f"--output {output}: give a file that ends in {', '.join(_FORMATS)}")
    folders = list(dict.fromkeys(folder for name in args.runs for folder in _seeds(name)))
    from bert_jax.training import curves, metrics  # late, as they import JAX

    runs = []
    for folder, name in zip(folders, _names(folders), strict=True):
        records = metrics.read_records(folder / "metrics.jsonl")
        if not records:
            raise UserError(f"{folder} has no metrics yet; leave it out")
        if not any(args.by in record for record in records):
            wrong = f"the metrics of {folder} do not have {args.by}"
            raise UserError(f"{wrong}; leave it out, or draw by step")
        runs.append(curves.Run(name, records, metrics.read_baselines(folder)))
    try:
        curves.draw(output, runs, args.by)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror})") from error
    print(f"{output}: {', '.join(run.name for run in runs)}")


def _seeds(name: str) -> list[Path]:
    """Return the folder of a run as it is, or those of the seeds of fine-tuning."""
    path, folders = Path(name), ("", "seed-*/", "random-*/")
    try:
        found = [file for folder in folders for file in sorted(path.glob(f"{folder}metrics.jsonl"))]
    except (OSError, ValueError) as error:  # ValueError for a NUL byte
        raise UserError(f"{path} cannot be read ({error}); give the workdir of a run") from error
    if not found:
        wrong = "has no metrics.jsonl" if path.is_dir() else file_fault(path) or "is a file"
        raise UserError(f"{path} {wrong}; give the workdir of a run")
    for file in found:
        if fault := file_fault(file):
            raise UserError(f"{file} {fault}; restore it, or leave it out")
    return [file.parent.resolve() for file in found]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the paths from the folder that has all runs; the seeds of a run are in the run."""
    is_seed = (folder.name.startswith(("seed-", "random-")) for folder in folders)
    runs = (f.parent if seed else f for f, seed in zip(folders, is_seed, strict=True))
    shared = os.path.commonpath([run.parent for run in runs])
    return [str(folder.relative_to(shared)) for folder in folders]

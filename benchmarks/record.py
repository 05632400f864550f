"""Metadata of a benchmark record (commit, hardware, versions), and comparison of its figures."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np


def heading(packages: Sequence[str]) -> str:
    """Returns the command, the commit, the machine and the versions of packages in a run."""
    shown = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    command = shlex.join(["python", *sys.argv])
    return (
        f"    {command}\n\n{_processor()}, {len(os.sched_getaffinity(0))} cores; commit "
        f"{_commit()}; Python {platform.python_version()}, {shown}\n"
    )


def ratio(times: Sequence[float], ours: Sequence[float]) -> str:
    """Returns the median of the rounds' ratios with its quartiles."""
    found = sorted(other / own for other, own in zip(times, ours, strict=True))
    low, middle, high = np.quantile(found, [0.25, 0.5, 0.75])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def _commit() -> str:
    if not shutil.which("git"):
        return "unknown"
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changes = subprocess.run([*git, "status", "--short", "-uno"], capture_output=True, text=True)
    return (commit.stdout.strip() or "unknown") + " and changes" * bool(changes.stdout)

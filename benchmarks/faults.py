"""Kill runs, fuzz readers and damage files: is anything lost, or wrong in silence?

    python benchmarks/faults.py kills|fuzz|damage --output=FOLDER

kills: SIGKILL of `train.py` and `finetune.py` at random moments of their life, then the same
  command until it ends. Its parameters, evaluations and predictions must be those of an undisturbed
  run.
fuzz: mutated files for every reader (fuzzing.py), which must succeed or refuse with a `UserError`.
damage: each kind of file of a workdir, a store and a checkpoint is damaged in ten ways. The command
  must refuse in one line, or give the same numbers.

FOLDER gets `README.md`, a table of counts, and each fault that was found.
"""

import argparse
import collections
import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import damaging
import fuzzing
import record
from fault_samples import (
    CONTEXT,
    ROOT,
    commands,
    differences,
    in_a_child,
    make_samples,
    result,
    row,
)


def main() -> None:
    """Run a part of the campaign and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--count", type=int, default=0, help="kills, inputs or damages")
    parser.add_argument("--minutes", type=float, default=1e6, help="end after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=3, help="at a time (3)")
    parser.add_argument("--output", type=Path, required=True, help="a new folder for the record")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(args.output.absolute() / "programs")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    CONTEXT.set_forkserver_preload(["fuzzing"])  # which imports the package, but starts no JAX
    heading = record.heading(["jax", "orbax-checkpoint", "tokenizers"])
    started = time.monotonic()
    args.deadline = started + 60 * args.minutes
    table = PARTS[args.part](args)
    minutes = (time.monotonic() - started) / 60
    text = f"{heading}\n{table}\n"
    print(text := f"{text}\n{minutes:.0f} minutes, {args.processes} processes at a time.\n")
    (args.output / "README.md").write_text(text)
    shutil.rmtree(args.output / "programs", ignore_errors=True)


# --- Fuzz ----------------------------------------------------------------------------------------


def fuzz(args: argparse.Namespace) -> str:
    """Fuzz every reader, and return a table by reader."""
    samples = args.output / "samples"
    if not samples.exists():
        in_a_child(make_samples, samples)
    paths = [samples / name for name in ("pretrained", "finetuned", "unfinished")]
    names = list(fuzzing.readers(*paths))
    in_a_child(fuzzing.check, paths, args.output / "check")
    faults = args.output / "faults"
    faults.mkdir(exist_ok=True)
    counts = [CONTEXT.RawArray("q", 4 * len(names)) for _ in range(args.processes)]
    total, started = args.count or 1_000_000, time.monotonic()

    def run(number: int) -> None:
        """Start a worker again whenever it ends, until there were enough inputs."""
        clock, crashes = CONTEXT.RawArray("d", 2), 0
        while clock[0] >= 0:
            clock[0] = time.monotonic() + 60  # for the start
            seed = (args.seed * 100 + number) * 1000 + crashes
            child = CONTEXT.Process(
                target=fuzzing.work, args=(number, paths, faults, counts[number], clock, seed)
            )
            child.start()
            assert child.pid
            is_late = False
            while child.is_alive():
                child.join(0.5)
                is_late = 0 < clock[0] < time.monotonic() - fuzzing.SECONDS
                if is_late and child.is_alive():
                    os.kill(child.pid, signal.SIGABRT)  # faulthandler writes where it was
                if sum(sum(c[::4]) for c in counts) >= total or time.monotonic() > args.deadline:
                    clock[0] = -1
            if child.exitcode:
                crashes += 1
                reader, scratch = int(clock[1]), Path(f"/dev/shm/fuzzing-{child.pid}")
                counts[number][4 * reader + 2] += 1
                dump = (faults / f"crash-{number}.txt").read_text(errors="replace")
                own = [line.strip() for line in dump.splitlines() if fuzzing.PACKAGE in line]
                kind = "hang" if is_late else f"exit {child.exitcode}"
                key = f"{names[reader]}: {kind} {own[0] if own else dump[:200]}"
                fuzzing.save_fault(faults, key, dump, scratch / str(reader) / "x")
                shutil.rmtree(scratch, ignore_errors=True)
                print(key, flush=True)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(args.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started
    rows = ["| reader | inputs | refused | read | faults | slowest, s |", "|---|" + "---:|" * 5]
    sums = [0, 0, 0, 0.0]
    for i, name in enumerate(names):
        done, refused, faulty = (sum(c[4 * i + k] for c in counts) for k in range(3))
        slowest = max(c[4 * i + 3] for c in counts) / 1e6
        rows.append(row(name, done, refused, done - refused - faulty, faulty, slowest))
        sums = [sums[0] + done, sums[1] + refused, sums[2] + faulty, max(sums[3], slowest)]
    rows.append(row("all", sums[0], sums[1], sums[0] - sums[1] - sums[2], *sums[2:]))
    found = sorted(path.read_text().split("\n")[0] for path in faults.glob("*/fault.txt"))
    listed = "\n".join(f"- {key}" for key in found) or "None."
    speed = f"{sums[0] / seconds:,.0f} inputs a second"
    return "\n".join([*rows, "", speed, "", f"Distinct faults: {len(found)}\n\n{listed}"])


# --- Kills ---------------------------------------------------------------------------------------

PHASES = ("starting", "preparing", "compiling", "training", "saving", "ending")


def kills(args: argparse.Namespace) -> str:
    """Kill both scripts at random moments, and return a table by phase."""
    folder = args.output.absolute()
    if not (folder / "samples").exists():
        in_a_child(make_samples, folder / "samples")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ.pop("JAX_COMPILATION_CACHE_DIR")
    words, jobs = commands(folder), []
    # Long enough to be killed between two checkpoints.
    steps = {"steps": 2000, "log_every": 20, "eval_every": 500, "checkpoint.every": 250}
    words["train.py"] += [f"--config.{name}={number}" for name, number in steps.items()]
    lock, total = threading.Lock(), args.count or 100
    counts = {script: collections.Counter() for script in words}
    expected, lives = {}, {}
    for script, flags in words.items():
        for name in ("first", "expected"):  # the first compiles
            lives[script] = _life(script, folder / name / Path(script).stem, flags)
        expected[script] = in_a_child(result, script, folder / "expected" / Path(script).stem)
    lost: list[str] = []

    def work(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread, and of the processes that it starts
        draw = random.Random(f"{args.seed} {core}")
        for trial in itertools.count():
            for script in words:
                done = sum(counts[script][phase] for phase in PHASES)
                if done >= total or time.monotonic() > args.deadline:
                    continue
                workdir = folder / f"{Path(script).stem}-{core}-{trial}"
                for _ in range(3):
                    phase = _kill(script, workdir, words[script], draw.uniform(*lives[script]))
                    with lock:
                        counts[script][phase] += 1
                code, errors = _run(script, workdir, words[script])
                problem = f"exit {code}: {errors}" if code or errors else ""
                problem = problem or in_a_child(differences, script, workdir, expected[script])
                with lock:
                    counts[script]["runs"] += 1
                    if problem:
                        counts[script]["lost"] += 1
                        lost.append(f"{workdir.name}: {problem}")
                        print(lost[-1], flush=True)
                if not problem:
                    shutil.rmtree(workdir)
            is_late = time.monotonic() > args.deadline
            if is_late or all(sum(c[p] for p in PHASES) >= total for c in counts.values()):
                return

    jobs = [
        threading.Thread(target=work, args=(core,))
        for core in sorted(os.sched_getaffinity(0))[: args.processes]
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    rows = [f"| | {' | '.join(words)} |", "|---|---:|---:|"]
    rows += [row(f"killed while {p}", *(counts[s][p] for s in words)) for p in PHASES]
    kill_counts = [sum(counts[s][phase] for phase in PHASES) for s in words]
    rows += [row("kills", *kill_counts)]
    rows += [row(f"{name}", *(counts[s][name] for s in words)) for name in ("runs", "lost")]
    return "\n".join([*rows, "", *(f"- {each}" for each in lost)])


def _start(script: str, workdir: Path, flags: Sequence[str]) -> subprocess.Popen:
    workdir.parent.mkdir(exist_ok=True)
    with workdir.with_suffix(".out").open("w") as out, workdir.with_suffix(".err").open("w") as err:
        command = [sys.executable, str(ROOT / script), f"--workdir={workdir}", *flags]
        return subprocess.Popen(command, stdout=out, stderr=err)


def _run(script: str, workdir: Path, flags: Sequence[str]) -> tuple[int, str]:
    code = _start(script, workdir, flags).wait(timeout=300)
    return code, workdir.with_suffix(".err").read_text()


def _life(script: str, workdir: Path, flags: Sequence[str]) -> tuple[float, float]:
    """Run to the end; return after how many seconds the workdir appears, and the run ends."""
    started, appeared = time.monotonic(), 0.0
    child = _start(script, workdir, flags)
    while child.poll() is None:
        time.sleep(0.01)
        if not appeared and workdir.exists():
            appeared = time.monotonic() - started
    if child.returncode:
        raise SystemExit(workdir.with_suffix(".err").read_text())
    return appeared, time.monotonic() - started


def _kill(script: str, workdir: Path, flags: Sequence[str], seconds: float) -> str:
    """Start a script, kill it after some seconds, and return the phase that it was in."""
    child = _start(script, workdir, flags)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
        return "ended before"
    child.kill()
    child.wait()
    printed = workdir.with_suffix(".out").read_text()
    if script == "train.py" and (workdir / "store").exists() and "devices" not in printed:
        return "preparing"
    if "devices" not in printed:
        return "starting"
    if any(".orbax-checkpoint-tmp" in name for _, names, _ in os.walk(workdir) for name in names):
        return "saving"
    lines = re.findall(r"^step (\d+)/(\d+) ", printed, re.M)
    if not lines:
        return "compiling"
    is_last = script == "train.py" or (workdir / "seed-2/result.json").exists()
    return "ending" if lines[-1][0] == lines[-1][1] and is_last else "training"


PARTS = {"kills": kills, "fuzz": fuzz, "damage": damaging.damage}

if __name__ == "__main__":
    main()

"""Try this program on an accelerator that it has never run on, and measure it there.

    python benchmarks/device.py --minutes=25 --output=benchmarks/records/2026-12-01-h100

Eight groups of parts, in this order, each part a process of its own:

- check: versions, the rates of a matmul and of memory, and a layer's attention by each kernel.
- tests: those marked `device`, which compare the device with a CPU.
- speed: the train step of ModernBERT-base, BERT-large and BERT-base in bfloat16, by length, kind of
  attention and batch. The batch grows as long as that is faster.
- peers: PyTorch compiled, with each of its kernels of attention, where PyTorch has the device.
- profile: the time of the step with the most operations a second, by kind and by kernel.
- settings: the same step under each of the settings of JAX and XLA in `SETTINGS`.
- default: `python train.py`.
- use: an encoder of MiniLM's size is fine-tuned, is trained on pairs at a batch of 8,192, and
  encodes 100,000 texts beside sentence-transformers.

Steps are compiled eight at a time, on a machine with CPUs enough, and timed one after the other.
What a part found is in the output when it ends. Of one that fails, the first line of the cause is
reported, and the next one starts. The same command again continues: first with the parts that had
no turn, then with those that failed. README.md of the output has the tables, and the defaults that
should change.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import device_cell
import jax
from device_cell import TINY, Cell
from device_report import Found, speed, write_report

from bert_jax.commands import process
from bert_jax.errors import UserError
from bert_jax.models.attention import unsupported
from bert_jax.storage.machine import num_cores

ROOT = Path(__file__).resolve().parents[1]
SHARES = {
    "check": 1,
    "tests": 3,
    "speed": 10,
    "peers": 4,
    "profile": 1,
    "settings": 2,
    "default": 2,
    "use": 2,
}  # of the time
AGAIN, SHARE_AGAIN = "again", 2  # the group of all parts that had a turn before
# What matters most comes first: not everything may have a turn.
PAIRS = [("modernbert_base", 1024), ("large", 128), ("large", 512), ("modernbert_base", 512)]
PAIRS += [("modernbert_base", 8192), ("base", 128), ("base", 512)]
EXACT = ("base", 128)  # also in float32
PEERS = [("modernbert_base", 1024), ("large", 128), ("large", 512), ("base", 128), ("base", 512)]
# Environment variables that may make a step faster on a GPU; a TPU ignores the last one.
SETTINGS = {
    "optimization-O1": {"JAX_OPTIMIZATION_LEVEL": "O1"},
    "no-command-buffers": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="},
}
# Tokens of the first batch and of the largest batch of a device. Sequences of more than 1,024 begin
# with fewer: the memory of plain attention grows with the square of the length.
FIRST, LARGEST = 1 << 15, 1 << 17
LEAST, MOST, ENDING = 90.0, 300.0, 5.0  # seconds of a part, and to end one whose time is over
POLL = 0.5  # seconds after which a process is told that this program is to end
GROUP = (
    100.0  # seconds of a group at least: the check took 85, the tests 49 to 83, a step 60 to 110
)
# Steps that are compiled at the same time: eight on 16 CPUs took no longer than one. None of them
# takes the memory of the GPU beforehand.
AT_ONCE = max(1, min(8, num_cores() // 2))
TURNS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
PROBE = """
import json, jax
one = jax.devices()[0]
found = {"platform": one.platform, "kind": one.device_kind, "count": jax.device_count()}
print(json.dumps(found | {"version": one.client.platform_version}))
"""
TORCH = "import torch, transformers; print(torch.cuda.is_available())"


@dataclasses.dataclass(frozen=True)
class Part:
    """A process with its name and its group.

    `command` returns its command for some seconds, or raises a LookupError that says why there is
    nothing to run. `env` is added to its environment. `takes_turns` is whether it may run beside
    others that do: it is a step, which `device_cell` compiles beside others and times alone.
    """

    name: str
    group: str
    command: Callable[[float], list[str]]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    takes_turns: bool = False


class Commands:
    """The commands of the parts, some of which follow from what those before have found."""

    def __init__(self, found: Found, *, tiny: bool):
        self._found, self._tiny = found, tiny
        self._pairs = [("base", 16), ("modernbert_base", 32)] if tiny else PAIRS
        self._exact = self._pairs[0] if tiny else EXACT
        self.cells = list(self._cells())

    def parts(self) -> list[Part]:
        """Return all parts, in their order."""
        # The tests take CPUs alone, unless they are told.
        platforms = {"JAX_PLATFORMS": self._found.device.get("platforms", "")}
        parts = [Part("check", "check", self._check)]
        parts.append(Part("tests", "tests", self._tests, platforms))
        for cell in self.cells:
            command = partial(self._speed, cell)
            parts.append(Part(cell.name, "speed", command, takes_turns=True))
        for recipe, length in self._pairs[:1] if self._tiny else PEERS:
            name = f"peers-{recipe}-{length}"
            parts.append(Part(name, "peers", partial(self._peers, name, recipe, length)))
        trace = str(self._found.output / "trace")
        parts.append(Part("profile", "profile", partial(self._again, "profile", trace)))
        for setting, env in SETTINGS.items():
            name = f"settings-{setting}"
            command = partial(self._again, name, "")
            parts.append(Part(name, "settings", command, env, takes_turns=True))
        parts.append(Part("default", "default", self._default))
        parts.append(Part("use", "use", self._use))
        return [*parts, Part("encode", "use", self._encode)]

    def _cells(self) -> Iterator[Cell]:
        late = []
        for recipe, length in self._pairs:
            plain = Cell(recipe, length, tiny=self._tiny)
            forms = self._fused(plain)
            if forms and forms[0].attention_dropout:  # so that `auto` has the kernel
                yield forms.pop(0)
            yield plain
            if length < 512:  # where fused attention gains least
                late += forms
            else:
                yield from forms
        yield Cell(*self._exact, "float32", tiny=self._tiny)
        yield from late

    def _fused(self, plain: Cell) -> list[Cell]:
        """Return fused attention as published, and both forms without dropout, if they are others.

        Where there is no kernel for one of the two, it is left out.
        """
        found, platform = [], self._found.device["platform"]
        for dropout in (True, False):
            plain = dataclasses.replace(plain, attention_dropout=dropout)
            fused = dataclasses.replace(plain, attention="fused")
            config = fused.config(1)
            options: Any = {"window": 0, "packed": config.data.packing, "training": True}
            if not unsupported(config.model, platform, plain.length, **options):
                found += [fused] if dropout else [plain, fused]
            if not config.model.attention_probs_dropout_prob:
                break
        return found

    def _check(self, seconds: float) -> list[str]:
        script = str(ROOT / "benchmarks/device_check.py")
        return [sys.executable, script, str(self._found.figures("check")), *["tiny"] * self._tiny]

    def _tests(self, seconds: float) -> list[str]:
        files = [p for p in ROOT.glob("tests/**/test_*.py") if "mark.device" in p.read_text()]
        words = ["-q", "-o", "addopts=", "-m", "device", "-W", "default", "-p", "no:cacheprovider"]
        words += [f"--junitxml={self._found.figures('tests')}", *map(str, sorted(files))]
        return [sys.executable, "-m", "pytest", *words]

    def _measure(self, name: str, cell: Cell, first: int, most: int, trace: str = "") -> list[str]:
        figures = str(self._found.figures(name))
        values = [dataclasses.asdict(cell), first, most, figures, trace]
        return [sys.executable, str(ROOT / "benchmarks/device_cell.py"), json.dumps(values)]

    def _speed(self, cell: Cell, seconds: float) -> list[str]:
        length, count = cell.length, self._found.device["count"]
        first = count * max(1, int(FIRST / length * min(1.0, 1024 / length)))
        most = max(first, count * LARGEST // length)
        if self._tiny:
            first, most = 2 * count, 4 * count
        plain = Cell(cell.recipe, cell.length, tiny=self._tiny)
        if cell != plain and (best := self._found.best(plain)):
            first = best["batch_size"]
        most = first if cell.dtype == "float32" else most
        return self._measure(cell.name, cell, first, most)

    def _peers(self, name: str, recipe: str, length: int, seconds: float) -> list[str]:
        plain = Cell(recipe, length, tiny=self._tiny)
        forms = [plain, *self._fused(plain)]
        found = [(row, cell) for cell in forms if (row := self._found.best(cell))]
        # Without attention dropout, if that was measured: both sides have a kernel for it.
        found = [pair for pair in found if not pair[1].attention_dropout] or found
        if not found:
            raise LookupError("its batch was not measured")
        best, fastest = max(found, key=lambda pair: speed(pair[0]))
        if reason := self._no_torch:
            raise LookupError(reason)
        words = [f"--config={recipe}", f"--config.data.max_length={length}"]
        words += [f"--config.data.batch_size={best['batch_size']}"]
        words += [f"--config.model.attention={fastest.attention}"]
        if not fastest.attention_dropout:
            words.append("--config.model.attention_probs_dropout_prob=0")
        words += [f"--config.model.{field}={n}" for field, n in TINY.items() if self._tiny]
        peers = ["bert-jax", "torch-masked-compiled", "torch-compiled"]
        peers.append("torch-masked-cudnn")
        if recipe != "modernbert_base":  # whose windows need a mask, which that kernel refuses
            peers.append("torch-masked-flash")
        words += ["--alone", f"--peers={','.join(peers)}", "--dtypes=bfloat16"]
        words += ["--rounds=3", f"--seconds={0.1 if self._tiny else 4}"]
        words.append(f"--output={self._found.figures(name)}")
        return [sys.executable, str(ROOT / "benchmarks/peers.py"), *words]

    @cached_property
    def _no_torch(self) -> str:
        """Why PyTorch cannot be used on this device; "" if it can. To ask takes seconds."""
        done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True)
        if done.returncode:
            return f"PyTorch cannot be used: {cause(done.stderr, done.returncode)}"
        is_seen = self._found.device["platform"] == "cpu" or "True" in done.stdout
        return "" if is_seen else "PyTorch sees no such device"

    def _again(self, name: str, trace: str, seconds: float) -> list[str]:
        """Return the command of the step with the most operations a second."""
        found = [(self._found.best(cell), cell) for cell in self.cells]
        found = [(row, cell) for row, cell in found if row and cell.dtype == "bfloat16"]
        if not found:
            raise LookupError("no step was measured")
        row, cell = max(found, key=lambda pair: pair[0]["random"]["model_flops_per_second"])
        sizes = row["batch_size"], row["batch_size"]
        return self._measure(name, cell, *sizes, trace)

    def _default(self, seconds: float) -> list[str]:
        workdir = self._found.output / "workdir"
        shutil.rmtree(workdir, ignore_errors=True)  # a run is timed from its beginning
        steps = ["--config.steps=20"] * self._tiny
        return [sys.executable, str(ROOT / "train.py"), f"--workdir={workdir}", *steps]

    def _use(self, seconds: float) -> list[str]:
        script, folder = str(ROOT / "benchmarks/device_use.py"), str(self._found.output / "minilm")
        shutil.rmtree(folder, ignore_errors=True)
        return [
            *(sys.executable, script, folder, str(self._found.figures("use"))),
            *["tiny"] * self._tiny,
        ]

    def _encode(self, seconds: float) -> list[str]:
        length, texts = (16, 64) if self._tiny else (32, 100_000)
        words = [f"--lengths={length}", f"--tokens={texts * length}", "--rounds=2"]
        words += ["--dtype=bfloat16", "--peers=sentence-transformers,transformers"]
        words += ["--layers=2", "--size=64"] * self._tiny
        words.append(f"--figures={self._found.figures('encode')}")
        words.append(f"--output={self._found.output / 'encoders'}")
        return [sys.executable, str(ROOT / "benchmarks/encode_peers.py"), *words]


def cause(log: str, code: int) -> str:
    """Return the line of a log that says best why a process has failed."""
    lines = [line for line in log.splitlines() if line.strip()] or ["no output"]
    tests = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    own = [line for line in lines if re.match(r"(\w+\.py|bert-jax): .*(?<!above)$", line)]
    traces = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    raised = [x for x in lines[traces[-1] + 1 :] if not x[0].isspace()] if traces else []
    first = [": ".join(tests[:1] + errors[:1])] if tests else []
    found = (first or own[-1:] or raised[:1] or lines[-1:])[0]
    ended = f"ended by {signal.Signals(-code).name}: " if code < 0 else ""
    return (ended + found)[:300]


def run(
    command: Sequence[str],
    log: Path,
    seconds: float,
    env: Mapping[str, str],
    stop: threading.Event | None = None,
) -> int | None:
    """Run a process with all that it starts; return its exit code.

    It is None if its time was over, or if `stop` was set. The log is continued.
    """
    end = time.monotonic() + seconds
    with log.open("ab") as file:
        # A log is whole when its process ends. Of several GPUs the first, as PyTorch takes one.
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": gpu, **env}
        options: Any = {"stdout": file, "stderr": file, "cwd": ROOT, "env": env}
        child = subprocess.Popen(command, start_new_session=True, **options)
    try:
        while (left := end - time.monotonic()) > 0 and not (stop and stop.is_set()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(min(left, POLL))
        return None
    finally:  # also where this program is to end
        for number, wait in ((signal.SIGTERM, ENDING), (signal.SIGKILL, ENDING)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, number)
                child.wait(wait)


def run_part(part: Part, found: Found, seconds: float, stop: threading.Event | None = None) -> None:
    """Run a part, and write how it ended, unless `stop` was set."""
    started = time.monotonic()
    entry: dict[str, Any] = {"status": "skipped"}
    try:
        command = part.command(seconds)
    except LookupError as error:
        entry["cause"] = str(error)
    except Exception as error:  # such as figures that cannot be read: the other parts go on
        entry = {"status": "failed", "cause": repr(error)}
    else:
        log = found.output / f"{part.name}.log"
        log.unlink(missing_ok=True)
        env = dict(part.env)
        if part.takes_turns:
            env |= TURNS | {device_cell.TURNS: str(found.output / "turns")}
        code, began, last = device_cell.MORE, started, 0.0
        while code == device_cell.MORE and began - started + 1.2 * last < seconds:
            code = run(command, log, started + seconds - began, env, stop)
            began, last = time.monotonic(), time.monotonic() - began
        if stop and stop.is_set():
            return
        stopped = {None: f"its {seconds:.0f} s were over", device_cell.MORE: "no time for more"}
        entry = {"status": "complete" if code == 0 else "failed", "command": command}
        if code in stopped:
            entry |= {"status": "out of time", "cause": stopped[code]}
        elif code:
            entry["cause"] = cause(log.read_text(errors="replace"), code)
    if part.name == "default":
        found.keep_default(found.output / "workdir")
    for folder in ("minilm", "encoders"):  # models
        shutil.rmtree(found.output / folder, ignore_errors=True)
    found.write(part.name, {**entry, "seconds": time.monotonic() - started})


def run_parts(parts: Sequence[Part], found: Found, seconds: float) -> Generator[Part, None, None]:
    """Run parts at the same time, and yield each when it has ended; closed, it ends the others."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(parts)) as pool:
        running = {pool.submit(run_part, part, found, seconds, stop): part for part in parts}
        try:
            for ended in as_completed(running):
                ended.result()
                yield running[ended]
        finally:
            stop.set()


def probe(output: Path, *, tiny: bool) -> dict[str, Any]:
    """Return the device of JAX, which has to be that of the output."""
    log = output / "device.log"
    log.unlink(missing_ok=True)
    code = run([sys.executable, "-c", PROBE], log, 180, {})
    text = log.read_text(errors="replace")
    if code != 0:
        raise UserError(f"JAX does not start ({cause(text, code or 0)}); see {log}")
    device = json.loads(text.strip().splitlines()[-1]) | {"tiny": tiny}
    makers = [name for name in ("cuda", "rocm") if name in device["version"].lower()]
    name = (makers or [device["platform"]])[0]
    device["platforms"] = "cpu" if name == "cpu" else f"{name},cpu"
    if device["platform"] == "cpu" and not tiny:
        raise UserError("JAX sees no accelerator here; --tiny tries this program on the CPU")
    path = output / "device.json"
    before = json.loads(path.read_text()) if path.exists() else device
    if any(before[key] != device[key] for key in ("kind", "count", "tiny")):
        wrong = f"{output} has the results of {before['count']} × {before['kind']}"
        raise UserError(f"{wrong}{', tiny' * before['tiny']}; name another --output")
    path.write_text(json.dumps(device))
    return device


def missing_packages() -> list[str]:
    """Return the requirements of this project, and of its tests, that are not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    missing = []
    for requirement in [*project["dependencies"], "pytest"]:
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def schedule(
    parts: Sequence[Part], found: Found, end: float, least: float
) -> Iterator[tuple[list[Part], float]]:
    """Yield the parts that are to run, with the seconds that each may take.

    Parts that take turns come together, at most `AT_ONCE`; the others one by one. A group has its
    share of the time that is left when it begins, or `GROUP`. Parts that had a turn before are a
    group of their own, the last one.
    """
    todo = [part for part in parts if found.read(part.name).get("status") != "complete"]
    groups = [AGAIN if found.read(part.name) else part.group for part in todo]
    ends: dict[str, float] = {}
    pairs = sorted(zip(groups, todo, strict=True), key=lambda pair: pair[0] == AGAIN)
    while pairs:
        group, part = pairs[0]
        together = [
            other for its_group, other in pairs if (its_group, other.takes_turns) == (group, True)
        ]
        parts = together[:AT_ONCE] if part.takes_turns else [part]
        pairs = [pair for pair in pairs if pair[1] not in parts]
        now = time.monotonic()
        if group not in ends:
            later = {each: SHARES.get(each, SHARE_AGAIN) for each in {*groups} - ends.keys()}
            share = (end - now) * later[group] / sum(later.values())
            ends[group] = min(end, now + max(share, GROUP))
        seconds = ends[group] - now - 2 * ENDING
        if seconds >= least:
            alone = part.group in ("speed", "peers") and len(parts) == 1
            yield parts, min(seconds, MOST) if alone else seconds


def parse() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output", type=Path, required=True, help="a folder for all results")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all of it, at most (25)")
    parser.add_argument("--parts", default=",".join(SHARES), help="groups, comma separated (all)")
    parser.add_argument("--tiny", action="store_true", help="small models, to try this program")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - SHARES.keys():
        raise UserError(f"--parts {', '.join(sorted(unknown))}: there are {', '.join(SHARES)}")
    if not 0 < args.minutes < math.inf:
        raise UserError("--minutes must be positive")
    try:
        args.output = args.output.absolute()
        args.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output).close()
    except OSError as error:
        raise UserError(f"--output={args.output} cannot be written ({error.strerror})") from error
    return args


def main() -> None:
    """Run the parts, and write the report after each."""
    end = time.monotonic()
    args = parse()
    end += 60 * args.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if missing := missing_packages():
        print(f"not installed, so that parts may fail: {' '.join(missing)}", flush=True)
    found = Found(args.output, probe(args.output, tiny=args.tiny))
    jax.config.update("jax_platforms", "cpu")  # this process leaves the device to the parts
    commands = Commands(found, tiny=args.tiny)
    parts = commands.parts()
    report = partial(write_report, found, [p.name for p in parts], commands.cells, missing)
    chosen = [part for part in parts if part.group in args.parts]
    report()
    for parts, seconds in schedule(chosen, found, end, 5.0 if args.tiny else LEAST):
        for part in parts:
            print(f"{part.name}: at most {seconds:.0f} s", flush=True)
        with contextlib.closing(run_parts(parts, found, seconds)) as ended:
            for part in ended:
                print(f"{part.name}: {found.summary(part.name)}", flush=True)
                report()
    print(f"{args.output / 'README.md'} has the results")


if __name__ == "__main__":
    process.run(main, Path(__file__).name)

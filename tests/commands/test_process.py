"""What commands set for their process: the cache of compiled programs, the allocator."""

import errno
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest
from training_runs import CACHE_VARIABLES

from bert_jax import console
from bert_jax.commands import main, memory, process
from bert_jax.errors import HostLost, Interrupted, TrainingError, UserError
from bert_jax.storage.replacement import replacing

# Compiles a function, and says whether it was found; then damages what is kept and goes on.
CODE = """
import sys
from pathlib import Path
import jax
from jax import monitoring
from bert_jax.commands import process as programs

found = []
monitoring.register_event_listener(lambda event, **_: found.append(event))
programs.cache_compiled_programs()

def compiled(name):
    del found[:]
    jax.clear_caches()
    print(name, jax.jit(lambda x: x + 1)(1), "/jax/compilation_cache/cache_hits" in found)

compiled("new")
if len(sys.argv) > 1:
    compiled("kept")
    entries = list(Path(sys.argv[1]).glob("jit__lambda-*-cache"))
    for content in (b"", entries[0].read_bytes()[:100]):
        entries[0].write_bytes(content)
        compiled("damaged")
        compiled("mended")
"""
DAMAGED = ["damaged 2 False", "mended 2 True"] * 2


def run(cache: Path, *words: Path) -> list[str]:
    """Returns what is printed, which must not be a warning."""
    environment = {k: v for k, v in os.environ.items() if k not in CACHE_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", CODE, *map(str, words)],
        env={**environment, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_another_process_finds_them_and_damaged_ones_are_made_anew(tmp_path):
    assert run(tmp_path) == ["new 2 False"]
    assert (tmp_path / "bert-jax").stat().st_mode & 0o777 == 0o700
    assert run(tmp_path, tmp_path / "bert-jax/programs") == ["new 2 True", "kept 2 True", *DAMAGED]


def test_a_place_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "bert-jax").write_text("")  # for root, who may write in any folder
    assert run(tmp_path) == ["new 2 False"]


@pytest.mark.parametrize(
    ("platforms", "has_accelerator", "keeps"),
    [("cpu", True, True), ("cuda,cpu", False, False), (None, False, True), (None, True, False)],
)
def test_freed_memory_is_kept_on_cpus_alone(platforms, has_accelerator, keeps, monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "_configure_malloc", lambda *options: calls.append(options))
    monkeypatch.setattr(memory, "_has_accelerator", lambda: has_accelerator)
    monkeypatch.setattr(
        jax,
        "config",
        SimpleNamespace(jax_platforms=platforms, update=lambda *option: calls.append(option)),
    )
    memory.keep_host_memory()
    assert len(calls) == (2 if keeps else 0)  # of the allocator, and of JAX


@pytest.fixture
def ends(monkeypatch):
    """The exit codes with which this process would have ended."""
    codes = []
    monkeypatch.setattr(process.os, "_exit", codes.append)
    monkeypatch.setattr(process, "_interrupts", [])
    handlers = process._STOPPED_BY.items()
    before = {number: signal.signal(number, handler) for number, handler in handlers}
    yield codes
    for number, handler in before.items():
        signal.signal(number, handler)


def test_stop_signals_are_noted_and_restored(ends, capsys):
    before = signal.getsignal(signal.SIGTERM)
    with process.stop_signals("train.py") as reason:
        assert reason() == ""
        signal.raise_signal(signal.SIGTERM)
        assert reason() == "SIGTERM"
        signal.raise_signal(signal.SIGTERM)  # a second one ends the process
        assert ends == [128 + signal.SIGTERM]
        assert capsys.readouterr().err == "train.py: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_hangup_is_the_same_one(ends):
    """Bash sends one to its commands when its terminal closes, and the system another."""
    with process.stop_signals("train.py") as reason:
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        assert (reason(), ends) == ("SIGHUP", [])
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def command():
        try:
            signal.raise_signal(signal.SIGHUP)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGHUP)  # while it cleans up
            raise

    process.run(command, "bert-jax index")
    assert ends == [128 + signal.SIGHUP]


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError, 2), (TrainingError, 1), (Interrupted, 75), (HostLost, 69)],
)
def test_an_error_ends_with_its_exit_code_where_nobody_reads(error, code, ends, monkeypatch):
    def command():
        monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
        raise error("something is wrong; mend it")

    process.run(command, "bert-jax export")
    assert ends == [code]


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError, 2), (TrainingError, 1), (Interrupted, 75), (HostLost, 69)],
)
def test_an_error_ends_with_its_line_and_exit_code(error, code, capsys, ends):
    def command():
        raise error("something is wrong; mend it")

    process.run(command, "bert-jax export")
    assert ends == [code]
    assert capsys.readouterr().err == "bert-jax export: something is wrong; mend it\n"


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ("{} --help >&-", "standard output is closed; "),
        ("{} embed m - --json <&-", "stdin is closed; "),
        ("{} --help >/dev/full", "No space left on device; "),
        ("mkdir gone; cd gone; rmdir ../gone; {} --help", "the working directory was deleted; "),
        ("{} pretrain --connect_timeout=nan", "--connect_timeout nan is no time; "),
        ("{} prepare none.txt store", "data source none.txt does not exist; "),
        ("JAX_PLATFORMS=none {} fill-mask m '[MASK]'", "JAX cannot start, with JAX_PLATFORMS="),
        ("JAX_PLATFORMS=none {} benchmark", "JAX cannot start, with JAX_PLATFORMS="),
        ("JAX_PLATFORMS=none {} import m x", "JAX cannot start, with JAX_PLATFORMS="),
        ("JAX_PLATFORMS=none {} export m x", "JAX cannot start, with JAX_PLATFORMS="),
    ],
)
def test_a_process_that_fails_ends_with_a_line(shell, message, tmp_path):
    program = f"{sys.executable} -c 'from bert_jax.commands.main import main; main()'"
    done = subprocess.run(
        ["bash", "-c", shell.format(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert re.fullmatch(rf"bert-jax( [\w-]+)?: {re.escape(message)}.*\n", done.stderr)
    assert not list(tmp_path.iterdir())


def test_a_plan_starts_no_device():
    program = "from bert_jax.commands.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", "--config=tiny", "--topology=v5e-8", "--json"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "none"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout)[0]["topology"] == "v5e:2x4"


def test_a_notebook_is_not_ended(ends, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=print))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit, match="a notebook starts a command by !"):
        process.run(lambda: None, "train.py")
    assert (ends, signal.getsignal(signal.SIGINT)) == ([], before)


def test_a_command_may_open_many_files(ends):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        process.run(lambda: None, "train.py")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(4096, limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_garbage_is_collected_less_often(ends):
    before = gc.get_threshold()
    gc.set_threshold(700)
    process.run(lambda: None, "train.py")
    assert gc.get_threshold() == before  # as of the tests
    assert before[0] > 700


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_by_hand(error, capsys, ends):
    """A library may make another error of it."""

    def command():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None

    process.run(command, "bert-jax export")
    assert ends == [130]
    assert capsys.readouterr().err == "bert-jax export: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # once more does no harm


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_command_removes_what_it_has_not_finished(tmp_path, capsys, ends, number):
    def command():
        with replacing(tmp_path / "new") as path:
            path.mkdir()
            signal.raise_signal(number)

    process.run(command, "bert-jax index")
    assert ends == [128 + number]
    assert capsys.readouterr().err == "bert-jax index: interrupted\n"
    assert not list(tmp_path.iterdir())


def test_a_signal_within_a_callback_is_not_lost(capsys, ends, monkeypatch):
    """Python drops what a callback of the garbage collector raises, as some of JAX's are."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    class Callback:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def command():
        Callback()
        time.sleep(10)

    started = time.monotonic()
    process.run(command, "bert-jax embed")
    assert ends == [128 + signal.SIGTERM]
    assert time.monotonic() - started < 5
    assert capsys.readouterr().err == "bert-jax embed: interrupted\n"


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_a_run_stops_where_its_output_is_closed(ends, monkeypatch, number):
    def closed(*_, **__):
        raise OSError(number, os.strerror(number))

    with (
        console.output(console.Level.PROGRESS),
        process.stop_signals("train.py") as reason,
        monkeypatch.context() as patch,
    ):
        patch.setattr("builtins.print", closed)
        console.show("step 1")
        assert reason() == "a closed output"
        console.show("step 2")  # nothing more
        signal.raise_signal(signal.SIGINT)  # the first signal, which leaves time to save
        assert (reason(), ends) == ("a closed output", [])
    with console.output(console.Level.PROGRESS), monkeypatch.context() as patch:
        patch.setattr("builtins.print", closed)
        with pytest.raises(OSError, match=os.strerror(number)):
            console.show("a line of another command")


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_cache_that_others_may_write_to_is_not_used(tmp_path, mode):
    (tmp_path / "bert-jax").mkdir()
    (tmp_path / "bert-jax").chmod(mode)
    assert run(tmp_path) == ["new 2 False"]
    assert not [*(tmp_path / "bert-jax").iterdir()]


def test_an_interruption_while_commands_are_imported(capsys, ends, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "importlib", SimpleNamespace(import_module=interrupted))
    monkeypatch.setattr("sys.argv", ["bert-jax", "plan"])
    main.main()
    assert ends == [130]
    assert capsys.readouterr().err == "bert-jax plan: interrupted\n"


def test_freed_memory_is_kept_before_a_thread_shows_work(monkeypatch):
    """The C library fixes its arenas at the first thread; a step took a quarter longer."""
    shown = []

    class Kept(Exception):
        pass

    def keep() -> None:
        raise Kept

    monkeypatch.setattr(process, "keep_host_memory", keep)
    monkeypatch.setattr(process.console, "working", shown.append)
    with pytest.raises(Kept):
        process.train("pretrain", None, None)
    assert not shown


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ("--xla_force_host_platform_device_count=8", None, "32"),
        ("--xla_force_host_platform_device_count=8", "5", "5"),
        ("", None, None),
    ],
)
def test_fake_devices_have_enough_threads(flags, before, after, monkeypatch):
    monkeypatch.setattr(process.os, "environ", {"XLA_FLAGS": flags})
    if before:
        process.os.environ["NPROC"] = before
    process.use_enough_threads()
    assert process.os.environ.get("NPROC") == after

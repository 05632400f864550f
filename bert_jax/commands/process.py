"""Process-wide setup of the commands: exit codes, XLA compilation cache, signals.

The library sets none of this: `import bert_jax` and its functions leave the process as it is.
"""

import argparse
import contextlib
import gc
import importlib
import itertools
import logging
import os
import re
import resource
import signal
import sys
import threading
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from bert_jax import console
from bert_jax.commands.flags import Recipe
from bert_jax.commands.memory import keep_host_memory
from bert_jax.config.fields import Dtype
from bert_jax.errors import CommandError, TextWarning, UserError, first_line
from bert_jax.storage import paths

if TYPE_CHECKING:
    from bert_jax.bert import Bert

_CACHE = "jax_compilation_cache_dir"
_OPEN_FILES = 4096  # at a time, where the system allows it; macOS begins with 256
# The signals that interrupt a command, so that it removes what it has not finished; with what each
# does in a process of Python's that has changed neither.
_STOPPED_BY = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
# What JAX warns of when it cannot use an entry of the cache, which it then compiles again.
_WARNING = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(.*?)'")


def run(command: Callable[[], None], name: str) -> None:
    """Run a command; print an error of the user's or of training as one line, after its `name`."""
    if sys.stdout is not None and not hasattr(sys.stdout, "reconfigure"):
        # Of a notebook, whose process must not end with the command.
        sys.exit(f"{name}: a notebook starts a command by !; or call bert_jax from Python")
    # Modules and traced programs are millions of objects that live to the end: with Python's own
    # 700, looking through them again and again is an eighth of the time that a short run takes.
    gc.set_threshold(20_000, 10, 10)
    quiet_libraries()
    # Files that are opened must not have the number of a closed input or output.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with contextlib.suppress(OSError, ValueError):  # a store of many shards has as many files
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    for number, default in _STOPPED_BY.items():
        if signal.getsignal(number) is default:  # not ignored, as by nohup
            signal.signal(number, partial(_interrupt, name))
    try:
        _check_process()
        # Text of any script is printed on any terminal, and names that are not UTF-8.
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore
        _run_and_flush(command)
        _leave_signals()
    except (CommandError, KeyboardInterrupt) as error:
        end_process(name, error)
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if not _interrupts and isinstance(error, OSError):  # such as a full disk
            words = filter(None, (error.filename, error.strerror or first_line(error)))
            reason = f"{': '.join(map(str, words))}; --verbose shows the origin"
            end_process(name, CommandError(reason))
        if not _interrupts:
            raise
        end_process(name, KeyboardInterrupt())  # of which a library has made another error


def _leave_signals() -> None:
    """Ignore Ctrl-C, as all is done, and let the other signals end the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _check_process() -> None:
    """Refuse to run without an output or a working directory, of which libraries have errors."""
    if sys.stdout is None:
        raise UserError("standard output is closed; redirect it to a file or to /dev/null")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory was deleted; change to another one") from None


def _run_and_flush(command: Callable[[], None]) -> None:
    """Run a command, which may exit; an output that cannot be written is an error of it."""
    try:
        command()
    except SystemExit:  # after help
        sys.stdout.flush()
        raise
    sys.stdout.flush()


_interrupts: list[int] = []  # the signals that have raised KeyboardInterrupt
_shows_origin = False  # of an error that ends the process


def _interrupt(name: str, number: int, _: FrameType | None) -> None:
    """Raise KeyboardInterrupt; the second time, end at once."""
    if _is_repeated_hangup(number, _interrupts):
        return
    if _interrupts:
        end_process(name, KeyboardInterrupt())
    _interrupts.append(number)
    raise KeyboardInterrupt


def _is_repeated_hangup(number: int, before: Sequence[int]) -> bool:
    """Return whether a signal is a second SIGHUP.

    When a terminal closes, a shell sends one to its commands, and the system the next.
    """
    return number == signal.SIGHUP and number in before


def end_process(name: str, error: CommandError | KeyboardInterrupt) -> None:
    """End the process with a line, whatever its threads do, which could print errors of theirs."""
    with contextlib.suppress(ValueError):  # in another thread than the main one
        _leave_signals()  # also while the line waits for its reader
    if _shows_origin:
        traceback.print_exception(error)
    message = f"{name}: {str(error) or 'interrupted'}\n"
    for stream, line in ((sys.stderr, message), (sys.stdout, "")):
        with contextlib.suppress(AttributeError, OSError):  # it is closed, or its disk is full
            stream.write(line)
            stream.flush()
    number = _interrupts[0] if _interrupts else signal.SIGINT
    os._exit(getattr(error, "exit_code", 128 + number))


def train(
    name: str,
    args: argparse.Namespace,
    recipe: Recipe,
    **options: Any,
) -> None:
    """Run `start` and `train_run` of a module, as one of several processes, which end together.

    `options` are those of `start` that the module alone has.
    """
    keep_host_memory()  # before any thread: that which shows work is one
    use_enough_threads()
    with console.working("starting JAX", says_end=False):
        from bert_jax.distributed import hosts

    def connected() -> None:
        hosts.connect(
            coordinator_address=args.coordinator_address,
            num_processes=args.num_processes,
            process_id=args.process_id,
            connect_timeout=args.connect_timeout,
        )
        cache_compiled_programs()
        with console.working("starting", says_end=False):
            module = importlib.import_module(f"bert_jax.runs.{name}")
        workdir = paths.as_path(args.workdir or f"runs/{recipe.name}")
        with contextlib.nullcontext() if hosts.is_main() else console.quiet():
            run = module.start(
                recipe.config,
                workdir=workdir,
                init=args.init,
                fields=recipe.fields,
                recipe=recipe.name,
                **options,
            )
            with stop_signals(args.parser.prog) as reason:
                module.train_run(run, reason)

    hosts.run(connected)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the flag that `load_checkpoint` takes."""
    what = "of the computation; auto: bfloat16 where the device has it (the checkpoint's)"
    parser.add_argument("--dtype", choices=typing.get_args(Dtype), help=what)


def load_checkpoint(path: str, dtype: "Dtype | None" = None) -> "Bert":
    """Return the model of a checkpoint, whose compiled programs and freed memory are kept."""
    from bert_jax.bert import load

    set_up_jax()
    return load(path, dtype=dtype)


def set_up_jax() -> None:
    """Keep freed memory and compiled programs, for a command of one host that computes."""
    keep_host_memory()
    use_enough_threads()
    cache_compiled_programs()


def start_jax() -> int:
    """Start the devices, and return the number of hosts; UserError if there is no device."""
    import jax

    try:
        return jax.process_count()
    except Exception as error:  # of many types: of a platform that is not there, or of a driver
        platforms = os.environ.get("JAX_PLATFORMS")
        which = f", with JAX_PLATFORMS={platforms!r}" if platforms else ""
        remedy = "unset it, or name" if platforms else "let JAX_PLATFORMS name"
        raise UserError(
            f"JAX cannot start{which} ({first_line(error)}); {remedy} a platform that JAX is "
            "installed for, such as cpu"
        ) from error


def cache_compiled_programs() -> None:
    """Keep compiled programs in the user's cache, unless JAX has a folder for them."""
    import jax

    num_hosts = start_jax()
    # Several hosts must share the folder, so there the user has to name it.
    if getattr(jax.config, _CACHE) is None and num_hosts == 1:
        try:
            folder = paths.cache_folder()
            for own in (folder, folder := folder / "programs"):
                own.mkdir(mode=0o700, exist_ok=True)
                found = own.stat()
                if found.st_uid != os.getuid() or found.st_mode & 0o022:
                    what = "is not yours alone, so that others could put programs there"
                    console.show(f"cache      none: {own} {what}", console.Level.DETAILS)
                    return
        except (OSError, RuntimeError):  # a full or read-only disk, or no home
            return
        jax.config.update(_CACHE, str(folder))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def remove_damaged(message: str, _: type[Warning]) -> bool:
        match = _WARNING.match(message)
        folder = getattr(jax.config, _CACHE)
        if match and match[1] == "reading" and folder:  # an entry that JAX would not replace
            for path in Path(folder).glob(f"{match[2]}-*-cache"):
                with contextlib.suppress(OSError):
                    path.unlink()
        return bool(match)

    warnings.filterwarnings("always", _WARNING.pattern)  # not the first of its kind alone
    _handle_warnings(remove_damaged)


def _handle_warnings(handled: Callable[[str, type[Warning]], bool]) -> None:
    """Show only the warnings that a function does not handle."""
    show = warnings.showwarning

    def show_others(message: Any, category: type[Warning], *rest: Any, **named: Any) -> None:
        if not handled(str(message), category):
            show(message, category, *rest, **named)

    warnings.showwarning = show_others


def use_data_dir(folder: str | None) -> None:
    """Let TFDS prepare and read its datasets in a folder, unless it is None."""
    if folder is not None:
        os.environ["TFDS_DATA_DIR"] = os.path.expanduser(folder)


def use_enough_threads() -> None:
    """Give XLA more threads than it has fake devices, which else can wait for each other for ever.

    It reads NPROC when it starts; one that the user has set stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if match := re.search(r"--xla_force_host_platform_device_count=(\d+)", flags):
        os.environ.setdefault("NPROC", str(4 * int(match[1])))


def quiet_libraries() -> None:
    """Keep other libraries' messages away from a command's own."""
    # Orbax logs every file that it writes, and the traceback of each error that it raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # A failed read of a damaged checkpoint closes Orbax's event loop before other reads end.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    # Apache Beam logs each error of a worker, with which it ends, and misses a client of its own.
    logging.getLogger("apache_beam.runners").setLevel(logging.CRITICAL)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs each error of a request
    logging.getLogger().addFilter(lambda record: "apitools" not in record.getMessage())
    # A server that does not answer is named in a line of this program's own.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    show = sys.unraisablehook

    def show_others(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt) and _interrupts:
            # It came within a callback, which drops it: again, once the callback is over.
            timer = threading.Timer(0.05, os.kill, (os.getpid(), _interrupts.pop()))
            timer.daemon = True  # so that a command which ends meanwhile has ended
            timer.start()
        elif str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = show_others


def show_warnings_of_texts() -> None:
    """Print warnings of texts as those of a command."""

    def show_in_a_line(message: str, category: type[Warning]) -> bool:
        is_of_texts = issubclass(category, TextWarning)
        if is_of_texts:
            console.warn(message)
        return is_of_texts

    warnings.filterwarnings("always", category=TextWarning)
    warnings.filterwarnings("once", ".*unknown to the tokenizer", TextWarning)
    _handle_warnings(show_in_a_line)


def show_details() -> None:
    """Show other libraries' warnings, and where an error comes from."""
    global _shows_origin
    _shows_origin = True
    logging.getLogger("absl").setLevel(logging.WARNING)
    warnings.simplefilter("default")


# How often JAX has been asked whether to stop. Not the step: JAX counts the calls of a process.
_ASKED = itertools.count(1)


@contextlib.contextmanager
def stop_signals(name: str) -> Iterator[Callable[[], str]]:
    """Note signals; yield a function that returns the reason to save and stop, or "".

    A closed output is one too, as of a reader that has ended.
    """
    # Of several processes, JAX takes SIGTERM, and all agree on the step to stop after.
    import jax
    from jax.experimental import multihost_utils

    received: list[int] = []
    reasons: list[str] = []
    is_alone = jax.process_count() == 1

    def stop_for(what: str) -> None:
        reasons.append(what)
        if not is_alone and len(reasons) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def note(number: int, _: object) -> None:
        if _is_repeated_hangup(number, received):
            return
        received.append(number)
        if len(received) == 1:
            stop_for(signal.Signals(number).name)
        elif is_alone:
            _interrupts.append(number)
            end_process(name, KeyboardInterrupt())
        else:
            raise KeyboardInterrupt

    def reason() -> str:
        if is_alone:
            return reasons[0] if reasons else ""
        stops = multihost_utils.reached_preemption_sync_point(next(_ASKED))
        return "a signal to one of the hosts" if stops else ""

    console.when_closed(partial(stop_for, "a closed output"))
    numbers = [*_STOPPED_BY] if is_alone else [signal.SIGINT, signal.SIGHUP]
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield reason
    finally:
        console.when_closed(None)
        for number, handler in previous.items():
            signal.signal(number, handler)

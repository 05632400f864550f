"""Stop a run after a whole step: signals are noted, and training asks whether there was one."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.experimental import multihost_utils

# How often JAX has been asked whether to stop. Not the step: JAX counts the calls of a process.
_ASKED = itertools.count(1)


@contextlib.contextmanager
def signals_noted(
    numbers: Sequence[signal.Signals], again: Callable[[], object]
) -> Iterator[Callable[[], str]]:
    """Note signals; yield a function that returns the reason to save and stop, or "".

    A second signal calls `again`. Of several processes, JAX takes SIGTERM, and all agree on the
    step to stop after.
    """
    received: list[str] = []
    is_alone = jax.process_count() == 1

    def note(number: int, _: object) -> None:
        if received and is_alone:
            again()
        elif received:
            raise KeyboardInterrupt
        else:
            received.append(signal.Signals(number).name)
            if not is_alone:
                os.kill(os.getpid(), signal.SIGTERM)

    def reason() -> str:
        if is_alone:
            return "".join(received)
        stops = multihost_utils.reached_preemption_sync_point(next(_ASKED))
        return "SIGTERM or SIGINT on one of the hosts" if stops else ""

    numbers = numbers if is_alone else [signal.SIGINT]
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield reason
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupt_noted() -> Iterator[Callable[[], str]]:
    """Note Ctrl-C, or the stop of a notebook, as `signals_noted` does, in a run from Python.

    A second one is a KeyboardInterrupt at once. In another thread than the main one, beside other
    processes, or where the caller has a handler of its own, nothing is noted.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (is_main and is_default and jax.process_count() == 1):
        yield lambda: ""
        return
    with signals_noted([signal.SIGINT], _interrupt) as reason:
        yield reason


def _interrupt() -> None:
    raise KeyboardInterrupt

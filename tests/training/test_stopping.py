"""Signals are noted while a run trains, and the handlers from before are set again."""

import signal

import pytest

from bert_jax.runs import pretrain as pretraining
from bert_jax.training import stopping

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture(autouse=True)
def default_handlers():
    """Those of a script; pytest has its own for SIGINT."""
    before = [signal.signal(each, signal.default_int_handler) for each in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def test_a_second_signal_does_not_wait():
    calls = []
    with stopping.signals_noted(SIGNALS, lambda: calls.append("again")) as reason:
        assert reason() == ""
        signal.raise_signal(signal.SIGTERM)
        assert (reason(), calls) == ("SIGTERM", [])
        signal.raise_signal(signal.SIGINT)
        assert calls == ["again"]
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


def test_a_run_from_python_is_told_of_an_interrupt(tiny_config, tmp_path, monkeypatch):
    def train_run(run, stop):
        assert stop() == ""
        signal.raise_signal(signal.SIGINT)
        assert stop() == "SIGINT"  # of which a run saves and stops
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(pretraining, "train_run", train_run)
    with pytest.raises(KeyboardInterrupt):
        pretraining.pretrain(tiny_config, tmp_path, quiet=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_caller_stays():
    def own(*_):
        pass

    signal.signal(signal.SIGINT, own)
    with stopping.interrupt_noted() as reason:
        assert signal.getsignal(signal.SIGINT) is own
        assert reason() == ""

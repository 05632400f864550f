"""Batches by step, prepared ahead by Grain, each process reading its own rows alone."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from bert_jax.batches import Batch, packing
from bert_jax.batches.sequences import FullBlocks, SentencePairs
from bert_jax.config import DataConfig, Phase, TrainConfig, phases
from bert_jax.text.store import Corpus, TokenStore
from bert_jax.text.tokenizer import Tokenizer

# Of the held-out rows, which are the same whatever the run's own seed.
_EVAL_SEED = 0
PREFETCHED_BATCHES = 4


# Gives the rows of a batch of some size that a process is to read, each run as (first, end).
ProcessSlices = Callable[[int], Sequence[tuple[int, int]]]


def single_process(batch_size: int) -> Sequence[tuple[int, int]]:
    """Returns the rows of a process that is alone: all of them."""
    return [(0, batch_size)]


def make_sequences(
    store: TokenStore, tokenizer: Tokenizer, config: DataConfig, length: int, seed: int
) -> SentencePairs | FullBlocks:
    """Returns the rows of `config.pairs` over a store, with L = `length` and this seed."""
    if config.pairs == "none":
        return FullBlocks(store, tokenizer, length, seed)
    kind = packing.PackedPairs if config.packing else SentencePairs
    return kind(store, tokenizer, length, seed, config.pairs == "sop", config.short_fraction)


class TrainBatches:
    """The batch of every step of a run, by index: a pure function of (config, text, step).

    Args:
      corpus: the text.
      config: of the run.
      process_slices: which rows of a batch this process reads; theirs and no others are given.
    """

    def __init__(
        self, corpus: Corpus, config: TrainConfig, process_slices: ProcessSlices = single_process
    ):
        self._steps, self._process_slices = config.steps, process_slices
        self._phases = []
        for number, (first_step, phase) in enumerate(phases(config)):
            # Phases draw from seeds of their own, so that none repeats another's rows.
            seed = config.seed * 1000 + number
            rows = make_sequences(
                corpus.train, corpus.tokenizer, config.data, phase.max_length, seed
            )
            self._phases.append((first_step, phase.batch_size, rows))

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Batch:
        first_step, size, rows = next(p for p in reversed(self._phases) if p[0] <= index)
        return _batch(rows, index - first_step, size, self._process_slices)

    def epochs(self) -> float:
        """Returns how many times the run sees the text."""
        ends = [first for first, _, _ in self._phases[1:]] + [self._steps]
        return sum(
            (end - first) * size / rows.sequences_per_epoch
            for end, (first, size, rows) in zip(ends, self._phases, strict=True)
        )

    def padding(self) -> dict[int, tuple[float, float]]:
        """Returns the share of padding by length, without packing and with it; none of blocks."""
        pairs = [rows for _, _, rows in self._phases if isinstance(rows, SentencePairs)]
        return {rows.length: packing.padding(rows) for rows in pairs}

    def starting_at(self, step: int) -> Iterator[Batch]:
        """Yields the batches from `step` on."""
        return prefetched(self, step)


def prefetched(batches: Any, step: int) -> Iterator[Any]:
    """Yields what a sequence has from `step` on; a thread prepares the next ones meanwhile."""
    dataset = grain.MapDataset.source(batches)[step:]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED_BATCHES)
    return iter(dataset.to_iter_dataset(options))


def take_slices(batch: Batch, process_slices: ProcessSlices) -> Batch:
    """Returns the rows of a whole batch that this process reads, in their order."""
    size = len(batch["input_ids"])
    runs = [slice(low, high) for low, high in process_slices(size)]
    return _joined([{name: value[run] for name, value in batch.items()} for run in runs])


def _batch(rows: Any, index: int, size: int, process_slices: ProcessSlices) -> Batch:
    """Returns the rows of a batch that this process reads, in their order."""
    return _joined([rows.batch(index, size, low, high) for low, high in process_slices(size)])


def _joined(runs: Sequence[Batch]) -> Batch:
    return {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}


def eval_batches(
    corpus: Corpus,
    config: TrainConfig,
    phase: Phase,
    process_slices: ProcessSlices = single_process,
) -> Iterator[Batch]:
    """Yields held-out rows, each once; the last batch is filled up with rows of padding.

    They are not packed, so that the held-out losses of runs with and without packing are those of
    the same rows and masks.

    `row` is the place among all the held-out rows, so that every evaluation draws the same masks.

    Args:
      corpus: the text.
      config: of the run.
      phase: the length of the rows, and how many a batch has.
      process_slices: which of them this process reads.
    """
    batch_size = phase.batch_size
    data = dataclasses.replace(config.data, packing=False)
    rows = make_sequences(corpus.eval, corpus.tokenizer, data, phase.max_length, _EVAL_SEED)
    total = min(rows.sequences_per_epoch, config.eval_rows)
    for index in range(-(-total // batch_size)):
        batch = dict(_batch(rows, index, batch_size, process_slices))
        batch["index"] = batch["index"] + np.int32(index * batch_size)
        surplus = batch["index"] >= total
        batch["attention_mask"] = np.where(surplus[:, None], 0, batch["attention_mask"])
        yield batch

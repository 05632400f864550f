"""Batches by step, prepared ahead by Grain, each process reading its own rows alone."""

from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np

from bert_jax.config import Phase, TrainConfig, phases
from bert_jax.data.corpus import Corpus
from bert_jax.data.pretraining import Batch, make_rows

# Of the held-out rows, which are the same whatever the run's own seed.
_EVAL_SEED = 0
_PREFETCHED_BATCHES = 4


def _own_rows(batch_size: int) -> tuple[int, int]:
    """Returns which rows of a batch belong to the devices of this process."""
    process, count = jax.process_index(), jax.process_count()
    return batch_size * process // count, batch_size * (process + 1) // count


class TrainBatches:
    """The batch of every step of a run, by index: a pure function of (config, text, step)."""

    def __init__(self, corpus: Corpus, config: TrainConfig):
        self._steps = config.steps
        self._phases = []
        for number, (first_step, phase) in enumerate(phases(config)):
            # Phases draw from seeds of their own, so that none repeats another's rows.
            seed = config.seed * 1000 + number
            rows = make_rows(corpus.train, corpus.tokenizer, config.data, phase.max_length, seed)
            self._phases.append((first_step, phase.batch_size, rows))

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Batch:
        first_step, size, rows = next(p for p in reversed(self._phases) if p[0] <= index)
        return rows.batch(index - first_step, size, *_own_rows(size))

    def epochs(self) -> float:
        """Returns how many times the run sees the text."""
        ends = [first for first, _, _ in self._phases[1:]] + [self._steps]
        return sum(
            (end - first) * size / rows.rows_per_epoch
            for end, (first, size, rows) in zip(ends, self._phases, strict=True)
        )

    def starting_at(self, step: int) -> Iterator[Batch]:
        """Yields the batches from `step` on."""
        return prefetched(self, step)


def prefetched(batches: Any, step: int) -> Iterator[Any]:
    """Yields what a sequence has from `step` on; a thread prepares the next ones meanwhile."""
    dataset = grain.MapDataset.source(batches)[step:]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCHED_BATCHES)
    return iter(dataset.to_iter_dataset(options))


def eval_batches(corpus: Corpus, config: TrainConfig, phase: Phase) -> Iterator[Batch]:
    """Yields held-out rows, each once; the last batch is filled up with rows of padding.

    `row` is the place among all the held-out rows, so that every evaluation draws the same masks.
    """
    batch_size = phase.batch_size
    rows = make_rows(corpus.eval, corpus.tokenizer, config.data, phase.max_length, _EVAL_SEED)
    low, high = _own_rows(batch_size)
    total = min(rows.rows_per_epoch, config.eval_rows)
    for index in range(-(-total // batch_size)):
        batch = dict(rows.batch(index, batch_size, low, high))
        batch["row"] = batch["row"] + np.int32(index * batch_size)
        surplus = batch["row"] >= total
        batch["attention_mask"] = np.where(surplus[:, None], 0, batch["attention_mask"])
        yield batch

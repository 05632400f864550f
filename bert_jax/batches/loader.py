"""Batches by step, prefetched by Grain; each process reads its own sequences only."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bert_jax import console
from bert_jax.batches import Batch, packing
from bert_jax.batches.full_blocks import FullBlocks
from bert_jax.batches.mixed_sequences import MixedSequences, part_seeds
from bert_jax.batches.packing import PackedPairs
from bert_jax.batches.sentence_pairs import SentencePairs
from bert_jax.batches.shuffle import FORK, keyed_generator
from bert_jax.config import DataConfig
from bert_jax.config.schedule import Stage
from bert_jax.text.store import Corpus, TokenStore
from bert_jax.text.tokenizer import Tokenizer

_EVAL_SEED = 0  # the same held-out sequences for every run, whatever its own seed

# Returns the indices that a process reads of a global batch of some size; np.arange for all of it.
ProcessIndices = Callable[[int], np.ndarray]


def make_sequences(
    store: TokenStore, tokenizer: Tokenizer, config: DataConfig, length: int, seed: int
) -> SentencePairs | FullBlocks:
    """Return the sequences of `length` tokens that `config.pairs` asks for."""
    if config.pairs == "none":
        return FullBlocks(store, tokenizer, length, seed)
    kind = PackedPairs if config.packing else SentencePairs
    return kind(store, tokenizer, length, seed, config.pairs == "sop", config.short_fraction)


def has_same_sequences(one: DataConfig, other: DataConfig) -> bool:
    """Return whether a text has the same sequences of a length by the settings of two runs."""
    if one.pairs == other.pairs == "none":
        return True
    first, second = ((x.pairs, x.packing, x.short_fraction) for x in (one, other))
    return first == second


class Earlier(NamedTuple):
    """Sequences of a stage that were read before a run began."""

    stage: int  # the number of the first stage of this length, by which the text is shuffled
    max_length: int
    sequences: int


@dataclasses.dataclass(frozen=True)
class ReadBefore:
    """What was read of its text before a run began: by the runs that it forks, else nothing.

    Attributes:
      counted_from: the step that the run began with, from which it counts its own sequences.
      earlier: the sequences that were read by then.
      shuffled_anew: the step at which a run was forked to another text, or to other sequences of
        it; 0 for none. It is part of the shuffle's key, so that documents which both texts have
        come in another order.
    """

    counted_from: int = 0
    earlier: tuple[Earlier, ...] = ()
    shuffled_anew: int = 0

    def until(self, step: int, stages: Sequence[Stage]) -> "ReadBefore":
        """Return what has been read after some steps of a run, for one that forks it there."""
        counts = self.counts(step, stages).items()
        earlier = tuple(Earlier(*of, count) for of, count in counts)
        return ReadBefore(step, earlier, self.shuffled_anew)

    def counts(self, step: int, stages: Sequence[Stage]) -> dict[tuple[int, int], int]:
        """Return the sequences read by a step of a run, by `_shuffle_of` their stage."""
        counts = {(stage, length): count for stage, length, count in self.earlier}
        for stage in stages:
            steps = min(step, stage.end) - max(stage.first_step, self.counted_from)
            if steps > 0:
                of = _shuffle_of(stage.max_length, stages)
                counts[of] = counts.get(of, 0) + steps * stage.batch_size
        return counts


def _shuffle_of(length: int, stages: Sequence[Stage]) -> tuple[int, int]:
    """Return the number of the first stage of this length, and the length.

    All stages of the length read the text in one order, and each reads on from the one before.
    """
    return [stage.max_length for stage in stages].index(length), length


def has_same_order(one: Sequence[Stage], other: Sequence[Stage]) -> bool:
    """Return whether the sequences of each length that two runs share come in one order."""
    lengths = {stage.max_length for stage in one} & {stage.max_length for stage in other}
    return all(_shuffle_of(length, one) == _shuffle_of(length, other) for length in lengths)


NOTHING_READ = ReadBefore()


class TrainBatches:
    """The batch of every step of a run, by index: a pure function of (config, text, step)."""

    def __init__(
        self,
        corpus: Corpus,
        stages: Sequence[Stage],
        data: DataConfig,
        seed: int,
        process_indices: ProcessIndices = np.arange,
        read_before: ReadBefore = NOTHING_READ,
    ):
        """Batches of another size than those of `read_before` continue where these ended."""
        self._stages, self._read_before = stages, read_before
        self._process_indices, self._mixed = process_indices, corpus.mixed
        lengths = dict.fromkeys(stage.max_length for stage in stages)
        self._shuffles = [_shuffle_of(length, stages) for length in lengths]
        ended = [(stage, length) for stage, length, _ in read_before.earlier]  # some of them
        make = partial(_mixed_sequences, corpus, data, (seed, read_before.shuffled_anew))
        self._sequences = {of: make(*of) for of in dict.fromkeys([*self._shuffles, *ended])}

    def __len__(self) -> int:
        return self._stages[-1].end

    def __getitem__(self, step: int) -> Batch:
        stage = next(stage for stage in reversed(self._stages) if stage.first_step <= step)
        of = _shuffle_of(stage.max_length, self._stages)
        sequences, size = self._sequences[of], stage.batch_size
        # The number of a batch counts the steps of earlier runs, whose batches may have differed,
        # and of earlier stages.
        number = step - self._stages[of[0]].first_step
        skipped = self._read_before.counts(step, self._stages).get(of, 0) - number * size
        batch = sequences.batch(number, size, self._process_indices(size), skipped)
        if sequences.is_full:
            return {name: value for name, value in batch.items() if name != "attention_mask"}
        return batch

    def progress(self, step: int) -> dict[str, float]:
        """Return the passes over the text in the first steps, and their sequences and tokens."""
        seen = list(self._seen(step))
        return {
            "epoch": sum(count / kind.sequences_per_epoch for count, kind in seen),
            "sequences": sum(count for count, _ in seen),
            "tokens": sum(count * kind.parts[0].length for count, kind in seen),
            **{f"epoch/{part.name}": epochs for part, _, epochs in self.progress_of_parts(step)},
        }

    def progress_of_parts(self, step: int) -> list[tuple[Corpus, int, float]]:
        """Return the sequences and the epochs of each text of a mixture in the first steps."""
        result = []
        for i, part in enumerate(self._mixed):
            seen = [(m.counts(n)[i], m.parts[i].sequences_per_epoch) for n, m in self._seen(step)]
            epochs = sum(count / per_epoch for count, per_epoch in seen)
            result.append((part, sum(count for count, _ in seen), epochs))
        return result

    def _seen(self, step: int) -> Iterator[tuple[int, MixedSequences]]:
        """Yield the number of sequences in the first steps that are counted, by their shuffle."""
        for of, count in self._read_before.counts(step, self._stages).items():
            yield count, self._sequences[of]

    def epochs(self) -> float:
        """Return the number of passes over the text in the run."""
        return self.progress(len(self))["epoch"]

    def statistics(self) -> dict[int, packing.PairStatistics]:
        """Return the statistics of the pairs by length; none of full blocks."""
        result = {}
        for of in self._shuffles:
            sequences = self._sequences[of]
            pairs = [kind for kind in sequences.parts if isinstance(kind, SentencePairs)]
            if pairs:
                means = np.average(list(map(packing.statistics, pairs)), 0, sequences.weights)
                result[pairs[0].length] = packing.PairStatistics._make(means.tolist())
        return result

    def block_padding(self) -> dict[int, float]:
        """Return the share of padding in full blocks, by the lengths that have any."""
        result = {}
        for of in self._shuffles:
            sequences = self._sequences[of]
            blocks = [kind for kind in sequences.parts if isinstance(kind, FullBlocks)]
            if blocks and not sequences.is_full:
                shares = [kind.padding for kind in blocks]
                result[blocks[0].length] = float(np.average(shares, weights=sequences.weights))
        return result


def _mixed_sequences(
    corpus: Corpus, data: DataConfig, seeds: tuple[int, int], number: int, length: int
) -> MixedSequences:
    """Return the sequences of a stage, by its number: no stage repeats those of another.

    `seeds` are that of the run, and the step by which a fork shuffles another text anew.
    """
    (seed, anew), weights = seeds, [part.weight for part in corpus.parts]
    stage_seed = seed * 1000 + number
    if anew:
        stage_seed = int(keyed_generator(stage_seed, FORK, anew).integers(1 << 62))
    parts = [
        make_sequences(part.train, part.tokenizer, data, length, part_seed)
        for part, part_seed in zip(corpus.parts, part_seeds(stage_seed, len(weights)), strict=True)
    ]
    return MixedSequences(parts, weights, stage_seed)


def prefetch(batches: Any, step: int) -> Iterator[Any]:
    """Yield the items of a sequence from `step` on, while a thread prepares the next ones."""
    with console.logging_kept():  # Grain imports Orbax, which logs
        import grain  # half a second, which `plan` does without

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(grain.MapDataset.source(batches)[step:].to_iter_dataset(options))


def take_indices(batch: Batch, process_indices: ProcessIndices) -> Batch:
    """Return the sequences of a global batch that a process reads."""
    return {name: value[process_indices(len(value))] for name, value in batch.items()}


class EvalBatches:
    """The batches of held-out sequences, each once and not packed; padding completes the last one.

    There are `num_sequences`, whatever a process reads of them: at most `most`, and at least one. A
    batch, on which its random pairs depend, comes in microbatches.
    """

    def __init__(
        self,
        corpus: Corpus,
        stage: Stage,
        data: DataConfig,
        most: int,
        process_indices: ProcessIndices = np.arange,
        *,
        microbatches: int = 1,
    ):
        data, length = dataclasses.replace(data, packing=False), stage.max_length
        self._sequences = make_sequences(corpus.eval, corpus.tokenizer, data, length, _EVAL_SEED)
        self._size, self._microbatches = stage.batch_size, microbatches
        self._process_indices = process_indices
        self.num_sequences = min(self._sequences.sequences_per_epoch, max(1, most))

    def __iter__(self) -> Iterator[Batch]:
        size, count = self._size, -(-self.num_sequences // self._size)
        for number in range(count):
            console.advance(number, count)
            batch = dict(self._sequences.batch(number, size, self._process_indices(size)))
            batch["index"] = batch["index"] + np.int32(number * size)
            is_padding = batch["index"] >= self.num_sequences
            batch["attention_mask"] = np.where(is_padding[:, None], 0, batch["attention_mask"])
            for part in range(self._microbatches):
                yield {name: value[part :: self._microbatches] for name, value in batch.items()}

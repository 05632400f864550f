"""The train step of a phase as train.py runs it, without text: to compile it, or to time it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.batches.packing import NO_PAIR, max_pairs
from bert_jax.config import Phase, TrainConfig
from bert_jax.distributed.fsdp import BATCH_AXES
from bert_jax.distributed.mesh import Layout, make_layout
from bert_jax.models.heads import BertForPreTraining
from bert_jax.training.masking import Masking
from bert_jax.training.objectives import Pretraining
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.step import init_state, make_train_step

_SPECIAL = (0, 1, 2, 3)  # of a tokenizer that is not there: padding, [CLS], [SEP] and [MASK]
_PAIRS = 2  # of a packed row, about as many as rows of 512 have of Wikipedia


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run of a phase begins with.

    Attributes:
      new_state: makes a state from a key.
      like: the abstract state, with the sharding of every array.
      layout: where everything lies.
      step: `train_step(state, batch, collectives)`.
    """

    new_state: Callable[[jax.Array], Any]
    like: Any
    layout: Layout
    step: Callable[..., Any]


def set_up(config: TrainConfig, phase: Phase, mesh: Mesh, masking: Masking | None = None) -> Setup:
    """Returns the train step of a phase, for rows of any pieces.

    Args:
      config: of the run.
      phase: its length and rows.
      mesh: the devices.
      masking: of a tokenizer, for text; else of none, for the rows made here.
    """
    model = BertForPreTraining(config.model, next_sentence=config.data.pairs != "none")
    optimizer = make_optimizer(config.optimizer, config.steps)

    def new_state(key: jax.Array) -> Any:
        return init_state(model.init_params(key), optimizer, config.seed)

    like, layout = make_layout(new_state, mesh, config.parallel)
    pieces, most = config.model.vocab_size, phase.max_predictions
    masking = masking or Masking(
        counts=np.minimum(np.arange(phase.max_length + 1), most).astype(np.int32),
        max_predictions=most,
        vocab_size=pieces,
        special_ids=_SPECIAL,
        mask_id=_SPECIAL[-1],
        is_continuation=np.zeros(pieces, bool) if config.data.whole_word_masking else None,
    )
    step = make_train_step(Pretraining(model, masking), optimizer, config.optimizer.microbatches)
    return Setup(new_state, like, layout, step)


def rows(config: TrainConfig, phase: Phase, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a batch of random pieces, without padding, as the loader gives one."""
    random = np.random.default_rng(seed)
    shape = (phase.batch_size, phase.max_length)
    batch = {
        "input_ids": random.integers(len(_SPECIAL), config.model.vocab_size, shape),
        "token_type_ids": np.zeros(shape, np.int32),
        "attention_mask": np.ones(shape, np.int32),
        "index": np.arange(phase.batch_size),
    }
    if config.data.pairs != "none":
        batch["token_type_ids"][:, phase.max_length // 2 :] = 1
        batch["next_sentence_label"] = random.integers(0, 2, phase.batch_size)
    if config.data.packing:
        batch |= _packed(shape, random)
    return {name: value.astype(np.int32) for name, value in batch.items()}


def abstract_rows(config: TrainConfig, phase: Phase, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of what `rows` gives, and where they lie; no batch is too large for it."""
    one = rows(config, dataclasses.replace(phase, batch_size=1))
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    return {
        name: jax.ShapeDtypeStruct((phase.batch_size, *x.shape[1:]), x.dtype, sharding=sharding)
        for name, x in one.items()
    }


def _packed(shape: tuple[int, int], random: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns what is other in packed rows, [B, L]; their pairs are of one size."""
    rows, length = shape
    most = max_pairs(length)
    number = min(_PAIRS, most)
    size = -(-length // number)
    place = np.broadcast_to(np.arange(length), shape)
    starts = np.zeros((rows, most), np.int32)
    starts[:, :number] = np.arange(number) * size
    label = np.full_like(starts, NO_PAIR)
    label[:, :number] = random.integers(0, 2, (rows, number))
    return {
        "token_type_ids": place % size >= size // 2,
        "attention_mask": 1 + place // size,
        "position_ids": place % size,
        "segment_starts": starts,
        "next_sentence_label": label,
    }

"""The train step of a pretraining stage on random sequences, to be compiled or timed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.batches.packing import NO_PAIR, max_pairs
from bert_jax.config import TrainConfig
from bert_jax.config.schedule import Stage, make_schedule
from bert_jax.distributed import mesh as mesh_lib
from bert_jax.distributed.devices import resolve_dtype
from bert_jax.distributed.fsdp import BATCH_AXES
from bert_jax.errors import refuse
from bert_jax.objectives import make_objective
from bert_jax.objectives.masking import Masking
from bert_jax.text import mixture
from bert_jax.training.setup import Setup, set_up
from bert_jax.training.step import make_train_step

_SPECIAL_IDS = (0, 1, 2, 3)  # [PAD], [CLS], [SEP] and [MASK]
_PAIRS = 2  # in a packed sequence; Wikipedia has about as many in one of 512 tokens


def resolve(config: TrainConfig, device: Any) -> TrainConfig:
    """Return the config with the dtype "auto" and the vocabulary size 0 resolved."""
    model = resolve_dtype(config.model, device)
    if not model.vocab_size:
        parts = mixture.find(config.data.source)
        size = mixture.resolve_vocab_size(config, parts, None)
        model = dataclasses.replace(model, vocab_size=size)
    refuse(
        model.vocab_size <= len(_SPECIAL_IDS),
        f"model.vocab_size is {model.vocab_size}, all of them special tokens",
        fix="give more",
    )
    return dataclasses.replace(config, model=model)


def checked_setup(config: TrainConfig, stages: Sequence[Stage], devices: Sequence[Any]) -> Setup:
    """Return what a resolved config trains, or refuse stages that do not divide over devices."""
    mesh, objective = mesh_lib.make_mesh(config.parallel, devices), make_objective(config)
    objective.check_mesh(mesh, stages)
    return set_up(objective.model, config, make_schedule(config).rate, mesh)


def train_step(setup: Setup, config: TrainConfig, stage: Stage) -> Any:
    """Return the train step of a stage for random sequences, jitted; it donates its state."""
    vocab_size, predictions = config.model.vocab_size, stage.max_predictions
    counts = np.minimum(np.arange(stage.max_length + 1), predictions).astype(np.int32)
    continues_word = np.zeros(vocab_size, bool) if config.data.whole_word_masking else None
    mask_id = _SPECIAL_IDS[-1]
    masking = Masking(counts, predictions, vocab_size, _SPECIAL_IDS, mask_id, continues_word)
    objective = dataclasses.replace(make_objective(config), masking=masking)
    step = make_train_step(objective, setup.optimizer, config.optimizer.microbatches)
    return mesh_lib.jit_step(step, setup.layout, ("state", "metrics"))


def random_batch(config: TrainConfig, stage: Stage) -> dict[str, np.ndarray]:
    """Return a batch of random tokens without padding, with the arrays of the loader's batches."""
    random = np.random.default_rng(0)
    length, has_pairs = stage.max_length, config.data.pairs != "none"
    pairs = min(_PAIRS, max_pairs(length)) if config.data.packing else 1
    size = -(-length // pairs)  # of each pair
    position = np.broadcast_to(np.arange(length), (stage.batch_size, length))
    batch = {
        "input_ids": random.integers(len(_SPECIAL_IDS), config.model.vocab_size, position.shape),
        "token_type_ids": has_pairs & (position % size >= size // 2),
        "index": np.arange(stage.batch_size),
    }
    if has_pairs:
        batch["attention_mask"] = 1 + position // size
    labels = random.integers(0, 2, (stage.batch_size, pairs))
    if config.data.packing:
        missing = ((0, 0), (0, max_pairs(length) - pairs))
        starts = np.broadcast_to(np.arange(pairs) * size, labels.shape)
        batch["position_ids"] = position % size
        batch["segment_starts"] = np.pad(starts, missing)
        batch["next_sentence_label"] = np.pad(labels, missing, constant_values=NO_PAIR)
    elif has_pairs:
        batch["next_sentence_label"] = labels[:, 0]
    return {name: value.astype(np.int32) for name, value in batch.items()}


def abstract_batch(config: TrainConfig, stage: Stage, mesh: Mesh) -> dict[str, Any]:
    """Return the shapes and shardings of `random_batch`, without making it."""
    example = random_batch(config, dataclasses.replace(stage, batch_size=1))
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    return {
        name: jax.ShapeDtypeStruct((stage.batch_size, *x.shape[1:]), x.dtype, sharding=sharding)
        for name, x in example.items()
    }

"""Small models and batches for the tests."""

import contextlib
import dataclasses
import gzip
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from bert_jax import Bert, load
from bert_jax.batches.loader import TrainBatches
from bert_jax.config import ModelConfig, ParallelConfig, TrainConfig
from bert_jax.config.schedule import make_schedule
from bert_jax.config.settings import as_variant
from bert_jax.distributed.mesh import Layout, compile_step, make_mesh
from bert_jax.errors import UserError
from bert_jax.objectives import OBJECTIVES, objective_name, pretraining_model
from bert_jax.objectives.base import Pretraining
from bert_jax.objectives.masking import Masking
from bert_jax.tasks import make_task, task_class
from bert_jax.tasks.foreign import UnknownColumns
from bert_jax.text.store import Corpus
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.objective import Objective
from bert_jax.training.setup import make_setup
from bert_jax.training.step import TrainState, make_train_step

LENGTH, PREDICTIONS, VOCAB = 32, 6, 100
SPECIAL = (0, 2, 3, 4)


def model_config(model_type: str = "bert", **changes) -> ModelConfig:
    """Two layers, 16 wide."""
    small = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
    )
    return dataclasses.replace(as_variant(small, model_type), **changes)


def batch(rows: int, seed: int = 0, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Rows `[CLS] A [SEP] B [SEP]` of random pieces, of very different lengths."""
    generator = np.random.default_rng(seed)
    ids = np.zeros((rows, length), np.int32)
    types, mask = np.zeros_like(ids), np.zeros_like(ids)
    for row in range(rows):
        size = generator.integers(5, length + 1)
        ids[row, :size] = generator.integers(5, VOCAB, size)
        split = generator.integers(2, size - 2)
        ids[row, 0], ids[row, split], ids[row, size - 1] = 2, 3, 3
        types[row, split + 1 : size] = 1
        mask[row, :size] = 1
    return {
        "input_ids": ids,
        "token_type_ids": types,
        "attention_mask": mask,
        "next_sentence_label": generator.integers(0, 2, rows).astype(np.int32),
        "index": np.arange(rows, dtype=np.int32),
    }


def assert_same_arrays(actual: Mapping, expected: Mapping) -> None:
    """Check that two batches have the same arrays under the same names."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def check_gradients(actual: Mapping, expected: Mapping, *, zero: str = "self.key.bias") -> float:
    """Compare gradients by their names, each within 1e-5 of its norm; return the worst error.

    Those that end with `zero` are zero but for rounding: softmax does not see a key's bias.
    A reference's table of positions may have embeddings more, of padding, at its start.
    """
    norm, worst = np.sqrt(sum(float((value**2).sum()) for value in expected.values())), 0.0
    for name, value in actual.items():
        gradient = expected[name][-len(value) :]
        assert value.shape == gradient.shape
        if zero and name.endswith(zero):
            assert np.abs(value).max() < 1e-5 * norm
        else:
            error = np.linalg.norm(value - gradient) / np.linalg.norm(gradient)
            assert error < 1e-5, (name, error)
            worst = max(worst, float(error))
    return worst


def write_file(path: Path, content: str | bytes) -> str:
    """Write a file, compressed if its name ends with .gz or .xz, and return its name."""
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(content))
    return str(path)


def flip_bit(path: Path) -> None:
    """Damage a file that keeps its size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextlib.contextmanager
def refused(*key_words: str) -> Iterator[None]:
    """Check that a block ends with a `UserError` that has the key words."""
    with pytest.raises(UserError) as caught:
        yield
    for words in key_words:
        assert words in str(caught.value)


def refuses_to_load(path: Path | str, *key_words: str) -> str:
    """Check that loading fails with one line that names the path and has the key words."""
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    for words in (str(path), *key_words):
        assert words in message
    return message


def masking(continues: np.ndarray | None = None, length: int = LENGTH) -> Masking:
    """Google's counts for rows of `length` tokens."""
    counts = [min(PREDICTIONS, max(1, round(0.15 * n))) for n in range(length + 1)]
    return Masking(np.array(counts, np.int32), PREDICTIONS, VOCAB, SPECIAL, 4, continues)


def objective(length: int = LENGTH, **changes) -> Pretraining:
    """The pretraining objective of a small model."""
    config = TrainConfig(model=model_config(**changes))
    kind = OBJECTIVES[objective_name(config)]
    return kind(kind.make_model(config), config, masking(length=length))


def random_arrays(init: Callable, *inputs, seed: int = 0):
    """Parameters of `init`, large enough for every gradient to be well above rounding."""
    shapes = jax.eval_shape(init, jax.random.key(0), *inputs)
    generator = np.random.default_rng(seed)

    def value(path, leaf):
        noise = generator.normal(size=leaf.shape, scale=0.3)
        return jnp.asarray(noise + (path[-1].key == "scale"), leaf.dtype)

    return jax.tree.map_with_path(value, nn.unbox(shapes))


def params(objective: Pretraining, seed: int = 0):
    return random_arrays(objective.model.init_params, seed=seed)


def random_bert(config: ModelConfig, tokenizer: Tokenizer, *, pairs: bool = True) -> Bert:
    """Return a model of random parameters, with the heads that it is pretrained with."""
    model = pretraining_model(config, pairs=pairs)
    return Bert(config, random_arrays(model.init_params), tokenizer, model)


def untrained(bert: Bert, kind: str, labels: Sequence[str] = ()) -> Bert:
    """Return a model with the head of a task, of random parameters."""
    task, data = task_class(kind).settings(kind=kind, labels=labels), UnknownColumns(max_length=32)
    if kind == "question_answering":
        task = dataclasses.replace(task, max_question=8)
    model = make_task(task).model(bert.config, "")
    params = random_arrays(model.init_params)
    return Bert(bert.config, params, bert.tokenizer, model, task=task, data=data)


def train(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    batches: Iterable[Mapping],
    config: ParallelConfig | None = None,
    devices: Sequence[jax.Device] | None = None,
    microbatches: int = 1,
    params=None,
) -> tuple[TrainState, list[dict], Layout]:
    """Train on one device or some; return the state, the metrics of each step, and the layout."""
    config = config or ParallelConfig()
    mesh = make_mesh(config, jax.devices()[:1] if devices is None else devices)
    setup = make_setup(objective.model, optimizer, 3, mesh, config)
    state = setup.new_state()
    if params is not None:
        state = state.replace(params=jax.device_put(params, setup.layout.params))
    train_step = make_train_step(objective, optimizer, microbatches)
    step = compile_step(train_step, config.mode, setup.layout, ("state", "metrics"))
    metrics = []
    for batch in batches:
        state, measured = step(state, batch)
        metrics.append(jax.device_get(measured))
    return jax.device_get(state), metrics, setup.layout


class FakeTokenizer:
    """Only the special pieces."""

    pad_id, unk_id, cls_id, sep_id, mask_id = 0, 1, 2, 3, 4
    special_ids = (0, 2, 3, 4)


def train_batches(corpus: Corpus, config: TrainConfig, *indices) -> TrainBatches:
    """The training batches of a config; those at some indices where a host has a part."""
    return TrainBatches(corpus, make_schedule(config).stages, config.data, config.seed, *indices)

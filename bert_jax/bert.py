"""A checkpoint, loaded to be used: `bert_jax.load`."""

import dataclasses
import functools
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import traverse_util

from bert_jax.config import (
    DataFiles,
    FinetuneConfig,
    ModelConfig,
    TaskConfig,
    TrainConfig,
    validate_model,
)
from bert_jax.convert import google, huggingface, names
from bert_jax.embeddings import Encoder
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForPreTraining, TaskModel, task_model
from bert_jax.settings import from_dict
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint

_ROW = 384  # pieces of a row of a foreign model's task, at most: that of `run_squad.py`


@dataclasses.dataclass(frozen=True)
class Guess:
    """A token for a masked position.

    Attributes:
      token: as it stands in the vocabulary.
      probability: that the model gives it.
      text: the whole text with the token filled in.
    """

    token: str
    probability: float
    text: str


@dataclasses.dataclass(frozen=True)
class Bert:
    """A pretrained or a fine-tuned model with its tokenizer.

    Attributes:
      config: of the model.
      params: of `model`, float32.
      tokenizer: that it was trained with.
      model: encoder and pretraining heads, of which `params` may lack some; or the task's head.
      unused: names of tensors of a foreign checkpoint that the model has no place for.
      task: what the model was fine-tuned for; None for a pretrained one.
      data: how its examples were read: the columns, and how long a row may be.
    """

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer
    model: BertForPreTraining | TaskModel
    unused: Sequence[str] = ()
    task: TaskConfig | None = None
    data: DataFiles = dataclasses.field(default_factory=DataFiles)

    def encode(
        self, texts: str | Sequence[str], layer: int | Sequence[int] = -1, pooling: str = "mean"
    ) -> Any:
        """Returns embeddings of texts; a text alone is taken for a list of one.

        Args:
          texts: of any length; what exceeds the model's positions is left out, with a warning.
          layer: whose output is taken: 0 for the embeddings, i for layer i, -1 for the last; or
            several, whose outputs are added up.
          pooling: "mean", "max" or "cls" for a vector of each text; "tokens" or "words" for one of
            each piece or word of it, as `features.Encoder` says.

        Returns:
          [N, D] float32 for N texts; or a list of N arrays, [n, D], by piece or word.

        Raises:
          UserError: there is no such layer or pooling.
        """
        texts = [texts] if isinstance(texts, str) else texts
        layers = (layer,) if isinstance(layer, int) else tuple(layer)
        found = list(self.encoder(layers, pooling)(texts))
        cut = sum(embedded.is_truncated for embedded in found)
        if cut:
            warnings.warn(
                f"{cut} of {len(texts)} texts are longer than the model's "
                f"{self.config.max_position_embeddings} positions; their ends were left out",
                stacklevel=2,
            )
        vectors = [embedded.vectors for embedded in found]
        if pooling in ("tokens", "words"):
            return vectors
        return np.array(vectors, np.float32).reshape(len(texts), self.config.hidden_size)

    def encoder(self, layers: tuple[int, ...], pooling: str) -> Encoder:
        """Returns what `encode` uses: the same one, with what it has compiled, each time."""
        if (layers, pooling) not in self._encoders:
            self._encoders[layers, pooling] = Encoder(
                self.config, self.params["bert"], self.tokenizer, layers, pooling
            )
        return self._encoders[layers, pooling]

    @functools.cached_property
    def _encoders(self) -> dict[tuple[tuple[int, ...], str], Encoder]:
        return {}

    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Guess]]:
        """Returns the `top_k` most probable pieces for each "[MASK]" of a text, best first.

        Raises:
          UserError: the text has no "[MASK]", or is longer than the model's positions.
        """
        ids = self.tokenizer.encode_with_masks(text)
        if self.tokenizer.mask_id not in ids:
            raise UserError(
                f"the text has no [MASK]: {text[:60]!r}; put one where a piece is wanted"
            )
        return self.fill_masked_pieces(ids, top_k)

    def fill_masked_pieces(self, ids: Sequence[int], top_k: int = 5) -> list[list[Guess]]:
        """Does what `fill_mask` does, for the pieces of a text, without [CLS] and [SEP].

        Raises:
          UserError: the pieces are more than the model's positions, or it has no masked LM head.
        """
        if "mlm_head" not in self.params:
            raise UserError(
                "the checkpoint has no masked LM head; take one that was pretrained and not "
                "fine-tuned, or train.py --init to train a head for it"
            )
        if top_k < 1:
            raise UserError(f"top_k is {top_k}; it must be at least 1")
        tokenizer = self.tokenizer
        row = [tokenizer.cls_id, *ids, tokenizer.sep_id]
        if len(row) > self.config.max_position_embeddings:
            raise UserError(
                f"the text has {len(row)} pieces and the model only "
                f"{self.config.max_position_embeddings} positions; shorten it"
            )
        positions = [i for i, index in enumerate(row) if index == tokenizer.mask_id]
        logits = self._mlm_logits(row, positions)
        # Rows of the embedding table beyond the vocabulary are padding, and no pieces.
        probabilities = np.asarray(jax.nn.softmax(logits[:, : tokenizer.vocab_size]))
        guesses = []
        for position, chances in zip(positions, probabilities, strict=True):
            best = np.argsort(-chances)[:top_k].tolist()
            filled = [[*row[:position], index, *row[position + 1 :]] for index in best]
            guesses.append(
                [
                    Guess(
                        tokenizer.id_to_token(index), float(chances[index]), self.text(pieces[1:-1])
                    )
                    for index, pieces in zip(best, filled, strict=True)
                ]
            )
        return guesses

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of some pieces, in which masked ones show as [MASK]."""
        parts, part = [], []
        for index in ids:
            if index == self.tokenizer.mask_id:
                parts.append(self.tokenizer.decode(part))
                part = []
            else:
                part.append(index)
        parts.append(self.tokenizer.decode(part))
        return " [MASK] ".join(part.strip() for part in parts).strip()

    @functools.cached_property
    def _apply(self) -> Callable[..., Any]:
        return jax.jit(self.model.apply)

    def _mlm_logits(self, ids: list[int], positions: list[int]) -> jax.Array:
        """Returns the logits of some positions of one row, [len(positions), V]."""
        # Padded to a few sizes, so that few programs are compiled.
        length = min(max(16, 1 << (len(ids) - 1).bit_length()), self.config.max_position_embeddings)
        input_ids = np.zeros((1, length), np.int32)
        input_ids[0, : len(ids)] = ids
        mask = (np.arange(length) < len(ids)).astype(np.int32)[None]
        chosen = np.zeros((1, -(-len(positions) // 16) * 16), np.int32)
        chosen[0, : len(positions)] = positions
        variables = {"params": self.params}
        output = self._apply(variables, input_ids, np.zeros_like(input_ids), mask, chosen)
        return output.mlm_logits[0, : len(positions)]


def load(path: str | Path) -> Bert:
    """Loads a checkpoint.

    Args:
      path: a workdir, for its latest checkpoint; one of its checkpoints; a directory of Hugging
        Face's; or one of Google's.

    Raises:
      UserError: there is none, or it is damaged, or of another architecture.
    """
    path = Path(path)
    for module, is_of in ((google, google.is_google), (huggingface, huggingface.is_huggingface)):
        if is_of(path):
            config, converted, tokenizer = module.load(path)
            params, task = converted.params, converted.task
            model = _model(config, task, there=names.module_names(params))
            data = DataFiles(max_length=min(_ROW, config.max_position_embeddings))
            return Bert(config, params, tokenizer, model, converted.unused, task, data)
    found = checkpoint.find(path)
    where, description = f"{found}/config", checkpoint.read_json(found, "config")
    of_task = isinstance(description, dict) and "task" in description
    run = from_dict(FinetuneConfig if of_task else TrainConfig, description, where)
    validate_model(run.model, where)
    task, probe, data = (run.task, run.probe, run.data) if of_task else (None, "", DataFiles())
    try:
        model = _model(run.model, task, probe)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    tokenizer = load_tokenizer(found)
    like = nn.unbox(jax.eval_shape(model.init_params, jax.random.key(0)))
    params = checkpoint.read_params(found, like, () if task else names.OPTIONAL_MODULES)
    model = _model(run.model, task, probe, there=names.module_names(params))
    return Bert(run.model, params, tokenizer, model, task=task, data=data)


def _model(
    config: ModelConfig,
    task: TaskConfig | None,
    probe: str = "",
    there: Iterable[str] = names.OPTIONAL_MODULES,
) -> BertForPreTraining | TaskModel:
    if task:
        return task_model(config, task.kind, task.labels, probe)
    return BertForPreTraining(config, next_sentence={"bert/pooler", "nsp_head"} <= set(there))


def load_tokenizer(path: str | Path, *, lowercase: bool = True) -> Tokenizer:
    """Reads the tokenizer of a checkpoint, or from one of its files, or the folder of these.

    Raises:
      UserError: there is none, or it is damaged.
    """
    path = Path(path)
    if any((path / name).is_dir() for name in ("state", "best", "checkpoints")):
        found = checkpoint.find(path)
        content = checkpoint.read_json(found, "tokenizer")
        return tokenizer_lib.from_json(content, f"{found}/tokenizer")
    return tokenizer_lib.load(path, lowercase=lowercase)


def model_to_train(init: Bert, config: ModelConfig, given: Iterable[str]) -> ModelConfig:
    """Returns the model for training to go on with: that of `init`, but for how it is computed.

    The head of a task has no say in it: its shape is not the encoder's.

    Args:
      init: the model to begin with.
      config: the one that a recipe describes.
      given: fields that were set by hand, which are kept, such as "hidden_dropout_prob".

    Raises:
      UserError: one of them asks for other parameters.
    """
    how = ("dtype", "remat", "scan_layers", "attention")
    kept = {name: getattr(config, name) for name in {*how, *given}}
    if not kept.get("vocab_size"):  # 0 is the size that the checkpoint has
        kept.pop("vocab_size", None)
    model = dataclasses.replace(init.config, **kept)
    validate_model(model, "config")
    shapes = jax.eval_shape(BertForPreTraining(model).init_params, jax.random.key(0))
    pretrained = {k: v for k, v in init.params.items() if k not in names.TASK_MODULES}
    there: Any = traverse_util.flatten_dict(pretrained, sep="/")
    wanted: Any = traverse_util.flatten_dict(nn.unbox(shapes), sep="/")
    for name, param in there.items():
        if name not in wanted or wanted[name].shape != param.shape:
            raise UserError(
                f"--init has {name} of shape {param.shape}, which the config does not ask for; "
                "leave the shape of the model out of the command"
            )
    return model


def fill(params: Any, given: Any) -> Any:
    """Returns `params` with copies of those that are in `given` too, on the same devices.

    Each host of a run has all of `given`, of which it copies what its own devices hold.
    """
    flat: Any = traverse_util.flatten_dict(given, sep="/")
    own: Any = traverse_util.flatten_dict(params, sep="/")

    def copied(name: str, like: jax.Array) -> jax.Array:
        value = np.asarray(flat[name])
        # Not the array itself: a step reuses the memory of the state that it is given.
        return jax.make_array_from_callback(
            value.shape, like.sharding, lambda index: np.array(value[index])
        )

    filled = {name: copied(name, v) if name in flat else v for name, v in own.items()}
    return traverse_util.unflatten_dict(filled, sep="/")


def save(bert: Bert, path: str | Path) -> None:
    """Writes a checkpoint of a model, which `load` reads.

    Raises:
      UserError: something is at `path`, or it cannot be written.
    """
    path = Path(path)
    _check_free(path)
    run = TrainConfig(model=bert.config)
    if bert.task:
        run = FinetuneConfig(model=bert.config, task=bert.task, data=bert.data, probe=_probe(bert))
    description = dataclasses.asdict(run)
    try:
        checkpoint.write_params(path, bert.params, description, bert.tokenizer)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error})") from error


def export(bert: Bert, path: str | Path, head: str | None = None) -> huggingface.Exported:
    """Writes a directory that Hugging Face's `transformers` loads, at once or not at all.

    Args:
      bert: the model.
      path: the directory; nothing may be there.
      head: "pretraining", "masked-lm" or "none", for the pooler alone; None for all there are, or
        for that of the task.

    Raises:
      UserError: `transformers` has no such model, or something is at `path`.
    """
    path = Path(path)
    _check_free(path)
    if _probe(bert) and head != "none":
        raise UserError(
            f"the checkpoint is a probe (of {_probe(bert)!r}), and no class of transformers has "
            "such a head; export its encoder by --head=none, or fine-tune without a probe"
        )
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=f".{path.name}."))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error})") from error
    try:
        made = huggingface.save(
            bert.config, bert.params, bert.tokenizer, temporary, head, bert.task
        )
        temporary.chmod(0o755)
        temporary.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return made


def _probe(bert: Bert) -> str:
    return bert.model.probe if isinstance(bert.model, TaskModel) else ""


def _check_free(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path} is already there; choose another place, or remove it")

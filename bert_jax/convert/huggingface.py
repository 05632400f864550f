"""Directories of Hugging Face's `transformers`: a BERT's or a RoBERTa's, both ways.

Such a directory has `config.json`, `model.safetensors` (or several files and an index of them) and
the tokenizer's files. Neither `transformers` nor PyTorch is needed.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from bert_jax.config import ModelConfig, TaskConfig, validate_model
from bert_jax.convert import names, tokenizer_files
from bert_jax.convert.names import Converted, Tensor
from bert_jax.errors import UserError
from bert_jax.models.heads import NUM_OUTPUTS, TASK_MODELS
from bert_jax.models.positions import sinusoidal_positions
from bert_jax.settings import from_dict
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text.tokenizer import Tokenizer

_ONE_FILE, _INDEX, _PICKLE = "model.safetensors", "model.safetensors.index.json", "*.bin"
_POSITIONS = "bert.embeddings.position_embeddings.weight"
_DTYPES = ("F64", "F32", "F16", "BF16")
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_new"}  # two names of one function
_MOST_LABELS = 1 << 16  # that names are made up for, where a config only counts them


def _classes(ending: str) -> dict[str, str]:
    return {"bert": f"Bert{ending}", "roberta": f"Roberta{ending}"}


# What can be exported: the parts, and the class of `transformers`, of a BERT and of a RoBERTa. The
# last ones are tasks, by their kind.
HEADS = {
    "pretraining": (("bert/pooler", "mlm_head", "nsp_head"), {"bert": "BertForPreTraining"}),
    "masked-lm": (("mlm_head",), _classes("ForMaskedLM")),
    "none": (("bert/pooler",), _classes("Model")),
    "classification": (("bert/pooler", "classifier"), _classes("ForSequenceClassification")),
    "regression": (("bert/pooler", "classifier"), _classes("ForSequenceClassification")),
    "token_classification": (("classifier",), _classes("ForTokenClassification")),
    "question_answering": (("classifier",), _classes("ForQuestionAnswering")),
    "multiple_choice": (("bert/pooler", "classifier"), _classes("ForMultipleChoice")),
}
# The `problem_type` of a class that has several.
_PROBLEMS = {"classification": "single_label_classification", "regression": "regression"}
# Of the config.json that `save` writes, and of nobody else's.
_PIECES, _TASK = "tokenizer_pieces", "bert_jax_task"


@dataclasses.dataclass(frozen=True)
class Exported:
    """What `save` wrote.

    Attributes:
      architecture: the class of `transformers` that it is of.
      dropped: modules of the model that this class does not have.
      newly_initialized: modules of this class that the model does not have.
    """

    architecture: str
    dropped: Sequence[str]
    newly_initialized: Sequence[str]


def is_huggingface(path: Path) -> bool:
    """Returns whether a directory is one of Hugging Face's, by its files."""
    weights = (_ONE_FILE, _INDEX, _PICKLE)
    return (path / "config.json").is_file() and any(any(path.glob(name)) for name in weights)


def load(path: Path) -> tuple[ModelConfig, Converted, Tokenizer]:
    """Reads a model and its tokenizer.

    Raises:
      UserError: it is no BERT or RoBERTa, or something is missing, damaged or does not fit.
    """
    values = read_json(path / "config.json")
    config = read_config(values, str(path / "config.json"))
    task = read_task(values, config, str(path / "config.json"))
    tensors = _open(path, HEADS[task.kind][1][config.model_type] if task else "")
    if config.model_type == "roberta" and _POSITIONS in tensors:
        tensors[_POSITIONS] = _Rows(tensors[_POSITIONS], _first_position(values))
    converted = names.from_foreign(tensors, config, str(path), task)
    tokenizer = tokenizer_lib.load(path)
    check_vocabulary(path, tokenizer, config, values.get(_PIECES))
    return config, converted, tokenizer


def check_vocabulary(
    path: Path, tokenizer: Tokenizer, config: ModelConfig, pieces: int | None = None
) -> None:
    """Refuses a vocabulary of another model's, or one that was cut.

    A few pieces less than embeddings are usual, where the table is filled up to a round number.

    Args:
      path: the directory.
      tokenizer: that was found there.
      config: of the model.
      pieces: how many there must be, where that was written down.

    Raises:
      UserError: the vocabulary is of another size.
    """
    least, most = (pieces, pieces) if pieces else (config.vocab_size - 127, config.vocab_size)
    if not least <= tokenizer.vocab_size <= most:
        raise UserError(
            f"{path} has a vocabulary of {tokenizer.vocab_size} pieces for {pieces or most} "
            "embeddings; fetch the one that goes with the model"
        )


def read_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the model that a `config.json` describes.

    Raises:
      UserError: another architecture, or a value that is impossible or not supported.
    """
    kind = values.get("model_type", "bert")  # the oldest files, and Google's, do not say
    if kind not in ("bert", "roberta"):
        raise UserError(f"{where} is of a model of type {kind!r}; only bert and roberta are read")
    for name in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        if values.get(name):
            raise UserError(f"{where} has {name}; only encoders are read")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    missing = [name for name in ("vocab_size", "hidden_size") if name not in values]
    if missing:
        raise UserError(f"{where} has no {missing[0]}; it is not the config of a BERT")
    # What a file leaves out is what `transformers` takes it for: the erf form of GELU, for one.
    given = {"hidden_act": "gelu", **{k: v for k, v in values.items() if k in known}}
    given |= {"model_type": kind, "dtype": "float32"}
    config = from_dict(ModelConfig, given, where)
    config.hidden_act = _ACTIVATIONS.get(config.hidden_act, config.hidden_act)
    if kind == "roberta":
        if config.position_embedding_type != "absolute":
            raise UserError(f"{where}: relative positions are read of a bert alone")
        config.max_position_embeddings -= _first_position(values)
    validate_model(config, where)
    return config


def read_task(values: Mapping[str, Any], config: ModelConfig, where: str) -> TaskConfig | None:
    """Returns what a `config.json` says that its model was fine-tuned for.

    Returns:
      None for a pretrained model, and for tasks that are none of ours: several labels, or several
      numbers, for each text.

    Raises:
      UserError: the labels are damaged.
    """
    given = values.get("architectures")
    given = given[0] if isinstance(given, list) and given else None
    kind = next((k for k in TASK_MODELS if HEADS[k][1][config.model_type] == given), None)
    if kind is None:
        return None
    labels = () if kind in NUM_OUTPUTS else _read_labels(values, where)
    if kind == "classification":
        # As `transformers` takes it, where it is not said.
        usual = _PROBLEMS["regression" if len(labels) == 1 else kind]
        problem = values.get("problem_type") or usual
        kind = next((k for k, name in _PROBLEMS.items() if name == problem), None)
        if kind is None or (kind == "regression" and len(labels) > 1):
            return None
        labels = () if kind == "regression" else labels
    if _TASK in values:
        ours = from_dict(TaskConfig, values[_TASK], f"{where}: {_TASK}")
        # Another kind or other labels: `transformers` has trained the model again since.
        if ours.kind == kind and (kind in NUM_OUTPUTS or ours.labels == labels):
            return ours
    return TaskConfig(kind=kind, labels=labels)


def _read_labels(values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    found = values.get("id2label")
    if found is None:  # the usual names, of two labels unless it is said
        number = values.get("num_labels", 2)
        if not isinstance(number, int) or not 0 < number < _MOST_LABELS:
            raise UserError(f"{where}: num_labels is {number!r}; fetch it again")
        return tuple(f"LABEL_{index}" for index in range(number))
    found = found if isinstance(found, dict) else {}
    given = (found.get(str(index)) for index in range(len(found)))
    labels = tuple(label for label in given if isinstance(label, str))
    if not 0 < len(set(labels)) == len(found):
        raise UserError(
            f"{where}: id2label must give each of the numbers 0, 1, 2 … a name of its own; mend "
            "it, or fetch it again"
        )
    return labels


def _first_position(values: Mapping[str, Any]) -> int:
    """Returns the row of a RoBERTa's position table that is of a text's first token.

    Those before it are of padding, which nothing depends on. Source: fairseq's
    `LearnedPositionalEmbedding`, by way of `create_position_ids_from_input_ids`.
    """
    padding = values.get("pad_token_id", 1)
    return padding + 1 if isinstance(padding, int) and padding >= 0 else 2


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor of a safetensors file."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        # Opened for each: what has been read of an open file stays in memory beside the copies.
        with safetensors.safe_open(str(self.file), "np") as file:
            dtype = file.get_slice(self.name).get_dtype()
            if dtype not in _DTYPES:
                raise UserError(
                    f"{self.file}: {self.name} is of type {dtype}; only "
                    f"{', '.join(_DTYPES)} are read"
                )
            return file.get_tensor(self.name)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A tensor without its first rows."""

    tensor: Tensor
    first: int

    @property
    def shape(self) -> tuple[int, ...]:
        rows = (max(size - self.first, 0) for size in self.tensor.shape[:1])
        return (*rows, *self.tensor.shape[1:])

    def read(self) -> np.ndarray:
        return self.tensor.read()[self.first :]


def _open(path: Path, architecture: str) -> dict[str, Tensor]:
    """Returns the tensors of a directory by their standard names."""
    if (path / _INDEX).exists():
        files = read_json(path / _INDEX).get("weight_map")
        files = [str(file) for file in files.values()] if isinstance(files, dict) else []
        if not files or not all(file.isprintable() for file in files):
            raise UserError(f"{path / _INDEX} has no weight_map of files; fetch it again")
        files = sorted({Path(file).name for file in files})
    elif (path / _ONE_FILE).exists():
        files = [_ONE_FILE]
    else:
        raise UserError(
            f"{path} has its weights as a pickle, {next(path.glob(_PICKLE)).name}, which could run "
            f"any code and is not read; make {_ONE_FILE} of it where torch is installed: python -c "
            "'import torch, safetensors.torch as s; s.save_file({k: v.clone() for k, v in "
            f'torch.load("{next(path.glob(_PICKLE))}", weights_only=True).items()}}, '
            f'"{path / _ONE_FILE}")\''
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safetensors.safe_open(str(path / file), "np") as opened:
                shapes = {key: opened.get_slice(key).get_shape() for key in opened.offset_keys()}
        except (OSError, safetensors.SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{path / file} is damaged ({reason}); fetch it again") from error
        stored = [_Stored(path / file, name, tuple(shape)) for name, shape in shapes.items()]
        tensors |= {names.standard(tensor.name, architecture): tensor for tensor in stored}
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Returns the settings of a JSON file.

    Raises:
      UserError: it is damaged or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no settings; fetch it again")
    return values


def save(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    path: Path,
    head: str | None,
    task: TaskConfig | None = None,
) -> Exported:
    """Writes a directory that `transformers` loads.

    Args:
      config: of the model.
      params: of it.
      tokenizer: that it was trained with.
      path: an empty directory.
      head: a key of `HEADS`; None for the task, or the first one that the checkpoint has all of.
      task: what the model was fine-tuned for, if it was.

    Raises:
      UserError: `transformers` has no such model, or the checkpoint no such head.
    """
    if config.position_embedding_type.startswith("relative"):
        raise UserError(
            f"model.position_embedding_type is {config.position_embedding_type}, which "
            "transformers has no longer had since its version 5; it cannot be exported"
        )
    made = _choose(params, config.model_type, head, task)
    values = {"architectures": [made.architecture], **dataclasses.asdict(config)}
    del values["remat"], values["scan_layers"], values["attention"]  # how it is computed
    values[_PIECES] = tokenizer.vocab_size
    values |= {"dtype": "float32", "pad_token_id": tokenizer.pad_id, "tie_word_embeddings": True}
    values["position_embedding_type"] = "absolute"
    if task and "classifier" not in made.dropped:
        values |= _describe(task)
    tensors = dict(names.to_foreign(params, made.dropped))
    if config.position_embedding_type == "sinusoidal":
        sizes = config.max_position_embeddings, config.hidden_size
        tensors[_POSITIONS] = sinusoidal_positions(*sizes)
    if config.model_type == "roberta":
        first = _first_position(values)
        tensors[_POSITIONS] = np.pad(tensors[_POSITIONS], ((first, 0), (0, 0)))
        values["max_position_embeddings"] += first
        values |= {"bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}
    tensors = {names.named_in(made.architecture, name): x for name, x in tensors.items()}
    (path / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    _write_tensors(path / _ONE_FILE, tensors)
    for name, content in tokenizer_files.files(tokenizer, config).items():
        (path / name).write_bytes(content)
    return made


def _describe(task: TaskConfig) -> dict[str, Any]:
    """Returns what `read_task` reads."""
    values: dict[str, Any] = {_TASK: dataclasses.asdict(task)}
    if task.kind in _PROBLEMS:
        values["problem_type"] = _PROBLEMS[task.kind]
    labels = ("LABEL_0",) if task.kind == "regression" else task.labels
    if task.kind == "regression" or task.kind not in NUM_OUTPUTS:
        values["id2label"] = dict(enumerate(labels))
        values["label2id"] = {label: index for index, label in enumerate(labels)}
    return values


def _choose(
    params: Mapping[str, Any], kind: str, head: str | None, task: TaskConfig | None
) -> Exported:
    """Returns the class of `transformers` for some parts, or for as many as there are."""
    there = names.module_names(params)
    if task:
        head = head or task.kind
        if head in TASK_MODELS and head != task.kind:
            raise UserError(f"--head={head} is not for a checkpoint of {task.kind}; leave it out")
    if head is None:
        fitting = (h for h, (parts, classes) in HEADS.items() if kind in classes)
        head = next((h for h in fitting if there.issuperset(HEADS[h][0])), "none")
    parts, classes = HEADS[head]
    if kind not in classes:
        raise UserError(f"--head={head} is not for a {kind}; use --head=masked-lm")
    absent = sorted(set(parts) - there)
    if absent and head != "none":
        raise UserError(
            f"the checkpoint has no {', '.join(absent)}, which --head={head} is to write; it has "
            f"{', '.join(sorted(there)) or 'the encoder alone'}"
        )
    return Exported(classes[kind], sorted(there - set(parts)), absent)


def _write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file, one tensor at a time: its library wants all of them copied first.

    Format: the size of the header in eight bytes, the header as JSON, and the values.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in tensors.items():
        span = [place, place + 4 * tensor.size]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        place = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, "<f4").data)

"""Every setting of a run: typed, with the defaults of BERT-base as released, and validated.

The dataclasses are not frozen because `ml_collections.config_flags` sets flags in place; for the
same reason `validate` is a function that each entry point calls first, not a `__post_init__`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from bert_jax.config_json import from_dict, to_json
from bert_jax.errors import UserError


@dataclasses.dataclass
class ModelConfig:
    """The encoder, in the names of BERT's own `config.json`; the defaults are BERT-base uncased.

    Source: google-research/bert `modeling.py` (`BertConfig`). `hidden_act` is "gelu" for the erf
    form and "gelu_new" for the tanh form that Google's code has had since February 2019.
    """

    model_type: str = "bert"  # or "roberta": no pooler, no next sentence head
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512  # the longest row, in tokens
    position_embedding_type: str = "absolute"  # learned; docs/positions.md has the others
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    # Of activations and matrix products; parameters are float32. "auto": what the device does best.
    dtype: str = "float32"
    remat: bool = False  # compute each layer again for its gradient, for memory; same result
    scan_layers: bool = False  # one program for all layers, which compiles faster; same result
    attention: str = "auto"  # "plain", "fused" (on TPUs and GPUs), or the better; same result


@dataclasses.dataclass
class TokenizerConfig:
    """Which tokenizer: loaded from `path`, or trained on the text to `model.vocab_size` pieces."""

    kind: str = "sentencepiece"  # "wordpiece" or "byte_bpe"; what to train where `path` is empty
    path: str = ""  # a SentencePiece .model, a BERT vocab.txt, a tokenizer.json or their folder
    model_type: str = "unigram"  # or "bpe"; of a SentencePiece trained here
    lowercase: bool = True  # of a vocabulary trained here, and of a vocab.txt


@dataclasses.dataclass
class Phase:
    """A later part of a run, with another length: BERT trains its last 10% of steps at 512."""

    start: float  # where it begins, as a fraction of `steps`
    max_length: int
    batch_size: int
    max_predictions: int = 0


@dataclasses.dataclass
class DataConfig:
    """Text, and how rows are made of it. Source: `create_pretraining_data.py` and the paper."""

    # "builtin", files or globs (comma separated), "tfds:NAME", or a folder that `prepare` wrote
    source: str = "builtin"
    eval_source: str = ""  # held-out text; empty holds out `eval_fraction` of the documents
    eval_fraction: float = 0.05
    text_field: str = "text"  # of JSON lines and TFDS
    sentences: str = "auto"  # "lines": one a line; "split": paragraphs; "auto": see which it is
    max_length: int = 128
    batch_size: int = 256  # rows a step, over all devices
    phases: tuple[Phase, ...] = ()  # later phases; the fields above are the first
    pairs: str = "nsp"  # "nsp", "sop" (ALBERT's order prediction) or "none" (full blocks)
    packing: bool = False  # several pairs in a row, each by itself, where one leaves room
    short_fraction: float = 0.1  # documents cut to a random shorter target length
    mask_fraction: float = 0.15
    max_predictions: int = 0  # masked positions kept for each row; 0 for mask_fraction of a row
    whole_word_masking: bool = False


@dataclasses.dataclass
class OptimizerConfig:
    """Source: google-research/bert `optimization.py` and the paper, appendix A.2."""

    name: str = "bert_adamw"  # as released, without bias correction; or "adamw", optax's own
    learning_rate: float = 1e-4
    warmup_fraction: float = 0.01  # of `steps`; the paper's 10,000 of 1,000,000
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    clip_norm: float = 1.0  # the longest that the gradient may be; 0 for any
    microbatches: int = 1  # each step's rows in this many passes, for memory; same result


@dataclasses.dataclass
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: int = 1000  # steps
    keep: int = 2  # the latest ones; the best by held-out loss is kept besides


@dataclasses.dataclass
class ParallelConfig:
    """How a step is spread over devices: over a mesh of data × fsdp × tensor.

    The rows of a batch are shared among data × fsdp. Each of the three is a number of devices; one
    of them may be -1, for all that the others leave.
    """

    data: int = -1  # copies of the model
    fsdp: int = 1  # parts of each copy's parameters, gradients and moments, gathered when needed
    tensor: int = 1  # parts of heads, feed-forward and vocabulary, each computed on its own
    zero: int = 3  # ZeRO stage: 1 leaves the parameters whole and spreads the moments over fsdp
    mode: str = "mesh"  # or "pmap", which JAX keeps in maintenance; data alone


@dataclasses.dataclass
class TrainConfig:
    """A pretraining run."""

    seed: int = 0
    steps: int = 1_000_000
    log_every: int = 100
    eval_every: int = 10_000
    eval_rows: int = 20_000  # held-out rows that an evaluation takes, at most
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)


@dataclasses.dataclass
class TaskConfig:
    """What is learned of an encoder. Source of the defaults: Devlin et al. 2019, `run_squad.py`."""

    # or "regression", "token_classification", "question_answering", "multiple_choice"
    kind: str = "classification"
    glue: str = ""  # one of GLUE's nine tasks, by name: its columns, labels and metrics
    labels: tuple[str, ...] = ()  # in the head's order; empty for those of the training data
    metrics: tuple[str, ...] = ()  # whose mean tells the best checkpoint; empty for the usual
    # Of question answering:
    doc_stride: int = 128  # pieces from one window of a long context to the next
    max_question: int = 64  # pieces
    max_answer: int = 30  # pieces
    n_best: int = 20  # starts and ends of a window, and answers, that are considered
    with_unanswerable: bool = False  # as SQuAD 2.0 has
    null_threshold: float = 0.0  # "no answer" where its score leads by more; tuned on `eval`


@dataclasses.dataclass
class DataFiles:
    """A task's data: .tsv, .csv, .jsonl, .conll, SQuAD's .json, or "tfds:NAME@SPLIT"."""

    train: str = ""
    # What the best checkpoint is chosen by; several as "NAME=FILE,NAME=FILE", by the first one.
    # Empty holds out `eval_fraction` of the training examples.
    eval: str = ""
    test: str = ""  # only predicted, and scored where it has labels
    eval_fraction: float = 0.1
    text: str = "sentence"  # the column of the text, or two of a pair, comma separated
    label: str = "label"  # the column of the label
    max_length: int = 128  # pieces
    batch_size: int = 32  # rows a step, over all devices


@dataclasses.dataclass
class FinetuneConfig:
    """A fine-tuning run."""

    seed: int = 0
    seeds: int = 1  # runs, with this seed and those that follow it
    epochs: float = 3.0
    evaluations: int = 1  # an epoch
    # Evaluations without a better score (of equals, a lower loss) after which a run ends; 0: never.
    patience: int = 0
    log_every: int = 50
    layer_decay: float = 1.0  # by which each layer's rate is lower than that of the one above
    probe: str = ""  # "mix" of all layers, or one layer's number: the encoder is left as it is
    new_head: bool = False  # whether to replace a head that --init has
    compare: bool = False  # with random weights too and, of classes, with TF-IDF and regression
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    data: DataFiles = dataclasses.field(default_factory=DataFiles)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=3e-5, warmup_fraction=0.1)
    )
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)


# Fields that change what is written or shown, not what is computed: a run may resume with others.
_FREE_TO_CHANGE = ("log_every", "eval_every", "eval_rows", "checkpoint.", "parallel.")
_FREE_TO_CHANGE += ("model.remat", "model.scan_layers", "model.attention")
_FREE_TO_CHANGE += ("seeds", "compare", "data.test")

_CHOICES = {
    "model.model_type": ("bert", "roberta"),
    "model.position_embedding_type": (
        "absolute",
        "sinusoidal",
        "relative_key",
        "relative_key_query",
    ),
    "model.hidden_act": ("gelu", "gelu_new", "relu"),
    "model.dtype": ("float32", "bfloat16", "auto"),
    "model.attention": ("auto", "plain", "fused"),
    "tokenizer.kind": ("sentencepiece", "wordpiece", "byte_bpe"),
    "tokenizer.model_type": ("unigram", "bpe"),
    "data.sentences": ("auto", "lines", "split"),
    "data.pairs": ("nsp", "sop", "none"),
    "optimizer.name": ("bert_adamw", "adamw"),
    "parallel.mode": ("mesh", "pmap"),
    "parallel.zero": (1, 3),
    "task.kind": (
        "classification",
        "regression",
        "token_classification",
        "question_answering",
        "multiple_choice",
    ),
}

# Half-open or closed at 0 as the name says; every other number must be positive.
_FRACTIONS_BELOW_ONE = (
    "model.hidden_dropout_prob",
    "model.attention_probs_dropout_prob",
    "data.eval_fraction",
    "data.short_fraction",
    "optimizer.warmup_fraction",
    "optimizer.weight_decay",
    "optimizer.b1",
    "optimizer.b2",
)
_LARGEST_SIZE = 1 << 24  # of anything that a model has; the product of two must fit into 64 bits
_MAY_BE_ZERO = ("seed", "data.max_predictions", "optimizer.clip_norm", "patience")
_MAY_BE_NEGATIVE = ("task.null_threshold",)
_MAY_BE_THE_REST = ("parallel.data", "parallel.fsdp", "parallel.tensor")  # written as -1


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the fields of nested dataclasses by dotted name."""
    flat = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, name + ".")
        else:
            flat[name] = value
    return flat


def default_predictions(max_length: int, mask_fraction: float) -> int:
    """Returns the masked positions kept for a row: 20 at length 128 and 77 at 512, for 15%."""
    return max(1, -int(-max_length * mask_fraction // 1))


def phases(config: TrainConfig) -> list[tuple[int, Phase]]:
    """Returns each phase with its first step; the first is `data`'s own length and batch."""
    data = config.data
    first = Phase(0.0, data.max_length, data.batch_size, data.max_predictions)
    result = []
    for phase in (first, *data.phases):
        predictions = phase.max_predictions or default_predictions(
            phase.max_length, data.mask_fraction
        )
        start = round(phase.start * config.steps)
        result.append((start, dataclasses.replace(phase, max_predictions=predictions)))
    return result


def validate(config: TrainConfig) -> None:
    """Checks every field alone and against the others.

    Raises:
      UserError: a field is of the wrong type, out of range, or does not fit another.
    """
    from_dict(type(config), json.loads(to_json(config)), "config")  # checks the types
    _validate_fields(flatten(config))
    model, data = config.model, config.data
    validate_model(model, "config")
    _validate_parallel(config.parallel)
    starts = [phase.start for phase in data.phases]
    if starts != sorted(set(starts)) or not all(0 < start < 1 for start in starts):
        raise UserError(f"data.phases begin at {starts}; they must rise and lie between 0 and 1")
    if not data.eval_fraction and not data.eval_source:
        raise UserError("data.eval_fraction is 0; raise it, or give data.eval_source")
    if data.pairs != "none" and model.model_type == "roberta":
        raise UserError(
            f"data.pairs {data.pairs} needs a next sentence head and model.model_type roberta has "
            "none; set data.pairs to none"
        )
    if data.pairs != "none" and model.type_vocab_size < 2:
        raise UserError(
            f"data.pairs {data.pairs} needs two token types and model.type_vocab_size is "
            f"{model.type_vocab_size}; set it to 2 or data.pairs to none"
        )
    if data.packing and data.pairs == "none":
        raise UserError("data.packing is for pairs; set it to False, rows of pairs none are full")
    for number, (_, phase) in enumerate(phases(config)):
        _validate_phase(config, phase, f"data.phases[{number - 1}]" if number else "data")


def _validate_phase(config: TrainConfig, phase: Phase, where: str) -> None:
    microbatches = config.optimizer.microbatches
    _validate_length(where, phase.max_length, config.model)
    if phase.batch_size < 1 or phase.max_predictions < 0:
        raise UserError(f"{where} has a batch_size or max_predictions below what is possible")
    if phase.max_predictions > phase.max_length:
        raise UserError(
            f"{where}.max_predictions {phase.max_predictions} exceeds {where}.max_length "
            f"{phase.max_length}; lower it, or set 0 for {config.data.mask_fraction:.0%} of a row"
        )
    if phase.batch_size % microbatches:
        raise UserError(
            f"{where}.batch_size {phase.batch_size} is not a multiple of optimizer.microbatches "
            f"{microbatches}; change one of them"
        )


def validate_finetuning(config: FinetuneConfig) -> None:
    """Checks every field of a fine-tuning run, once its model is that of its checkpoint.

    Raises:
      UserError: a field is of the wrong type, out of range, or does not fit another.
    """
    from_dict(type(config), json.loads(to_json(config)), "config")
    _validate_fields(flatten(config))
    model, data, task = config.model, config.data, config.task
    validate_model(model, "config")
    _validate_parallel(config.parallel)
    _validate_length("data", data.max_length, model)
    if data.batch_size % config.optimizer.microbatches:
        raise UserError(
            f"data.batch_size {data.batch_size} is not a multiple of optimizer.microbatches "
            f"{config.optimizer.microbatches}; change one of them"
        )
    if config.probe and config.layer_decay < 1:
        raise UserError("layer_decay is of no use with probe, which leaves all layers as they are")
    if config.layer_decay > 1:
        raise UserError(f"layer_decay is {config.layer_decay}; it is at most 1, for equal rates")
    layers = [str(layer) for layer in range(model.num_hidden_layers + 1)]
    if config.probe not in ("", "mix", *layers):
        raise UserError(
            f"probe is {config.probe!r}; it is 'mix', or a layer from 0 (the embeddings) to "
            f"{layers[-1]}, or empty to train the encoder too"
        )
    if len(set(task.labels)) < len(task.labels):
        raise UserError(f"task.labels has one twice: {', '.join(task.labels)}")
    if task.kind == "question_answering" and task.max_question > data.max_length // 2:
        raise UserError(
            f"task.max_question {task.max_question} leaves too little of data.max_length "
            f"{data.max_length} for the context; lower the one or raise the other"
        )


def _validate_parallel(config: ParallelConfig) -> None:
    sizes = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    if list(sizes.values()).count(-1) > 1:
        raise UserError("two axes of parallel are -1, and one alone can be the rest; set the other")
    if config.mode == "pmap" and (config.fsdp, config.tensor) != (1, 1):
        raise UserError(
            "parallel.mode pmap keeps all parameters on each device; set parallel.fsdp and "
            "parallel.tensor to 1, or parallel.mode to mesh"
        )


def _validate_length(where: str, length: int, model: ModelConfig) -> None:
    if length > model.max_position_embeddings:
        raise UserError(
            f"{where}.max_length {length} exceeds model.max_position_embeddings "
            f"{model.max_position_embeddings}; lower the one or raise the other"
        )
    if length < 8:
        raise UserError(f"{where}.max_length {length} leaves no room for text; use at least 8")


def validate_model(config: ModelConfig, where: str) -> None:
    """Checks a model's fields alone and against each other.

    Raises:
      UserError: one is out of range, or does not fit another; `where` says whose.
    """
    try:
        _validate_fields(flatten(config, "model."))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for name, value in flatten(config, "model.").items():
        if isinstance(value, int) and value > _LARGEST_SIZE:
            raise UserError(f"{where}: {name} is {value}, which no BERT has; lower it")
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"{where}: model.hidden_size {config.hidden_size} is not a multiple of "
            f"model.num_attention_heads {config.num_attention_heads}; change one of them"
        )


def _validate_fields(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name in _CHOICES and value not in _CHOICES[name]:
            raise UserError(
                f"{name} is {value!r}; choose one of {', '.join(map(str, _CHOICES[name]))}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name in _FRACTIONS_BELOW_ONE:
            if not 0 <= value < 1:
                raise UserError(f"{name} is {value}; it must be at least 0 and below 1")
        elif name == "data.mask_fraction":
            if not 0 < value <= 1:
                raise UserError(f"{name} is {value}; it must be above 0 and at most 1")
        elif value >= 2**32 and (isinstance(value, int) or value == float("inf")):
            raise UserError(f"{name} is {value}; it must be below 2**32")
        elif name in _MAY_BE_THE_REST and value == -1:
            continue
        elif name not in _MAY_BE_NEGATIVE and not (
            value >= 0 if name in _MAY_BE_ZERO else value > 0
        ):
            raise UserError(f"{name} is {value}; it must be a positive number")


def check_same_run(config: TrainConfig | FinetuneConfig, path: Path) -> None:
    """Refuses to resume a run under a config that computes something else.

    Raises:
      UserError: `path`, a workdir's `config.json`, differs from `config` in a field that matters.
    """
    try:
        saved = flatten(from_dict(type(config), json.loads(path.read_text()), str(path)))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not JSON ({error}); mend it or choose another --workdir"
        ) from error
    for name, value in flatten(config).items():
        is_free = name in _FREE_TO_CHANGE or name.split(".")[0] + "." in _FREE_TO_CHANGE
        if saved[name] != value and not is_free:
            raise UserError(
                f"{path.parent} belongs to another config: {name} is {saved[name]!r} there and "
                f"{value!r} here; choose another --workdir or set the field back"
            )

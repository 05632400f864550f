"""Every setting of a run; those of model and optimizer have the defaults of BERT-base as released.

Each field says what it is, what it accepts and whether a run may resume with another value.
`validation.py` checks fields against each other.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

from bert_jax.config.ranges import (
    COUNT_OR_REST,
    NOT_NEGATIVE,
    POSITIVE_SHARE,
    SHARE,
    SHARE_OR_ALL,
    SHARE_OR_STEPS,
    SIZE,
    SIZE_OR_ZERO,
    STEPS,
)
from bert_jax.config.settings import Variants, setting

Service = Literal["wandb"]
_resumable = functools.partial(setting, resumable=True)

# The `models.architecture.Architecture` of each name, or "module:object", imported when it is used.
MODEL_TYPES: dict[str, Any] = {
    "bert": "bert_jax.models.bert:ARCHITECTURE",
    "roberta": "bert_jax.models.roberta:ARCHITECTURE",
    "xlm-roberta": "bert_jax.models.roberta:XLM_ROBERTA",
    "camembert": "bert_jax.models.roberta:CAMEMBERT",
    "modernbert": "bert_jax.models.modernbert:ARCHITECTURE",
    "electra": "bert_jax.models.electra:ARCHITECTURE",
}
# The `models.positions.PositionKind` of each name, or "module:object".
POSITIONS: dict[str, Any] = {
    "absolute": "bert_jax.models.positions:LEARNED",
    "sinusoidal": "bert_jax.models.positions:SINUSOIDAL",
    "relative_key": "bert_jax.models.positions:RELATIVE",
    "relative_key_query": "bert_jax.models.positions:RELATIVE",
    "rotary": "bert_jax.models.positions:ROTARY",
}

Dtype = Literal["float32", "bfloat16", "auto"]


@dataclasses.dataclass(slots=True)
class ModelConfig:
    """The settings that every encoder has, in the names of BERT's own `config.json`.

    An architecture with settings of its own has a subclass, which `model_type` chooses.

    Source: `BertConfig` in google-research/bert `modeling.py`. `hidden_act` is "gelu" for the erf
    form and "gelu_new" for the tanh form, which Google's code has had since February 2019.

    >>> ModelConfig(num_hidden_layers=2).hidden_size
    768
    """

    variants: ClassVar[Variants] = Variants(
        "model_type",
        MODEL_TYPES,
        dropped=(
            "global_attn_every_n_layers",
            "local_attention",
            "global_rope_theta",
            "local_rope_theta",
            "classifier_pooling",
            "embedding_size",
            "generator_hidden_size",
        ),
    )

    model_type: str = setting("bert", f"architecture: {', '.join(MODEL_TYPES)}")
    vocab_size: int = setting(30522, "word embeddings; 0 for those of the tokenizer", SIZE_OR_ZERO)
    hidden_size: int = setting(768, "width of the encoder", SIZE)
    num_hidden_layers: int = setting(12, "layers", SIZE)
    num_attention_heads: int = setting(12, "attention heads; they divide hidden_size", SIZE)
    intermediate_size: int = setting(3072, "width of the feed-forward layer", SIZE)
    hidden_act: Literal["gelu", "gelu_new", "relu"] = setting("gelu_new", "activation function")
    hidden_dropout_prob: float = setting(0.1, "dropout of hidden states", SHARE)
    attention_probs_dropout_prob: float = setting(0.1, "dropout of attention weights", SHARE)
    max_position_embeddings: int = setting(512, "longest sequence, in tokens", SIZE)
    position_embedding_type: str = setting(
        "absolute", f"kind of positions, which docs/encoders.md compares: {', '.join(POSITIONS)}"
    )
    type_vocab_size: int = setting(2, "token types", SIZE)
    pair_separators: Literal[0, 1, 2] = setting(
        0, "[SEP] between the two texts of a pair; 0: as many as model_type has", NOT_NEGATIVE
    )
    pair_token_types: Literal[0, 1, 2] = setting(
        0, "token types of a pair; 1: both texts have type 0; 0: as model_type has", NOT_NEGATIVE
    )
    initializer_range: float = setting(0.02, "standard deviation of initial weights")
    layer_norm_eps: float = setting(1e-12, "epsilon of layer normalization")
    dtype: Dtype = setting(  # noqa: RUF009 - strings alone
        "float32", "type of activations and matmuls; auto: bfloat16 where the device has it"
    )
    remat: bool = _resumable(False, "recompute each layer for its gradient, to save memory")
    scan_layers: bool = _resumable(False, "compile one layer instead of all, to save time")
    attention: Literal["auto", "plain", "fused"] = _resumable("auto", "auto: fused on a GPU")


@dataclasses.dataclass(slots=True)
class TokenizerConfig:
    """A tokenizer: loaded from `path`, or trained on the text.

    >>> TokenizerConfig(kind="wordpiece").lowercase
    True
    """

    kind: Literal["sentencepiece", "wordpiece", "byte_bpe"] = setting(
        "sentencepiece", "what to train where path is none"
    )
    path: str = setting("", "a SentencePiece .model, vocab.txt or tokenizer.json, or their folder")
    model_type: Literal["unigram", "bpe", "char"] = setting(
        "unigram", "algorithm of a SentencePiece; char: each character is a token"
    )
    add: int = setting(0, "with --init: tokens of the text to add to its vocabulary", NOT_NEGATIVE)
    lowercase: bool = setting(True, "lower-case text, for a trained vocabulary or a vocab.txt")
    strip_accents: bool = setting(False, "remove accents and other marks; not of sentencepiece")


@dataclasses.dataclass(slots=True)
class Phase:
    """A later part of a run: its length and batch size, and what else is not that of the run.

    >>> Phase(start=0.9, max_length=512, batch_size=256).max_predictions
    0
    """

    start: float = setting(0.5, "first step, or below 1 its share of all steps", SHARE_OR_STEPS)
    max_length: int = setting(0, "tokens a sequence; 0: data's", NOT_NEGATIVE)
    batch_size: int = setting(0, "sequences a step, over all devices; 0: data's", NOT_NEGATIVE)
    max_predictions: int = setting(0, "masked positions, at most; 0: no limit", NOT_NEGATIVE)
    mask_fraction: float = setting(0.0, "share of tokens to predict; 0: data's", SHARE_OR_ALL)
    learning_rate: float = setting(0.0, "rate that the schedule scales; 0: run's", NOT_NEGATIVE)
    global_rope_theta: float = setting(0.0, "rotary base, global layers; 0: model's", NOT_NEGATIVE)


@dataclasses.dataclass(slots=True)
class DataConfig:
    """Text, and how sequences are made of it.

    Source: `create_pretraining_data.py` in google-research/bert, and Devlin et al. 2019.

    >>> DataConfig(source="text/*.txt").pairs
    'nsp'
    """

    source: str = setting(
        "builtin",
        "files, globs or URLs, comma separated; tfds:NAME; builtin; a store; a mixture A@0.7,B@0.3",
    )
    eval_source: str = setting("", "held-out text; none: a part of the documents")
    eval_fraction: float = setting(0.05, "share of documents held out", SHARE)
    text_field: str = setting("text", "field with the text, of JSON lines, tables and TFDS")
    sentences: Literal["auto", "lines", "documents", "split"] = setting(
        "auto",
        "lines: a sentence a line, documents between blank lines; documents: a document a line; "
        "split: paragraphs. Records are split, but by lines",
    )
    max_length: int = setting(128, "tokens a sequence, before the first phase")
    batch_size: int = setting(256, "sequences a step, over all devices, before the first phase")
    length_warmup_fraction: float = _resumable(
        0.0,
        "steps that begin the run with sequences of 16 tokens, then 64 and so on: below 1 a share "
        "of all, from 1 on their number",
        SHARE_OR_STEPS,
    )
    phases: tuple[Phase, ...] = _resumable((), "later phases, with other lengths")
    pairs: Literal["nsp", "sop", "none"] = setting(
        "nsp", "sentence pairs: next sentence, sentence order, or none for full blocks of text"
    )
    packing: bool = setting(False, "pack several pairs into one sequence")
    short_fraction: float = setting(0.1, "share of documents with shorter pairs", SHARE)
    mask_fraction: float = setting(0.15, "share of tokens to predict", POSITIVE_SHARE)
    max_predictions: int = setting(0, "masked positions, at most; 0: no limit", NOT_NEGATIVE)
    whole_word_masking: bool = setting(False, "mask whole words")


@dataclasses.dataclass(slots=True)
class OptimizerConfig:
    """Adam with decoupled weight decay; a linear warm-up, and how the rate then decays.

    Source: `optimization.py` in google-research/bert, and Devlin et al. 2019, appendix A.2; of
    `wsd` (warm-up, stable, decay by 1 - sqrt) and `stable_adamw`, Warner et al. 2024; of `muon`,
    Jordan 2024, with updates as large as Adam's by Liu et al. 2025.

    >>> OptimizerConfig(learning_rate=3e-5).name
    'bert_adamw'
    """

    name: Literal["bert_adamw", "adamw", "stable_adamw", "muon"] = setting(
        "bert_adamw",
        "bert_adamw: as released, without bias correction; adamw: Optax's; stable_adamw: with "
        "Adafactor's update clipping; muon: adamw, but Muon for the matrices of the layers",
    )
    learning_rate: float | tuple[float, ...] = setting(
        1e-4, "peak learning rate; in fine-tuning also several, of which the best is found first"
    )
    warmup_fraction: float = setting(
        0.01, "steps that warm up: below 1 a share of all, from 1 on their number", SHARE_OR_STEPS
    )
    schedule: Literal["linear", "cosine", "constant", "wsd"] = setting(
        "linear",
        "after the warm-up: to 0 in a line or a cosine; constant; wsd: constant, then to 0",
    )
    decay_fraction: float = setting(
        0.1, "wsd: last steps, which decay to 0; a share or their number", SHARE_OR_STEPS
    )
    weight_decay: float = setting(0.01, "weight decay, of all but biases and LayerNorm", SHARE)
    b1: float = setting(0.9, "decay of Adam's first moment", SHARE)
    b2: float = setting(0.999, "decay of Adam's second moment", SHARE)
    eps: float = setting(1e-6, "Adam's epsilon")
    clip_norm: float = setting(1.0, "maximum global gradient norm; 0 for none", NOT_NEGATIVE)
    microbatches: int = setting(1, "passes a step is split into, to save memory")

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The peak learning rate, or the several of which the best is to be found."""
        rates = self.learning_rate
        return rates if isinstance(rates, tuple) else (rates,)


@dataclasses.dataclass(slots=True)
class CheckpointConfig:
    """When checkpoints are written, and which are kept.

    >>> CheckpointConfig().keep
    2
    """

    every: int = _resumable(1000, "steps between checkpoints")
    keep: int = _resumable(2, "latest checkpoints to keep; the best by held-out loss is kept too")


@dataclasses.dataclass(slots=True)
class ParallelConfig:
    """How a step is spread over a mesh of devices, data × fsdp × tensor.

    >>> ParallelConfig(fsdp=8).data
    -1
    """

    data: int = _resumable(-1, "replicas of the model", COUNT_OR_REST)
    fsdp: int = _resumable(1, "shards of parameters, gradients and moments", COUNT_OR_REST)
    tensor: int = _resumable(1, "shards of heads, feed-forward and vocabulary", COUNT_OR_REST)
    zero: Literal[1, 3] = _resumable(3, "ZeRO stage; 1 replicates parameters and shards moments")
    mode: Literal["mesh", "pmap"] = _resumable("mesh", "pmap: jax.pmap, which is in maintenance")


@dataclasses.dataclass(slots=True)
class TrainConfig:
    """A pretraining run.

    >>> config = TrainConfig(steps=1000)
    >>> config.data.max_length
    128
    """

    seed: int = setting(0, "of initial weights, data order, masks and dropout", NOT_NEGATIVE)
    steps: int = _resumable(1_000_000, "training steps", STEPS)
    log_every: int = _resumable(100, "steps between logs")
    eval_every: int = _resumable(10_000, "steps between evaluations")
    eval_rows: int = _resumable(20_000, "held-out sequences of an evaluation, at most")
    log_to: tuple[Service, ...] = _resumable((), "also log to Weights & Biases: wandb")
    objective: str = setting("auto", "what to learn; auto: what model and data.pairs are made for")
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)


@dataclasses.dataclass(slots=True)
class EmbeddingConfig:
    """How a text becomes a vector, and what the vectors are trained by.

    Source: Reimers and Gurevych 2019 (pooling); Henderson et al. 2017 and Gao et al. 2021
    (`ranking`, temperature 0.05); Kusupati et al. 2022 (`dimensions`).

    >>> EmbeddingConfig(loss="cosent").pooling
    'mean'
    """

    pooling: Literal["mean", "cls", "max"] = setting(
        "mean", "of the last layer: mean or max over all tokens, or the first token"
    )
    dense: int = setting(0, "width of a dense layer after the pooling; 0: none", SIZE_OR_ZERO)
    dense_activation: Literal["tanh", "identity"] = setting("tanh", "of the dense layer")
    normalize: bool = setting(True, "scale vectors to unit length")
    query_prompt: str = setting("", "what to put before each query")
    passage_prompt: str = setting("", "what to put before each passage")
    pairs: Literal["columns", "same", "neighbours"] = setting(
        "columns",
        "columns: query, passage and perhaps negatives, by data.text; same: a text twice, with "
        "other dropout; neighbours: a line and the next one",
    )
    loss: Literal["ranking", "cosine", "cosent"] = setting(
        "ranking",
        "ranking: find the passage of a query among all of the batch; of scored pairs, cosine: "
        "squared error; cosent: the order of the scores",
    )
    temperature: float = setting(0.05, "ranking and cosent: divisor of the cosines")
    symmetric: bool = setting(True, "ranking: also find the query of a passage")
    dimensions: tuple[int, ...] = setting((), "first numbers of a vector to train too")
    evaluation: Literal["auto", "retrieval", "similarity"] = setting(
        "auto", "scores; auto: similarity for scored pairs, or else retrieval"
    )


# The subclass of `tasks.base.Task` of each kind, or "module:Class", imported when it is used.
_MODULE = "bert_jax.tasks"
TASKS: dict[str, Any] = {
    "classification": f"{_MODULE}.classification:Classification",
    "regression": f"{_MODULE}.classification:Regression",
    "multi_label_classification": f"{_MODULE}.multi_label:MultiLabelClassification",
    "token_classification": f"{_MODULE}.token_classification:TokenClassification",
    "question_answering": f"{_MODULE}.question_answering:QuestionAnswering",
    "multiple_choice": f"{_MODULE}.multiple_choice:MultipleChoice",
    "embedding": f"{_MODULE}.embedding:Embedding",
    "reranker": f"{_MODULE}.reranker:Reranker",
    "late_interaction": f"{_MODULE}.late_interaction:LateInteraction",
    "sparse": f"{_MODULE}.sparse:Sparse",
}

# Fields that version 0.2.0 wrote for a task of any kind.
_OF_EVERY_TASK = ("doc_stride", "max_question", "max_answer", "n_best", "with_unanswerable")
_OF_EVERY_TASK += ("null_threshold", "teacher", "embedding")


@dataclasses.dataclass(slots=True)
class TaskConfig:
    """What an encoder is fine-tuned for; a kind with settings of its own has a subclass.

    >>> TaskConfig(labels=("negative", "positive")).kind
    'classification'
    """

    variants: ClassVar[Variants] = Variants("kind", TASKS, dropped=_OF_EVERY_TASK)

    kind: str = setting("classification", f"kind of task: {', '.join(TASKS)}")
    glue: str = setting("", "one of GLUE's nine tasks by name: its columns, labels and metrics")
    labels: tuple[str, ...] = setting((), "labels by output; none: the head's, or the data's")
    metrics: tuple[str, ...] = setting((), "scores that choose the best checkpoint by their mean")
    stride: int = setting(0, "tokens from a window to the next; 0: half of one", NOT_NEGATIVE)
    window_confidence: float = setting(
        0.0,
        "probability of its class from which the first such window of a text decides alone, and "
        "not the mean of all; 1: always the mean; 0: tuned on held-out texts",
        SHARE_OR_ALL,
    )


@dataclasses.dataclass(slots=True)
class DataFiles:
    """A task's data: .tsv, .csv, .jsonl, .parquet, .conll, SQuAD's .json, or "tfds:NAME@SPLIT".

    >>> DataFiles(train="train.tsv", eval="dev.tsv").text
    'sentence'
    """

    train: str = setting("", "training examples")
    eval: str = setting("", "held-out examples, or NAME=FILE,NAME=FILE; none: part of train")
    test: str = _resumable("", "examples to predict, scored where they have labels")
    eval_fraction: float = setting(0.1, "share of the training examples held out", SHARE)
    text: str = setting("sentence", "column of the text; two of a pair, comma separated")
    label: str = setting("label", "column of the label")
    max_length: int = setting(128, "tokens of a text or a pair, at most; a text may be in windows")
    batch_size: int = setting(32, "examples a step, over all devices")


@dataclasses.dataclass(slots=True)
class FinetuneConfig:
    """A fine-tuning run.

    >>> FinetuneConfig(epochs=2.0).optimizer.learning_rate
    3e-05
    """

    seed: int = setting(0, "of a new head, data order and dropout", NOT_NEGATIVE)
    seeds: int = _resumable(1, "runs, with consecutive seeds")
    epochs: float = setting(3.0, "passes over the training examples")
    evaluations: int = setting(1, "evaluations an epoch")
    patience: int = setting(0, "evaluations without a gain that end a run; 0: none", NOT_NEGATIVE)
    log_every: int = _resumable(50, "steps between logs")
    log_to: tuple[Service, ...] = _resumable((), "also log to Weights & Biases: wandb")
    layer_decay: float = setting(1.0, "a layer's rate as a share of the next one's", POSITIVE_SHARE)
    probe: str = setting("", "freeze the encoder and train a head on a layer, by number, or a mix")
    new_head: bool = setting(False, "replace a head that the checkpoint has")
    compare: bool = _resumable(False, "also train from random weights and, for classes, TF-IDF")
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    data: DataFiles = dataclasses.field(default_factory=DataFiles)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=3e-5, warmup_fraction=0.1)
    )
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)

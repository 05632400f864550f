"""Refuse a config whose fields do not fit each other, in one line, before any long work.

Call `validate` before a config is used. The range of each field is beside it, in `config.py`.
"""

from bert_jax.config import (
    DataFiles,
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from bert_jax.config.fields import MODEL_TYPES
from bert_jax.config.schedule import Stage, make_schedule
from bert_jax.config.settings import check
from bert_jax.errors import UserError, nearest


def validate(config: TrainConfig) -> None:
    """Refuse a field of the wrong type, out of range, or that does not fit another."""
    check(config)
    model, data = config.model, config.data
    validate_model(model, "config")
    _validate_parallel(config.parallel)
    _validate_optimizer(config.optimizer)
    schedule = make_schedule(config)
    strips = not config.tokenizer.path and config.tokenizer.kind != "sentencepiece"
    if config.tokenizer.strip_accents and not strips:
        wrong = "tokenizer.strip_accents is for a wordpiece or byte_bpe that is trained"
        raise UserError(f"{wrong}; drop it, or train such a tokenizer")
    starts = [phase.start for phase in data.phases]
    steps = [start if start >= 1 else start * config.steps for start in starts]
    is_whole = all(start < 1 or start % 1 == 0 for start in starts)
    if not is_whole or steps != sorted(set(steps)) or not all(0 < s < config.steps for s in steps):
        wanted = f"they must rise, each a share between 0 and 1 or a step before {config.steps:,}"
        raise UserError(f"data.phases start at {starts}; {wanted}")
    if not data.eval_fraction and not data.eval_source:
        raise UserError("data.eval_fraction is 0; raise it, or give data.eval_source")
    needs = f"data.pairs {data.pairs} needs"
    if data.pairs != "none" and not MODEL_TYPES[model.model_type].has_nsp:
        lacks = f"a head that model.model_type {model.model_type} does not have"
        raise UserError(f"{needs} {lacks}; set data.pairs to none")
    if model.model_type == "electra":
        _validate_generator(model)
    if data.pairs != "none" and model.type_vocab_size < 2:
        raise UserError(f"{needs} a model.type_vocab_size of 2; set it, or data.pairs to none")
    if data.packing and data.pairs == "none":
        raise UserError("data.packing is for pairs; full blocks need none: set it to False")
    if (warmup := schedule.length_warmup) and warmup >= min([*steps, config.steps]):
        wrong = f"data.length_warmup_fraction {data.length_warmup_fraction} is {warmup:,} steps"
        raise UserError(f"{wrong}, and must end before the next phase and the run; lower it")
    for number, phase in enumerate(schedule.main_stages):
        where = f"data.phases[{number - 1}]" if number else "data"
        _validate_batches(where, phase, model, config.optimizer)
        if (
            number
            and data.phases[number - 1].global_rope_theta
            and model.position_embedding_type != "rotary"
        ):
            wrong = f"{where}.global_rope_theta is for rotary positions, and the model has"
            raise UserError(f"{wrong} {model.position_embedding_type} ones; leave it out")
        if phase.max_predictions > phase.max_length:
            wrong = f"{where}.max_predictions {phase.max_predictions} exceeds {where}.max_length"
            raise UserError(f"{wrong} {phase.max_length}; lower it, or set 0 for mask_fraction")


def _validate_generator(model: ModelConfig) -> None:
    share, every = model.generator_hidden_size, model.num_attention_heads
    heads = share * every
    # A third may be written as 0.333.
    if share and (round(heads) < 1 or abs(heads - round(heads)) > 0.01):
        wrong = f"model.generator_hidden_size {share} leaves {heads:.3g} of"
        advice = f"set it to a multiple of 1/{every}, such as {max(1, round(heads)) / every:.3g}"
        raise UserError(f"{wrong} model.num_attention_heads {every}; {advice}")


def validate_finetuning(config: FinetuneConfig) -> None:
    """Refuse what `validate` does in a fine-tuning run, whose model is its checkpoint's."""
    check(config)
    model, data, task = config.model, config.data, config.task
    validate_model(model, "config")
    _validate_parallel(config.parallel)
    _validate_optimizer(config.optimizer)
    _validate_batches("data", data, model, config.optimizer)
    if config.probe and config.layer_decay < 1:
        raise UserError("layer_decay does nothing with probe, which freezes all layers; leave one")
    layers = [str(layer) for layer in range(model.num_hidden_layers + 1)]
    if config.probe not in ("", "mix", *layers):
        values = f"it is 'mix', or a layer from 0 (the embeddings) to {layers[-1]}"
        raise UserError(f"probe is {config.probe!r}; {values}, or empty to train the encoder too")
    if len(set(task.labels)) < len(task.labels):
        raise UserError(f"task.labels has one twice: {', '.join(task.labels)}")
    if task.kind == "question_answering" and task.max_question > data.max_length // 2:
        wrong = f"task.max_question {task.max_question} leaves too little for the context of"
        raise UserError(f"{wrong} data.max_length {data.max_length}; lower one or raise the other")
    if task.kind == "embedding":
        _validate_embedding(config)


def _validate_embedding(config: FinetuneConfig) -> None:
    model, embedding = config.model, config.task.embedding
    width = embedding.dense or model.hidden_size
    if not all(0 < size <= width for size in embedding.dimensions):
        wrong = f"task.embedding.dimensions has {', '.join(map(str, embedding.dimensions))}"
        raise UserError(f"{wrong}, and a vector has {width} numbers; give some from 1 to {width}")
    if config.probe:
        raise UserError(f"probe is {config.probe!r}, and embeddings have no head; leave it empty")
    if embedding.loss != "cosine" and config.data.batch_size < 2:
        wrong = f"task.embedding.loss {embedding.loss} compares the examples of a batch"
        raise UserError(f"{wrong}, and data.batch_size is 1; raise it")
    has_dropout = model.hidden_dropout_prob or model.attention_probs_dropout_prob
    if embedding.pairs == "same" and not has_dropout:
        wrong = "task.embedding.pairs same needs dropout, and the model has none"
        raise UserError(f"{wrong}; set --config.model.hidden_dropout_prob=0.1")
    if embedding.pairs != "columns" and embedding.loss != "ranking":
        wrong = f"task.embedding.pairs {embedding.pairs} has no scores for loss {embedding.loss}"
        raise UserError(f"{wrong}; use ranking")


def validate_model(config: ModelConfig, where: str) -> None:
    """Refuse what `validate` does in a model; the message begins with `where`."""
    check(config, f"{where}: model.")
    if config.model_type not in MODEL_TYPES:
        every = f"choose one of {', '.join(MODEL_TYPES)}, or import the file of your own"
        hint = nearest(config.model_type, [*MODEL_TYPES], every)
        raise UserError(f"{where}: model.model_type is {config.model_type!r}; {hint}")
    if config.hidden_size % config.num_attention_heads:
        wrong = f"{where}: model.hidden_size {config.hidden_size} is not a multiple of"
        heads = f"model.num_attention_heads {config.num_attention_heads}"
        raise UserError(f"{wrong} {heads}; change one of them")
    if config.embedding_size and not MODEL_TYPES[config.model_type].has_embedding_size:
        wrong = f"{where}: model.embedding_size is {config.embedding_size}, and a model.model_type"
        raise UserError(f"{wrong} {config.model_type} projects no embeddings; set it to 0")
    positions = MODEL_TYPES[config.model_type].positions
    head_size = config.hidden_size // config.num_attention_heads
    if config.position_embedding_type == "rotary" and head_size % 2:
        wrong = f"{where}: rotary positions need heads of an even size, not of {head_size}"
        raise UserError(f"{wrong}; change model.hidden_size or model.num_attention_heads")
    if MODEL_TYPES[config.model_type].has_windows and config.local_attention % 2:
        wrong = f"{where}: model.local_attention {config.local_attention} is odd"
        raise UserError(f"{wrong}; make it even, as half of it is on either side of a token")
    if config.position_embedding_type not in positions:
        raise UserError(
            f"{where}: a {config.model_type} has no {config.position_embedding_type} positions; "
            f"set model.position_embedding_type to {' or '.join(positions)}"
        )


def _validate_parallel(config: ParallelConfig) -> None:
    if (config.data, config.fsdp, config.tensor).count(-1) > 1:
        raise UserError("two axes of parallel are -1, and one alone can be the rest; set the other")
    if config.mode == "pmap" and (config.fsdp, config.tensor) != (1, 1):
        advice = "set parallel.fsdp and parallel.tensor to 1, or parallel.mode to mesh"
        raise UserError(f"parallel.mode pmap keeps all parameters on each device; {advice}")


def _validate_optimizer(config: OptimizerConfig) -> None:
    if config.schedule != "wsd" and config.decay_fraction != OptimizerConfig().decay_fraction:
        wrong = f"optimizer.decay_fraction does nothing with optimizer.schedule {config.schedule}"
        raise UserError(f"{wrong}; set the schedule to wsd, or leave decay_fraction out")


def _validate_batches(
    where: str, batches: Stage | DataFiles, model: ModelConfig, optimizer: OptimizerConfig
) -> None:
    length, batch_size = batches.max_length, batches.batch_size
    if length > model.max_position_embeddings:
        limit = f"model.max_position_embeddings {model.max_position_embeddings}"
        raise UserError(f"{where}.max_length {length} exceeds {limit}; lower it or raise the other")
    if length < 8:
        raise UserError(f"{where}.max_length {length} leaves no room for text; use at least 8")
    if batch_size % optimizer.microbatches:
        wrong = f"{where}.batch_size {batch_size} is not a multiple of optimizer.microbatches"
        raise UserError(f"{wrong} {optimizer.microbatches}; change one of them")

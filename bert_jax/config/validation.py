"""Refuse a config whose fields do not fit each other, in one line, before any long work.

Call `validate` before a config is used. A rule is a call of `refuse`: the condition, what is wrong,
and the remedy. The rules of a function are checked in their order, and may rely on earlier ones.
The range of each field is beside it, in `fields.py`.
"""

from bert_jax.config import (
    DataFiles,
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TokenizerConfig,
    TrainConfig,
)
from bert_jax.config.fields import MODEL_TYPES, POSITIONS, TASKS
from bert_jax.config.ranges import LIMIT
from bert_jax.config.schedule import Stage, make_schedule, share_of_steps
from bert_jax.config.settings import check, look_up, resolve
from bert_jax.errors import UserError, refuse


def validate(config: TrainConfig) -> None:
    """Refuse a field of the wrong type, out of range, or that does not fit another."""
    check(config)
    model, data = config.model, config.data
    validate_model(model, "config")
    _validate_parallel(config.parallel)
    _validate_optimizer(config.optimizer, max_rates=1)
    schedule = make_schedule(config)
    _validate_tokenizer(config.tokenizer)
    starts = [phase.start for phase in data.phases]
    steps = [share_of_steps(start, config.steps) for start in starts]
    refuse(
        steps != sorted(set(steps)) or not all(0 < step < config.steps for step in steps),
        f"data.phases start at {starts}",
        fix="they must rise by a step or more, each a share between 0 and 1 or a step before "
        f"{config.steps:,}, and leave a step to the last",
    )
    refuse(
        not data.eval_fraction and not data.eval_source,
        "data.eval_fraction is 0",
        fix="raise it, or give data.eval_source",
    )
    refuse(
        data.packing and data.pairs == "none",
        "data.packing is for pairs",
        fix="full blocks need none: set it to False",
    )
    warmup = schedule.length_warmup
    refuse(
        warmup and warmup >= min([*steps, config.steps]),
        f"data.length_warmup_fraction {data.length_warmup_fraction} is {warmup:,} steps, and must "
        "end before the next phase and the run",
        fix="lower it, or raise steps in a run that has begun with it",
    )
    for number, phase in enumerate(schedule.main_stages):
        where = f"data.phases[{number - 1}]" if number else "data"
        _validate_length(where, phase.max_length, model)
        _validate_batches(where, phase, config.optimizer)
        refuse(
            phase.global_rope_theta and not hasattr(model, "global_rope_theta"),
            f"{where}.global_rope_theta is for rotary positions, and the model has "
            f"{model.position_embedding_type} ones",
            fix="leave it out",
        )
        refuse(
            phase.max_predictions > phase.max_length,
            f"{where}.max_predictions {phase.max_predictions} exceeds {where}.max_length "
            f"{phase.max_length}",
            fix="lower it, or set it to 0: as many as mask_fraction asks for",
        )


def validate_finetuning(config: FinetuneConfig) -> None:
    """Refuse what `validate` does in a fine-tuning run, whose model is its checkpoint's."""
    check(config)
    refuse(
        config.seed + config.seeds > LIMIT,
        f"seed + seeds is {config.seed + config.seeds}, and the last seed is below 2**32",
        fix="lower seed",
    )
    model, data = config.model, config.data
    validate_model(model, "config")
    _validate_parallel(config.parallel)
    _validate_optimizer(config.optimizer)
    task = resolve(TASKS, config.task.kind)
    if not task.has_windows:
        _validate_length("data", data.max_length, model)
    _validate_batches("data", data, config.optimizer)
    refuse(
        config.probe and config.layer_decay < 1,
        "layer_decay does nothing with probe, which freezes all layers",
        fix="leave one",
    )
    refuse_probe(config.probe, model)
    task.check(config)


def refuse_probe(probe: str, model: ModelConfig) -> None:
    """Refuse the probe of a layer that a model does not have."""
    layers = [str(layer) for layer in range(model.num_hidden_layers + 1)]
    refuse(
        probe not in ("", "mix", *layers),
        f"probe is {probe!r}",
        fix=f"it is 'mix', or a layer from 0 (the embeddings) to {layers[-1]}, or empty to train "
        "the encoder too",
    )


def validate_model(config: ModelConfig, where: str) -> None:
    """Refuse what `validate` does in a model; the message begins with `where`."""
    check(config, f"{where}: model.")
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"{where}: model.hidden_size {config.hidden_size} is not a multiple of "
            f"model.num_attention_heads {config.num_attention_heads}; change one of them"
        )
    refuse(
        config.pair_token_types > config.type_vocab_size,
        f"{where}: model.pair_token_types is 2, and model.type_vocab_size is 1",
        fix="set the one to 0, or the other to 2",
    )
    _validate_positions(config, where)
    resolve(MODEL_TYPES, config.model_type).check(config, where)


def _validate_positions(config: ModelConfig, where: str) -> None:
    """Refuse a kind of position that is none, or that the architecture does not take."""
    kind, rotates = config.position_embedding_type, resolve(MODEL_TYPES, config.model_type).rotates
    positions = look_up(POSITIONS, kind, f"{where}: model.position_embedding_type")
    if positions.rotates != rotates:
        others = [name for name in POSITIONS if resolve(POSITIONS, name).rotates == rotates]
        raise UserError(
            f"{where}: a {config.model_type} has no {kind} positions; "
            f"set model.position_embedding_type to {' or '.join(others)}"
        )
    head_size = config.hidden_size // config.num_attention_heads
    if rotates and head_size % 2:
        raise UserError(
            f"{where}: rotary positions need heads of an even size, not of {head_size}; "
            "change model.hidden_size or model.num_attention_heads"
        )


def _validate_parallel(config: ParallelConfig) -> None:
    refuse(
        (config.data, config.fsdp, config.tensor).count(-1) > 1,
        "several axes of parallel are -1, and only one can be what the others leave",
        fix="set the others",
    )
    refuse(
        config.mode == "pmap" and (config.fsdp, config.tensor) != (1, 1),
        "parallel.mode pmap keeps all parameters on each device",
        fix="set parallel.fsdp and parallel.tensor to 1, or parallel.mode to mesh",
    )


def _validate_tokenizer(config: TokenizerConfig) -> None:
    refuse(
        config.strip_accents and (config.path or config.kind == "sentencepiece"),
        "tokenizer.strip_accents is for a wordpiece or byte_bpe that is trained",
        fix="drop it, or train such a tokenizer",
    )
    refuse(
        config.model_type != TokenizerConfig().model_type and config.kind != "sentencepiece",
        f"tokenizer.model_type {config.model_type} is of SentencePiece, and tokenizer.kind is "
        f"{config.kind}",
        fix=f"set it to {TokenizerConfig().model_type}, which is the default, or change the kind",
    )


def _validate_optimizer(config: OptimizerConfig, *, max_rates: int | None = None) -> None:
    refuse(
        max_rates and len(config.learning_rates) > max_rates,
        "optimizer.learning_rate has several rates, which only fine-tuning tries",
        fix="give one",
    )
    refuse(
        config.schedule != "wsd" and config.decay_fraction != OptimizerConfig().decay_fraction,
        f"optimizer.decay_fraction does nothing with optimizer.schedule {config.schedule}",
        fix=f"set the schedule to wsd, or decay_fraction to {OptimizerConfig().decay_fraction}, "
        "which is the default",
    )


def _validate_length(where: str, length: int, model: ModelConfig) -> None:
    refuse(
        length > model.max_position_embeddings,
        f"{where}.max_length {length} exceeds model.max_position_embeddings "
        f"{model.max_position_embeddings}",
        fix="lower it or raise the other",
    )


def _validate_batches(where: str, batches: Stage | DataFiles, optimizer: OptimizerConfig) -> None:
    length, batch_size = batches.max_length, batches.batch_size
    refuse(
        length < 8,
        f"{where}.max_length {length} leaves no room for text",
        fix="use at least 8",
    )
    refuse(
        batch_size % optimizer.microbatches,
        f"{where}.batch_size {batch_size} is not a multiple of optimizer.microbatches "
        f"{optimizer.microbatches}",
        fix="change one of them",
    )

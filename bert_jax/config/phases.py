"""When a run does what: the phases, learning rates and schedule that follow from its settings."""

import dataclasses

from bert_jax.config import DataConfig, OptimizerConfig, Phase, TrainConfig
from bert_jax.errors import UserError

# Of a length warm-up: a BERT learns from neighboring tokens soonest at 16, and keeps it at four
# times the length, but hardly at eight times (docs/encoders.md).
_SHORTEST, _GROWTH = 16, 4


def default_predictions(max_length: int, mask_fraction: float) -> int:
    """Return the masked positions of a sequence: 20 at length 128 and 77 at 512, for 15%."""
    return max(1, -int(-max_length * mask_fraction // 1))


def phases(config: TrainConfig) -> list[tuple[int, Phase]]:
    """Return each phase with its first step: of the length warm-up, of `data` itself, the later."""
    data, warmup = config.data, length_warmup(config)
    whole = Phase(float(warmup), data.max_length, data.batch_size, data.max_predictions)
    result = []
    for phase in (*_warmup_phases(data, warmup), whole, *data.phases):
        share = phase.mask_fraction or data.mask_fraction
        most = phase.max_predictions or default_predictions(phase.max_length, share)
        theta = phase.global_rope_theta or config.model.global_rope_theta
        resolved = dataclasses.replace(
            phase,
            max_predictions=most,
            mask_fraction=share,
            global_rope_theta=theta,
            learning_rate=phase.learning_rate or config.optimizer.learning_rate,
        )
        result.append((share_of_steps(phase.start, config.steps), resolved))
    return result


def main_phases(config: TrainConfig) -> list[tuple[int, Phase]]:
    """Return the phases without those of the length warm-up."""
    return phases(config)[-1 - len(config.data.phases) :]


def length_warmup(config: TrainConfig) -> int:
    """Return the number of steps with shorter sequences, at the beginning."""
    share = config.data.length_warmup_fraction
    if config.data.max_length <= _SHORTEST:
        return 0
    return min(round(share * config.steps), config.steps - 1) if share < 1 else int(share)


def _warmup_phases(data: DataConfig, steps: int) -> list[Phase]:
    """Return the phases of a length warm-up, of about as many tokens a step.

    Source of the idea: Press et al. 2021, section 3, and Li et al. 2022, section 4.
    """
    lengths, length = [], _SHORTEST
    while steps and length < data.max_length:
        lengths.append(length)
        length *= _GROWTH
    return [
        Phase(
            float(index * steps // len(lengths)),
            length,
            data.max_length // length * data.batch_size,
        )
        for index, length in enumerate(lengths)
    ]


def peaks(config: TrainConfig) -> list[tuple[int, float]]:
    """Return the learning rates of phases that have another than the one before, by first step."""
    result, before = [], config.optimizer.learning_rate
    for first, phase in phases(config):
        if phase.learning_rate != before:
            result.append((first, before := phase.learning_rate))
    return result


def as_of_step(config: TrainConfig, step: int) -> TrainConfig:
    """Return the config whose model has the rotary base with which a step was trained.

    It is that of a checkpoint of the step. Its later phases name theirs, as a fork needs them.
    """
    if not any(phase.global_rope_theta for phase in config.data.phases):
        return config
    count = len(config.data.phases)
    thetas = [(first, phase.global_rope_theta) for first, phase in phases(config)]
    later = (
        dataclasses.replace(phase, global_rope_theta=theta)
        for phase, (_, theta) in zip(config.data.phases, thetas[-count:], strict=True)
    )
    theta = next(theta for first, theta in reversed(thetas) if first < max(step, 1))
    model = dataclasses.replace(config.model, global_rope_theta=theta)
    data = dataclasses.replace(config.data, phases=tuple(later))
    return dataclasses.replace(config, model=model, data=data)


def share_of_steps(share: float, steps: int) -> int:
    """Return a number of steps that is a share of all below 1, and itself from 1 on."""
    return round(share * steps) if share < 1 else int(share)


def warmup_and_decay(config: OptimizerConfig, steps: int) -> tuple[int, int]:
    """Return how many steps warm up, and how many of "wsd" decay; refuse more than there are."""
    warmup = share_of_steps(config.warmup_fraction, steps)
    decay = share_of_steps(config.decay_fraction, steps) if config.schedule == "wsd" else 0
    if warmup + decay > steps + 1:  # of two shares, each is rounded
        taken = f"optimizer.warmup_fraction is {warmup:,}"
        if decay:
            taken += f" and optimizer.decay_fraction {decay:,}"
        raise UserError(f"{taken} of a run of {steps:,} steps; lower them, or train for more steps")
    return warmup, min(decay, steps - warmup)

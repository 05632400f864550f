"""The schedule of a run: what is done at which step, computed once from the settings.

The settings are what the user wrote, such as a share of all steps; a schedule is what will be done.
"""

import dataclasses
from collections.abc import Collection, Sequence

from bert_jax.config.fields import DataConfig, OptimizerConfig, TrainConfig
from bert_jax.errors import UserError

# Of a length warm-up: a BERT learns from neighboring tokens soonest at 16, and keeps it at four
# times the length, but hardly at eight times (docs/encoders.md).
_SHORTEST, _GROWTH = 16, 4


@dataclasses.dataclass(frozen=True)
class RateSchedule:
    """The learning rate of a run: it rises in the warm-up, then follows `kind`.

    Attributes:
      kind: "linear", "cosine", "constant" or "wsd", as `OptimizerConfig.schedule`.
      steps: the steps of the run.
      warmup: the number of first steps, in which the rate rises.
      decay: of "wsd", the number of last steps, in which it falls.
      peaks: the highest rates, each with the first step that has it; the first one is of step 0.
    """

    kind: str
    steps: int
    warmup: int
    decay: int
    peaks: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps that have sequences of one length and batches of one size.

    Attributes:
      max_length: tokens of a sequence.
      batch_size: sequences of a step, over all devices.
      max_predictions: masked positions of a sequence, at most.
      mask_fraction: the share of tokens to predict.
      learning_rate: the rate, of which the schedule leaves a share.
      global_rope_theta: the rotary base of global layers; 0 for a model without.
      first_step: the number of steps before it.
      end: the number of steps at its end.
    """

    max_length: int
    batch_size: int
    max_predictions: int = 0
    mask_fraction: float = 0.0
    learning_rate: float = 0.0
    global_rope_theta: float = 0.0
    first_step: int = 0
    end: int = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a pretraining run does at which step.

    Attributes:
      steps: the steps of the run.
      warmup_stages: those of the length warm-up, with shorter sequences.
      main_stages: that of the sequences of `data` itself, and its later phases.
      rate: the learning rate.

    >>> schedule = make_schedule(TrainConfig(steps=1000))
    >>> [(stage.max_length, stage.first_step, stage.end) for stage in schedule.stages]
    [(128, 0, 1000)]
    """

    steps: int
    warmup_stages: tuple[Stage, ...]
    main_stages: tuple[Stage, ...]
    rate: RateSchedule

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, in their order."""
        return (*self.warmup_stages, *self.main_stages)

    @property
    def length_warmup(self) -> int:
        """The number of steps with shorter sequences, at the beginning."""
        return self.main_stages[0].first_step

    @property
    def largest(self) -> Stage:
        """The stage whose batches have most tokens."""
        return max(self.stages, key=lambda stage: stage.batch_size * stage.max_length)

    def stage_of(self, step: int) -> Stage:
        """Return the stage of a step, of which 1 is the first."""
        return next(x for x in reversed(self.stages) if x.first_step < max(step, 1))

    def until(self, step: int) -> list[Stage]:
        """Return the stages of the first steps, and of at least one; the last one ends there."""
        step = max(step, 1)
        begun = [stage for stage in self.stages if stage.first_step < step]
        return [dataclasses.replace(stage, end=min(stage.end, step)) for stage in begun]


def make_schedule(config: TrainConfig) -> Schedule:
    """Return the schedule that follows from the settings of a run.

    Raises:
      UserError: the learning rate's warm-up and decay take more steps than there are.
    """
    data, steps, warmup = config.data, config.steps, _length_warmup(config)
    stages = _warmup_stages(data, warmup)
    num_warmup = len(stages)
    stages.append(Stage(data.max_length, data.batch_size, data.max_predictions, first_step=warmup))
    for phase in data.phases:
        fields = dataclasses.asdict(phase)
        first_step = share_of_steps(fields.pop("start"), steps)
        stages.append(Stage(**fields, first_step=first_step))
    ends = [*(stage.first_step for stage in stages[1:]), steps]
    resolved = [_resolve(config, stage, end) for stage, end in zip(stages, ends, strict=True)]
    peaks = [(stage.first_step, stage.learning_rate) for stage in resolved[1:]]
    rate = make_rate_schedule(config.optimizer, steps, peaks)
    return Schedule(steps, tuple(resolved[:num_warmup]), tuple(resolved[num_warmup:]), rate)


def _resolve(config: TrainConfig, stage: Stage, end: int) -> Stage:
    """Return a stage with the values of the run for all that it has none of its own for."""
    share = stage.mask_fraction or config.data.mask_fraction
    length = stage.max_length or config.data.max_length
    return dataclasses.replace(
        stage,
        max_length=length,
        batch_size=stage.batch_size or config.data.batch_size,
        max_predictions=stage.max_predictions or default_predictions(length, share),
        mask_fraction=share,
        learning_rate=stage.learning_rate or config.optimizer.learning_rates[0],
        global_rope_theta=stage.global_rope_theta
        or getattr(config.model, "global_rope_theta", 0.0),
        end=end,
    )


def default_predictions(max_length: int, mask_fraction: float) -> int:
    """Return room for the masked positions of a sequence: 20 at length 128, 77 at 512, for 15%."""
    return max(1, -int(-max_length * mask_fraction // 1))


def _length_warmup(config: TrainConfig) -> int:
    """Return the number of steps with shorter sequences, at the beginning."""
    share = config.data.length_warmup_fraction
    if config.data.max_length <= _SHORTEST:
        return 0
    return min(round(share * config.steps), config.steps - 1) if share < 1 else int(share)


def _warmup_stages(data: DataConfig, steps: int) -> list[Stage]:
    """Return the stages of a length warm-up, of about as many tokens a step.

    Source of the idea: Press et al. 2021, section 3, and Li et al. 2022, section 4.
    """
    lengths, length = [], _SHORTEST
    while steps and length < data.max_length:
        lengths.append(length)
        length *= _GROWTH
    return [
        Stage(
            max_length=length,
            batch_size=round(data.max_length / length) * data.batch_size,
            max_predictions=min(
                data.max_predictions, default_predictions(length, data.mask_fraction)
            ),
            first_step=index * steps // len(lengths),
        )
        for index, length in enumerate(lengths)
    ]


def make_rate_schedule(
    config: OptimizerConfig, steps: int, later_peaks: Sequence[tuple[int, float]] = ()
) -> RateSchedule:
    """Return the schedule of the learning rate; `later_peaks` replace it from their steps on.

    Raises:
      UserError: warm-up and decay take more steps than there are.
    """
    warmup = share_of_steps(config.warmup_fraction, steps)
    decay = share_of_steps(config.decay_fraction, steps) if config.schedule == "wsd" else 0
    # Of two shares, each is rounded.
    if warmup > steps or warmup + decay > steps + 1:
        and_decay = f" and optimizer.decay_fraction {decay:,}" if decay else ""
        raise UserError(
            f"optimizer.warmup_fraction is {warmup:,}{and_decay} of a run of {steps:,} steps; "
            "train for more steps, or lower them in a new run"
        )
    peaks = [(0, config.learning_rates[0])]
    for first_step, peak in later_peaks:
        if peak != peaks[-1][1]:
            peaks.append((first_step, peak))
    return RateSchedule(config.schedule, steps, warmup, min(decay, steps - warmup), tuple(peaks))


def share_of_steps(share: float, steps: int) -> int:
    """Return a number of steps that is a share of all below 1, and itself from 1 on."""
    return round(share * steps) if share < 1 else int(share)


def config_of_step(config: TrainConfig, schedule: Schedule, step: int) -> TrainConfig:
    """Return the config whose model has the rotary base with which a step was trained.

    It is that of a checkpoint of the step. Its later phases name theirs, as a fork needs them.
    """
    if not any(phase.global_rope_theta for phase in config.data.phases):
        return config
    phases = tuple(
        dataclasses.replace(phase, global_rope_theta=stage.global_rope_theta)
        for phase, stage in zip(config.data.phases, schedule.main_stages[1:], strict=True)
    )
    theta = schedule.stage_of(step).global_rope_theta
    model = dataclasses.replace(config.model, **{"global_rope_theta": theta})
    return dataclasses.replace(
        config, model=model, data=dataclasses.replace(config.data, phases=phases)
    )


def keep_begun_stages(
    config: TrainConfig, saved: TrainConfig, done: int, *, set_anew: Collection[str] = ()
) -> None:
    """Set the first steps of stages that have begun, and the length warm-up, to those of a run.

    A share of another number of steps would begin at another step, so the step at which a stage
    has begun is kept. A start that `config` sets anew stays.

    Args:
      config: of the run that continues.
      saved: the config that the first steps were done with.
      done: the number of those steps.
      set_anew: the dotted names of fields whose shares, if they differ, were set by the user.
    """
    before, now = make_schedule(saved), make_schedule(config)
    config.data.length_warmup_fraction = _kept_start(
        config.data.length_warmup_fraction,
        saved.data.length_warmup_fraction,
        first_steps=(before.length_warmup, now.length_warmup),
        is_set_anew="data.length_warmup_fraction" in set_anew,
    )
    phases = list(config.data.phases)
    stages = zip(before.main_stages[1:], now.main_stages[1:], strict=False)
    for index, (was, stage) in enumerate(stages):
        if was.first_step < max(done, 1):  # it has begun
            start = _kept_start(
                phases[index].start,
                saved.data.phases[index].start,
                first_steps=(was.first_step, stage.first_step),
                is_set_anew="data.phases" in set_anew,
            )
            phases[index] = dataclasses.replace(phases[index], start=start)
    config.data.phases = tuple(phases)


def _kept_start(
    start: float, saved: float, *, first_steps: tuple[int, int], is_set_anew: bool
) -> float:
    """Return a share of the steps, or its first step before if it is another one now.

    A share that is not the saved one was set anew. Where a number of steps has become of that,
    `is_set_anew` decides.
    """
    before, now = first_steps
    is_same = 0 < start < 1 and (start == saved or (saved >= 1 and not is_set_anew))
    return float(before) if is_same and now != before else start

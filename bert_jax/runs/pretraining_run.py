"""A pretraining run that is ready to train."""

import dataclasses
from collections.abc import Callable

from bert_jax.config import TrainConfig
from bert_jax.config.schedule import Schedule, config_of_step
from bert_jax.objectives import Pretraining
from bert_jax.runs.origin import Origin
from bert_jax.runs.workdir import Workdir
from bert_jax.storage.paths import AnyPath
from bert_jax.text.store import Corpus
from bert_jax.training.setup import Setup
from bert_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to train: its config, resolved and valid, and its text."""

    config: TrainConfig
    has_open_vocabulary: bool  # whether its size was 0, for that of the tokenizer
    schedule: Schedule
    workdir: Workdir[TrainConfig]
    origin: Origin
    init_name: str  # as it was typed
    recipe: str  # its name, or ""
    corpus: Corpus
    objective: Pretraining
    setup: Setup
    new_state: Callable[[], TrainState]

    @property
    def last_checkpoint(self) -> AnyPath:
        """The checkpoint of the last step, which is there when the run has ended."""
        return self.workdir.checkpoints / str(self.config.steps)

    def config_at(self, step: int) -> TrainConfig:
        """Return the config of the checkpoint of a step."""
        return config_of_step(self.config, self.schedule, step)

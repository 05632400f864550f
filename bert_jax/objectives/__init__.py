"""Objectives, one file each. One for pretraining is a new file, and an entry of OBJECTIVES."""

from collections.abc import Mapping

from flax import linen as nn

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.objectives.base import Pretraining
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.replaced_tokens import ReplacedTokens
from bert_jax.objectives.sentence_pairs import SentencePairs

# By the name in `TrainConfig.objective`. Of "auto" the last one that is the default of a config, so
# that one of the user's own is asked before those of the package.
OBJECTIVES: dict[str, type[Pretraining]] = {
    "masked_lm": MaskedLM,
    "sentence_pairs": SentencePairs,
    "replaced_tokens": ReplacedTokens,
}
_OF_THE_PACKAGE = dict(OBJECTIVES)


def objective_name(config: TrainConfig) -> str:
    """Return the name of the objective that a config names, or that is its default."""
    if config.objective == "auto":
        return _default(OBJECTIVES, config)
    if config.objective not in OBJECTIVES:
        raise UserError(
            f"objective is {config.objective!r}; choose auto or one of {', '.join(OBJECTIVES)}, or "
            "import the file of your own"
        )
    return config.objective


def _default(objectives: Mapping[str, type[Pretraining]], config: TrainConfig) -> str:
    return next(name for name in reversed([*objectives]) if objectives[name].is_default(config))


def make_objective(config: TrainConfig) -> Pretraining:
    """Return the objective of a pretraining run; refuse a config that it cannot train."""
    kind = OBJECTIVES[objective_name(config)]
    kind.check(config)
    return kind(kind.make_model(config), config)


def pretraining_model(config: ModelConfig, *, pairs: bool, objective: str = "") -> nn.Module:
    """Return an encoder with the heads that it is pretrained with, on pairs of texts or without.

    They are those of an objective of the user's own, if `objective` names one that is known.
    """
    run = TrainConfig(model=config)
    if not pairs:
        run.data.pairs = "none"
    if objective not in OBJECTIVES.keys() - _OF_THE_PACKAGE.keys():
        objective = _default(_OF_THE_PACKAGE, run)
    return OBJECTIVES[objective].make_model(run)

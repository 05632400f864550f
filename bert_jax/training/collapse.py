"""Warn of a run that learns nothing from the context of masked tokens."""

from collections.abc import Callable, Mapping

from bert_jax.config import TrainConfig

_PATIENCE = 1000  # steps in which a sound run has left the unigram entropy
_LEAD = 0.1  # nats below it, many times the noise of a log
# A collapsed run was seen at 1 to eight digits, sound ones below 0.4. Others' encoders reach 0.99.
_ALIKE = 0.9999


def watch(
    config: TrainConfig, warmup: int, baselines: Mapping[str, float]
) -> Callable[[int, Mapping[str, float]], str]:
    """Return a function of a step and the means logged or evaluated there: a warning, or "".

    It warns once, of hidden states that have become alike, or of an MLM loss that after `warmup`
    steps is that of tokens guessed by their frequency.
    """
    has_warned = False

    def warning(step: int, values: Mapping[str, float]) -> str:
        nonlocal has_warned
        similarity, loss = values.get("hidden_similarity", 0.0), values["mlm_loss"]
        if has_warned:
            return ""
        if similarity > _ALIKE:
            wrong = f"the hidden states of all tokens are alike (their cosine is {similarity:.4f})"
        elif step >= max(warmup, _PATIENCE) and loss > baselines["mlm_loss"] - _LEAD:
            guess = f"guessing tokens by their frequency ({baselines['mlm_loss']:.2f})"
            wrong = f"the MLM loss of {loss:.2f} is no better than {guess}"
        else:
            return ""
        has_warned = True
        return (
            f"at step {step:,} {wrong}, and such a run seldom recovers; begin another one with "
            f"{' or '.join(_remedies(config))}"
        )

    return warning


def _remedies(config: TrainConfig) -> list[str]:
    optimizer = config.optimizer
    remedies = [f"optimizer.learning_rate below {optimizer.learning_rate:g}"]
    if optimizer.name == "bert_adamw":
        remedies.append("optimizer.name adamw, which corrects Adam's bias")
    if config.model.model_type == "bert":
        remedies.append("--config=small, whose layers normalize what they read")
    return remedies

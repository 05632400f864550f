"""The interface of a pretraining objective, and what several of them compute."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from bert_jax.batches.packing import PairStatistics
from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.config.schedule import Stage
from bert_jax.distributed import mesh as meshes
from bert_jax.models.architecture import architecture
from bert_jax.objectives.masking import Masking, make_masking
from bert_jax.text.store import Corpus
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.objective import Objective, WeightedSum

_PATIENCE = 1000  # steps in which a sound run has left the baseline of its loss
_LEAD = 0.1  # nats below the baseline, many times the noise of a log
# A collapsed run was seen at 1 to eight digits, sound ones below 0.4. Others' encoders reach 0.99.
_ALIKE = 0.9999


@dataclasses.dataclass(frozen=True, eq=False)
class Pretraining(Objective):
    """What an encoder is pretrained by: its heads, what it draws, its loss and what it reports.

    Beside the methods below, an objective has the `figures`, `weights`, `loss` and `prepare` of
    `training.objective.Objective`. The first of its figures is its main loss.

    Attributes:
      config: of the run.
      masking: the choice of tokens to predict in the sequences of a stage; None before `in_stage`.
    """

    config: TrainConfig
    masking: Masking | None = None

    @classmethod
    def is_default(cls, config: TrainConfig) -> bool:
        """Return whether a config whose `objective` is "auto" is trained by this one."""
        return False

    @classmethod
    @abc.abstractmethod
    def make_model(cls, config: TrainConfig) -> nn.Module:
        """Return the encoder with the heads of the objective; it has `init_params(key)`."""

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Refuse a config that the objective cannot train."""

    def check_mesh(self, mesh: Mesh, stages: Sequence[Stage]) -> None:
        """Refuse encoders or batches that a mesh does not divide, and lengths of no attention."""
        config, lengths = self.config, [stage.max_length for stage in stages]
        for name, encoder in self.encoders.items():
            owner = "model." if name == "model" else f"the {name}'s "
            meshes.check_model(encoder, mesh, lengths, packed=config.data.packing, owner=owner)
        for stage in stages:
            meshes.check_divides(stage.batch_size, config.optimizer.microbatches, mesh)

    def in_stage(self, stage: Stage, tokenizer: Tokenizer) -> Self:
        """Return the objective for the sequences of a stage of the run."""
        theta = {"global_rope_theta": stage.global_rope_theta} if stage.global_rope_theta else {}
        model = dataclasses.replace(self.config.model, **theta)
        return dataclasses.replace(
            self,
            model=self.make_model(dataclasses.replace(self.config, model=model)),
            masking=make_masking(tokenizer, stage, self.config.data),
        )

    @property
    def encoders(self) -> Mapping[str, ModelConfig]:
        """The encoders that a step runs, by name; "model" is the one that a run is for."""
        return {"model": self.config.model}

    def head_flops(self, stage: Stage) -> float:
        """Return the operations of the heads for a sequence, forward and backward."""
        return 0.0

    def check_text(self, corpus: Corpus) -> None:
        """Refuse a text that has nothing to learn from."""

    def text_warnings(self, corpus: Corpus, statistics: Mapping[int, PairStatistics]) -> list[str]:
        """Return why a text teaches little, by the statistics of its pairs at each length."""
        return []

    def baselines(self, corpus: Corpus, stage: Stage) -> dict[str, float]:
        """Return the baselines of the figures on held-out sequences of a stage."""
        return {}

    def moving_baselines(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the baselines that depend on the model, by the scores of an evaluation."""
        return {}

    def warning(
        self,
        step: int,
        values: Mapping[str, float],
        baselines: Mapping[str, float],
        warmup: int,
    ) -> str:
        """Return why a run with these logged or evaluated means learns nothing, or "".

        The loss is compared with its baseline after the `warmup` of the learning rate, and 1,000
        steps at least.
        """
        similarity = values.get("hidden_similarity", 0.0)
        if similarity > _ALIKE:
            return self._sentence(
                step,
                f"the hidden states of all tokens are alike (their cosine is {similarity:.4f})",
            )
        for figure in self.figures[:1]:
            loss, baseline = values.get(figure.name), baselines.get(figure.name)
            if loss is None or baseline is None or step < max(warmup, _PATIENCE):
                continue
            if loss > baseline - _LEAD:
                how = "no" if loss >= baseline else "hardly"
                reached = f"the {figure.title} of {loss:.2f} is {how} better than its baseline"
                return self._sentence(step, f"{reached}, the {figure.baseline} ({baseline:.2f})")
        return ""

    def _sentence(self, step: int, seen: str) -> str:
        optimizer = self.config.optimizer
        remedies = [f"optimizer.learning_rate below {optimizer.learning_rates[0]:g}"]
        if optimizer.name == "bert_adamw":
            remedies.append("optimizer.name adamw, which corrects Adam's bias")
        if not architecture(self.config.model).normalizes_inputs:
            remedies.append("--config=small, whose layers normalize what they read")
        return (
            f"at step {step:,} {seen}, and such a run seldom recovers; begin another one with "
            f"{' or '.join(remedies)}"
        )


def hidden_similarity(hidden: Float[Array, "B P D"], weights: Float[Array, "B P"]) -> WeightedSum:
    """Return the cosine of two hidden states of a sequence, over all pairs of positions."""
    hidden = hidden.astype(jnp.float32)
    norm = jnp.linalg.norm(hidden, axis=-1, keepdims=True)
    unit = weights[..., None] * hidden / jnp.maximum(norm, 1e-9)
    count = weights.sum(1)  # each position has a cosine of 1 with itself
    return WeightedSum((jnp.square(unit.sum(1)).sum(-1) - count).sum(), (count * (count - 1)).sum())


def cross_entropy(
    prefix: str,
    logits: Float[Array, "*any N"],
    labels: Int[Array, "*any"],
    weights: Float[Array, "*any"],
) -> dict[str, WeightedSum]:
    """Return the cross-entropy in nats, "loss", and the "accuracy" of the argmax."""
    labels = labels[..., None]
    label_logits = _look_up(logits, labels)
    losses = jax.nn.logsumexp(logits, axis=-1) - label_logits[..., 0]
    # `logits.argmax(-1) == labels`, in half its time on a CPU: the first of equal logits wins.
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    is_lower = (logits < label_logits) | ((logits == label_logits) & (classes >= labels))
    correct = is_lower.all(axis=-1).astype(jnp.float32)
    values = {"loss": losses, "accuracy": correct}
    weight = weights.sum()
    return {prefix + k: WeightedSum((weights * v).sum(), weight) for k, v in values.items()}


@jax.custom_jvp
def _look_up(logits: Float[Array, "*any N"], labels: Int[Array, "*any 1"]) -> Array:
    """Return the logits of the labels, [*any, 1].

    Its gradient is an elementwise operation. That of the lookup alone is an array of zeros, as
    large as the logits, in which the compiler writes the gradient of each label.
    """
    return jnp.take_along_axis(logits, labels, axis=-1)


@_look_up.defjvp
def _look_up_jvp(operands: Any, tangents: Any) -> tuple[Array, Array]:
    logits, labels = operands
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    chosen = jnp.where(classes == labels, tangents[0], 0.0)
    return _look_up(logits, labels), chosen.sum(-1, keepdims=True)

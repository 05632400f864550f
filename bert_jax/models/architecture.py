"""What the package asks of an architecture: each answers it in a file of its own."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from bert_jax.config import ModelConfig
from bert_jax.config.fields import MODEL_TYPES
from bert_jax.config.settings import resolve
from bert_jax.models.attention import attention_route
from bert_jax.models.encoder import Encoder
from bert_jax.models.exchange import Exchange


class Architecture:
    """An encoder with all that depends on its kind; `MODEL_TYPES` has one of each by name.

    Attributes:
      encoder: the module, which is called as `models.bert.BertModel` is.
      settings: the class of its config.
      pretrains_on_pairs: whether it may be pretrained on pairs of texts.
      mlm_activation: of the MLM head; "" for `hidden_act`.
      has_mlm_head: whether its checkpoints have the head of masked language modelling.
      rotates: whether it takes the kinds of position that rotate queries and keys, and no others.
      exchange: its names in files of `transformers`; None where it is not exported.
      separators: how many [SEP] are between the two texts of a pair, unless the config says it.
      feed_forward_inputs: how many arrays as wide as the feed-forward its activation takes.
      normalizes_inputs: whether its layers normalize what they read, instead of what they write.
      has_pair_types: whether the second text of a pair has token type 1, else 0, unless the
        config says it.
    """

    encoder: ClassVar[type[Encoder]]
    settings: ClassVar[type[ModelConfig]] = ModelConfig
    pretrains_on_pairs: ClassVar[bool] = False
    mlm_activation: ClassVar[str] = ""
    has_mlm_head: ClassVar[bool] = True
    rotates: ClassVar[bool] = False
    separators: ClassVar[int] = 1
    feed_forward_inputs: ClassVar[int] = 1
    normalizes_inputs: ClassVar[bool] = False
    has_pair_types: ClassVar[bool] = True
    exchange: ClassVar[Exchange | None] = None

    def check(self, config: Any, where: str) -> None:
        """Refuse settings that do not fit each other, in a message that begins with `where`."""

    def embedding_size(self, config: Any) -> int:
        """Return the width of the embeddings."""
        return config.hidden_size

    def windows(self, config: Any) -> list[int]:
        """Return for each layer how many tokens one sees to either side; 0 for no limit."""
        return [0] * config.num_hidden_layers

    def attended_keys(self, config: Any, length: int) -> int:
        """Return the keys that a token attends to at most, summed over the layers."""
        return sum(min(length, 2 * w + 1) if w else length for w in self.windows(config))

    def encoder_flops(self, config: Any, length: int) -> float | None:
        """Return the operations of a sequence, forward and backward; None if nobody counted them.

        An operation is a multiplication or an addition of a matrix product.
        """
        return None

    def transformer_flops(self, config: Any, length: int) -> float:
        """Return what `encoder_flops` is of layers of attention and a feed-forward.

        docs/speed.md has the formula.
        """
        size, inner = config.hidden_size, config.intermediate_size
        layer = 24 * size**2 + 6 * (1 + self.feed_forward_inputs) * size * inner
        keys = 12 * size * self.attended_keys(config, length)
        return float(length * (config.num_hidden_layers * layer + keys))


def architecture(config: ModelConfig) -> Architecture:
    """Return the architecture of a model."""
    return resolve(MODEL_TYPES, config.model_type)


def describe_attention(
    config: ModelConfig, platform: str, lengths: Sequence[int], *, packed: bool
) -> str:
    """Return how the layers attend in training, and why not by a kernel, for each length."""

    def describe(length: int) -> str:
        routes = Counter(
            attention_route(config, platform, length, window=window, packed=packed, training=True)
            for window in architecture(config).windows(config)
        )
        reasons: dict[str, list[str]] = {}
        for (name, reason), count in routes.items():
            in_layers = f" in {count} layers" if len(routes) > 1 else ""
            reasons.setdefault(reason, []).append(f"{name}{in_layers}")
        return "; ".join(
            f"{', '.join(names)}: {reason}" if reason else ", ".join(names)
            for reason, names in reasons.items()
        )

    found = {length: describe(length) for length in lengths}
    if len({*found.values()}) == 1:
        return found[lengths[0]]
    return "; ".join(f"at length {length:,} {words}" for length, words in found.items())


def num_separators(config: ModelConfig) -> int:
    """Return how many [SEP] are between the two texts of a pair."""
    return config.pair_separators or architecture(config).separators


def num_token_types(config: ModelConfig) -> int:
    """Return how many token types the texts of a model have; 1 if they do not tell texts apart.

    By default two separators tell them apart: most tokenizers that put these give type 0 to all.
    """
    has_types = architecture(config).has_pair_types and num_separators(config) == 1
    if config.pair_token_types:
        has_types = config.pair_token_types == 2
    return config.type_vocab_size if has_types else 1


def make_encoder(config: ModelConfig, *, add_pooling_layer: bool) -> Encoder:
    """Return the encoder of a model."""
    return architecture(config).encoder(config, add_pooling_layer)

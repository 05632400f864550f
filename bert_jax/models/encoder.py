"""What the encoders share: what heads need of them, their output, and running their layers.

Shape letters are those of `models.bert`.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from bert_jax.errors import UserError
from bert_jax.models.layers import DropoutKey, fold_key


class Encoder(nn.Module):
    """An encoder, and what its heads need of it.

    A subclass is called as `models.bert.BertModel` is and returns an `EncoderOutput`. It has
    `embeddings.word_embeddings`, [V, E], and names its layers `layer_0` and so on.

    Attributes:
      config: the settings of the model, of the class that its architecture has.
      add_pooling_layer: whether it returns `pooled`.
    """

    config: Any
    add_pooling_layer: bool = True

    has_own_transform = False  # `token_features` ends with the dense layer that an MLM head has

    def token_features(self, hidden: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        """Return what the heads for tokens see of hidden states."""
        return hidden

    def classifier_stddev(self) -> float:
        """Return the initial standard deviation of a classifier on the encoder."""
        return self.config.initializer_range


@struct.dataclass
class EncoderOutput:
    """The output of an encoder.

    Attributes:
      last_hidden_state: [B, L, D].
      pooled: the features of the whole sequence, [B, D]; in packed sequences of each segment,
        [B, T, D]; None without a pooling layer.
      hidden_states: if requested, the embeddings and the output of each layer, each [B, L, D].
      attentions: if requested, the attention map of each layer before dropout, [B, H, L, M].
      queries_keys: if requested, the queries and keys of each layer, as `AttentionMaps`.
    """

    last_hidden_state: Any
    pooled: Any = None
    hidden_states: Any = None
    attentions: Any = None
    queries_keys: Any = None

    def without_padding(self, length: int) -> "EncoderOutput":
        """Return the states and maps of the first tokens of each sequence alone."""
        states, maps = self.hidden_states, self.attentions
        return self.replace(  # pyright: ignore
            last_hidden_state=self.last_hidden_state[:, :length],
            hidden_states=states and tuple(state[:, :length] for state in states),
            attentions=maps and tuple(each[..., :length, :length] for each in maps),
        )


class Requested(NamedTuple):
    """What an encoder returns of each layer."""

    hidden_states: bool = False
    attentions: bool = False
    queries_keys: bool = False

    @property
    def maps(self) -> bool:
        """Whether the layers must compute attention maps."""
        return self.attentions or self.queries_keys


NOTHING = Requested()


def run_layers(
    layers: Sequence[nn.Module],
    hidden: Float[Array, "B L D"],
    mask: Any,
    dropout_key: DropoutKey | None,
    requested: Requested,
    scanned: Sequence[nn.Module] = (),
    first_scanned: int = 0,
) -> EncoderOutput:
    """Return the output of the layers, without pooling.

    `layer(hidden, mask, key, output_maps)` returns the output of a layer, and its `AttentionMaps`
    or None. With `scanned`, the layers from `first_scanned` on run by a scan over their stacked
    parameters, which compiles faster. `scanned` are layers without parameters, as many as a step of
    the scan has.
    """

    def run(layer: Any, hidden: Array, index: Any) -> tuple[Array, Any]:
        key = fold_key(dropout_key, index)
        hidden, maps = layer(hidden, mask, key, requested.maps)
        if maps is None and requested.maps:
            raise UserError("the layers of this encoder return no attention maps")
        state = hidden if requested.hidden_states else ()
        attention = maps.probabilities if maps and requested.attentions else ()
        rest: Any = ()
        if maps and requested.queries_keys:
            rest = dataclasses.replace(maps, probabilities=None)
        return hidden, (state, attention, rest)

    number = first_scanned if scanned else len(layers)
    embedded, outputs = hidden, []
    for index, layer in enumerate(layers[:number]):
        hidden, output = run(layer, hidden, index)
        outputs.append(output)
    if params := [layer.variables["params"] for layer in layers[number:]]:
        groups = [params[i : i + len(scanned)] for i in range(0, len(params), len(scanned))]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *groups)

        def step(hidden: Array, group: tuple[Any, Array]) -> tuple[Array, Any]:
            several = []
            for offset, (layer, params) in enumerate(zip(scanned, group[0], strict=True)):
                layer = partial(layer.apply, {"params": params})
                hidden, output = run(layer, hidden, group[1] + offset)
                several.append(output)
            return hidden, several

        indices = jnp.arange(number, len(layers), len(scanned))
        hidden, several = jax.lax.scan(step, hidden, (stacked, indices))
        for i in range(len(groups)):
            outputs += jax.tree.map(itemgetter(i), several)
    states, attentions, queries_keys = zip(*outputs, strict=True)
    return EncoderOutput(
        last_hidden_state=hidden,
        hidden_states=(embedded, *states) if requested.hidden_states else None,
        attentions=attentions if requested.attentions else None,
        queries_keys=queries_keys if requested.queries_keys else None,
    )


def gather_positions(
    hidden: Float[Array, "B L D"], positions: Int[Array, "B P"]
) -> Float[Array, "B P D"]:
    """Return the hidden states at some positions of each sequence."""
    return jnp.take_along_axis(hidden, positions[:, :, None], axis=1)

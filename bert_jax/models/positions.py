"""Kinds of position: learned, sinusoidal, rotary, and relative in the attention scores.

Shape letters are those of `models.bert`; besides, R = 2 L - 1 distances and K2 = K / 2.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.lax import optimization_barrier
from jaxtyping import Array, Float, Int

from bert_jax.config import ModelConfig
from bert_jax.config.fields import POSITIONS
from bert_jax.config.settings import resolve
from bert_jax.models.layers import param, truncated_normal


@dataclasses.dataclass(frozen=True)
class PositionKind:
    """How a kind of position enters an encoder; `config.fields.POSITIONS` has each by name.

    Attributes:
      is_learned: whether an embedding of each position is learned, and added to that of the word.
      embeddings: returns fixed embeddings [length, size] float32 of the first positions, by length
        and size, which are added to those of the words; None for none.
      scores: a module, made from the config, that returns a term of the attention scores before
        scaling, [B, H, L, M] float32, from queries and keys [B, H, L, K]; None for none.
      rotates: whether queries and keys are rotated, by an architecture that does so.
    """

    is_learned: bool = False
    embeddings: Callable[[int, int], np.ndarray] | None = None
    scores: type[nn.Module] | None = None
    rotates: bool = False


def position_kind(config: ModelConfig) -> PositionKind:
    """Return the kind of position of a model."""
    return resolve(POSITIONS, config.position_embedding_type)


def sinusoidal_positions(length: int, size: int) -> np.ndarray:
    """Return the fixed embedding of each position, [length, size] float32.

    `PE(p, 2i) = sin(p / 10000^(2i / size))`, and `PE(p, 2i + 1)` is its cosine. Source: Vaswani et
    al. 2017, section 3.5.
    """
    feature = np.arange(size)
    angles = np.arange(length)[:, None] / 10000.0 ** (feature // 2 * 2 / size)
    return np.where(feature % 2, np.cos(angles), np.sin(angles)).astype(np.float32)


def rotation(
    positions: Int[Array, "*B L"], head_size: int, theta: float
) -> tuple[Float[Array, "*B L K2"], Float[Array, "*B L K2"]]:
    """Return the cosine and sine of each position's angles, for `rotate`.

    Angle i of position p is `p / theta^(2i / K)`. Source: Su et al. 2021, section 3.2.2.
    """
    exponents = jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size
    angles = positions[..., None] * (1.0 / jnp.asarray(theta, jnp.float32) ** exponents)
    # Without the barrier a CPU's compiler computes both again for each head of each layer.
    return optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rotate(
    x: Float[Array, "B L D"], rotation: tuple[Array, Array], num_heads: int
) -> Float[Array, "B L D"]:
    """Return queries or keys, heads side by side, rotated by their positions (`rotation`).

    Element i of a head is paired with element i + K/2, as in GPT-NeoX and `transformers`.
    """
    cos, sin = (angle[..., None, :] for angle in rotation)
    heads = x.reshape(*x.shape[:2], num_heads, -1).astype(jnp.float32)
    first, second = jnp.split(heads, 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).reshape(x.shape).astype(x.dtype)


class RelativePositions(nn.Module):
    """A term of the attention scores, from an embedding of the distance of query and key.

    `relative_key` adds the product of the query with the embedding of its distance to the key (Shaw
    et al. 2018); `relative_key_query` adds that of the key too (Huang et al. 2020, method 4).
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, query: Float[Array, "B H L K"], key: Float[Array, "B H L K"]
    ) -> Float[Array, "B H L L"]:
        """Return the term of the scores before scaling, in float32."""
        c, length = self.config, query.shape[2]
        longest = c.max_position_embeddings
        shape = (2 * longest - 1, query.shape[3])
        init = truncated_normal(c.initializer_range)
        # Row `longest - 1 + d` embeds the distance d, the query's position minus the key's.
        table = param(self, "embeddings", init, shape, ("position", "hidden"))
        # Packed texts may together be longer than the table: only texts that do not attend to each
        # other are so far apart.
        beyond = max(0, length - longest)
        table = jnp.pad(table, ((beyond, beyond), (0, 0)), mode="edge")
        middle = longest - 1 + beyond
        distances = table[middle - (length - 1) : middle + length].astype(query.dtype)

        def scores_by_distance(x: Array, embeddings: Array) -> Array:
            return jnp.einsum("BHLK,RK->BHLR", x, embeddings, preferred_element_type=jnp.float32)

        scores = _relative_shift(scores_by_distance(query, distances[::-1]))
        if c.position_embedding_type == "relative_key_query":
            scores += _relative_shift(scores_by_distance(key, distances)).swapaxes(2, 3)
        return scores


def _relative_shift(x: Float[Array, "B H L R"]) -> Float[Array, "B H L L"]:
    """Return `y[..., l, m] = x[..., l, m - l + L - 1]`, by reshapes alone.

    Padding each line by one and reading the flat array in lines of R shifts each line by one more.
    A gather would be slow, above all its gradient. Source: Dai et al. 2019, appendix B.
    """
    batch, heads, length, distances = x.shape
    flat = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(batch, heads, -1)
    shifted = flat[:, :, length - 1 : length - 1 + length * distances]
    return shifted.reshape(batch, heads, length, distances)[:, :, :, :length]


LEARNED = PositionKind(is_learned=True)
SINUSOIDAL = PositionKind(embeddings=sinusoidal_positions)
RELATIVE = PositionKind(scores=RelativePositions)
ROTARY = PositionKind(rotates=True)

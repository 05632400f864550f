"""How the encoder knows where a token stands; shape letters are those of `models.bert`."""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from bert_jax.config import ModelConfig
from bert_jax.models.layers import param, truncated_normal


def sinusoidal_positions(length: int, size: int) -> np.ndarray:
    """Returns a fixed embedding of each position, [length, size] float32.

    `PE(p, 2i) = sin(p / 10000^(2i / size))` and `PE(p, 2i + 1)` its cosine. Source: Vaswani et al.
    2017, section 3.5.
    """
    place = np.arange(size)
    angles = np.arange(length)[:, None] / 10000.0 ** (place // 2 * 2 / size)
    return np.where(place % 2, np.cos(angles), np.sin(angles)).astype(np.float32)


class RelativePositions(nn.Module):
    """Attention scores from the distance of query and key, one embedding for each distance.

    `relative_key` adds the product of the query with the embedding of its distance to the key (Shaw
    et al. 2018); `relative_key_query` that of the key as well (Huang et al. 2020, method 4).
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, query: Float[Array, "B H L K"], key: Float[Array, "B H L K"]
    ) -> Float[Array, "B H L L"]:
        """Returns what is to be added to the product of queries and keys, float32."""
        c, length = self.config, query.shape[2]
        longest = c.max_position_embeddings
        shape = (2 * longest - 1, query.shape[3])
        init = truncated_normal(c.initializer_range)
        # Row d is of the distance d - (longest - 1), of the query's place minus the key's.
        table = param(self, "embeddings", init, shape, ("position", "hidden"))
        near = table[longest - length : longest + length - 1].astype(query.dtype)

        def products(x: Array, embeddings: Array) -> Array:
            return jnp.einsum("BHLK,RK->BHLR", x, embeddings, preferred_element_type=jnp.float32)

        scores = _pick_diagonals(products(query, near[::-1]))
        if c.position_embedding_type == "relative_key_query":
            scores += _pick_diagonals(products(key, near)).swapaxes(2, 3)
        return scores


def _pick_diagonals(x: Float[Array, "B H L R"]) -> Float[Array, "B H L L"]:
    """Returns `y[..., l, m] = x[..., l, m - l + L - 1]`, for R = 2 L - 1, by moves alone.

    A row more wide by one makes each row begin one later than the last when they are laid end to
    end and cut again at R. A gather of the same would be slow, above all its gradient.
    """
    batch, heads, length, width = x.shape
    flat = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(batch, heads, -1)
    cut = flat[:, :, length - 1 : length - 1 + length * width]
    return cut.reshape(batch, heads, length, width)[:, :, :, :length]

"""What an encoder computes of sequences: hidden states, attention maps, queries and keys."""

import functools
from collections.abc import Mapping
from typing import Any

from bert_jax.inference.loading import LoadedModel
from bert_jax.inference.runner import Arrays, Sequences, apply
from bert_jax.models.architecture import make_encoder
from bert_jax.models.encoder import Encoder, EncoderOutput


def encoder_output(
    model: LoadedModel,
    sequences: Sequences,
    *,
    output_hidden_states: bool = False,
    output_attentions: bool = False,
    output_queries_keys: bool = False,
) -> EncoderOutput:
    """Return the encoder's output for all sequences in one batch, of the length of the longest."""
    outputs = {
        "output_hidden_states": output_hidden_states,
        "output_attentions": output_attentions,
        "output_queries_keys": output_queries_keys,
    }
    has_pooler = not {"pooler", "head"}.isdisjoint(model.params["bert"])
    encoder = make_encoder(model.config, add_pooling_layer=has_pooler)
    step = model.runner.compile(
        ("encoder", *outputs.values()), functools.partial(_encode, encoder, outputs)
    )
    output = model.runner.call(step, sequences.all())
    return output.without_padding(int(sequences.lengths.max()))


def _encode(
    encoder: Encoder, outputs: Mapping[str, bool], params: Any, batch: Arrays
) -> EncoderOutput:
    return apply(encoder, params["bert"], batch, **outputs)

"""What an encoder computes of sequences: hidden states, attention maps, queries and keys."""

from typing import Any

from bert_jax.inference.loading import LoadedModel
from bert_jax.inference.runner import Arrays, Sequences, apply
from bert_jax.models.architecture import make_encoder
from bert_jax.models.encoder import EncoderOutput


def encoder_output(model: LoadedModel, sequences: Sequences, **outputs: bool) -> EncoderOutput:
    """Return the encoder's output for all sequences in one batch, of the length of the longest.

    `outputs` are options of the encoder, such as `output_attentions`.
    """
    has_pooler = not {"pooler", "head"}.isdisjoint(model.params["bert"])
    encoder = make_encoder(model.config, add_pooling_layer=has_pooler)

    def encode(params: Any, batch: Arrays) -> EncoderOutput:
        return apply(encoder, params["bert"], batch, **outputs)

    step = model.runner.compile(("encoder", *outputs.items()), encode)
    output = model.runner.call(step, sequences.all())
    return output.without_padding(int(sequences.lengths.max()))

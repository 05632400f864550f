"""What a step has to send, whoever compiles it."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.config import ParallelConfig, Phase, TrainConfig
from bert_jax.distributed.fsdp import RULES
from bert_jax.models.heads import BertForPreTraining

_FLOAT32 = 4  # bytes


def needed(config: TrainConfig, phase: Phase, option: ParallelConfig) -> float:
    """Returns the bytes that a device has to send in a step, in rings.

    Gradients are added up in float32: over "data" each device gets the whole sum, for twice
    (n - 1) / n of it; over "fsdp" its part, for half of that. Parameters that are split over "fsdp"
    are put together once, in the type that they are used in, and those of the layers once more
    where these are computed again; under ZeRO-1 after the update, in float32. Along "tensor" a
    layer adds up its activations twice forward and twice backward, and the head those of its
    predictions once; the embeddings what is looked up, in float32. The few sums of losses and norms
    are left out.

    Args:
      config: of the run.
      phase: its batch and its lengths.
      option: the mesh, without -1, and the ZeRO stage.
    """
    data, fsdp, tensor = option.data, option.fsdp, option.tensor
    model = config.model
    narrow = jnp.dtype(model.dtype).itemsize
    module = BertForPreTraining(model, next_sentence=config.data.pairs != "none")
    boxed = jax.eval_shape(module.init_params, jax.random.key(0))
    total = 0.0
    leaves = jax.tree.leaves_with_path(
        boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
    )
    for path, leaf in leaves:
        axes = [RULES[name] for name in leaf.names]
        here = leaf.value.size / (tensor if "tensor" in axes else 1)
        if "fsdp" in axes:
            again = model.remat and "layer_" in jax.tree_util.keystr(path[:2])
            gathered = _FLOAT32 if option.zero == 1 else narrow * (1 + again)
            total += (_FLOAT32 + gathered) * here * _ring(fsdp)
            total += 2 * _FLOAT32 * here / fsdp * _ring(data)
        else:
            total += 2 * _FLOAT32 * here * _ring(data * fsdp)
    rows = phase.batch_size / (data * fsdp)
    activations = rows * phase.max_length * model.hidden_size
    predicted = rows * phase.max_predictions * model.hidden_size
    of_layers = 4 * model.num_hidden_layers * activations * narrow
    of_ends = activations * _FLOAT32 + predicted * narrow
    return total + 2 * (of_layers + of_ends) * _ring(tensor)


def _ring(devices: int) -> float:
    return (devices - 1) / devices

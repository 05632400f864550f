"""Start a run from another model's weights (`--init`): take its architecture and parameters."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import traverse_util

from bert_jax.bert import Bert
from bert_jax.config import ModelConfig, validate_model
from bert_jax.convert import names
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForPreTraining

_COMPUTATION = ("dtype", "remat", "scan_layers", "attention")


def model_config(
    init: Bert, config: ModelConfig, fields: Iterable[str] | None = None
) -> ModelConfig:
    """Return the config of a model that continues from `init`: its own, but for how it computes.

    Args:
      init: the model to continue from.
      config: the model of the recipe.
      fields: fields that the user set, such as "hidden_dropout_prob", which are kept; None for
        those that differ from their defaults.

    Raises:
      UserError: one of them asks for parameters of another shape.
    """
    if fields is None:
        defaults = dataclasses.asdict(ModelConfig())
        fields = [name for name, value in defaults.items() if getattr(config, name) != value]
    kept = {name: getattr(config, name) for name in {*_COMPUTATION, *fields}}
    if not kept.get("vocab_size"):  # 0 is the size that the checkpoint has
        kept.pop("vocab_size", None)
    model = dataclasses.replace(init.config, **kept)
    validate_model(model, "config")
    shapes = jax.eval_shape(BertForPreTraining(model).init_params, jax.random.key(0))
    # The head of a task has no say: its shape is not the encoder's.
    pretrained = {k: v for k, v in init.params.items() if k not in names.TASK_MODULES}
    wanted: Any = traverse_util.flatten_dict(nn.unbox(shapes), sep="/")
    params: Any = traverse_util.flatten_dict(pretrained, sep="/")
    for name, param in params.items():
        if name not in wanted or wanted[name].shape != param.shape:
            raise UserError(
                f"--init has {name} of shape {param.shape}, which the config does not ask for; "
                "leave the shape of the model out of the command"
            )
    return model


def copy_params(params: Any, source: Any) -> Any:
    """Return `params` with those that `source` has too replaced by copies, on the same devices.

    Each host has all of `source` and copies what its own devices hold.
    """
    sources: Any = traverse_util.flatten_dict(source, sep="/")
    targets: Any = traverse_util.flatten_dict(params, sep="/")

    def copy(name: str, target: jax.Array) -> jax.Array:
        if name not in sources:
            return target
        value = np.asarray(sources[name])
        # Copies, since a step reuses the memory of the state that it is given.
        return jax.make_array_from_callback(
            value.shape, target.sharding, lambda index: np.array(value[index])
        )

    copied = {name: copy(name, target) for name, target in targets.items()}
    return traverse_util.unflatten_dict(copied, sep="/")

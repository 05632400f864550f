"""An ELECTRA's generator, which `transformers` has as a model of its own, in a folder beside it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.models.electra import ElectraConfig, embedding_size
from bert_jax.objectives.replaced_tokens import generator_config

FOLDER = "generator"
_SAME = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_SAME += ("vocab_size", "max_position_embeddings", "type_vocab_size", "hidden_act")
_SAME += ("layer_norm_eps", "position_embedding_type")

Params = Mapping[str, Any]


def split(config: Any, params: Params) -> tuple[ElectraConfig, Params] | None:
    """Return the generator as a model that is its own generator; None without one."""
    if "generator_head" not in params:
        return None
    encoder = {name: module for name, module in params["bert"].items() if name != "pooler"}
    if own := generator_config(config):
        encoder = {"embeddings": encoder["embeddings"], **params["generator"]}
    alone = dataclasses.replace(own or config, generator_hidden_size=0.0)
    return alone, {"bert": encoder, "generator_head": params["generator_head"]}


def join(
    config: Any, params: Params, own: Any, generator: Params, where: str
) -> tuple[ElectraConfig, dict[str, Any]]:
    """Return a discriminator with its generator, a model that was read from `where`."""
    head = {"generator_head": generator["generator_head"]}
    if not config.generator_hidden_size:
        return config, {**params, **head}
    share = own.num_attention_heads / config.num_attention_heads
    if share > 1:
        heads = f"{own.num_attention_heads} heads, and its model {config.num_attention_heads}"
        raise UserError(f"{where} is a generator larger than its model: it has {heads}; remove it")
    wanted = generator_config(config)
    if not wanted or wanted.num_attention_heads != own.num_attention_heads:
        config = dataclasses.replace(config, generator_hidden_size=share)
        wanted = generator_config(config)
    sizes = {"embedding_size": (embedding_size(own), embedding_size(config))}
    sizes |= {name: (getattr(own, name), getattr(wanted, name)) for name in _SAME}
    for name, (there, here) in sizes.items():
        if there != here:
            wrong = f"{where} has {name} {there}, and beside this model only {here} is read"
            raise UserError(f"{wrong}; remove the folder to read the discriminator alone")
    layers = dict(generator["bert"])
    if not _equal(layers.pop("embeddings"), params["bert"]["embeddings"]):
        wrong = f"{where} has other embeddings than its model; untied, it is not supported"
        raise UserError(f"{wrong}; remove the folder to read the discriminator alone")
    return config, {**params, "generator": layers, **head}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    return np.array_equal(one, other)

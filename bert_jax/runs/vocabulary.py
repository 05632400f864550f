"""Begin a run from a model with another tokenizer: embeddings for tokens that it did not have."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import traverse_util

from bert_jax import console
from bert_jax.bert import Bert
from bert_jax.config import TokenizerConfig, TrainConfig
from bert_jax.distributed import hosts
from bert_jax.errors import UserError, refuse
from bert_jax.objectives import pretraining_model
from bert_jax.text import mixture, tokenizer_loading
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.tokenizer_extension import extended
from bert_jax.text.vocabulary import spellings, summary

_CHOSEN = ("tokenizer.path", "tokenizer.add")  # settings of a tokenizer that is not trained
_LOWERCASE = "tokenizer.lowercase"
_AXIS = "vocab"  # the logical name of an axis with an entry for each token


def chosen_tokenizer(
    config: TrainConfig, parts: mixture.Parts, bert: Bert, resumed: Path | None
) -> Tokenizer:
    """Return the tokenizer of a run that begins with a model: its own, or that of the settings.

    `resumed` is the workdir of a run that resumes; the tokenizer is there already.
    """
    settings = config.tokenizer
    if resumed and (settings.path or settings.add):
        return tokenizer_loading.load(resumed / "tokenizer")
    tokenizer = bert.tokenizer
    if settings.path:
        tokenizer = tokenizer_loading.load(settings.path, lowercase=settings.lowercase)
    if not settings.add:
        return tokenizer
    larger = hosts.run_on_all_hosts(
        lambda: extended(tokenizer, mixture.sample_sentences(config, parts), settings.add)
    )
    if (added := larger.vocab_size - tokenizer.vocab_size) < settings.add:
        hosts.warn_on_main(
            f"tokenizer.add is {settings.add}, and the text has no more than {added} to add that "
            "occur twice"
        )
    return larger


def with_tokenizer(bert: Bert, tokenizer: Tokenizer) -> Bert:
    """Return a model with another tokenizer, whose embeddings follow from those that it has.

    A token that both have keeps its embedding. Any other starts from the mean of the tokens that
    spell it, or of all tokens where none do. The same holds for everything that has an entry for
    each token, such as the bias of the masked LM head.

    Raises:
      UserError: no token can be spelled but special ones.
    """
    if tokenizer.fingerprint == bert.tokenizer.fingerprint:
        return bert
    with console.working("moving to the other vocabulary", says_end=False):
        found = spellings(tokenizer, bert.tokenizer)
    one, several, none = summary(found)
    if one + several <= len({*tokenizer.special_ids, tokenizer.unk_id}):
        raise UserError(
            "no token of the tokenizer can be spelled by those of --init, so that none of its "
            "embeddings can be used; train without --init, or give another tokenizer.path"
        )
    config = dataclasses.replace(bert.config, vocab_size=tokenizer.vocab_size)
    model = pretraining_model(dataclasses.replace(config, dtype="float32"), pairs=True)
    boxed = jax.eval_shape(model.init_params, jax.random.key(0))
    names: Any = traverse_util.flatten_dict(nn.get_partition_spec(boxed), sep="/")
    params: Any = traverse_util.flatten_dict(bert.params, sep="/")
    for name, value in params.items():
        if _AXIS in names.get(name, ()):
            axis = names[name].index(_AXIS)
            params[name] = _transferred(np.asarray(value), axis, found, bert.tokenizer.vocab_size)
    hosts.print_on_main(
        f"vocabulary {tokenizer.vocab_size:,} tokens: {one:,} keep the embedding of a token of "
        f"--init, {several:,} start from the mean of those that spell them, {none:,} from the "
        "mean of all"
    )
    return dataclasses.replace(
        bert,
        config=config,
        params=traverse_util.unflatten_dict(params, sep="/"),
        tokenizer=tokenizer,
    )


def _transferred(values: np.ndarray, axis: int, found: list[list[int]], count: int) -> np.ndarray:
    """Return an array with an entry for each list of ids: the mean of theirs, of `count` known."""
    values = np.moveaxis(values, axis, 0)[:count]
    everything = values.mean(0)
    new = np.stack([values[ids].mean(0) if ids else everything for ids in found])
    return np.moveaxis(new, 0, axis).astype(np.float32)


def check(config: TrainConfig, kept_by: str, fields: Collection[str]) -> None:
    """Refuse settings of a tokenizer that a new run would ignore.

    Args:
      config: that of the run.
      kept_by: the flag whose model has a tokenizer, --init or --fork; "" without.
      fields: the dotted names of the settings that the command line has.
    """
    count = config.tokenizer.add
    fix = "give --init, or set a larger model.vocab_size"
    refuse(
        count and kept_by != "--init",
        f"tokenizer.add is {count}, and adds tokens to the vocabulary of --init",
        fix="leave it out: a fork keeps its tokenizer" if kept_by else fix,
    )
    of_training = (each for each in fields if each.startswith("tokenizer.") and each not in _CHOSEN)
    unused = next(of_training, None)
    refuse(
        unused and kept_by and not config.tokenizer.path,
        f"{unused} has no effect, as the tokenizer is that of {kept_by}",
        fix="leave it out"
        + (", or give tokenizer.path" if (kept_by, unused) == ("--init", _LOWERCASE) else ""),
    )
    if config.tokenizer.path:
        _check_beside_path(config.tokenizer, fields)


def _check_beside_path(config: TokenizerConfig, fields: Collection[str]) -> None:
    """Refuse settings that say something else than the tokenizer of `tokenizer.path`."""
    of_path = f"the tokenizer is that of tokenizer.path {config.path}"
    for name in ("tokenizer.kind", "tokenizer.model_type"):
        refuse(name in fields, f"{name} has no effect, as {of_path}", fix="leave it out")
    if _LOWERCASE in fields:
        one, other = hosts.run_on_all_hosts(
            lambda: [tokenizer_loading.load(config.path, lowercase=each) for each in (True, False)]
        )
        refuse(
            one.fingerprint == other.fingerprint and one.lowers_case != config.lowercase,
            f"tokenizer.lowercase {config.lowercase} has no effect, as {of_path}, which decides",
            fix="leave it out",
        )

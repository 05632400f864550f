"""The text of a run: one, or a mixture of several by weights, NAME@WEIGHT,NAME@WEIGHT."""

import dataclasses
import glob
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from bert_jax.config import DataConfig, TokenizerConfig, TrainConfig
from bert_jax.errors import UserError, refuse
from bert_jax.storage import paths
from bert_jax.storage.replacement import replacing
from bert_jax.text import fetched, prepare, store, tokenizer_loading, tokenizer_training
from bert_jax.text.fetched import is_store
from bert_jax.text.sources import check_apart
from bert_jax.text.store import Corpus
from bert_jax.text.tokenizer import Tokenizer

_LEAST = 1e-9  # weight; far smaller ones are lost when they are divided by their sum
# Settings by which a text becomes a store, which has them from then on.
_OF_PREPARING = {
    "data.eval_fraction",
    "data.sentences",
    "data.text_field",
    *(f"tokenizer.{name}" for name in ("kind", "model_type", "lowercase", "strip_accents")),
}


@dataclasses.dataclass(frozen=True)
class Parts:
    """What `data.source` names, found out once: host 0 alone may have its plain text.

    Attributes:
      source: as the user wrote it.
      weights: of each text of a mixture by its name, as `parse` returns them.
      stores: the names of those texts that are stores.
    """

    source: str
    weights: dict[str, float]
    stores: list[str]

    @property
    def names(self) -> list[str]:
        """The name of each text."""
        return [*self.weights] or [self.source]

    @property
    def is_prepared(self) -> bool:
        """Whether all texts are stores."""
        return len(self.stores) == len(self.names)


def find(source: str) -> Parts:
    """Return what a source names on this host."""
    parts = Parts(source, parse(source), [])
    return dataclasses.replace(parts, stores=[*filter(is_store, parts.names)])


def parse(source: str) -> dict[str, float]:
    """Return the weight of each text of a mixture; {} for a source that is no mixture.

    The weights sum to 1. They are 0 for stores without weights, whose shares are those of their
    tokens. A file whose own name has an "@" has no weight.
    """
    parts = [_split_weight(part) for part in map(str.strip, source.split(",")) if part]
    names, weights = [name for name, _ in parts], [weight for _, weight in parts]
    is_weighted = weights.count(None) < len(weights)
    has_stores = len(names) > 1 and any(map(is_store, names))
    is_one = is_store(source) or os.path.lexists(source)  # a file may be named like a mixture
    if is_one or not (is_weighted or has_stores):
        return {}
    resolved = [_resolve(name) for name in names]
    for name, weight in parts:
        if resolved.count(_resolve(name)) > 1:
            raise UserError(f"data.source: {name} is there twice; name each text once")
        if weight is None and is_weighted:
            raise UserError(
                f"data.source: {name} has no weight, and another text has; write {name}@NUMBER"
            )
        if weight is not None and not _LEAST <= weight <= 1 / _LEAST:
            raise UserError(
                f"data.source: {name} has the weight {weight:g}; give a number from {_LEAST:g} to "
                f"{1 / _LEAST:g}, or drop the text"
            )
    total = sum(weight or 0.0 for weight in weights) or 1.0
    return {name: (weight or 0.0) / total for name, weight in parts}


def _resolve(name: str) -> str:
    return name.rstrip("/") if paths.is_remote(name) else os.path.realpath(os.path.expanduser(name))


def _split_weight(part: str) -> tuple[str, float | None]:
    name, _, weight = part.rpartition("@")
    path = os.path.expanduser(part)
    try:
        is_number = weight.isascii() and "_" not in weight  # float() takes more than users mean
        is_weighted = name and is_number and not (os.path.lexists(path) or glob.glob(path))
        return (name.strip(), float(weight)) if is_weighted else (part, None)
    except ValueError:
        return part, None


def resolve_vocab_size(config: TrainConfig, parts: Parts, init_tokenizer: Tokenizer | None) -> int:
    """Return `model.vocab_size`, or the size of the run's tokenizer if that is 0."""
    if config.model.vocab_size:
        return config.model.vocab_size
    if parts.stores:
        return tokenizer_loading.load(fetched.tokenizer_folder(parts.stores[0])).vocab_size
    tokenizer = prepare.choose_tokenizer(config, init_tokenizer)
    return tokenizer.vocab_size if isinstance(tokenizer, Tokenizer) else prepare.DEFAULT_VOCAB_SIZE


def check_settings(parts: Parts, fields: Collection[str]) -> None:
    """Refuse settings, by their dotted names, that have no effect where texts are stores."""
    unused = sorted(_OF_PREPARING.intersection(fields))
    if not parts.stores:
        return
    why, what = "whose text is prepared", "the text"
    if not parts.is_prepared:
        unused = [name for name in unused if name.startswith("tokenizer.")]
        why, what = f"whose texts have the tokenizer of {parts.stores[0]}", "the stores"
    if unused:
        raise UserError(
            f"{unused[0]} has no effect on {parts.source}, {why}; leave it out, or prepare {what} "
            "anew with it: bert-jax prepare"
        )


def check_sources(data: DataConfig, parts: Parts) -> None:
    """Refuse a text of `data.source` that cannot be read, before long work."""
    names = [name for name in parts.names if name not in parts.stores]
    texts = [prepare.open_sources(dataclasses.replace(data, source=name)) for name in names]
    check_apart(text[0] for text in texts)


def open_prepared(parts: Parts, folder: Path) -> Corpus:
    """Return what `read` has prepared in a folder."""
    folders = _folders(parts, folder)
    return _mix(parts.weights, {name: store.open_store(path) for name, path in folders.items()})


def read(
    config: TrainConfig, parts: Parts, init_tokenizer: Tokenizer | None, folder: Path
) -> Corpus:
    """Return the text of a run, prepared in `folder` where that has not been done."""
    weights, vocab_size = parts.weights, config.model.vocab_size
    if weights and config.data.eval_source:
        raise UserError(
            "data.eval_source is not for a mixture, each text of which has held-out documents; "
            "leave it out, or prepare stores with --eval-source"
        )
    if config.data.eval_source and parts.stores:
        raise UserError(
            f"data.eval_source is not for a store, and {config.data.source} is one with held-out "
            "documents of its own; leave it out, or prepare the text with --eval-source"
        )
    tokenizer = prepare.choose_tokenizer(config, init_tokenizer)
    stores = parts.stores
    data = {n: dataclasses.replace(config.data, source=n) for n in parts.names if n not in stores}
    check_sources(config.data, parts)
    folders = _folders(parts, folder)
    corpora = {name: _open_given(folders[name], tokenizer) for name in stores}
    _check_distinct(corpora)  # before the long work
    for name in stores:
        tokenizer = corpora[stores[0]].tokenizer
        if corpora[name].tokenizer.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{name} has another tokenizer than {stores[0]}; prepare it again with "
                f"--tokenizer={folders[stores[0]]}/tokenizer"
            )
    if weights and isinstance(tokenizer, TokenizerConfig):
        tokenizer = _train_tokenizer(config, parts, folder)
    if isinstance(tokenizer, Tokenizer):
        _check_vocab_size(tokenizer, vocab_size)
    for name, each in data.items():
        corpora[name] = prepare.prepare(each, tokenizer, vocab_size, folders[name])
    return _mix(weights, corpora)


def _open_given(folder: Path, tokenizer: Tokenizer | TokenizerConfig) -> Corpus:
    """Open a store that is a text of the run; a tokenizer that was loaded must be its own."""
    corpus = store.open_store(folder)
    if isinstance(tokenizer, Tokenizer) and tokenizer.fingerprint != corpus.tokenizer.fingerprint:
        raise UserError(
            f"the tokenizer of tokenizer.path, --init or --fork is not the one that {folder} was "
            "prepared with; drop that flag, or prepare the text anew: bert-jax prepare SOURCE "
            "STORE --tokenizer=CHECKPOINT; or move --init to the vocabulary of the store: "
            f"--config.tokenizer.path={folder}/tokenizer"
        )
    return corpus


def _folders(parts: Parts, folder: Path) -> dict[str, Path]:
    """Return the folder of each text's store; a text that is no store becomes one in `folder`."""
    own = {n: folder / str(i) if parts.weights else folder for i, n in enumerate(parts.names)}
    return own | {name: fetched.folder(name) for name in parts.stores}


def _check_distinct(corpora: Mapping[str, Corpus]) -> None:
    """Refuse two stores of one text that hold out other documents, which both are trained on."""
    names: dict[str, str] = {}
    for name, corpus in corpora.items():
        other = names.setdefault(corpus.source_identity, name)
        refuse(
            corpora[other].text_identity != corpus.text_identity,
            f"data.source: {name} has the same text as {other} and holds out other documents, so "
            "that these would be trained on",
            fix="name each text once",
        )


def _mix(weights: Mapping[str, float], corpora: Mapping[str, Corpus]) -> Corpus:
    if not weights:
        return next(iter(corpora.values()))
    _check_distinct(corpora)
    sizes = {name: weights[name] or len(corpora[name].train.tokens) for name in weights}
    parts = tuple(
        dataclasses.replace(corpora[name], name=short, weight=size / sum(sizes.values()))
        for short, (name, size) in zip(_short_names([*sizes]), sizes.items(), strict=True)
    )
    hashes = {
        name: hashlib.sha256(
            json.dumps([(getattr(part, name), part.weight) for part in parts]).encode()
        ).hexdigest()
        for name in ("fingerprint", "text_identity")
    }
    unknown = sum(part.weight * part.unknown for part in parts)
    return dataclasses.replace(parts[0], unknown=unknown, mixed=parts, **hashes)


def _short_names(names: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that differ, in characters that every logger accepts."""
    cleaned = [re.sub(r"[^\w./-]+", "_", name, flags=re.ASCII).strip("/") for name in names]
    ends = (["/".join(name.split("/")[-n:]) for name in cleaned] for n in range(1, 99))
    numbered = [f"{number}_{name}" for number, name in enumerate(cleaned)]
    return next((short for short in ends if len({*short}) == len(names)), numbered)


def _train_tokenizer(config: TrainConfig, parts: Parts, folder: Path) -> Tokenizer:
    """Return a tokenizer trained on all texts; a text's share of the sample is its weight."""
    data, size = config.data, config.model.vocab_size or prepare.DEFAULT_VOCAB_SIZE
    texts = (dataclasses.replace(data, source=name) for name in parts.names)
    identities = [source.identity() for text in texts for source in prepare.open_sources(text)]
    settings = (config.tokenizer, size, data.source, data.eval_fraction, identities)
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    path = folder / f"tokenizer-{digest[:8]}"
    if not path.exists():
        if any(folder.glob("tokenizer-????????")):
            raise UserError(
                f"{folder} has a tokenizer that was trained on other texts or with other settings; "
                "remove the folder, or choose another --workdir"
            )
        # Another process may have written the same one meanwhile.
        with replacing(path, os.path.isdir) as new:
            sentences = sample_sentences(config, parts)
            prepare.train_tokenizer(sentences, config.tokenizer, size).save(new)
    return tokenizer_loading.load(path)


def sample_sentences(config: TrainConfig, parts: Parts) -> Iterator[str]:
    """Yield a sample of the training text; a text's share of it is its weight."""
    data = config.data
    for name, weight in (parts.weights or {parts.source: 1.0}).items():
        if name in parts.stores:
            raise UserError(
                f"{name} is a store, whose text has been tokenized; give the text itself"
            )
        sources = prepare.open_sources(dataclasses.replace(data, source=name))
        sentences = prepare.training_sentences(sources, data.eval_fraction)
        most = max(1, round(weight * tokenizer_training.MAX_SENTENCES))
        yield from tokenizer_training.sample(sentences, most)


def _check_vocab_size(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a model with fewer embeddings than the tokenizer has tokens; 0 is as many."""
    if vocab_size and vocab_size < tokenizer.vocab_size:
        size = f"the tokenizer's {tokenizer.vocab_size} tokens"
        raise UserError(f"model.vocab_size {vocab_size} is smaller than {size}; raise it")

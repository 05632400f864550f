"""Load a tokenizer from files of its own, of Hugging Face, or of Google."""

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from bert_jax.errors import UserError
from bert_jax.text.tokenizer import (
    ByteLevelTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    WordPieceTokenizer,
    configure,
)

_SETTINGS, _ADDED_TOKENS = "tokenizer_config.json", "added_tokens.json"


def load(path: str | Path, *, lowercase: bool = True) -> Tokenizer:
    """Load a tokenizer from one of its files or their folder; `lowercase` is for a `vocab.txt`."""
    path = Path(path)
    if not os.path.exists(path):  # unlike Path.exists, False for a name that is too long
        raise UserError(f"tokenizer {path} does not exist; give one of its files, or their folder")
    names = (
        "*.model",
        "tokenizer.json",
        "vocab.txt",
        "vocab.json",
        "merges.txt",
        _SETTINGS,
        _ADDED_TOKENS,
    )
    paths = [path] if path.is_file() else [p for name in names for p in sorted(path.glob(name))]
    try:
        files = {p.name: p.read_bytes() for p in paths}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    return _try(from_files(files, str(path), lowercase=lowercase), str(path))


def from_json(files: Any, where: str) -> Tokenizer:
    """Build a tokenizer from `Tokenizer.to_json`; `where` names it in an error."""
    try:
        content = {name: base64.b64decode(text) for name, text in files.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{where} holds no readable tokenizer ({error})") from error
    return _try(from_files(content, where), where)


def _try(tokenizer: Tokenizer, where: str) -> Tokenizer:
    """Return a tokenizer that encodes and decodes a text, which some damaged ones do not."""
    try:
        tokenizer.encode(["a river \U0010ffff"])
        tokenizer.encode_with_offsets("a river")
        tokenizer.decode(tokenizer.encode_with_masks("a [MASK] river"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of any kind, also Rust's panic, which is no Exception
        raise UserError(f"{where} holds no readable tokenizer ({error}); fetch it again") from error
    return tokenizer


def from_files(files: Mapping[str, bytes], where: str, *, lowercase: bool = True) -> Tokenizer:
    """Build a tokenizer from the content of its files by name; `where` names them in an error.

    Of several kinds the first is used: SentencePiece `.model`, `tokenizer.json`, `vocab.json` with
    `merges.txt`, `vocab.txt`. A `tokenizer_config.json` overrides how they normalize text.
    """
    try:
        settings = json.loads(files.get(_SETTINGS, b"{}"))
        if not isinstance(settings, dict):
            raise UserError(f"{_SETTINGS} is not a JSON object; fetch it again")
        added = _added_tokens(settings, json.loads(files.get(_ADDED_TOKENS, b"{}")))
        for name, content in files.items():
            if name.endswith(".model"):
                return SentencePieceTokenizer(content)
        if "tokenizer.json" in files:
            return _from_tokenizer_json(files["tokenizer.json"].decode(), settings, added)
        if {"vocab.json", "merges.txt"} <= set(files):
            lines = files["merges.txt"].decode().split("\n")
            lines = lines[lines[0].startswith("#version") :]
            merges: Any = [line.partition(" ")[::2] for line in lines if line]
            model = models.BPE(dict(json.loads(files["vocab.json"])), merges)
            tokenizer = tokenizers.Tokenizer(model)
            prefix = bool(settings.get("add_prefix_space"))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
            configure(tokenizer, settings, added)
            return ByteLevelTokenizer.from_model(tokenizer)
        for name, content in files.items():
            if name.endswith(".txt"):
                # Not splitlines: a token may hold another character that it splits at.
                tokens = content.decode().removesuffix("\n").split("\n")
                tokens = [token.removesuffix("\r") for token in tokens]
                return WordPieceTokenizer.from_vocabulary(
                    tokens, lowercase=lowercase, settings=settings, added=added
                )
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exception for a damaged file
        raise UserError(f"{where} holds no readable tokenizer ({error}); fetch it again") from error
    raise UserError(
        f"{where} has no sentencepiece .model, tokenizer.json, vocab.txt, or vocab.json with "
        "merges.txt; add one"
    )


def _added_tokens(
    settings: Mapping[str, Any], listed: Mapping[str, int]
) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens beside a vocabulary, by id, as `transformers` reads them."""
    decoder = settings.get("added_tokens_decoder")
    if decoder is not None:
        return {int(index): tokenizers.AddedToken(**token) for index, token in decoder.items()}
    special = [value for name, value in settings.items() if name.endswith("_token")]
    added = {}
    for token, index in listed.items():
        is_special = token in special
        added[index] = tokenizers.AddedToken(token, normalized=not is_special, special=is_special)
    return added


def _from_tokenizer_json(
    text: str, settings: Mapping[str, Any], added: Mapping[int, tokenizers.AddedToken]
) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(text)
    configure(tokenizer, settings, added)
    model = tokenizer.model
    if isinstance(model, models.WordPiece):
        if model.unk_token not in WordPieceTokenizer.special:
            raise UserError("tokenizer.json has no token for unknown words; BERT's is [UNK]")
        return WordPieceTokenizer(tokenizer)
    if isinstance(model, models.BPE) and '"ByteLevel"' in text:
        return ByteLevelTokenizer(tokenizer)
    kind = type(model).__name__
    raise UserError(
        f"tokenizer.json holds a {kind} tokenizer, which is read from its .model alone; put that "
        "beside it"
    )

"""Load a tokenizer from files of its own, of Hugging Face, or of Google."""

import base64
import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from bert_jax.errors import UserError, refuse
from bert_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from bert_jax.text.tokenizer import (
    ByteLevelTokenizer,
    Tokenizer,
    WordPieceTokenizer,
)
from bert_jax.text.unigram import UnigramTokenizer
from bert_jax.text.wordpiece import wordpiece_model

_SETTINGS, _ADDED_TOKENS = "tokenizer_config.json", "added_tokens.json"
# Of the settings, and what `tokenizers` calls them.
_NORMALIZER = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# By the model of a `tokenizer.json`.
_CLASSES = {
    "WordPiece": WordPieceTokenizer,
    "BPE": ByteLevelTokenizer,
    "Unigram": UnigramTokenizer,
}
# The file of the models that fairseq trained, whose ids are its own.
_OTHER_IDS = "sentencepiece.bpe.model"
_SPECIAL_TOKENS, _DECODER = "special_tokens_map.json", "added_tokens_decoder"
_ADDITIONAL = ("additional_special_tokens", "extra_special_tokens")
# Classes of `transformers` that a tokenizer.json is for as it is, whatever the settings say.
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")
_PARTS = ("vocab.json", "merges.txt")  # of one vocabulary
NAMES = ("tokenizer.json", "vocab.txt", *_PARTS)
NAMES += (_SETTINGS, _ADDED_TOKENS, _SPECIAL_TOKENS)
# Settings of Japanese tokenizers, with the only values that are read: those of BERT.
_WORDS = {"word_tokenizer_type": "basic", "subword_tokenizer_type": "wordpiece"}


def load(path: str | Path, *, lowercase: bool = True) -> Tokenizer:
    """Load a tokenizer from one of its files or their folder; `lowercase` is for a `vocab.txt`.

    Beside a file, its folder's settings are read.
    """
    path = Path(os.path.expanduser(path))
    if not os.path.exists(path):  # unlike Path.exists, False for a name that is too long
        raise UserError(f"tokenizer {path} does not exist; give one of its files, or their folder")
    if path.is_dir():
        paths = [*sorted(path.glob("*.model")), *(path / name for name in NAMES)]
    else:
        beside = (_SETTINGS, _ADDED_TOKENS, _SPECIAL_TOKENS)
        if path.name in _PARTS:
            beside += _PARTS
        paths = [path, *(path.with_name(name) for name in beside)]
    with _reading(str(path)):
        files = {p.name: p.read_bytes() for p in paths if p.is_file()}
    return from_files(files, str(path), lowercase=lowercase)


def from_json(files: Any, where: str) -> Tokenizer:
    """Build a tokenizer from `Tokenizer.to_json`; `where` names it in an error."""
    with _reading(where):
        content = {name: base64.b64decode(text) for name, text in files.items()}
    return from_files(content, where)


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turn any error of damaged files into a UserError that names them."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except BaseException as error:  # of any kind, also Rust's panic, which is no Exception
        raise UserError(f"{where} holds no readable tokenizer ({error}); fetch it again") from error


def from_files(files: Mapping[str, bytes], where: str, *, lowercase: bool = True) -> Tokenizer:
    """Build a tokenizer, which encodes and decodes, from the content of its files by name."""
    with _reading(where):
        settings = json.loads(files.get(_SETTINGS, b"{}"))
        if not isinstance(settings, dict):
            raise UserError(f"{_SETTINGS} is not a JSON object; fetch it again")
        refuse(
            settings.get("truncation_side") == "left",
            f"{_SETTINGS} keeps the end of a long text (truncation_side left), which is not done",
            fix="shorten long texts yourself, and remove it",
        )
        added = _added_tokens(settings, json.loads(files.get(_ADDED_TOKENS, b"{}")))
        listed = json.loads(files.get(_SPECIAL_TOKENS, b"{}"))
        is_json = "tokenizer.json" in files
        vocabulary = _read_vocabulary(files, settings, lowercase=lowercase)
        if isinstance(vocabulary, SentencePieceTokenizer):  # which reads no others from a text
            tokenizer = vocabulary
            refuse(
                settings.get("do_lower_case") is True,
                f"{_SETTINGS} has do_lower_case, which is not done before a .model",
                fix="lowercase all texts yourself, and remove it",
            )
            for index, token in added.items():
                if tokenizer.id_to_token(index) != token.content:
                    raise UserError(
                        f"the added token {token.content!r} is not token {index} of the .model, "
                        "which reads no other; remove it"
                    )
        else:
            added = _additional(vocabulary, settings, listed, has_own=is_json) | added
            if is_json and _DECODER not in settings:  # older files: those of the tokenizer.json win
                own = vocabulary.get_added_tokens_decoder()
                added = {index: token for index, token in added.items() if index not in own}
            _configure(vocabulary, settings, added)
            cls = _CLASSES[type(vocabulary.model).__name__]
            truncation = vocabulary.truncation or {}
            refuse(
                truncation.get("direction") == "left" and "truncation_side" not in settings,
                "tokenizer.json keeps the end of a long text (truncation left), which is not done",
                fix="shorten long texts yourself, and set it to right",
            )
            tokenizer = (cls if is_json else cls.from_model)(vocabulary)
        _check_special(tokenizer, settings, {} if _DECODER in settings else listed)
        tokenizer.encode(["a river \U0010ffff"])
        tokenizer.encode_with_offsets("a river")
        tokenizer.decode(tokenizer.encode_with_masks("a [MASK] river"))
        return tokenizer


def _check_special(
    tokenizer: Tokenizer, settings: Mapping[str, Any], listed: Mapping[str, Any]
) -> None:
    """Refuse settings by which other tokens are special, or none of a text is.

    `listed` are the special tokens of another file, which overrules the settings.
    """
    for name in ("pad", "unk", "cls", "sep", "mask"):
        token = tokenizer.id_to_token(getattr(tokenizer, f"{name}_id"))
        key = f"{name}_token"
        value = _content({**settings, **listed}.get(key))
        file = _SPECIAL_TOKENS if key in listed else _SETTINGS
        refuse(
            value not in (None, token),
            f"{file} has the {key} {value!r}; only {token} is read",
            fix="correct it, or take a model that has this one",
        )
    refuse(
        settings.get("split_special_tokens"),
        f"{_SETTINGS} has split_special_tokens, which is not done",
        fix="remove it, where no text has the names of special tokens",
    )


def _read_vocabulary(
    files: Mapping[str, bytes], settings: Mapping[str, Any], *, lowercase: bool
) -> SentencePieceTokenizer | tokenizers.Tokenizer:
    # The first file of each suffix.
    names = {Path(name).suffix: name for name in [*files][::-1] if name != "merges.txt"}
    text = files.get("tokenizer.json", b"").decode()
    tokenizer = tokenizers.Tokenizer.from_str(text) if "tokenizer.json" in files else None
    if ".model" in names:
        from_model = SentencePieceTokenizer(files[names[".model"]])
        refuse(
            tokenizer is None and names[".model"] == _OTHER_IDS,
            f"the ids of its model are not those of {_OTHER_IDS}",
            fix="put the model's tokenizer.json beside it, and give their folder",
        )
        refuse(
            tokenizer is None and ".txt" in names,
            f"it has two vocabularies, {names['.model']} and {names.get('.txt')}",
            fix="remove the one that is not the model's",
        )
        if tokenizer is None or _has_tokens_of(tokenizer, from_model):
            if tokenizer is not None and tokenizer.post_processor is not None:
                from_model.join_as(tokenizer)
            return from_model
    if tokenizer is not None:
        _check_json(tokenizer.model, text, has_model=".model" in names)
        return tokenizer
    if {"vocab.json", "merges.txt"} <= {*files}:
        lines = files["merges.txt"].decode().replace("\r\n", "\n").split("\n")
        lines = lines[lines[0].startswith("#version") :]
        merges: Any = [line.partition(" ")[::2] for line in lines if line]
        tokenizer = tokenizers.Tokenizer(models.BPE(json.loads(files["vocab.json"]), merges))
        prefix = bool(settings.get("add_prefix_space"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        return tokenizer
    if ".txt" in names:
        for name, own in _WORDS.items():
            if settings.get(name, own) != own:
                raise UserError(f"{_SETTINGS} has {name} {settings[name]!r}; only {own} is read")
        # Not splitlines: a token may hold another character that it splits at.
        tokens = files[names[".txt"]].decode().removesuffix("\n").split("\n")
        return wordpiece_model([token.removesuffix("\r") for token in tokens], lowercase)
    known = "sentencepiece .model, tokenizer.json, vocab.txt, or vocab.json with merges.txt"
    raise UserError(f"it has no {known}; add one")


def _check_json(model: Any, text: str, *, has_model: bool) -> None:
    """Refuse a `tokenizer.json` with a model of another kind than are read."""
    kind = type(model).__name__
    refuse(
        kind == "WordPiece" and model.unk_token not in WordPieceTokenizer.special,
        "tokenizer.json has no token for unknown words",
        fix="set its unk_token to [UNK], as BERT's is",
    )
    is_other = kind == "BPE" and '"ByteLevel"' not in text
    if is_other and ('"Metaspace"' in text or model.byte_fallback or has_model):
        beside = ", and the one beside it has other tokens or ids" if has_model else ""
        raise UserError(
            f"a {kind} tokenizer.json is not read, only its .model is{beside}; put its own .model "
            "beside it, and give their folder"
        )
    refuse(
        is_other or kind not in _CLASSES,
        f"a tokenizer.json of {'a BPE without bytes' if is_other else kind} is not read",
        fix="take or train a WordPiece, a BPE of bytes or a SentencePiece",
    )


def _has_tokens_of(tokenizer: tokenizers.Tokenizer, model: SentencePieceTokenizer) -> bool:
    """Return whether a SentencePiece model has the tokens of a `tokenizer.json` and their ids."""
    ids = tokenizer.get_vocab()
    # Its own special tokens may be in the model alone.
    others = (index for index in range(model.vocab_size) if index not in model.special_ids)
    return all(ids.get(model.id_to_token(index)) == index for index in others) and all(
        model.id_to_token(index) == name for name, index in ids.items()
    )


def is_generic(settings: Mapping[str, Any]) -> bool:
    """Return whether settings name a class of `transformers` for any tokenizer.json."""
    return str(settings.get("tokenizer_class")).removesuffix("Fast") in _GENERIC


def _configure(
    tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], added: Mapping[int, Any]
) -> None:
    # Whether the class of `transformers` has settings that overrule the tokenizer.json.
    overrules = not is_generic(settings)
    is_bert = isinstance(tokenizer.normalizer, normalizers.BertNormalizer)
    for name in _NORMALIZER.keys() & settings.keys() if is_bert and overrules else ():
        setattr(tokenizer.normalizer, _NORMALIZER[name], settings[name])
    is_byte_level = isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)
    if overrules and settings.get("tokenizer_class") and is_byte_level:
        tokenizer.pre_tokenizer.add_prefix_space = bool(settings.get("add_prefix_space"))
    known = tokenizer.get_added_tokens_decoder()
    for index, token in sorted(added.items()):
        if repr(known.get(index)) != repr(token):
            tokenizer.add_tokens([token])
        if (found := tokenizer.token_to_id(token.content)) != index:
            ids = f"is listed as id {index} and loads as {found}"
            raise UserError(f"the added token {token.content!r} {ids}; fetch the files again")


def _additional(
    tokenizer: tokenizers.Tokenizer, *settings: Mapping[str, Any], has_own: bool
) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens of a vocabulary that settings name as special, by id.

    `has_own` is whether the tokenizer has its own special tokens: then settings may name more.
    """
    values: list[Any] = []
    for each in settings:
        for name in _ADDITIONAL:
            listed = each.get(name) or ()
            values += listed.values() if isinstance(listed, dict) else listed
        if has_own:
            values += [value for name, value in each.items() if name.endswith("_token")]
    names = [_content(value) for value in values]
    ids = {name: tokenizer.token_to_id(name) for name in names if isinstance(name, str)}
    token = partial(tokenizers.AddedToken, normalized=False, special=True)
    return {index: token(name) for name, index in ids.items() if index is not None}


def _added_tokens(
    settings: Mapping[str, Any], listed: Mapping[str, int]
) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens beside a vocabulary, by id, as `transformers` reads them."""
    decoder = settings.get(_DECODER)
    if decoder is not None:
        return {int(index): tokenizers.AddedToken(**token) for index, token in decoder.items()}
    special = [_content(value) for name, value in settings.items() if name.endswith("_token")]
    added = {}
    for token, index in listed.items():
        is_special = token in special
        added[index] = tokenizers.AddedToken(token, normalized=not is_special, special=is_special)
    return added


def _content(token: Any) -> Any:
    """Return the name of a token that settings give as it is, or with its properties."""
    return token.get("content") if isinstance(token, dict) else token

"""Tokenizer files of an export, which `transformers.AutoTokenizer` loads as the same tokenizer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError, refuse
from bert_jax.models.architecture import num_separators, num_token_types
from bert_jax.storage.json_files import read_json
from bert_jax.text import sentencepiece_model, tokenizer_loading
from bert_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from bert_jax.text.tokenizer import Tokenizer


def files(
    tokenizer: Tokenizer,
    config: ModelConfig,
    max_length: int | None = None,
    *,
    reads_words: bool = False,
) -> dict[str, bytes]:
    """Return the files by name: `tokenizer.json`, its settings, and the original vocabulary.

    Args:
      max_length: to which a text is truncated; None for the number of positions.
      reads_words: whether the model was trained on words, the first of which has a space before it
        as the others have.
    """
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    separators, has_types = num_separators(config), num_token_types(config) > 1
    template = tokenizer.template(separators, int(has_types))
    settings: dict[str, Any] = {
        # The class that reads tokenizer.json unchanged; BertTokenizer would build another.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length or config.max_position_embeddings,
        "model_input_names": inputs if has_types else [inputs[0], inputs[2]],
        "clean_up_tokenization_spaces": False,
    }
    for role in ("pad", "unk", "cls", "sep", "mask"):
        settings[f"{role}_token"] = tokenizer.id_to_token(getattr(tokenizer, f"{role}_id"))
    contents = tokenizer.files()
    if isinstance(tokenizer, SentencePieceTokenizer):
        # The model stays beside it, for SentencePiece and for an import.
        converted = _from_sentencepiece(tokenizer)
        converted.post_processor = template
        contents["tokenizer.json"] = converted.to_str(pretty=True).encode()
    else:
        joined = tokenizers.Tokenizer.from_str(contents["tokenizer.json"].decode())
        joins_otherwise = joined.num_special_tokens_to_add(True) != 2 + separators
        joins_otherwise |= has_types and tokenizer.pair_token_types != 2
        if joins_otherwise or (separators == 1 and tokenizer.kind != "wordpiece"):
            joined.post_processor = template
            contents["tokenizer.json"] = joined.to_str(pretty=True).encode()
        if reads_words:
            text = contents["tokenizer.json"].decode()
            text = text.replace('"add_prefix_space": false', '"add_prefix_space": true')
            contents["tokenizer.json"] = text.encode()
        content = json.loads(contents["tokenizer.json"])
        contents |= _vocabulary(tokenizer, content)
        pre_tokenizer = content["pre_tokenizer"] or {}
        if "add_prefix_space" in pre_tokenizer:  # which transformers 4 otherwise sets to False
            settings["add_prefix_space"] = pre_tokenizer["add_prefix_space"]
    contents["tokenizer_config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    return contents


def _vocabulary(tokenizer: Tokenizer, content: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a WordPiece or a byte-level BPE from before `tokenizer.json`."""
    model, normalizer = content["model"], content["normalizer"] or {}
    if model["type"] == "Unigram":
        return {}
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)]
    if model["type"] == "WordPiece":
        if normalizer.get("type") != "BertNormalizer":
            return {}  # with a `vocab.txt` it would be another tokenizer
        return {"vocab.txt": "".join(f"{token}\n" for token in tokens).encode()}
    ids = {token: index for index, token in enumerate(tokens)}
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {
        "vocab.json": json.dumps(ids, ensure_ascii=False).encode(),
        "merges.txt": "".join(f"{line}\n" for line in ["#version: 0.2", *merges]).encode(),
    }


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """Return the same tokenizer for `tokenizers`, which does not read SentencePiece models."""
    content = tokenizer.files()["sentencepiece.model"]
    proto = sentencepiece_model.Model.FromString(content)
    trainer, spec = proto.trainer_spec, proto.normalizer_spec
    if trainer.treat_whitespace_as_suffix or not spec.escape_whitespaces:
        raise UserError("the SentencePiece model marks the ends of words, which is not exported")
    normalizer = normalizers.Sequence(_normalizers(spec))
    unk = sentencepiece.SentencePieceProcessor(model_proto=content).unk_id()
    fallback = trainer.byte_fallback
    if trainer.model_type in (sentencepiece_model.UNIGRAM, sentencepiece_model.CHARACTERS):
        scores = _scores(proto.pieces, normalizer, (*tokenizer.special_ids, unk))
        model = models.Unigram(scores, unk, byte_fallback=fallback)
    elif trainer.model_type == sentencepiece_model.BPE:
        ids, name = {p.piece: i for i, p in enumerate(proto.pieces)}, proto.pieces[unk].piece
        model = models.BPE(
            ids, _merges(proto.pieces), unk_token=name, fuse_unk=True, byte_fallback=fallback
        )
    else:
        raise UserError("a SentencePiece model of words is not exported")
    result = tokenizers.Tokenizer(model)
    result.normalizer = normalizer
    result.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if _has_space_before_text_alone(spec) else "never",
        split=trainer.split_by_whitespace,
    )
    of_bytes = [decoders.ByteFallback()] if fallback else []
    strip = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    steps = [decoders.Replace("▁", " "), *of_bytes, decoders.Fuse(), *strip]
    result.decoder = decoders.Sequence(steps)
    special = sorted({*tokenizer.special_ids, tokenizer.unk_id})
    result.add_special_tokens([tokenizer.id_to_token(index) for index in special])
    return result


# A noncharacter of Unicode, which no text has; it separates characters during normalization.
_SEPARATOR = "\ufdd0"
# Characters that may form one grapheme with the character before, and many that do not.
_MARK = r"[^\p{L}\p{N}\p{P}\p{Z}]|[ﾞﾟำຳ]"


def _normalizers(spec: Any) -> list[normalizers.Normalizer]:
    """Return the steps that do what SentencePiece's normalizer of this specification does."""
    # `Precompiled` loses the marks of a letter that changes, so these are separated before, and
    # joined again after it, a mark at a time: NFC alone would also reorder them.
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        join_marks = [
            normalizers.Replace(tokenizers.Regex(rf"(?<!\p{{Mn}}){_SEPARATOR}"), ""),
            normalizers.NFC(),
        ]
        steps = [
            # Not at the start, where `Precompiled` may then panic, and not behind a control
            # character, which nothing joins: a text of them would seem to begin behind them.
            normalizers.Replace(tokenizers.Regex(rf"(?!\A)(?<!\p{{Cc}})(?={_MARK})"), _SEPARATOR),
            normalizers.Precompiled(spec.precompiled_charsmap),
            *(3 * join_marks),  # no character is a letter with more than three marks
            normalizers.Replace(_SEPARATOR, ""),
        ]
    before_alone = _has_space_before_text_alone(spec)
    if spec.remove_extra_whitespaces:
        # Not Strip, which removes other spaces too; SentencePiece also removes its mark at the end.
        outer = r"[ ▁]+\z" if before_alone else r"\A +|[ ▁]+\z"
        steps.append(normalizers.Replace(tokenizers.Regex(outer), ""))
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if before_alone:  # Metaspace puts none before a text that has SentencePiece's mark already
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A(?=▁)"), " "))
    elif spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    return steps


def _has_space_before_text_alone(spec: Any) -> bool:
    """Return whether a text gets one space before it, and what follows a special token has its own.

    These are normalized apart, so that a normalizer cannot tell them from the start of a text.
    """
    return spec.add_dummy_prefix and spec.remove_extra_whitespaces


def _scores(
    pieces: Sequence[Any], normalizer: normalizers.Normalizer, special: Sequence[int]
) -> list[tuple[str, float]]:
    """Return the tokens of a unigram model, each with the log probability that selects it."""
    least = min(piece.score for piece in pieces if piece.type == sentencepiece_model.NORMAL)
    scores = []
    for index, piece in enumerate(pieces):
        name, score = piece.piece, piece.score
        if piece.type == sentencepiece_model.USER_DEFINED:
            if "▁" in name or normalizer.normalize_str(f"a{name}").lstrip("▁") != f"a{name}":
                raise UserError(
                    f"the SentencePiece model has the symbol {name!r}, which tokenizers would "
                    "normalize; it cannot be exported"
                )
            score = -0.1  # its score in SentencePiece's `unigram_model.cc`, at any length
        elif piece.type != sentencepiece_model.NORMAL and index not in special:
            score = 100 * (least - 10)  # SentencePiece subtracts 10 for an unknown letter
        scores.append((name, score))
    return scores


def _merges(pieces: Sequence[Any]) -> list[tuple[str, str]]:
    """Return the merges of a BPE model: any two tokens that make up one, in order of its score."""
    if any(piece.type == sentencepiece_model.USER_DEFINED for piece in pieces):
        raise UserError("a SentencePiece bpe model with user-defined symbols is not exported")
    ids = {p.piece: index for index, p in enumerate(pieces) if p.type == sentencepiece_model.NORMAL}
    merges = []
    for token, index in ids.items():
        pairs = [(token[:split], token[split:]) for split in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in ids and b in ids]
        merges += [(-pieces[index].score, ids[a], ids[b], (a, b)) for a, b in known]
    return [pair for *_, pair in sorted(merges)]


def with_settings(tokenizer: Tokenizer, file: Path) -> Tokenizer:
    """Return a tokenizer with what sentence-transformers has in a file: lower-casing before all."""
    settings = read_json(file, "fetch it again") if file.exists() else {}
    for name in ("processing_kwargs", "processor_kwargs", "tokenizer_args"):
        refuse(
            settings.get(name),
            f"{file} has {name}, which are not supported",
            fix="take a model without",
        )
    if not settings.get("do_lower_case"):
        return tokenizer
    content = tokenizer.files().get("tokenizer.json")
    if not content:
        kind = f"its tokenizer, of kind {tokenizer.kind}, cannot"
        raise UserError(f"{file} has do_lower_case, which {kind}; lowercase texts yourself")
    inner = tokenizers.Tokenizer.from_str(content.decode())
    steps = [inner.normalizer] if inner.normalizer else []
    inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
    files = {"tokenizer.json": inner.to_str().encode()}
    return tokenizer_loading.from_files(files, str(file))

"""A tokenizer as the files from which `transformers.AutoTokenizer` makes the same one."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.text.tokenizer import SentencePieceTokenizer, Tokenizer, bert_template


def files(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, bytes]:
    """Returns the files by name: `tokenizer.json`, its settings, and the vocabulary as it was.

    Args:
      tokenizer: of the model.
      config: of the model.

    Raises:
      UserError: it is a SentencePiece model of a kind that `tokenizers` has not.
    """
    special = {
        "pad_token": tokenizer.pad_id,
        "unk_token": tokenizer.unk_id,
        "cls_token": tokenizer.cls_id,
        "sep_token": tokenizer.sep_id,
        "mask_token": tokenizer.mask_id,
    }
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    settings: dict[str, Any] = {
        # The class that takes a tokenizer.json as it stands; BertTokenizer would build another.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "model_input_names": inputs if config.type_vocab_size > 1 else [inputs[0], inputs[2]],
        "clean_up_tokenization_spaces": False,
        **{name: tokenizer.id_to_token(index) for name, index in special.items()},
    }
    made = tokenizer.files()
    if isinstance(tokenizer, SentencePieceTokenizer):
        # The model itself stays beside it: SentencePiece reads it, and it is imported again.
        made["tokenizer.json"] = _from_sentencepiece(tokenizer).to_str(pretty=True).encode()
    else:
        content = json.loads(made["tokenizer.json"])
        made |= _vocabulary(tokenizer, content["model"])
        before = content["pre_tokenizer"] or {}
        if "add_prefix_space" in before:  # which transformers 4 otherwise sets to False
            settings["add_prefix_space"] = before["add_prefix_space"]
    made["tokenizer_config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    return made


def _vocabulary(tokenizer: Tokenizer, model: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the files that BERT and RoBERTa had before there was a `tokenizer.json`."""
    pieces = [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)]
    if model["type"] == "WordPiece":
        return {"vocab.txt": "".join(f"{piece}\n" for piece in pieces).encode()}
    ids = {piece: index for index, piece in enumerate(pieces)}
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {
        "vocab.json": json.dumps(ids, ensure_ascii=False).encode(),
        "merges.txt": "".join(f"{line}\n" for line in ["#version: 0.2", *merges]).encode(),
    }


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """Returns the same tokenizer for `tokenizers`, which does not read SentencePiece's files."""
    content = tokenizer.files()["sentencepiece.model"]
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(content)  # pyright: ignore[reportAttributeAccessIssue]
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise UserError("the SentencePiece model marks words at their end, which is not exported")
    steps = normalizers.Sequence(_normalizers(normalizer))
    unk, fallback = processor.unk_id(), trainer.byte_fallback
    if trainer.model_type == trainer.UNIGRAM:
        scores = _scores(proto.pieces, steps, (*tokenizer.special_ids, unk))
        model = models.Unigram(scores, unk, byte_fallback=fallback)
    elif trainer.model_type == trainer.BPE:
        model = models.BPE(
            {piece.piece: index for index, piece in enumerate(proto.pieces)},
            _merges(proto.pieces),
            unk_token=processor.id_to_piece(unk),
            fuse_unk=True,
            byte_fallback=fallback,
        )
    else:
        raise UserError("only unigram and bpe SentencePiece models are exported")
    made = tokenizers.Tokenizer(model)
    made.normalizer = steps
    split = trainer.split_by_whitespace
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=split)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            *([decoders.ByteFallback()] if fallback else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if normalizer.add_dummy_prefix else []),
        ]
    )
    special = sorted({*tokenizer.special_ids, tokenizer.unk_id})
    made.add_special_tokens([tokenizer.id_to_token(index) for index in special])
    ends = (tokenizer.cls_id, tokenizer.sep_id)
    made.post_processor = bert_template({tokenizer.id_to_token(index): index for index in ends})
    return made


# Stands for no character, in any text (Unicode, noncharacters); holds characters apart here.
_APART = "\ufdd0"
# What may be one grapheme with the character before it, and much that is not.
_MARK = r"[^\p{L}\p{N}\p{P}\p{Z}]|[ﾞﾟำຳ]"


def _normalizers(spec: Any) -> list[normalizers.Normalizer]:
    """Returns the steps that do what SentencePiece's normalizer of this specification does.

    `Precompiled` takes a letter and the marks on it at once, and loses marks where the letter alone
    changes ("X" in lower case, with an accent). So it gets them apart, and those that are one
    character are joined afterwards, a mark at a time: NFC alone would also reorder the marks.
    """
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        joining = [
            normalizers.Replace(tokenizers.Regex(rf"(?<!\p{{Mn}}){_APART}"), ""),
            normalizers.NFC(),
        ]
        steps = [
            # Not at the start, where `Precompiled` may then panic.
            normalizers.Replace(tokenizers.Regex(rf"(?!\A)(?={_MARK})"), _APART),
            normalizers.Precompiled(spec.precompiled_charsmap),
            *(3 * joining),  # no character is a letter with more than three marks
            normalizers.Replace(_APART, ""),
        ]
    if spec.remove_extra_whitespaces:
        # Not Strip, which takes other space than this; SentencePiece takes its own mark at the end.
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A +|[ ▁]+\z"), ""))
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    return steps


def _scores(
    pieces: Sequence[Any], steps: normalizers.Normalizer, special: Sequence[int]
) -> list[tuple[str, float]]:
    """Returns the pieces of a unigram model, each with the logarithm of its probability.

    SentencePiece never reads a control piece or a byte from text: such a name in a text is letters.
    It reads a symbol that the user defined always. `tokenizers` goes by the score alone.
    """
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece  # pyright: ignore[reportAttributeAccessIssue]
    least = min(piece.score for piece in pieces if piece.type == kinds.NORMAL)
    scores = []
    for index, piece in enumerate(pieces):
        name, score = piece.piece, piece.score
        if piece.type == kinds.USER_DEFINED:
            if "▁" in name or steps.normalize_str(f"a{name}").lstrip("▁") != f"a{name}":
                raise UserError(
                    f"the SentencePiece model has the symbol {name!r}, which tokenizers would "
                    "normalize; it cannot be exported"
                )
            score = -0.1  # what it comes to in SentencePiece's `unigram_model.cc`, at any length
        elif piece.type != kinds.NORMAL and index not in special:
            score = 100 * (least - 10)  # 10 is what SentencePiece takes off for an unknown letter
        scores.append((name, score))
    return scores


def _merges(pieces: Sequence[Any]) -> list[tuple[str, str]]:
    """Returns the pairs that a BPE model joins, the first first; SentencePiece keeps only results.

    A piece is joined from any two others that make it up; its score is when.
    """
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece  # pyright: ignore[reportAttributeAccessIssue]
    if any(piece.type == kinds.USER_DEFINED for piece in pieces):
        raise UserError("a SentencePiece bpe model with symbols of the user's is not exported")
    ids = {p.piece: index for index, p in enumerate(pieces) if p.type == kinds.NORMAL}
    merges = []
    for piece, index in ids.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(a, b) for a, b in pairs if a in ids and b in ids]
        merges += [(-pieces[index].score, ids[a], ids[b], (a, b)) for a, b in known]
    return [pair for *_, pair in sorted(merges)]

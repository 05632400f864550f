"""Tokenizers: SentencePiece, WordPiece and byte-level BPE behind one interface."""

import abc
import base64
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.errors import UserError
from bert_jax.text.word_cache import WordCache

_SETTINGS = "tokenizer_config.json"
_FILE_KINDS = "sentencepiece .model, tokenizer.json, vocab.txt, or vocab.json with merges.txt"


class Tokenizer(abc.ABC):
    """Text to token ids and back."""

    kind: str
    vocab_size: int  # including special tokens
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    is_continuation: np.ndarray  # bool [vocab_size]: the token continues the word before it

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The tokens that are never masked: padding, [CLS], [SEP] and [MASK]."""
        return (self.pad_id, self.cls_id, self.sep_id, self.mask_id)

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the token ids of each text, without special tokens; all cores are used."""

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a text, and the characters at which each starts and ends."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without the special tokens."""

    @abc.abstractmethod
    def id_to_token(self, index: int) -> str:
        """Return a token as it is written in the vocabulary."""

    @abc.abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return the content of the tokenizer's files by name."""

    @property
    def fingerprint(self) -> str:
        """A hash of the tokenizer's files."""
        digest = hashlib.sha256(self.kind.encode())
        for name, content in sorted(self.files().items()):
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files to `folder`, each to a temporary name and renamed."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            temporary = folder / (name + ".tmp")
            temporary.write_bytes(content)
            os.replace(temporary, folder / name)

    def to_json(self) -> dict[str, str]:
        """Return the files as JSON, as they are stored in a checkpoint."""
        return {name: base64.b64encode(data).decode() for name, data in self.files().items()}

    def encode_with_masks(self, text: str) -> list[int]:
        """Return the token ids of a text in which "[MASK]", or the mask token itself, is masked.

        The mask token includes the space before it, as in RoBERTa.
        """
        *firsts, last = text.replace(self.id_to_token(self.mask_id), "[MASK]").split("[MASK]")
        parts = self.encode([*(part.rstrip() for part in firsts), last])
        joined = itertools.chain.from_iterable([self.mask_id, *part] for part in parts)
        return [int(index) for index in joined][1:]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; special tokens that it lacks are added after its vocabulary."""

    kind = "sentencepiece"
    _SPECIAL = (("<pad>", "[PAD]"), ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[MASK]", "<mask>"))

    def __init__(self, model: bytes):
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        tokens = [self._processor.id_to_piece(i) for i in range(self._processor.vocab_size())]
        special = []
        for names in self._SPECIAL:
            name = next((name for name in names if name in tokens), None)
            if name is None:
                tokens.append(name := names[0])
            special.append(tokens.index(name))
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = special
        self.unk_id = self._processor.unk_id()
        self.vocab_size = len(tokens)
        self._tokens = tokens
        self.is_continuation = np.array([not token.startswith("▁") for token in tokens])
        self.is_continuation[[*special, self.unk_id]] = False

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        threads = os.cpu_count() or 1
        return self._processor.encode(list(texts), num_threads=threads, return_type="numpy")

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._processor.encode(text, return_type="offset_mapping")
        # The offsets of a token that starts a word include the space before it.
        offsets = [(end - len(text[start:end].lstrip()), end) for start, end in encoding["offsets"]]
        return encoding["ids"], offsets

    def decode(self, ids: Sequence[int]) -> str:
        size, special = self._processor.vocab_size(), self.special_ids
        return self._processor.decode([int(i) for i in ids if i not in special and i < size])

    def id_to_token(self, index: int) -> str:
        return self._tokens[index]

    def files(self) -> dict[str, bytes]:
        return {"sentencepiece.model": self._model}


class _FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, as in a `tokenizer.json`."""

    special: tuple[str, str, str, str, str]  # for padding, unknown text, [CLS], [SEP] and [MASK]

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        ids = tokenizer.get_vocab()
        _check_special(self.special, ids)
        if tokenizer.post_processor is None:  # other libraries need it to join texts as we do
            tokenizer.post_processor = self._template(ids)
        self.vocab_size = max(ids.values()) + 1
        if len(ids) != self.vocab_size:
            raise UserError(f"the vocabulary has {len(ids)} tokens and ids to {self.vocab_size}")
        special = [ids[token] for token in self.special]
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = special
        self.is_continuation = np.zeros(self.vocab_size, bool)
        self.is_continuation[[i for token, i in ids.items() if self._continues(token)]] = True
        self.is_continuation[special] = False

    @abc.abstractmethod
    def _template(self, ids: Mapping[str, int]) -> processors.PostProcessor:
        """Return how one text or two are joined with special tokens."""

    @abc.abstractmethod
    def _continues(self, token: str) -> bool:
        """Return whether a token continues the word of the one before it."""

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])

    def id_to_token(self, index: int) -> str:
        return self._tokenizer.id_to_token(int(index)) or f"<{index}>"

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._tokenizer.to_str(pretty=True).encode()}


class WordPieceTokenizer(_FastTokenizer):
    """BERT's tokenizer. Source: google-research/bert `tokenization.py`."""

    kind = "wordpiece"
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        super().__init__(tokenizer)
        steps = (type(tokenizer.normalizer), type(tokenizer.pre_tokenizer))
        is_bert = steps == (normalizers.BertNormalizer, pre_tokenizers.BertPreTokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        # BERT's own steps never look beyond a space, but an added token may.
        is_local = not any(t.lstrip or t.rstrip or t.single_word or " " in t.content for t in added)
        self._cache = WordCache(super().encode) if is_bert and is_local else None

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return self._cache.encode(texts) if self._cache else super().encode(texts)

    @classmethod
    def from_vocabulary(
        cls, tokens: Sequence[str], *, lowercase: bool, settings: Mapping[str, Any] | None = None
    ):
        """Build BERT's tokenizer from the lines of a `vocab.txt`.

        `settings` are those of a `tokenizer_config.json`, which override `lowercase`.
        """
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
            raise UserError(f"the vocabulary has the token {twice!r} twice; remove one")
        _check_special(cls.special, ids)
        # The original turns words of over 100 characters into [UNK].
        model = models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = _normalizer({"do_lower_case": lowercase, **(settings or {})}, {})
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.add_special_tokens(list(cls.special))
        return cls(tokenizer)

    def _template(self, ids: Mapping[str, int]) -> processors.PostProcessor:
        return bert_template({token: ids[token] for token in ("[CLS]", "[SEP]")})

    def _continues(self, token: str) -> bool:
        return token.startswith("##")


def _normalizer(
    settings: Mapping[str, Any], original: Mapping[str, Any]
) -> normalizers.BertNormalizer:
    """Return BERT's normalizer: a `tokenizer_config.json` overrides that of a `tokenizer.json`."""
    names = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
    }
    fields = {k: v for k, v in original.items() if k in (*names.values(), "clean_text")}
    overrides = {ours: settings[name] for name, ours in names.items() if name in settings}
    return normalizers.BertNormalizer(**(fields | overrides))


class ByteLevelTokenizer(_FastTokenizer):
    """RoBERTa's byte-level BPE, which encodes any text. Source: GPT-2 (Radford et al. 2019)."""

    kind = "byte_bpe"
    special = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")

    @classmethod
    def from_merges(
        cls, ids: Mapping[str, int], merges: Sequence[tuple[str, str]], *, add_prefix_space: bool
    ):
        """Build RoBERTa's tokenizer from the content of its `vocab.json` and `merges.txt`."""
        _check_special(cls.special, ids)
        tokenizer = tokenizers.Tokenizer(models.BPE(dict(ids), list(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        return cls.from_model(tokenizer)

    @classmethod
    def from_model(cls, tokenizer: tokenizers.Tokenizer):
        """Add what does not depend on the vocabulary: special tokens and decoder."""
        tokenizer.decoder = decoders.ByteLevel()
        mask = tokenizers.AddedToken("<mask>", lstrip=True, special=True)
        tokenizer.add_special_tokens([*cls.special[:-1], mask])
        return cls(tokenizer)

    def _template(self, ids: Mapping[str, int]) -> processors.PostProcessor:
        pre_tokenizer = json.loads(self._tokenizer.to_str())["pre_tokenizer"] or {}
        prefix = bool(pre_tokenizer.get("add_prefix_space"))
        first, last = ("<s>", ids["<s>"]), ("</s>", ids["</s>"])
        return processors.RobertaProcessing(last, first, add_prefix_space=prefix)

    def _continues(self, token: str) -> bool:
        return not token.startswith("Ġ")


def bert_template(special: Mapping[str, int]) -> processors.TemplateProcessing:
    """Return how BERT joins one text or two with [CLS] and [SEP], which are `special`."""
    cls, sep = special
    return processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=list(special.items()),
    )


def _check_special(special: Sequence[str], ids: Mapping[str, int]) -> None:
    missing = [token for token in special if token not in ids]
    if missing:
        raise UserError(f"the vocabulary has no {missing[0]}; add this token, the model needs it")


def load(path: str | Path, *, lowercase: bool = True) -> Tokenizer:
    """Load a tokenizer from one of its files, or from the folder that holds them.

    `lowercase` is how to read a `vocab.txt`, which does not say.

    Raises:
      UserError: there is none at `path`, or it is damaged.
    """
    path = Path(path)
    names = ("*.model", "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", _SETTINGS)
    paths = [path] if path.is_file() else [p for name in names for p in sorted(path.glob(name))]
    try:
        files = {p.name: p.read_bytes() for p in paths}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    return from_files(files, str(path), lowercase=lowercase)


def from_json(files: Any, where: str) -> Tokenizer:
    """Build a tokenizer from `Tokenizer.to_json`; `where` names it in an error."""
    try:
        content = {name: base64.b64decode(text) for name, text in files.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{where} holds no readable tokenizer ({error})") from error
    return from_files(content, where)


def from_files(files: Mapping[str, bytes], where: str, *, lowercase: bool = True) -> Tokenizer:
    """Build a tokenizer from the content of its files by name; `where` names them in an error.

    Of several kinds the first is used: SentencePiece `.model`, `tokenizer.json`, `vocab.json` with
    `merges.txt`, `vocab.txt`. A `tokenizer_config.json` overrides how they normalize text.
    """
    try:
        settings = json.loads(files.get(_SETTINGS, b"{}"))
        if not isinstance(settings, dict):
            raise UserError(f"{_SETTINGS} holds no settings; fetch it again")
        for name, content in files.items():
            if name.endswith(".model"):
                return SentencePieceTokenizer(content)
        if "tokenizer.json" in files:
            return _from_tokenizer_json(files["tokenizer.json"].decode(), settings)
        if {"vocab.json", "merges.txt"} <= set(files):
            lines = files["merges.txt"].decode().split("\n")
            lines = lines[lines[0].startswith("#version") :]
            merges = [
                (first, second) for first, _, second in (m.partition(" ") for m in lines if m)
            ]
            prefix = bool(settings.get("add_prefix_space"))
            ids = json.loads(files["vocab.json"])
            return ByteLevelTokenizer.from_merges(ids, merges, add_prefix_space=prefix)
        for name, content in files.items():
            if name.endswith(".txt"):
                # Not splitlines: a token may hold another character that it splits at.
                tokens = [line.removesuffix("\r") for line in content.decode().split("\n")]
                tokens = tokens[:-1] if tokens[-1] == "" else tokens
                return WordPieceTokenizer.from_vocabulary(
                    tokens, lowercase=lowercase, settings=settings
                )
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exception for a damaged file
        raise UserError(f"{where} holds no readable tokenizer ({error}); fetch it again") from error
    raise UserError(f"{where} has no {_FILE_KINDS}; add one")


def _from_tokenizer_json(text: str, settings: Mapping[str, Any]) -> Tokenizer:
    content = json.loads(text)
    kind = content["model"].get("type")
    tokenizer = tokenizers.Tokenizer.from_str(text)
    if kind == "WordPiece":
        if content["model"].get("unk_token") not in WordPieceTokenizer.special:
            raise UserError("tokenizer.json has no token for unknown words; BERT's is [UNK]")
        normalizer = content["normalizer"] or {}
        if normalizer.get("type") == "BertNormalizer":
            tokenizer.normalizer = _normalizer(settings, normalizer)
        return WordPieceTokenizer(tokenizer)
    if kind == "BPE" and '"ByteLevel"' in text:
        return ByteLevelTokenizer(tokenizer)
    raise UserError(f"tokenizer.json is of kind {kind}; put its SentencePiece .model beside it")


def check_vocab_size(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a model with fewer embeddings than the tokenizer has tokens.

    More embeddings are padding, which speeds some devices up; 0 is the tokenizer's own size.
    """
    if vocab_size and vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {vocab_size} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} tokens; raise it to at least that"
        )

"""Text to pieces and back: SentencePiece, WordPiece and byte-level BPE behind one interface."""

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
from bert_jax.text.word_cache import Words


class Tokenizer(abc.ABC):
    """Text to pieces and back.

    Attributes:
      vocab_size: number of pieces, special ones included.
      pad_id, unk_id, cls_id, sep_id, mask_id: the special pieces.
      is_continuation: bool [vocab_size], whether a piece continues the word of the one before it.
    """

    kind: str
    vocab_size: int
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    is_continuation: np.ndarray

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The pieces that are never masked: padding, [CLS], [SEP] and [MASK]."""
        return (self.pad_id, self.cls_id, self.sep_id, self.mask_id)

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Returns the pieces of each text, with no special ones added, using all cores."""

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the pieces of a text, and where each begins and ends in it, in characters."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of some pieces, without the special ones."""

    @abc.abstractmethod
    def id_to_token(self, index: int) -> str:
        """Returns the name of a piece, as it stands in the vocabulary."""

    @abc.abstractmethod
    def files(self) -> dict[str, bytes]:
        """Returns the files that hold this tokenizer, by name."""

    @property
    def fingerprint(self) -> str:
        """A hash of the whole tokenizer: equal where every text gives equal pieces."""
        digest = hashlib.sha256(self.kind.encode())
        for name, content in sorted(self.files().items()):
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files into `folder`, each under its name at once."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            temporary = folder / (name + ".tmp")
            temporary.write_bytes(content)
            os.replace(temporary, folder / name)

    def to_json(self) -> dict[str, str]:
        """Returns the files as JSON, the form in which a checkpoint holds its tokenizer."""
        return {name: base64.b64encode(data).decode() for name, data in self.files().items()}

    def encode_with_masks(self, text: str) -> list[int]:
        """Returns the pieces of a text in which "[MASK]" stands for the mask piece.

        So does the mask piece's own name. It takes the space before it, as RoBERTa's does.
        """
        *firsts, last = text.replace(self.id_to_token(self.mask_id), "[MASK]").split("[MASK]")
        parts = self.encode([*(part.rstrip() for part in firsts), last])
        joined = itertools.chain.from_iterable([self.mask_id, *part] for part in parts)
        return [int(index) for index in joined][1:]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; special pieces that it lacks are added after its vocabulary."""

    kind = "sentencepiece"
    _SPECIAL = (("<pad>", "[PAD]"), ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[MASK]", "<mask>"))

    def __init__(self, model: bytes):
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        size = self._processor.vocab_size()
        names = [self._processor.id_to_piece(i) for i in range(size)]
        ids = {name: i for i, name in enumerate(names)}
        special = []
        for candidates in self._SPECIAL:
            found = next((ids[name] for name in candidates if name in ids), None)
            if found is None:
                found = len(names)
                names.append(candidates[0])
            special.append(found)
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = special
        self.unk_id = self._processor.unk_id()
        self.vocab_size = len(names)
        self._names = names
        self.is_continuation = np.array([not name.startswith("▁") for name in names])
        self.is_continuation[[*special, self.unk_id]] = False

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        threads = os.cpu_count() or 1
        return self._processor.encode(list(texts), num_threads=threads, return_type="numpy")

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._processor.encode(text, return_type="offset_mapping")
        # A piece that begins a word reaches back over the space before it.
        offsets = [(end - len(text[begin:end].lstrip()), end) for begin, end in found["offsets"]]
        return found["ids"], offsets

    def decode(self, ids: Sequence[int]) -> str:
        size, special = self._processor.vocab_size(), self.special_ids
        return self._processor.decode([int(i) for i in ids if i not in special and i < size])

    def id_to_token(self, index: int) -> str:
        return self._names[index]

    def files(self) -> dict[str, bytes]:
        return {"sentencepiece.model": self._model}


class _FastTokenizer(Tokenizer):
    """What `tokenizers`, the library that Hugging Face's models use, does for a `tokenizer.json`.

    Attributes:
      special: names of the pieces for padding, unknown text, [CLS], [SEP] and [MASK].
    """

    special: tuple[str, str, str, str, str]

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        ids = tokenizer.get_vocab()
        _check_special(self.special, ids)
        if tokenizer.post_processor is None:  # what others need for their rows, as ours
            tokenizer.post_processor = self._row_template(ids)
        self.vocab_size = max(ids.values()) + 1
        if len(ids) != self.vocab_size:
            raise UserError(f"the vocabulary has {len(ids)} pieces and ids to {self.vocab_size}")
        special = [ids[name] for name in self.special]
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = special
        self.is_continuation = np.zeros(self.vocab_size, bool)
        self.is_continuation[[i for name, i in ids.items() if self._continues_word(name)]] = True
        self.is_continuation[special] = False

    @abc.abstractmethod
    def _row_template(self, ids: Mapping[str, int]) -> processors.PostProcessor:
        """Returns how a row is made of one text or two."""

    @abc.abstractmethod
    def _continues_word(self, name: str) -> bool:
        """Returns whether a piece of this name goes on where the one before it ends."""

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
    """BERT's own tokenizer. Source: google-research/bert `tokenization.py`."""

    kind = "wordpiece"
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        super().__init__(tokenizer)
        steps = (type(tokenizer.normalizer), type(tokenizer.pre_tokenizer))
        known = (normalizers.BertNormalizer, pre_tokenizers.BertPreTokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        # Of BERT's own steps none looks beyond a space, but an added piece may.
        alone = not any(p.lstrip or p.rstrip or p.single_word or " " in p.content for p in added)
        self._words = Words(super().encode) if steps == known and alone else None

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return self._words.encode(texts) if self._words else super().encode(texts)

    @classmethod
    def from_vocabulary(
        cls, pieces: Sequence[str], *, lowercase: bool, settings: Mapping[str, Any] | None = None
    ):
        """Builds BERT's tokenizer over a `vocab.txt`, one piece a line, in the order of its ids.

        Args:
          pieces: the lines.
          lowercase: whether upper case and accents are taken away.
          settings: what a `tokenizer_config.json` says besides, if there is one.
        """
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        if len(vocabulary) != len(pieces):
            twice = next(p for i, p in enumerate(pieces) if vocabulary[p] != i)
            raise UserError(f"the vocabulary has the piece {twice!r} twice; remove one")
        _check_special(cls.special, vocabulary)
        # 100 is the original's limit of characters a word, beyond which it is [UNK].
        model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = _normalizer({"do_lower_case": lowercase, **(settings or {})})
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.add_special_tokens(list(cls.special))
        return cls(tokenizer)

    def _row_template(self, ids: Mapping[str, int]) -> processors.PostProcessor:
        return bert_template({name: ids[name] for name in ("[CLS]", "[SEP]")})

    def _continues_word(self, name: str) -> bool:
        return name.startswith("##")


# What `transformers` calls the fields of BERT's normalizer.
_NORMALIZER = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def _normalizer(settings: Mapping[str, Any], before: Any = None) -> normalizers.BertNormalizer:
    """Returns BERT's normalizer as a `tokenizer_config.json` has it.

    Args:
      settings: of that file.
      before: fields as a `tokenizer.json` has them, which `transformers` overrides.
    """
    known = {name: value for name, value in (before or {}).items() if name in _FIELDS}
    given = {ours: settings[theirs] for theirs, ours in _NORMALIZER.items() if theirs in settings}
    return normalizers.BertNormalizer(**(known | given))


_FIELDS = {*_NORMALIZER.values(), "clean_text"}


class ByteLevelTokenizer(_FastTokenizer):
    """RoBERTa's byte-level BPE, which knows every text. Source: GPT-2 (Radford et al. 2019)."""

    kind = "byte_bpe"
    special = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")

    @classmethod
    def from_merges(
        cls,
        vocabulary: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        *,
        add_prefix_space: bool,
    ):
        """Builds RoBERTa's tokenizer over the content of its `vocab.json` and `merges.txt`."""
        _check_special(cls.special, vocabulary)
        tokenizer = tokenizers.Tokenizer(models.BPE(dict(vocabulary), list(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        return cls(cls.finish(tokenizer))

    @classmethod
    def finish(cls, tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """Adds what does not depend on the vocabulary: special pieces and decoder."""
        tokenizer.decoder = decoders.ByteLevel()
        mask = tokenizers.AddedToken("<mask>", lstrip=True, special=True)
        tokenizer.add_special_tokens([*cls.special[:-1], mask])
        return tokenizer

    def _row_template(self, ids: Mapping[str, int]) -> processors.PostProcessor:
        before = json.loads(self._tokenizer.to_str())["pre_tokenizer"]
        prefix = bool((before or {}).get("add_prefix_space"))
        first, last = ("<s>", ids["<s>"]), ("</s>", ids["</s>"])
        return processors.RobertaProcessing(last, first, add_prefix_space=prefix)

    def _continues_word(self, name: str) -> bool:
        return not name.startswith("Ġ")


def bert_template(ends: Mapping[str, int]) -> processors.TemplateProcessing:
    """Returns how BERT makes a row of one text or two; `ends` are the pieces that begin and end."""
    first, last = ends
    return processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=list(ends.items()),
    )


def _check_special(special: Sequence[str], vocabulary: Mapping[str, int]) -> None:
    missing = [name for name in special if name not in vocabulary]
    if missing:
        raise UserError(f"the vocabulary has no {missing[0]}; the model needs it as a piece")


_TOKENIZER_FILES = "sentencepiece .model, tokenizer.json, vocab.txt, or vocab.json with merges.txt"


def from_files(files: Mapping[str, bytes], where: str, *, lowercase: bool = True) -> Tokenizer:
    """Builds a tokenizer from the content of its files, whichever kind they are.

    Args:
      files: content by file name: a SentencePiece `.model`, a `tokenizer.json`, a `vocab.txt`, or
        a `vocab.json` and a `merges.txt`; the first of these that is there. What a
        `tokenizer_config.json` says of the text's form goes before what they say.
      where: what to call the place in an error.
      lowercase: how to read a `vocab.txt`, which does not say.

    Raises:
      UserError: no file is of a known kind, or it is damaged.
    """
    try:
        settings = json.loads(files.get("tokenizer_config.json", b"{}"))
        if not isinstance(settings, dict):
            raise UserError("tokenizer_config.json holds no settings; fetch it again")
        for name, content in files.items():
            if name.endswith(".model"):
                return SentencePieceTokenizer(content)
        if "tokenizer.json" in files:
            return _from_json_file(files["tokenizer.json"].decode(), settings)
        if {"vocab.json", "merges.txt"} <= set(files):
            first, *lines = files["merges.txt"].decode().split("\n")
            lines = lines if first.startswith("#version") else [first, *lines]
            pairs = [line.partition(" ") for line in lines if line]
            merges = [(first, second) for first, _, second in pairs]
            return ByteLevelTokenizer.from_merges(
                json.loads(files["vocab.json"]),
                merges,
                add_prefix_space=bool(settings.get("add_prefix_space")),
            )
        for name, content in files.items():
            if name.endswith(".txt"):
                # Not splitlines: a piece may hold one of the other characters that it splits at.
                pieces = [line.removesuffix("\r") for line in content.decode().split("\n")]
                pieces = pieces[:-1] if pieces[-1] == "" else pieces
                return WordPieceTokenizer.from_vocabulary(
                    pieces, lowercase=lowercase, settings=settings
                )
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exception for a damaged file
        raise UserError(f"{where} holds no readable tokenizer ({error}); fetch it again") from error
    raise UserError(f"{where} has no {_TOKENIZER_FILES}; add one")


def _from_json_file(content: str, settings: Mapping[str, Any]) -> Tokenizer:
    model = json.loads(content)["model"]
    kind = model.get("type")
    tokenizer = tokenizers.Tokenizer.from_str(content)
    if kind == "WordPiece":
        if model.get("unk_token") not in WordPieceTokenizer.special:
            raise UserError("tokenizer.json has no piece for unknown words; BERT's is [UNK]")
        before = json.loads(content)["normalizer"] or {}
        if before.get("type") == "BertNormalizer":
            tokenizer.normalizer = _normalizer(settings, before)
        return WordPieceTokenizer(tokenizer)
    if kind == "BPE" and '"ByteLevel"' in content:
        return ByteLevelTokenizer(tokenizer)
    raise UserError(f"tokenizer.json is of kind {kind}; put its SentencePiece .model beside it")


def from_json(files: Any, where: str) -> Tokenizer:
    """Builds a tokenizer from `Tokenizer.to_json`, as a checkpoint holds it."""
    try:
        content = {name: base64.b64decode(text) for name, text in files.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{where} holds no readable tokenizer ({error})") from error
    return from_files(content, where)


def load(path: str | Path, *, lowercase: bool = True) -> Tokenizer:
    """Reads a tokenizer from one of its files or the folder that holds them.

    Raises:
      UserError: there is none at `path`, or it is damaged.
    """
    path = Path(path)
    names = ("*.model", "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt")
    found = [path] if path.is_file() else [p for name in names for p in sorted(path.glob(name))]
    if not found:
        raise UserError(f"{path} has no {_TOKENIZER_FILES}")
    settings = path / "tokenizer_config.json"
    try:
        files = {p.name: p.read_bytes() for p in [*found, *([settings] * settings.is_file())]}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    return from_files(files, str(path), lowercase=lowercase)


def check_vocab_size(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a model with fewer word embeddings than the tokenizer has pieces.

    Raises:
      UserError: `vocab_size` is too small. A larger one is padding, which speeds some devices up.
    """
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {vocab_size} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} pieces; raise it to at least that"
        )

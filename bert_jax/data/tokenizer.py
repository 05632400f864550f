"""Text to pieces and back: SentencePiece and WordPiece behind one small interface."""

import abc
import base64
import hashlib
import io
import itertools
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bert_jax.config import TokenizerConfig
from bert_jax.errors import UserError

# Enough text for a stable vocabulary; training time grows with it and quality hardly does.
_TRAINING_SENTENCES = 500_000
# SentencePiece leaves longer sentences out without a word; `text` cuts them well below this.
_TRAINING_SENTENCE_BYTES = 1 << 17
# SentencePiece's result depends on the number of threads, so it is not that of the machine.
_TRAINING_THREADS = 4


class Tokenizer(abc.ABC):
    """Text to pieces and back.

    Attributes:
      vocab_size: number of pieces, special ones included.
      pad_id, unk_id, cls_id, sep_id, mask_id: the special pieces.
      continues: bool [vocab_size], whether a piece continues the word of the one before it.
    """

    kind: str
    vocab_size: int
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    continues: np.ndarray

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
    def piece(self, index: int) -> str:
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
        """Returns the pieces of a text in which "[MASK]" stands for the mask piece."""
        parts = self.encode(text.split("[MASK]"))
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
        self.continues = np.array([not name.startswith("▁") for name in names])
        self.continues[[*special, self.unk_id]] = False

    @classmethod
    def train(cls, sentences: Iterable[str], config: TokenizerConfig, vocab_size: int):
        """Trains a vocabulary of `vocab_size` pieces.

        Raises:
          UserError: the text is too small for so many pieces.
        """
        model = _train_sentencepiece(
            sentences,
            vocab_size,
            model_type=config.model_type,
            normalization_rule_name="nmt_nfkc_cf" if config.lowercase else "nmt_nfkc",
        )
        return cls(model)

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

    def piece(self, index: int) -> str:
        return self._names[index]

    def files(self) -> dict[str, bytes]:
        return {"sentencepiece.model": self._model}


class WordPieceTokenizer(Tokenizer):
    """BERT's own tokenizer. Source: google-research/bert `tokenization.py`.

    The `tokenizers` library does the work: it is the one that Hugging Face's BERT uses.
    """

    kind = "wordpiece"

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        ids = tokenizer.get_vocab()
        missing = [name for name in _WORDPIECE_SPECIAL if name not in ids]
        if missing:
            raise UserError(f"the vocabulary has no {missing[0]}; BERT needs it as a piece")
        special = [ids[name] for name in _WORDPIECE_SPECIAL]
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = special
        self.continues = np.zeros(self.vocab_size, bool)
        self.continues[[i for name, i in ids.items() if name.startswith("##")]] = True

    @classmethod
    def from_vocabulary(cls, pieces: Sequence[str], *, lowercase: bool):
        """Builds BERT's tokenizer over a `vocab.txt`, one piece a line, in the order of its ids."""
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        if len(vocabulary) != len(pieces):
            twice = next(p for i, p in enumerate(pieces) if vocabulary[p] != i)
            raise UserError(f"the vocabulary has the piece {twice!r} twice; remove one")
        missing = [name for name in _WORDPIECE_SPECIAL if name not in vocabulary]
        if missing:
            raise UserError(f"the vocabulary has no {missing[0]}; BERT needs it as a piece")
        # 100 is the original's limit of characters a word, beyond which it is [UNK].
        model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
        return cls(_bert_pipeline(model, lowercase=lowercase))

    @classmethod
    def train(cls, sentences: Iterable[str], config: TokenizerConfig, vocab_size: int):
        """Trains a vocabulary of `vocab_size` pieces: every character, and merges by frequency.

        SentencePiece counts and merges, over the words that BERT's splitter finds. The trainer of
        `tokenizers` does the same, but gives another vocabulary each time that it is run.

        Raises:
          UserError: the text is too small for so many pieces.
        """
        pipeline = _bert_pipeline(models.WordPiece(unk_token="[UNK]"), lowercase=config.lowercase)
        normalize, split = pipeline.normalizer, pipeline.pre_tokenizer
        assert normalize is not None
        assert split is not None
        words = (
            " ".join(word for word, _ in split.pre_tokenize_str(normalize.normalize_str(sentence)))
            for sentence in sentences
        )
        model = _train_sentencepiece(
            words,
            vocab_size + 1,  # "▁", which marks the begin of a word, is no piece here
            model_type="bpe",
            normalization_rule_name="identity",
            split_by_unicode_script=False,
            split_by_number=False,
            hard_vocab_limit=False,
        )
        found = sentencepiece.SentencePieceProcessor(model_proto=model)
        names = [
            found.id_to_piece(index)
            for index in range(found.vocab_size())
            if not (found.is_control(index) or found.is_unknown(index))
        ]
        alphabet = [name for name in names if len(name) == 1 and name != "▁"]
        merges = [name[1:] if name[0] == "▁" else f"##{name}" for name in names if len(name) > 1]
        pieces = [*_WORDPIECE_SPECIAL, *alphabet, *(f"##{char}" for char in alphabet), *merges]
        pieces = list(dict.fromkeys(pieces))[:vocab_size]
        if len(pieces) != vocab_size:
            raise UserError(
                f"model.vocab_size {vocab_size} does not suit the text, which has {len(pieces)} "
                "pieces; set it to that or give more text"
            )
        return cls.from_vocabulary(pieces, lowercase=config.lowercase)

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])

    def piece(self, index: int) -> str:
        return self._tokenizer.id_to_token(int(index)) or f"<{index}>"

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._tokenizer.to_str(pretty=True).encode()}


def _train_sentencepiece(sentences: Iterable[str], vocab_size: int, **options: Any) -> bytes:
    """Returns a SentencePiece model with BERT's special pieces first.

    Raises:
      UserError: the text is too small for so many pieces.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=vocab_size,
            num_threads=_TRAINING_THREADS,
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            max_sentence_length=_TRAINING_SENTENCE_BYTES,
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        reason = str(error).rsplit("] ", 1)[-1].strip()
        raise UserError(
            f"model.vocab_size {vocab_size} does not suit the text (SentencePiece: {reason}); "
            "lower it or give more text"
        ) from error
    return model.getvalue()


_WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _bert_pipeline(model: models.WordPiece, *, lowercase: bool) -> tokenizers.Tokenizer:
    """Returns BERT's normalizer and word splitter around a WordPiece model."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(_WORDPIECE_SPECIAL))
    return tokenizer


_KINDS = {cls.kind: cls for cls in (SentencePieceTokenizer, WordPieceTokenizer)}


def train(sentences: Iterable[str], config: TokenizerConfig, vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of `config.kind` on a uniform sample of the sentences.

    Raises:
      UserError: there are none, or too few for `vocab_size` pieces.
    """
    sample = _sample(sentences, _TRAINING_SENTENCES)
    if not sample:
        raise UserError("data.source has no text to train a tokenizer on; give more text")
    return _KINDS[config.kind].train(sample, config, vocab_size)


def _sample(items: Iterable[str], size: int) -> list[str]:
    """Returns `size` items, each with the same chance, in one pass (Vitter 1985, algorithm R)."""
    generator = random.Random(0)
    sample: list[str] = []
    for index, item in enumerate(items):
        if index < size:
            sample.append(item)
        elif (place := generator.randrange(index + 1)) < size:
            sample[place] = item
    return sample


def from_files(files: dict[str, bytes], where: str, *, lowercase: bool = True) -> Tokenizer:
    """Builds a tokenizer from the content of its files, whichever kind they are.

    Args:
      files: content by file name: a SentencePiece `.model`, a `tokenizer.json` or a `vocab.txt`.
      where: what to call the place in an error.
      lowercase: how to read a `vocab.txt`, which does not say.

    Raises:
      UserError: no file is of a known kind, or it is damaged.
    """
    try:
        for name, content in files.items():
            if name.endswith(".model"):
                return SentencePieceTokenizer(content)
            if name == "tokenizer.json":
                return WordPieceTokenizer(tokenizers.Tokenizer.from_str(content.decode()))
        for name, content in files.items():
            if name.endswith(".txt"):
                # Not splitlines: a piece may hold one of the other characters that it splits at.
                pieces = [line.removesuffix("\r") for line in content.decode().split("\n")]
                pieces = pieces[:-1] if pieces[-1] == "" else pieces
                return WordPieceTokenizer.from_vocabulary(pieces, lowercase=lowercase)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exception for a damaged file
        raise UserError(f"{where} holds no readable tokenizer ({error}); fetch it again") from error
    raise UserError(f"{where} has no sentencepiece .model, tokenizer.json or vocab.txt; add one")


def from_json(files: Any, where: str) -> Tokenizer:
    """Builds a tokenizer from `Tokenizer.to_json`, as a checkpoint holds it."""
    return from_files({name: base64.b64decode(text) for name, text in files.items()}, where)


def load(path: str | Path, *, lowercase: bool = True) -> Tokenizer:
    """Reads a tokenizer from one of its files or the folder that holds them.

    Raises:
      UserError: there is none at `path`, or it is damaged.
    """
    path = Path(path)
    names = ("*.model", "tokenizer.json", "vocab.txt")
    found = [path] if path.is_file() else [p for name in names for p in sorted(path.glob(name))]
    if not found:
        raise UserError(f"{path} has no sentencepiece .model, tokenizer.json or vocab.txt")
    return from_files({p.name: p.read_bytes() for p in found[:1]}, str(path), lowercase=lowercase)


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a model with fewer word embeddings than the tokenizer has pieces.

    Raises:
      UserError: `vocab_size` is too small. A larger one is padding, which speeds some devices up.
    """
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {vocab_size} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} pieces; raise it to at least that"
        )

"""The interface of tokenizers, and those of the `tokenizers` library: WordPiece, byte-level BPE."""

import abc
import base64
import contextlib
import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, processors

from bert_jax.errors import UserError
from bert_jax.storage.json_files import write_bytes
from bert_jax.text.post_processor import num_separators, num_token_types
from bert_jax.text.scripts import CHINESE, MARKS, SPACELESS
from bert_jax.text.wordpiece import end_of_composed, wordpiece_model

MODEL_FILE, _JSON_FILE = "sentencepiece.model", "tokenizer.json"


class Tokenizer(abc.ABC):
    """Text to token ids and back."""

    kind: str
    separators = 0  # that a rule of its own puts between two texts; 0 for no rule
    pair_token_types = 0  # that this rule gives to two texts, as `num_token_types` says
    has_letters_alone = False  # whether each token is a single letter, or a space
    _continuation: re.Pattern[str]  # matches the start of a token that continues a word

    def __init__(self, tokens: Sequence[str], special: Sequence[int]):
        """`special` are the ids of padding, unknown text, [CLS], [SEP] and [MASK]."""
        self._tokens = tokens
        self.vocab_size = len(tokens)  # including special tokens
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = special
        # The tokens that are never masked: padding, [CLS], [SEP] and [MASK].
        self.special_ids = (self.pad_id, self.cls_id, self.sep_id, self.mask_id)
        self.is_continuation = np.array([bool(self._continuation.match(t)) for t in tokens])
        self.is_continuation[list(special)] = False

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the token ids of each text, without special tokens; all cores are used."""

    def encode_literally(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]:
        """Return what `encode` does of texts in which "[SEP]" is not a separator but itself.

        A tokenizer that has no other tokens for this name takes it for unknown text.
        """
        with self.literally():
            encoded = self.encode(texts)
        ids = np.concatenate(encoded).astype(np.int32)
        is_special = np.isin(ids, self.special_ids)
        if isinstance(encoded[0], np.ndarray) and not is_special.any():
            return encoded
        ids[is_special] = self.unk_id  # and lists become arrays, which are faster to store
        ends = itertools.accumulate(map(len, encoded), initial=0)
        return [ids[start:end] for start, end in itertools.pairwise(ends)]

    @contextlib.contextmanager
    def literally(self) -> Iterator[None]:
        """Make the names of special tokens in a text plain text, where the library can."""
        yield

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a text, and the characters at which each starts and ends."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without the special tokens."""

    @abc.abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return the content of the tokenizer's files by name."""

    def id_to_token(self, index: int) -> str:
        """Return a token as it is written in the vocabulary; a padding embedding has none."""
        return (index < self.vocab_size and self._tokens[index]) or f"<{index}>"

    def readable(self, index: int) -> str:
        """Return a token for people: of bytes, the characters that they are."""
        return self.id_to_token(index)

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        """[vocab_size] bool: which tokens are masked with the one before, if whole words are.

        In a script without spaces, each token is a word, as each Chinese character is to BERT.
        """
        begins = re.compile(rf"(##)?(?!{MARKS}){SPACELESS}")
        names = map(self.readable, range(self.vocab_size))
        is_word = np.array([bool(begins.match(name)) for name in names])
        return self.is_continuation & ~is_word

    @property
    def lowers_case(self) -> bool:
        """Whether upper case is read as lower case; False where "A" is unknown."""
        upper, lower = map(list, self.encode(["A", "a"]))
        return upper == lower and self.unk_id not in upper

    @property
    def fingerprint(self) -> str:
        """A hash of the tokenizer's files."""
        digest = hashlib.sha256(self.kind.encode())
        for name, content in sorted(self.files().items()):
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files to a folder, in place of another tokenizer's.

        Each has a temporary name until it is whole.
        """
        files = self.files()
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_bytes(folder / name, content)
        for name in {MODEL_FILE, _JSON_FILE} - files.keys():
            (folder / name).unlink(missing_ok=True)

    def to_json(self) -> dict[str, str]:
        """Return the files as JSON, as they are stored in a checkpoint."""
        return {name: base64.b64encode(data).decode() for name, data in self.files().items()}

    def join_as(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Join two texts by the rule of a tokenizer; UserError if it is not that of a BERT."""
        self.separators = num_separators(tokenizer, self.cls_id, self.sep_id)
        self.pair_token_types = num_token_types(tokenizer) if self.separators else 0

    def template(self, separators: int = 1, second_type: int = 1) -> processors.PostProcessor:
        """Return how one text or two are joined with special tokens, as BERT does by default."""
        cls, sep = self.id_to_token(self.cls_id), self.id_to_token(self.sep_id)
        single = f"{cls}:0 $A:0 {sep}:0"
        between = f" {sep}:0" * (separators - 1)
        return processors.TemplateProcessing(
            single=single,
            pair=f"{single}{between} $B:{second_type} {sep}:{second_type}",
            special_tokens=[(cls, self.cls_id), (sep, self.sep_id)],
        )

    def decode_with_masks(self, ids: Sequence[int]) -> str:
        """Return the text of token ids in which masked ones are "[MASK]", with spaces as usual."""
        tokens = np.array(ids, int)
        parts = np.split(tokens, np.flatnonzero(tokens == self.mask_id))
        text = self._unspaced(self.decode(parts[0].tolist()).strip())
        for previous, (_, *part) in itertools.pairwise(parts):
            last = "".join(map(self.id_to_token, previous[-1:].tolist()))
            has_space = not self.has_letters_alone or last == "▁"
            following = self._unspaced(self.decode(part).strip()).removeprefix("##")
            is_start = re.search(rf"({SPACELESS}|[(\[{{]|^)$", text)
            before = " " if has_space and not is_start else ""
            is_joined = part and self.is_continuation[part[0]]
            is_joined = is_joined or re.match(rf"{SPACELESS}|[.,:;!?)\]}}%]|$", following)
            text += f"{before}[MASK]{'' if is_joined else ' '}{following}"
        return text

    def _unspaced(self, text: str) -> str:
        """Return a decoded text without the spaces that only the tokenizer has added."""
        return text

    def encode_with_masks(self, text: str) -> list[int]:
        """Return the token ids of a text in which "[MASK]", or the mask token itself, is masked."""
        *parts, last = text.replace(self.id_to_token(self.mask_id), "[MASK]").split("[MASK]")
        if self._drops_spaces_before_mask:
            parts = [part.rstrip() for part in parts]
        first, *others = [*parts, last]
        ids = [*self.encode([first])[0]]
        for part in others:
            ids += [self.mask_id, *self.encode_rest(part)]
        return [int(index) for index in ids]

    @property
    def _drops_spaces_before_mask(self) -> bool:
        """Whether white space before the mask token is part of that token."""
        return True

    def encode_rest(self, text: str) -> Sequence[int]:
        """Return the token ids of a text without a space before it, such as what follows a mask.

        A WordPiece tokenizer takes it for the start of a word.
        """
        return self.encode([text])[0]

    def encode_words(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the token ids of texts with a space before each, as within a sentence."""
        return self.encode([f" {text}" for text in texts])


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, as in a `tokenizer.json`."""

    special: tuple[str, str, str, str, str]  # for padding, unknown text, [CLS], [SEP] and [MASK]
    _decoder: decoders.Decoder
    _mask_lstrip: bool  # `lstrip` of a mask token that is added here

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        ids = tokenizer.get_vocab()
        for token in self.special:
            if token not in ids:
                others = "one that was trained with other special tokens is not read"
                raise UserError(
                    f"the vocabulary has no {token}; a new model needs it, and {others}"
                )
        if len(ids) != max(ids.values()) + 1:
            raise UserError(f"the ids are not 0 to {len(ids) - 1}; fetch the vocabulary again")
        super().__init__(sorted(ids, key=ids.__getitem__), [ids[t] for t in self.special])
        if tokenizer.post_processor is None:  # other libraries need it to join texts as we do
            tokenizer.post_processor = self._own_post_processor()
        self.join_as(tokenizer)

    def _own_post_processor(self) -> processors.PostProcessor:
        """Return how texts are joined where the tokenizer's file does not say it."""
        return self.template()

    @classmethod
    def from_model(cls, tokenizer: tokenizers.Tokenizer):
        """Add what does not depend on the vocabulary: special tokens and decoder."""
        tokenizer.decoder = cls._decoder
        result = cls(tokenizer)  # refuses a vocabulary that has not all special tokens
        mask = tokenizers.AddedToken(cls.special[-1], lstrip=cls._mask_lstrip, special=True)
        tokenizer.add_special_tokens([*cls.special[:-1], mask])
        return result

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    @contextlib.contextmanager
    def literally(self) -> Iterator[None]:
        self._tokenizer.encode_special_tokens = True
        try:
            yield
        finally:
            self._tokenizer.encode_special_tokens = False

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])

    def files(self) -> dict[str, bytes]:
        return {_JSON_FILE: self._tokenizer.to_str(pretty=True).encode()}


class WordPieceTokenizer(FastTokenizer):
    """BERT's tokenizer. Source: google-research/bert `tokenization.py`."""

    kind = "wordpiece"
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    _continuation = re.compile("##")
    _decoder, _mask_lstrip = decoders.WordPiece(), False

    @classmethod
    def from_vocabulary(
        cls, tokens: Sequence[str], *, lowercase: bool, strip_accents: bool | None = None
    ):
        """Build a tokenizer from the lines of a `vocab.txt`, as `wordpiece_model` does."""
        return cls.from_model(wordpiece_model(tokens, lowercase, strip_accents))

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, offsets = super().encode_with_offsets(text)
        limits = [*(start for start, _ in offsets[1:]), len(text)]
        # Of a letter and a mark that are composed, the library has the letter alone.
        return ids, [
            (start, end_of_composed(text, start, end, limit))
            for (start, end), limit in zip(offsets, limits, strict=False)
        ]

    def normalized(self, text: str) -> str:
        """Return a text as its words are looked up, such as in lower case."""
        normalizer = self._tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def _unspaced(self, text: str) -> str:
        return re.sub(rf" ?([{CHINESE}]) ?", r"\1", text)


class ByteLevelTokenizer(FastTokenizer):
    """Byte-level BPE, which encodes any text. Source: GPT-2 (Radford et al. 2019).

    The special tokens are <s> and </s>, or [CLS] and [SEP] in a vocabulary that has those.
    """

    kind = "byte_bpe"
    special = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
    _continuation = re.compile("(?!Ġ)")
    _decoder, _mask_lstrip = decoders.ByteLevel(), True

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        if tokenizer.token_to_id("[MASK]") is not None:
            self.special = WordPieceTokenizer.special
        super().__init__(tokenizer)

    @property
    def _drops_spaces_before_mask(self) -> bool:
        added = self._tokenizer.get_added_tokens_decoder().get(self.mask_id)
        return added is None or added.lstrip

    def encode_part(self, name: str) -> list[int]:
        """Return the ids of a part of a word, or of a character, as the vocabulary writes it."""
        return [token.id for token in self._tokenizer.model.tokenize(name)]

    def encode_rest(self, text: str) -> Sequence[int]:
        return self._without_prefix.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _without_prefix(self) -> tokenizers.Tokenizer:
        text = self._tokenizer.to_str()
        text = text.replace('"add_prefix_space":true', '"add_prefix_space":false')
        return tokenizers.Tokenizer.from_str(text)

    def readable(self, index: int) -> str:
        text = self._tokenizer.decode([int(index)])
        is_readable = text and text.isprintable() and "\ufffd" not in text
        return text.replace(" ", "Ġ") if is_readable else self.id_to_token(index)

    def _own_post_processor(self) -> processors.PostProcessor:
        if self.special == WordPieceTokenizer.special:
            return super()._own_post_processor()
        prefix = getattr(self._tokenizer.pre_tokenizer, "add_prefix_space", False)
        first, last = ("<s>", self.cls_id), ("</s>", self.sep_id)
        return processors.RobertaProcessing(last, first, add_prefix_space=prefix)

"""SentencePiece's tokenizer."""

import functools
import itertools
import re
from collections.abc import Sequence

import sentencepiece

from bert_jax.storage.machine import num_cores
from bert_jax.text import sentencepiece_model
from bert_jax.text.tokenizer import MODEL_FILE, Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; special tokens that it lacks are added after its vocabulary."""

    kind = "sentencepiece"
    _continuation = re.compile("(?!▁)")
    SPECIAL = (("<pad>", "[PAD]"), ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[MASK]", "<mask>"))

    def __init__(self, model: bytes):
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model)  # which refuses an empty model
        proto = sentencepiece_model.Model.FromString(model)
        self.has_letters_alone = proto.trainer_spec.model_type == sentencepiece_model.CHARACTERS
        self._removes_spaces = proto.normalizer_spec.remove_extra_whitespaces
        tokens = [self._processor.id_to_piece(i) for i in range(self._processor.vocab_size())]
        special = []
        for names in self.SPECIAL:
            name = next((name for name in names if name in tokens), None)
            if name is None:
                tokens.append(name := names[0])
            special.append(tokens.index(name))
        super().__init__(tokens, [special[0], self._processor.unk_id(), *special[1:]])

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return self._processor.encode(list(texts), num_threads=num_cores(), return_type="numpy")

    def normalize(self, text: str) -> str:
        """Return a text as the model splits it, with "▁" for each space."""
        return self._processor.normalize(text)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._processor.encode(text, return_type="offset_mapping")
        ids, offsets, before = encoding["ids"], [], 0
        for token, (start, end) in zip(ids, encoding["offsets"], strict=True):
            # The offsets of a token that starts a word include the space before it.
            start = end - len(text[start:end].lstrip())
            # Of the tokens that one character has become, all but the last are empty.
            is_space = self.id_to_token(token) == "▁" and start >= before
            if start == end < len(text) and not is_space:
                end += 1
            offsets.append((start, end))
            before = end
        return ids, offsets

    def encode_with_masks(self, text: str) -> list[int]:
        others = {"▁", self.id_to_token(self.unk_id)}
        letters = (each for each in self._tokens if len(each) == 1 and each not in others)
        letter = next(letters, "") if self.has_letters_alone else ""
        if not letter:
            return super().encode_with_masks(text)
        # A mask is one letter, whichever, beside spaces that have tokens of their own.
        parts = text.replace(self.id_to_token(self.mask_id), "[MASK]").split("[MASK]")
        before = itertools.accumulate(parts[:-1], lambda text, part: f"{text}{letter}{part}")
        ids = [*map(int, self.encode([letter.join(parts)])[0])]
        for masked in self.encode([f"{part}{letter}" for part in before]):
            ids[len(masked) - 1] = self.mask_id
        return ids

    def encode_rest(self, text: str) -> Sequence[int]:
        # A model that keeps all spaces reads one before the text by itself.
        normalized = self._with_prefix[False].normalize(f".{text}")
        starts_word = self._removes_spaces and normalized.startswith(".▁")
        return self._with_prefix[starts_word].encode(text)

    def encode_words(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return self._with_prefix[True].encode(list(texts))

    def spell(self, words: Sequence[str]) -> list[list[str]]:
        """Return the tokens of each word, as `normalize` writes it: after a "▁", or without one."""
        texts = [word.removeprefix("▁") for word in words]
        spelled = {}
        for has_prefix, processor in self._with_prefix.items():
            chosen = [i for i, word in enumerate(words) if word.startswith("▁") == has_prefix]
            encoded = processor.encode([texts[index] for index in chosen])
            spelled.update(zip(chosen, encoded, strict=True))
        return [[self.id_to_token(token) for token in spelled[i]] for i in range(len(words))]

    @functools.cached_property
    def _with_prefix(self) -> dict[bool, sentencepiece.SentencePieceProcessor]:
        processors = {}
        for has_prefix in (False, True):
            proto = sentencepiece_model.Model.FromString(self._model)
            proto.normalizer_spec.add_dummy_prefix = has_prefix
            model = proto.SerializeToString()
            processors[has_prefix] = sentencepiece.SentencePieceProcessor(model_proto=model)
        return processors

    def decode(self, ids: Sequence[int]) -> str:
        size, special = self._processor.vocab_size(), self.special_ids
        return self._processor.decode([int(i) for i in ids if i not in special and i < size])

    def files(self) -> dict[str, bytes]:
        return {MODEL_FILE: self._model}

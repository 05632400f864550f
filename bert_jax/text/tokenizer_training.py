"""Vocabularies made from text: SentencePiece, WordPiece and byte-level BPE.

The same text gives the same vocabulary, on any machine.
"""

import io
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from bert_jax.config import TokenizerConfig
from bert_jax.errors import UserError
from bert_jax.text.tokenizer import (
    ByteLevelTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    WordPieceTokenizer,
)

# Enough text for a stable vocabulary; training time grows with it and quality hardly does.
_TRAINING_SENTENCES = 500_000
# SentencePiece leaves longer sentences out without a word; `text` cuts them well below this.
_TRAINING_SENTENCE_BYTES = 1 << 17
# SentencePiece's result depends on the number of threads, so it is not that of the machine.
_TRAINING_THREADS = 4


def train(sentences: Iterable[str], config: TokenizerConfig, vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of `config.kind` on a uniform sample of the sentences.

    Raises:
      UserError: there are none, or too few for `vocab_size` pieces.
    """
    sample = _sample(sentences, _TRAINING_SENTENCES)
    if not sample:
        raise UserError("data.source has no text to train a tokenizer on; give more text")
    return _TRAIN[config.kind](sample, config, vocab_size)


def _train_sentencepiece(
    sentences: Sequence[str], config: TokenizerConfig, vocab_size: int
) -> Tokenizer:
    model = _sentencepiece_model(
        sentences,
        vocab_size,
        model_type=config.model_type,
        normalization_rule_name="nmt_nfkc_cf" if config.lowercase else "nmt_nfkc",
    )
    return SentencePieceTokenizer(model)


def _train_wordpiece(
    sentences: Sequence[str], config: TokenizerConfig, vocab_size: int
) -> Tokenizer:
    """Trains every character, and merges by frequency.

    SentencePiece counts and merges, over the words that BERT's splitter finds. The trainer of
    `tokenizers` does the same, but gives another vocabulary each time that it is run.
    """
    normalize = normalizers.BertNormalizer(lowercase=config.lowercase)
    split = pre_tokenizers.BertPreTokenizer()
    words = (
        " ".join(word for word, _ in split.pre_tokenize_str(normalize.normalize_str(sentence)))
        for sentence in sentences
    )
    model = _sentencepiece_model(
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
    special = WordPieceTokenizer.special
    pieces = [*special, *alphabet, *(f"##{char}" for char in alphabet), *merges]
    pieces = list(dict.fromkeys(pieces))[:vocab_size]
    _check_size(len(pieces), vocab_size)
    return WordPieceTokenizer.from_vocabulary(pieces, lowercase=config.lowercase)


def _train_byte_level(
    sentences: Sequence[str], config: TokenizerConfig, vocab_size: int
) -> Tokenizer:
    """Trains all bytes, and merges by frequency. The first word of a text has a space before it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if config.lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],  # in RoBERTa's order
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    _check_size(tokenizer.get_vocab_size(), vocab_size)
    return ByteLevelTokenizer(ByteLevelTokenizer.finish(tokenizer))


_TRAIN: dict[str, Callable[[Sequence[str], TokenizerConfig, int], Tokenizer]] = {
    SentencePieceTokenizer.kind: _train_sentencepiece,
    WordPieceTokenizer.kind: _train_wordpiece,
    ByteLevelTokenizer.kind: _train_byte_level,
}


def _check_size(found: int, wanted: int) -> None:
    if found != wanted:
        raise UserError(
            f"model.vocab_size {wanted} does not suit the text, which has {found} pieces; set it "
            "to that or give more text"
        )


def _sentencepiece_model(sentences: Iterable[str], vocab_size: int, **options: Any) -> bytes:
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

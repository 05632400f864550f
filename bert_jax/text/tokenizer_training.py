"""Train SentencePiece, WordPiece or byte-level BPE; equal text has equal results anywhere."""

import io
import random
from collections.abc import Iterable, Sequence
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

# Enough for a stable vocabulary: more text takes longer and hardly improves it.
_MAX_SENTENCES = 500_000
# SentencePiece silently skips longer sentences; those of `sources` are well below this.
_MAX_SENTENCE_BYTES = 1 << 17
# Fixed, because SentencePiece's result depends on the number of threads.
_NUM_THREADS = 4


def train(sentences: Iterable[str], config: TokenizerConfig, vocab_size: int) -> Tokenizer:
    """Train a tokenizer of `config.kind` on a uniform sample of the sentences."""
    sample = _sample(sentences, _MAX_SENTENCES)
    if not sample:
        raise UserError("data.source has no text to train a tokenizer on; give more text")
    if config.kind == WordPieceTokenizer.kind:
        tokenizer = _train_wordpiece(sample, vocab_size, lowercase=config.lowercase)
    elif config.kind == ByteLevelTokenizer.kind:
        tokenizer = _train_byte_level(sample, vocab_size, lowercase=config.lowercase)
    else:
        rule = "nmt_nfkc_cf" if config.lowercase else "nmt_nfkc"
        options = {"model_type": config.model_type, "normalization_rule_name": rule}
        tokenizer = SentencePieceTokenizer(_train_sentencepiece(sample, vocab_size, **options))
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"model.vocab_size {vocab_size} does not suit the text, which has "
            f"{tokenizer.vocab_size} tokens; set it to that or give more text"
        )
    return tokenizer


def _train_wordpiece(sentences: Sequence[str], vocab_size: int, *, lowercase: bool) -> Tokenizer:
    """Return the vocabulary of all characters and the most frequent merges."""
    # Not by the trainer of `tokenizers`, which returns another vocabulary each time that it is run.
    normalize = normalizers.BertNormalizer(lowercase=lowercase).normalize_str
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    model = _train_sentencepiece(
        (" ".join(word for word, _ in split(normalize(sentence))) for sentence in sentences),
        vocab_size + 1,  # "▁", which marks the start of a word, is not a token of WordPiece
        model_type="bpe",
        normalization_rule_name="identity",
        split_by_unicode_script=False,
        split_by_number=False,
        hard_vocab_limit=False,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    names = [
        processor.id_to_piece(index)
        for index in range(processor.vocab_size())
        if not (processor.is_control(index) or processor.is_unknown(index))
    ]
    alphabet = [name for name in names if len(name) == 1 and name != "▁"]
    merges = [name[1:] if name[0] == "▁" else f"##{name}" for name in names if len(name) > 1]
    alphabet += [f"##{char}" for char in alphabet]
    tokens = list(dict.fromkeys((*WordPieceTokenizer.special, *alphabet, *merges)))[:vocab_size]
    return WordPieceTokenizer.from_vocabulary(tokens, lowercase=lowercase)


def _train_byte_level(sentences: Sequence[str], vocab_size: int, *, lowercase: bool) -> Tokenizer:
    """Return the vocabulary of all bytes and the most frequent merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    # A space before the first word makes its tokens those of the same word elsewhere.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],  # in RoBERTa's order
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return ByteLevelTokenizer.from_model(tokenizer)


def _train_sentencepiece(sentences: Iterable[str], vocab_size: int, **options: Any) -> bytes:
    """Return a SentencePiece model with BERT's special tokens first."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=vocab_size,
            num_threads=_NUM_THREADS,
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            max_sentence_length=_MAX_SENTENCE_BYTES,
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
    """Return `size` items, uniformly sampled in one pass (Vitter 1985, algorithm R)."""
    generator = random.Random(0)
    sample: list[str] = []
    for index, item in enumerate(items):
        if index < size:
            sample.append(item)
        elif (position := generator.randrange(index + 1)) < size:
            sample[position] = item
    return sample

"""Train SentencePiece, WordPiece or byte-level BPE: the same text gives the same tokenizer."""

import io
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from bert_jax.config import TokenizerConfig
from bert_jax.errors import UserError
from bert_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from bert_jax.text.tokenizer import (
    ByteLevelTokenizer,
    Tokenizer,
    WordPieceTokenizer,
)
from bert_jax.text.wordpiece import WORDPIECE_SPLITTER, wordpiece_normalizer

# Enough for a stable vocabulary: more text takes longer and hardly improves it.
MAX_SENTENCES = 500_000
_MAX_CHARACTERS = 300_000_000  # of those sentences
# SentencePiece silently skips longer sentences; those of `sources` are well below this.
_MAX_SENTENCE_BYTES = 1 << 17
# Fixed, because SentencePiece's result depends on the number of threads.
_NUM_THREADS = 4
_BATCH = 10_000  # sentences that are normalized at once
_MOST_CHARACTERS = 0.25  # of the vocabulary; if they are more, rare characters are no tokens
_COVERAGE = 0.9995  # of the text, by the most frequent characters; SentencePiece's own default
_LEAST_COVERAGE = 0.98  # that SentencePiece accepts
_NUM_BYTES, _NUM_SPECIAL = 256, 5
_RESERVED = "\u2585"  # ▅, for which SentencePiece leaves out the whole sentence


def train(sentences: Iterable[str], config: TokenizerConfig, vocab_size: int) -> Tokenizer:
    """Train a tokenizer on a sample of sentences, smaller where the text has no more tokens."""
    chosen = sample(sentences, MAX_SENTENCES)
    if not chosen:
        raise UserError("data.source has no text to train a tokenizer on; give more text")
    others = {WordPieceTokenizer.kind: _train_wordpiece, ByteLevelTokenizer.kind: _train_bytes}
    tokenizer = others.get(config.kind, _train_sentencepiece)(chosen, config, vocab_size)
    if tokenizer.vocab_size > vocab_size:
        need = f"{config.kind} needs {tokenizer.vocab_size} tokens"
        raise UserError(f"model.vocab_size {vocab_size} is too small: {need}; raise it")
    return tokenizer


def _train_sentencepiece(
    sentences: Sequence[str], config: TokenizerConfig, vocab_size: int
) -> Tokenizer:
    """Return a SentencePiece; characters that are no tokens become bytes, if these leave room."""
    rule = "nmt_nfkc_cf" if config.lowercase else "nmt_nfkc"
    normalizer = sentencepiece.SentencePieceNormalizer(rule_name=rule)
    counts: Counter[str] = Counter()
    for start in range(0, len(sentences), _BATCH):
        counts.update("".join(normalizer.normalize(list(sentences[start : start + _BATCH]))))
    has_bytes = vocab_size * _MOST_CHARACTERS >= _NUM_BYTES
    characters = _choose(counts, vocab_size, others=_NUM_BYTES if has_bytes else 0)
    is_complete = len(characters) == len(counts)
    model = _run_sentencepiece(
        sentences,
        vocab_size,
        counts,
        characters,
        model_type=config.model_type,
        normalization_rule_name=rule,
        byte_fallback=has_bytes and not is_complete,
    )
    return SentencePieceTokenizer(model)


def _train_wordpiece(sentences: list[str], config: TokenizerConfig, vocab_size: int) -> Tokenizer:
    # Not by the trainer of `tokenizers`, which returns another vocabulary each time that it is run.
    bert = wordpiece_normalizer(lowercase=config.lowercase, strip_accents=config.strip_accents)
    split = WORDPIECE_SPLITTER.pre_tokenize_str
    words = [[word for word, _ in split(bert.normalize_str(sentence))] for sentence in sentences]
    # A character that starts every word that it is in, as the Chinese do, needs one token.
    counts: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for sentence in words:
        counts.update("".join(f"▁{word}" for word in sentence))
        inside.update("".join(word[1:] for word in sentence))
    names = {f"##{character}": count for character, count in inside.items()}
    of_text = counts["▁"] - sum(map(len, words))  # which may have the character itself
    alphabet = _choose(Counter({**counts, **names, "▁": of_text}), vocab_size)
    model = _run_sentencepiece(
        map(" ".join, words),
        # "▁", which marks the start of a word, is no token of WordPiece, and "▁x" is the token of
        # the character "x". So more are asked for, and those beyond `vocab_size` are dropped.
        vocab_size + 1 + len(alphabet),
        counts,
        [*dict.fromkeys(("▁", *(name for name in alphabet if len(name) == 1)))],
        model_type="bpe",
        normalization_rule_name="identity",
        split_by_unicode_script=False,
        split_by_number=False,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    names = [processor.id_to_piece(i) for i in range(_NUM_SPECIAL, processor.vocab_size())]
    merges = [name[1:] if name[0] == "▁" else f"##{name}" for name in names if len(name) > 1]
    tokens = list(dict.fromkeys((*WordPieceTokenizer.special, *alphabet, *merges)))
    return WordPieceTokenizer.from_vocabulary(
        tokens[:vocab_size], lowercase=config.lowercase, strip_accents=config.strip_accents
    )


def _train_bytes(sentences: Sequence[str], config: TokenizerConfig, vocab_size: int) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if config.lowercase or config.strip_accents:
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=False,
            handle_chinese_chars=False,
            strip_accents=config.strip_accents,
            lowercase=config.lowercase,
        )
    # A space before the first word makes its tokens those of the same word elsewhere.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],  # in fairseq's order
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return ByteLevelTokenizer.from_model(tokenizer)


def _remedy(other: str, vocab_size: int) -> str:
    """Return what to do where characters do not fit; byte-level BPE has its own least size."""
    has_room = vocab_size >= _NUM_BYTES + _NUM_SPECIAL
    return f"{other}, or set tokenizer.kind=byte_bpe" if has_room else other


def _choose(counts: Counter[str], vocab_size: int, *, others: int = 0) -> list[str]:
    """Return the characters that become tokens, by frequency: all where they leave room.

    `others` is the number of tokens that write the other characters, if there are any.
    """
    ordered = sorted(+counts, key=lambda name: (-counts[name], name))
    if len(ordered) <= vocab_size * _MOST_CHARACTERS:
        return ordered
    shares = np.cumsum([counts[name] for name in ordered]) / counts.total()
    number = int(np.searchsorted(shares, _COVERAGE)) + 1
    room = vocab_size - _NUM_SPECIAL
    if min(number, room) < len(ordered):
        room -= others
    number = min(number, room)
    if number < 1 or shares[number - 1] < _LEAST_COVERAGE:
        raise UserError(
            f"model.vocab_size {vocab_size} is too small for a text of {len(ordered):,} "
            f"characters; {_remedy('raise it', vocab_size)}"
        )
    return ordered[:number]


def _run_sentencepiece(
    sentences: Iterable[str],
    vocab_size: int,
    counts: Counter[str],
    characters: Sequence[str],
    **options: Any,
) -> bytes:
    """Return a SentencePiece model with BERT's special tokens first, then the characters."""
    share = 1.0
    if len(characters) < len(counts):
        covered = sum(counts[name] for name in characters)
        share = (covered - 0.5) / counts.total()  # SentencePiece stops at the first above it
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(sentence.replace(_RESERVED, " ") for sentence in sentences),
            model_writer=model,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=max(share, _LEAST_COVERAGE),
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
            f"model.vocab_size does not suit the text (SentencePiece: {reason or 'no words'}); "
            f"{_remedy('try another', vocab_size)}"
        ) from error
    return model.getvalue()


def sample(items: Iterable[str], size: int) -> list[str]:
    """Return items, uniformly sampled in one pass (Vitter 1985, algorithm R).

    They are `size`, or as many as have `_MAX_CHARACTERS` together, or all.
    """
    generator = random.Random(0)
    chosen: list[str] = []
    characters = 0
    for index, item in enumerate(items):
        if index < size:
            chosen.append(item)
        elif (position := generator.randrange(index + 1)) < size:
            characters -= len(chosen[position])
            chosen[position] = item
        else:
            continue
        characters += len(item)
        while characters > _MAX_CHARACTERS and len(chosen) > 1:
            position = generator.randrange(len(chosen))
            chosen[position], chosen[-1] = chosen[-1], chosen[position]
            characters -= len(chosen.pop())
            size = len(chosen)
    return chosen

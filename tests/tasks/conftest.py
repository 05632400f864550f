"""Small vocabularies for the tests of tasks."""

import pytest
import tokenizers
from tokenizers import models
from tokenizers.pre_tokenizers import ByteLevel

from bert_jax.text.tokenizer import ByteLevelTokenizer, WordPieceTokenizer

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TOKENS += ["the", "fox", "jump", "##s", "##ed", "over", "lazy", "dog", "what", "who", ".", "?"]


@pytest.fixture(scope="session")
def wordpiece():
    return WordPieceTokenizer.from_vocabulary(TOKENS, lowercase=True)


@pytest.fixture(scope="session")
def byte_bpe():
    """A tokenizer like RoBERTa's, which puts no space before a text."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
    merges = [("Ġ", "f"), ("Ġf", "o"), ("Ġfo", "x"), ("f", "o"), ("Ġ", "T"), ("ĠT", "h")]
    names += [first + second for first, second in merges]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return ByteLevelTokenizer.from_model(tokenizer)

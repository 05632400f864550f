"""What tokenizers trained on texts of many languages lose, as a table for docs/languages.md.

    python benchmarks/languages.py FOLDER [VOCAB_SIZE]

FOLDER has a text file for each language, one sentence a line, for example the Universal Declaration
of Human Rights. Each tokenizer is trained on the text, with its case kept, and then encodes it.
"""

import sys
import unicodedata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bert_jax.config import DataConfig, TokenizerConfig
from bert_jax.text import tokenizer_training
from bert_jax.text.sources import open_source
from bert_jax.text.tokenizer import Tokenizer

KINDS = {"wordpiece": "WordPiece", "sentencepiece": "SentencePiece"}
_TITLES = ("tokens", "[UNK], % of tokens", "tokens per character", "given back")


def comparable(text: str, kind: str) -> str:
    """Return a text without what its form may change: equal marks, and how wide a space is."""
    words = unicodedata.normalize("NFC", text).replace("\u200b", " ").split()
    return ("" if kind == "wordpiece" else " ").join(words)


def measure(tokenizer: Tokenizer, sentences: list[str]) -> list[str]:
    """Return the cells of a tokenizer: those of `_TITLES`, for the sentences."""
    encoded = [[int(i) for i in ids] for ids in tokenizer.encode(sentences)]
    tokens = [index for ids in encoded for index in ids]
    same = sum(
        comparable(tokenizer.decode(ids), tokenizer.kind) == comparable(sentence, tokenizer.kind)
        for ids, sentence in zip(encoded, sentences, strict=True)
    )
    return [
        f"{tokenizer.vocab_size:,}",
        f"{tokens.count(tokenizer.unk_id) / len(tokens):.2%}",
        f"{len(tokens) / sum(map(len, sentences)):.2f}",
        f"{same / len(sentences):.0%}",
    ]


def main(folder: str, vocab_size: str = "1000") -> None:
    """Print a row for each text of a folder."""
    titles = [f"{kind}: {title}" for kind in KINDS.values() for title in _TITLES]
    print("| text | distinct characters |", " | ".join(titles), "|")
    print("|---|" + "--:|" * (1 + len(titles)))
    for path in sorted(Path(folder).glob("*.txt")):
        documents = open_source(str(path), DataConfig(sentences="lines")).documents()
        sentences = [sentence for document in documents for sentence in document]
        cells = [path.stem, str(len(set("".join(sentences))))]
        for kind in KINDS:
            config = TokenizerConfig(kind=kind, lowercase=False)
            tokenizer = tokenizer_training.train(sentences, config, int(vocab_size))
            cells += measure(tokenizer, sentences)
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

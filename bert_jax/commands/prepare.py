"""Tokenize text into a store, once, for any number of pretraining runs.

The same command again resumes after an interruption.
"""

import argparse
import shlex
from pathlib import Path

from bert_jax.config import DataConfig, ModelConfig, TokenizerConfig, TrainConfig, validate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    data = DataConfig()
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="text files or globs, comma separated (plain text, .gz, .xz, .jsonl), tfds:NAME or "
        "builtin",
    )
    parser.add_argument("store", metavar="STORE", help="the folder to write")
    parser.add_argument(
        "--tokenizer",
        default="sentencepiece",
        help="sentencepiece, wordpiece or byte_bpe to train one on the text; or a SentencePiece "
        ".model, a BERT vocab.txt, a tokenizer.json, their folder, or a checkpoint (sentencepiece)",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=32000, help="tokens of a tokenizer trained here (32000)"
    )
    parser.add_argument(
        "--model-type",
        choices=("unigram", "bpe"),
        default="unigram",
        help="algorithm of a SentencePiece (unigram)",
    )
    parser.add_argument("--cased", action="store_true", help="keep upper case")
    parser.add_argument("--eval-source", default="", metavar="SOURCE", help="held-out text")
    parser.add_argument(
        "--eval-fraction",
        type=float,
        default=data.eval_fraction,
        help="share of documents held out where there is no --eval-source (0.05)",
    )
    parser.add_argument(
        "--text-field", default=data.text_field, help="field with the text, of JSON lines and TFDS"
    )
    parser.add_argument(
        "--sentences",
        choices=("auto", "lines", "split"),
        default=data.sentences,
        help="lines: one sentence a line, a blank line between documents; split: paragraphs, to "
        "be split into sentences; auto: look at the text (auto)",
    )


def run(args: argparse.Namespace, _: list[str]) -> None:
    """Prepare the store."""
    from bert_jax.text import tokenizer as tokenizers
    from bert_jax.text.prepare import prepare

    is_path = args.tokenizer not in ("sentencepiece", "wordpiece", "byte_bpe")
    kind = TokenizerConfig.kind if is_path else args.tokenizer
    tokenizer = TokenizerConfig(kind=kind, model_type=args.model_type, lowercase=not args.cased)
    data = DataConfig(
        source=args.source,
        eval_source=args.eval_source,
        eval_fraction=args.eval_fraction,
        text_field=args.text_field,
        sentences=args.sentences,
    )
    model = ModelConfig(vocab_size=args.vocab_size)
    validate(TrainConfig(data=data, tokenizer=tokenizer, model=model))
    if is_path and Path(args.tokenizer).is_file():
        tokenizer = tokenizers.load(args.tokenizer, lowercase=not args.cased)
    elif is_path:
        from bert_jax.bert import load_tokenizer  # whose imports take a second

        tokenizer = load_tokenizer(args.tokenizer, lowercase=not args.cased)
    corpus = prepare(data, tokenizer, args.vocab_size, Path(args.store))
    for name, split in (("training", corpus.train), ("held out", corpus.eval)):
        print(
            f"{name}: {len(split.tokens):,} tokens, {split.num_sentences:,} sentences, "
            f"{split.num_documents:,} documents"
        )
    source = shlex.quote(f"--config.data.source={args.store}")
    print(f"train on it with: bert-jax pretrain {source} --config.model.vocab_size=0")

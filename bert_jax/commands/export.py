"""Make a directory that `transformers` loads: config, model.safetensors and tokenizer.

    bert-jax export runs/tiny exported

A fine-tuned model keeps its head and its labels.
"""

import argparse

from bert_jax.commands import process
from bert_jax.commands.flags import CHECKPOINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    add("destination", metavar="DST", help="the directory to write")
    heads = "heads to export with the encoder (default: all that the checkpoint has)"
    add("--head", choices=("pretraining", "masked-lm", "none"), help=heads)
    add("--force", action="store_true", help="replace an earlier export that is there")


def run(args: argparse.Namespace, _: list[str]) -> None:
    from bert_jax.bert import load

    process.return_host_memory()
    exported = load(args.checkpoint).export(args.destination, args.head, force=args.force)
    name = exported.architecture
    print(f"{name}; load it with transformers.{name}.from_pretrained({args.destination!r})")
    if exported.dropped:
        print(f"dropped, as {name} has no place for them: {', '.join(exported.dropped)}")
    if exported.newly_initialized:
        names = ", ".join(exported.newly_initialized)
        print(f"randomly initialized by transformers, as the model lacks them: {names}")

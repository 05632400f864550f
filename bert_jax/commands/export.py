"""Make a directory that `transformers` loads, or upload it to the Hugging Face hub.

    bert-jax export runs/tiny exported

It has config, model.safetensors, tokenizer, and a card, README.md, with the scores. A fine-tuned
model keeps its head and its labels; one of embeddings is for `sentence-transformers`. To upload it,
log in with `hf auth login`, or set HF_TOKEN.
"""

import argparse

from bert_jax.commands import process
from bert_jax.errors import without_controls
from bert_jax.storage import paths
from bert_jax.storage.paths import CHECKPOINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    add("destination", metavar="DST", help="the directory to write, or hf:OWNER/NAME to upload")
    heads = "heads to export with the encoder (default: all that the checkpoint has)"
    add("--head", choices=("pretraining", "masked-lm", "none"), help=heads)
    add("--force", action="store_true", help="replace an earlier export that is there")
    add("--private", action="store_true", help="make a new model of the hub a private one")


def run(args: argparse.Namespace, _: list[str]) -> None:
    from bert_jax.convert import hub

    # Before a long download.
    hub.check_destination(args.destination, force=args.force, private=args.private)
    bert = process.load_checkpoint(args.checkpoint)
    exported = bert.export(args.destination, args.head, force=args.force, private=args.private)
    name, path = exported.architecture, args.destination.removeprefix(paths.HUB)
    loader = f"{exported.library.replace('-', '_')}.{name}"
    if exported.library == "transformers":
        loader += ".from_pretrained"
    print(f"{name}; load it with {loader}({path!r})")
    if paths.is_on_hub(args.destination):
        print(f"uploaded to {hub.address(path)}; add a license and a language to its README.md")
    if lost := [*exported.dropped, *bert.unused]:
        dropped = without_controls(", ".join(lost))
        print(f"dropped, as {name} has no place for them: {dropped}")
    if exported.newly_initialized:
        names = ", ".join(exported.newly_initialized)
        print(f"randomly initialized by transformers, as the model lacks them: {names}")

"""Embed every line of a text file with the frozen encoder, into an .npz.

    bert-jax embed runs/tiny README.md --output=vectors.npz

It holds `vectors`, one a line. For tokens and words there is one vector each; `spans` has their
first and end character in the line, and `ends` the vector at which each line ends.
"""

import argparse
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from bert_jax import console
from bert_jax.commands import process
from bert_jax.commands.flags import CHECKPOINT
from bert_jax.errors import UserError
from bert_jax.text.records import file_fault, read_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    add("file", metavar="FILE", help="one text a line; plain, .gz or .xz")
    add("--output", required=True, metavar="OUT.npz", help="the file to write")
    add("--layer", default="-1", help="0 for the embeddings, -1 for the last; or a sum: -1,-2 (-1)")
    what = "mean or max over a text's tokens, its [CLS], or a vector a token or word (mean)"
    add("--pooling", choices=("mean", "cls", "max", "tokens", "words"), default="mean", help=what)


def run(args: argparse.Namespace, _: list[str]) -> None:
    try:
        layers = tuple(int(layer) for layer in args.layer.split(","))
    except ValueError as error:
        raise UserError(f"--layer {args.layer}: numbers are wanted, such as -2 or -1,-2") from error
    path, output = Path(args.file), Path(args.output)
    if fault := file_fault(path):
        raise UserError(f"{path} {fault}; give a file with a text a line")
    if output.suffix != ".npz" or os.path.isdir(output):
        raise UserError(f"--output {output}: give a file that ends in .npz")
    if not os.access(output.absolute().parent, os.W_OK):
        raise UserError(f"--output {output} cannot be written there; make the folder first")
    from bert_jax.bert import load
    from bert_jax.embeddings import Embedding, Encoder, chunks

    process.keep_host_memory()
    process.cache_compiled_programs()
    encoder: Encoder = load(args.checkpoint).encoder(layers, args.pooling)
    bar = console.progress_bar(total=path.stat().st_size, unit="B", unit_scale=True, leave=False)
    count = truncated = end = 0

    def lines() -> Iterator[str]:
        for text, position in read_lines(path):
            bar.update(position - bar.n)
            yield text

    def arrays() -> Iterator[Mapping[str, np.ndarray]]:
        nonlocal count, truncated, end
        for chunk in chunks(lines()):
            embeddings: list[Embedding] = encoder.encode_chunk(chunk)
            count += len(embeddings)
            truncated += sum(embedding.is_truncated for embedding in embeddings)
            part = {"vectors": np.concatenate([np.atleast_2d(e.vectors) for e in embeddings])}
            if spans := [e.spans for e in embeddings if e.spans is not None]:
                ends = end + np.cumsum([len(each) for each in spans])
                end = int(ends[-1])
                part |= {"spans": np.concatenate(spans), "ends": ends}
            yield part

    with bar:
        write_npz(output, arrays())
    print(f"{output}: {count:,} texts")
    if truncated:
        print(f"{truncated:,} of them are longer than the model's positions and were truncated")


def write_npz(path: Path, parts: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Write arrays that come in parts into an `.npz`, by way of files, to bound the memory."""
    shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    try:
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".embed.") as name:
            folder = Path(name)
            for part in parts:
                for key, array in part.items():
                    shapes[key] = array.dtype, array.shape[1:]
                    with (folder / key).open("ab") as file:
                        file.write(np.ascontiguousarray(array).data)
            if not shapes:
                raise UserError("the file has no lines; give a text a line")
            whole = {
                key: np.memmap(folder / key, dtype, "r").reshape(-1, *shape)
                for key, (dtype, shape) in shapes.items()
            }
            np.savez(folder / "whole.npz", **whole)  # pyright: ignore[reportArgumentType]
            os.replace(folder / "whole.npz", path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error

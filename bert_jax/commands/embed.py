"""Embed every line of a text file, or of stdin (-), with the frozen encoder.

    bert-jax embed runs/tiny README.md --output=vectors.npz

The .npz holds `vectors`, one a line. For tokens and words, and of late interaction, there is one
vector each: `ends` has the vector at which each line ends, and `spans`, of tokens and words, their
first and end character in the text, which of a plain file is the line without the white space
around it. An .npy holds the vectors alone. --json prints the same as a line of JSON for each line,
as they come.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax import console
from bert_jax.commands import process, texts
from bert_jax.errors import UserError
from bert_jax.retrieval.search import normalize
from bert_jax.retrieval.vectors import ArrayWriter
from bert_jax.storage.paths import CHECKPOINT, file_to_write, on_disk
from bert_jax.storage.replacement import temporary_folder

if TYPE_CHECKING:
    from bert_jax.inference.embeddings import TextEmbedding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    what = "one text a line; or .tsv, .csv, .jsonl, .parquet, with a text in --column; - for stdin"
    add("file", metavar="FILE", help=what)
    add("--column", help="column of the text in tables (text)")
    to = parser.add_mutually_exclusive_group(required=True).add_argument
    to("--output", metavar="OUT", help="the file to write, .npz or .npy")
    to("--json", action="store_true", help="print JSON, a line for each text")
    own = "; a model of embeddings: its own"
    what = f"0 for the embeddings, -1 for the last; or a sum, as --layer=-1,-2 (-1{own})"
    add("--layer", help=what)
    what = f"mean or max over a text's tokens, its [CLS], or a vector a token or word (mean{own})"
    add("--pooling", choices=("mean", "cls", "max", "tokens", "words"), help=what)
    what = "encode each line as one, with the model's prompt for it (as a passage, without)"
    add("--prompt", choices=("query", "passage"), default="", help=what)
    add("--normalize", action="store_true", help="make every vector one of unit length")
    process.add_dtype(parser)


def run(args: argparse.Namespace, _: list[str]) -> None:
    try:
        layers = args.layer and tuple(int(layer) for layer in args.layer.split(","))
    except ValueError as error:
        raise UserError(
            f"--layer {args.layer} is not numbers; give some such as -2 or -1,-2"
        ) from error
    if args.output:
        _check_output(args.output, is_by_token=args.pooling in ("tokens", "words"))
    column = texts.column_of(args.column, [args.file])
    lines = texts.numbered(args.file, column=column, with_empty=True)
    from bert_jax.inference.task_vectors import text_encoder
    from bert_jax.inference.tokenization import check_prompt
    from bert_jax.text.memory import chunks

    bert = process.load_checkpoint(args.checkpoint, args.dtype)
    check_prompt(bert, args.prompt)
    encoder = text_encoder(bert, layers, args.pooling, args.prompt)
    if args.output:
        _check_output(args.output, is_by_token=encoder.is_by_token)
    is_truncated: list[bool] = []

    def embed(chunk: list[str]) -> list["TextEmbedding"]:
        embeddings = encoder.encode_chunk(chunk)
        if args.normalize:
            embeddings = [replace(each, vectors=normalize(each.vectors)) for each in embeddings]
        is_truncated.extend(each.is_truncated for each in embeddings)
        return embeddings

    if args.json:
        for some in texts.read_ahead(lines):
            chunk = [line for _, line in some]
            for text, embedding in zip(chunk, embed(chunk), strict=True):
                texts.print_json({"text": text, **_plain(embedding)})
    else:
        with console.working("embedding", says_end=False):
            embedded = map(embed, chunks(line for _, line in lines))
            write_arrays(on_disk(args.output), _arrays(embedded))
        print(f"{args.output}: {console.counted(len(is_truncated), 'text')}")
    if any(is_truncated):
        truncated = console.counted(sum(is_truncated), "text")
        note = f"truncated {truncated} to the model's {encoder.max_length:,} tokens"
        print(note, file=sys.stderr if args.json else sys.stdout)


def _check_output(name: str, *, is_by_token: bool) -> None:
    path = file_to_write(name)
    if path.suffix not in (".npz", ".npy") or os.path.isdir(path):
        raise UserError(f"--output {path}: give a file that ends in .npz or .npy")
    if path.suffix == ".npy" and is_by_token:
        raise UserError(
            f"--output {path}: an .npy cannot say which text a vector is of; give an .npz"
        )


def _plain(embedding: "TextEmbedding") -> dict[str, Any]:
    """Return an embedding for JSON, which has no NaN: that of a truncated word is null."""
    vectors = [
        None if np.isnan(vector).any() else [float(str(x)) for x in vector]  # as short as exact
        for vector in np.atleast_2d(embedding.vectors)
    ]
    if embedding.vectors.ndim == 1:
        return {"vector": vectors[0]}
    spans = {} if embedding.spans is None else {"spans": embedding.spans.tolist()}
    return {"vectors": vectors, **spans}


def _arrays(chunks: Iterable[list["TextEmbedding"]]) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the arrays of the file, in a part for each chunk of embeddings."""
    end = 0
    for chunk in chunks:
        part = {"vectors": np.concatenate([np.atleast_2d(each.vectors) for each in chunk])}
        if chunk[0].vectors.ndim > 1:
            ends = end + np.cumsum([len(each.vectors) for each in chunk])
            end, part["ends"] = int(ends[-1]), ends
        if spans := [each.spans for each in chunk if each.spans is not None]:
            part["spans"] = np.concatenate(spans)
        yield part


def write_arrays(path: Path, parts: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Write arrays that come in parts into an `.npz`, or `vectors` alone into an `.npy`.

    By way of files, to bound the memory.
    """
    try:
        with temporary_folder(path) as name:
            folder, writers = Path(name), dict[str, ArrayWriter]()
            with contextlib.ExitStack() as files:
                for part in parts:
                    for key, array in part.items():
                        if key not in writers:
                            writer = ArrayWriter(folder / f"{key}.npy")
                            writers[key] = files.enter_context(writer)
                        writers[key].append(array)
            if path.suffix == ".npy":
                os.replace(folder / "vectors.npy", path)
                return
            whole = {key: np.load(folder / f"{key}.npy", mmap_mode="r") for key in writers}
            np.savez(folder / path.name, **whole)  # pyright: ignore[reportArgumentType]
            os.replace(folder / path.name, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error

"""All shards of a store by a runner of Apache Beam, which distributes the work and repeats it."""

import contextlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from bert_jax import console
from bert_jax.config import DataConfig
from bert_jax.errors import UserError, refuse
from bert_jax.storage import paths
from bert_jax.text import prepare, shards, tokenizer_loading
from bert_jax.text.tokenizer import Tokenizer

_MOST_SHARDS = 256  # unless a number is given
_QUIET = "--default_sdk_harness_log_level=ERROR"  # unless the options have another


def prepare_shards(
    data: DataConfig,
    tokenizer: Tokenizer,
    folder: str,
    count: int,
    runner: str,
    options: Sequence[str] = (),
) -> None:
    """Prepare `count` shards of a store, or of 0 one a chunk; UserError for what Beam refuses."""
    # Which also refuses a text that is missing, or cannot be divided.
    chunks = prepare.open_sources(data, (0, 1))[0].chunks
    count = count or min(len(chunks), _MOST_SHARDS)
    try:
        import apache_beam as beam  # pyright: ignore[reportMissingImports]
        from apache_beam.options import pipeline_options  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"--runner={runner} needs Apache Beam ({error}); pip install 'bert-jax[beam]'"
        ) from error
    for _, there in shards.numbered(Path(folder)).values():  # of a store on a disk
        if there != count:
            refuse(
                (Path(folder) / "store.json").exists(),
                f"{folder} is a complete store of {there} shards, not of {count}",
                fix=f"choose another folder, or give --shards={there} for the same text",
            )
            raise UserError(
                f"{folder} has shards of {there}, not of {count}; "
                f"remove {folder}/shards, or give --shards={there}"
            )
    folder = folder if paths.is_remote(folder) else os.path.abspath(folder)
    work = partial(_prepare_shard, data, tokenizer.to_json(), folder, count)
    refused = io.StringIO()
    try:
        with contextlib.redirect_stderr(refused):  # where it explains its flags
            given = pipeline_options.PipelineOptions([f"--runner={runner}", _QUIET, *options])
            given.get_all_options()
        shown = console.working(f"preparing {console.counted(count, 'shard')} by {runner}")
        with shown, beam.Pipeline(options=given) as pipeline:
            numbers = pipeline | beam.Create(range(count))
            # Without it, one worker would be given all of them.
            _ = numbers | beam.Reshuffle() | "prepare a shard" >> beam.Map(work)
    except SystemExit as error:
        if not error.code:  # Beam has printed its own help
            raise
        line = [str(error), *refused.getvalue().splitlines()][-1]
        raise UserError(f"--runner={runner}: {line}") from error
    except Exception as error:  # of any type, from any worker
        text = str(error).strip() or repr(error)
        own = re.search(r"(?:UserError|OtherText): (.+)", text)  # in the traceback of a worker
        line = (own[1] if own else text.splitlines()[-1]).partition(" [while running")[0]
        is_own = own or isinstance(error, UserError)
        raise UserError(line if is_own else f"--runner={runner}: {line}") from error


def _prepare_shard(
    data: DataConfig, tokenizer: Mapping[str, str], folder: str, count: int, number: int
) -> None:
    shard = number, count
    with console.quiet(), shards.mirrored(folder, shard) as path:
        loaded = tokenizer_loading.from_json(tokenizer, "the tokenizer")
        prepare.write(data, loaded, 0, shards.shard_folder(path, shard), shard)

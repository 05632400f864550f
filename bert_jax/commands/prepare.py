"""Tokenize text into a store, once, for any number of pretraining runs.

    bert-jax prepare builtin stores/library --vocab-size=8000

The same command again resumes after an interruption. Any number of machines can share the work:

    bert-jax prepare 'text/*.txt' stores/mine --sample=1  # trains the tokenizer, on a gigabyte
    bert-jax prepare 'text/*.txt' stores/mine --shard=0/16  # and so on, to 15/16, in any order

A runner of Apache Beam can prepare all shards, on its own machines; its options come after --:

    bert-jax prepare 'text/*.txt' stores/mine --runner=FlinkRunner -- --flink_master=HOST:PORT
"""

import argparse
import contextlib
import math
import os
import shlex
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_jax import console
from bert_jax.commands import process
from bert_jax.commands.flags import Parser, add_data_dir, add_fields
from bert_jax.config import DataConfig, ModelConfig, TokenizerConfig, TrainConfig
from bert_jax.config.validation import validate
from bert_jax.console import counted
from bert_jax.errors import HostLost, UserError, nearest, refuse
from bert_jax.storage import locks, paths, replacement

_KINDS = ("sentencepiece", "wordpiece", "byte_bpe")
_FIELDS = ("eval_source", "eval_fraction", "text_field", "sentences")
_FLAGS = {
    **{f"data.{name}": f"--{name.replace('_', '-')}" for name in _FIELDS},
    "data.source": "SOURCE",
    "model.vocab_size": "--vocab-size",
    "tokenizer.kind": "--tokenizer",
    "tokenizer.path": "--tokenizer",
    "tokenizer.model_type": "--model-type",
    "tokenizer.strip_accents": "--strip-accents",
    "sentencepiece (without --init)": "sentencepiece",
    "--config=letters": "--tokenizer=sentencepiece --model-type=char",
    "or remove the folder to prepare it again": "or replace it with --force",
}


def add_arguments(parser: Parser) -> None:
    parser.flags = _FLAGS
    add = parser.add_argument
    text = "plain text, .jsonl, .ndjson, .csv, .tsv, .fasta, or .gz or .xz of them; .parquet"
    text = f"files, globs or URLs, comma separated ({text}), tfds:NAME or builtin"
    add("source", metavar="SOURCE", help=text)
    add("store", metavar="STORE", help="the folder to write, or for shards a URL")
    kinds = "sentencepiece, wordpiece or byte_bpe to train one on the text; or a SentencePiece"
    files = ".model, a BERT vocab.txt, a tokenizer.json, their folder, a store, or a checkpoint"
    add("--tokenizer", default="sentencepiece", help=f"{kinds} {files} (sentencepiece)")
    add("--vocab-size", type=int, default=32000, help="tokens of a tokenizer trained here (32000)")
    add_fields(parser, TokenizerConfig(), ("model_type",))
    add("--cased", action="store_true", help="keep upper case")
    add("--strip-accents", action="store_true", help="remove accents and marks")
    add_fields(parser, DataConfig(), _FIELDS)
    add_data_dir(parser)
    sample = "only train the tokenizer of STORE, on so many gigabytes of the text"
    add("--sample", type=float, metavar="GB", help=sample)
    add("--shard", default="", metavar="I/N", help="only prepare shard I, from 0, of N")

    runner = (
        "prepare all shards by a runner of Apache Beam: DirectRunner, DataflowRunner, FlinkRunner"
    )
    add("--runner", default="", help=f"{runner} … [-- OPTIONS OF BEAM]")
    count = "number of shards of --runner (one for 64 MiB of text, at most 256)"
    add("--shards", type=int, default=0, metavar="N", help=count)
    parser.others = "those of Apache Beam follow --"

    add("--force", action="store_true", help="replace a store that is there, once this is whole")


def run(args: argparse.Namespace, options: list[str]) -> None:
    from bert_jax.text import shards

    name = args.store.rstrip("/")  # below "store//" a bucket has other files
    args.store = name if paths.is_remote(name) else os.path.expanduser(args.store)
    args.tokenizer = os.path.expanduser(args.tokenizer)
    args.eval_source = "" if args.eval_source == "none" else args.eval_source
    _check_flags(args, options)
    if args.runner or paths.is_remote(args.store):  # which take no --force
        args.parser.flags = {k: flag for k, flag in _FLAGS.items() if "--force" not in flag}
    shard = shards.parse(args.shard) if args.shard else None
    kind = args.tokenizer if args.tokenizer in _KINDS else TokenizerConfig().kind
    config = TokenizerConfig(
        kind=kind,
        lowercase=not args.cased,
        model_type=args.model_type,
        strip_accents=args.strip_accents,
    )
    data = DataConfig(source=args.source, **{name: getattr(args, name) for name in _FIELDS})
    model = ModelConfig(vocab_size=args.vocab_size)
    validate(TrainConfig(data=data, tokenizer=config, model=model))
    with shards.mirrored(args.store, shard) as folder:
        if args.sample is not None:
            refuse(
                paths.is_remote(args.store) and (folder / "tokenizer").exists(),
                f"{args.store}/tokenizer already exists",
                fix="choose another STORE, or remove that folder",
            )
            size, force = args.vocab_size, args.force
            sample = shards.train_tokenizer(data, config, size, folder, args.sample, force=force)
            end = f"tokenizer: {args.store}/tokenizer, trained on {sample}"
        elif args.runner:
            end = _prepare_with_beam(args, options, data, folder)
        elif shard:
            end = _prepare_shard(args, data, folder, shard)
        else:
            end = _prepare_whole(args, data, config, folder)
    if isinstance(end, str):  # printed once the folder has been sent to a STORE that is a URL
        print(end)
    else:
        _report(args, end)


def _check_flags(args: argparse.Namespace, options: list[str]) -> None:
    """Refuse flags that do not fit each other."""
    from bert_jax.text import mixture

    is_remote = paths.is_remote(args.store)
    if args.runner and (args.shard or args.sample is not None):
        raise UserError("--runner prepares all shards; drop --shard and --sample")
    if args.force and (args.runner or is_remote):
        raise UserError("--force replaces one store, shard or tokenizer, on a disk; drop it")
    if (options or args.shards) and not args.runner:
        raise UserError("--shards and what follows -- are for Apache Beam; add --runner=RUNNER")
    if not 0 <= args.shards < 100_000:
        raise UserError(f"--shards={args.shards} is no number of shards; give 1 to 99999")
    if is_remote and args.store.startswith(("http:", "https:", "file:")):
        raise UserError(f"{args.store} cannot be written; give a folder, or gs:// or s3://")
    if is_remote and not (args.runner or args.shard or args.sample is not None):
        raise UserError(
            f"{args.store} is not on a disk, where whole stores are written; "
            "prepare it by --sample and --shard or --runner, and train on it"
        )
    if mixture.parse(args.source):
        remedy = "prepare each text by itself, all with one --tokenizer=PATH"
        raise UserError(f"{args.source} is a mixture, which `bert-jax pretrain` makes; {remedy}")
    if args.sample is not None and (args.shard or not 0 < args.sample < math.inf):
        raise UserError("--sample must be a positive number of gigabytes, and without --shard")
    if args.eval_source:
        of_file = f"the text beside --eval-source={args.eval_source}"
        _refuse_flags(args, ["--eval-fraction"], of_file, fix="leave one out")
    is_path = args.tokenizer not in _KINDS
    if paths.is_remote(args.tokenizer):
        raise UserError(f"--tokenizer={args.tokenizer} is not on a disk; copy it, and give that")
    if is_path and not paths.is_on_hub(args.tokenizer) and not os.path.exists(args.tokenizer):
        hint = nearest(args.tokenizer, _KINDS, "give its file or folder, or what to train")
        raise UserError(f"--tokenizer={args.tokenizer} does not exist; {hint}")
    if args.sample is not None and is_path:
        raise UserError("--sample trains a tokenizer; choose --tokenizer=KIND or no --sample")
    if is_path:
        flags = "--vocab-size", "--model-type", "--strip-accents"
        _refuse_flags(args, flags, "a tokenizer that is trained already", fix="leave it out")


def _prepare_with_beam(
    args: argparse.Namespace, options: list[str], data: DataConfig, folder: Path
) -> Any:
    """Prepare all shards by a runner of Apache Beam; return the line to end with, or the store."""
    from bert_jax.text import beam, shards, store

    tokenizer = _tokenizer_of_shards(args, folder)
    with _ending_with_workers(args.parser.prog):
        beam.prepare_shards(data, tokenizer, args.store, args.shards, args.runner, options)
    if paths.is_remote(args.store):
        return f"complete: all shards of {args.store}; {_train_on(args.store)}"
    shards.finish(folder)
    return store.open_store(folder)


def _prepare_shard(args: argparse.Namespace, data: DataConfig, folder: Path, shard: Any) -> Any:
    """Prepare a shard, and after the last one the store; return that, or the line to end with."""
    from bert_jax.text import prepare, shards, store

    tokenizer = _tokenizer_of_shards(args, folder)
    with _replacing(shards.shard_folder(folder, shard), force=args.force) as new:
        prepare.write(data, tokenizer, args.vocab_size, new, shard, restarts=args.force)
        if args.force:
            (folder / "store.json").unlink(missing_ok=True)  # of the shards as they were
            if shards.has_other_tokenizer(folder, tokenizer):
                with replacement.replacing(folder / "tokenizer", os.path.isdir) as path:
                    tokenizer.save(path)
    # Shards that are replaced one after the other are of two texts until the last one is.
    is_alone = paths.is_remote(args.store) or (args.force and shard[1] > 1)
    if is_alone or shards.missing(folder, shard[1]):
        then = _train_on(args.store)
        return f"complete: shard {args.shard} of {args.store}; after all others: {then}"
    shards.finish(folder)
    return store.open_store(folder)


def _prepare_whole(
    args: argparse.Namespace, data: DataConfig, config: TokenizerConfig, folder: Path
) -> Any:
    """Prepare a store that has no shards, and return it."""
    from bert_jax.text import prepare, store

    tokenizer = config if args.tokenizer in _KINDS else _load_tokenizer(args)
    with _replacing(folder, force=args.force) as new:
        prepare.write(data, tokenizer, args.vocab_size, new, restarts=args.force)
        corpus = store.open_store(new)
        corpus.verify()
    return corpus


@contextlib.contextmanager
def _replacing(folder: Path, *, force: bool) -> Iterator[Path]:
    """Yield the folder to write; with `force`, one beside the store that it replaces at the end."""
    from bert_jax.text import store

    is_empty = os.path.isdir(folder) and not store.other_files(folder)
    if not force or is_empty or not os.path.lexists(folder):
        yield folder
        return
    if not store.is_only_store(folder):
        raise UserError(
            f"{folder} is not a store, or has other files too, and is not replaced; "
            "choose another folder, or remove it"
        )
    whole = folder.resolve()  # of a link, what it leads to
    new = whole.with_name(f".{whole.name}.new")
    locks.check_unlocked(whole)
    yield new
    with locks.locked(whole):  # another process may have begun to write there
        replacement.replace(new, whole)


def _tokenizer_of_shards(args: argparse.Namespace, folder: Path) -> Any:
    """Return the tokenizer that is given, or that `--sample` has trained."""
    from bert_jax.text import shards

    if args.tokenizer not in _KINDS:
        tokenizer = _load_tokenizer(args)
        refuse(
            not args.force and shards.has_other_tokenizer(folder, tokenizer),
            f"{folder} has another tokenizer than --tokenizer={args.tokenizer}",
            fix=f"leave --tokenizer out, or remove {folder}/tokenizer",
        )
        return tokenizer
    flags = "--tokenizer", "--vocab-size", "--model-type", "--cased", "--strip-accents"
    what = "shards, whose tokenizer `bert-jax prepare --sample` trains"
    _refuse_flags(args, flags, what, fix="give it there, and leave it out here")
    return shards.load_tokenizer(folder)


def _refuse_flags(args: argparse.Namespace, flags: Sequence[str], what: str, *, fix: str) -> None:
    """Refuse the first of the flags that is set, which has no effect on what is there."""
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        is_set = getattr(args, name) != args.parser.get_default(name)
        refuse(is_set, f"{flag} has no effect on {what}", fix=fix)


def _report(args: argparse.Namespace, corpus: Any) -> None:
    """Print what a store has."""
    for split_name, split in (("training", corpus.train), ("held out", corpus.eval)):
        sizes = len(split.tokens), split.num_sentences, split.num_documents
        counts = map(counted, sizes, ("token", "sentence", "document"))
        print(f"{split_name}: {', '.join(counts)}")
    print(f"unknown: {corpus.unknown:.2%} of the characters")
    if corpus.warning:
        console.warn(args.parser.in_its_words(corpus.warning))
    print(_train_on(args.store))


def _train_on(store: str) -> str:
    source = shlex.quote(f"--config.data.source={store}")
    return f"train on it with: bert-jax pretrain {source} --config.model.vocab_size=0"


def _load_tokenizer(args: argparse.Namespace) -> Any:
    """Read the tokenizer of a checkpoint or of a store, or its own files or their folder."""
    from bert_jax.text import store, tokenizer_loading

    path = Path(args.tokenizer)
    if store.is_store(path):
        path /= "tokenizer"
    if paths.is_on_hub(path):
        from bert_jax.convert import hub  # whose imports take a second

        path = hub.fetch(str(path), weights=False)
    if any(os.path.isdir(path / name) for name in ("state", "best", "checkpoints")):
        from bert_jax.training import checkpoint  # whose imports take a second

        tokenizer, says_case = checkpoint.read_tokenizer(checkpoint.find(path)), True
    else:
        from bert_jax.convert import google  # whose imports take a second

        if not args.cased and google.is_google(path):
            return google.load_tokenizer(path)
        tokenizer = tokenizer_loading.load(path, lowercase=not args.cased)
        says_case = tokenizer.fingerprint == tokenizer_loading.load(path).fingerprint
    refuse(
        args.cased and says_case and tokenizer.lowers_case,
        f"--cased has no effect on {path}, which says itself that text becomes lower case",
        fix="leave it out",
    )
    return tokenizer


@contextlib.contextmanager
def _ending_with_workers(name: str) -> Iterator[None]:
    """End the process with a line when a local worker of Apache Beam ends, which Beam waits for."""
    show = threading.excepthook

    def end_or_show(raised: threading.ExceptHookArgs) -> None:
        if raised.thread and raised.thread.name == "run_worker":  # which waits for its process
            reason = f"a worker has ended ({raised.exc_value}); repeat the command, which resumes"
            process.end_process(name, HostLost(reason))
        elif not raised.exc_type.__module__.startswith("grpc"):  # the servers of those workers
            show(raised)

    threading.excepthook = end_or_show
    try:
        yield
    finally:
        threading.excepthook = show

"""Shards of a store: each is prepared alone, on any machine; `finish` makes one store of them.

STORE/shards/00002-of-00016 is the store of the third of sixteen runs of chunks. The finished store
adds the tokenizer, the offsets of all sentences and documents, and as its manifest a `store.json`
with the shards in order, their sizes and checksums. The tokens stay in the shards.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from bert_jax.config import DataConfig, TokenizerConfig
from bert_jax.errors import UserError, refuse
from bert_jax.storage import checksums, json_files, locks, paths, remote
from bert_jax.storage.locks import locked
from bert_jax.storage.replacement import replacing
from bert_jax.text import prepare, store, tokenizer_loading
from bert_jax.text.sources import Shard, merge_identities
from bert_jax.text.tokenizer import Tokenizer

_BLOCK = 1 << 20  # number of offsets that are copied at once
_MOST_NAMED = 8  # missing shards in a message


def parse(text: str) -> Shard:
    """Return the shard that `I/N` names; UserError if that is none."""
    match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
    number, count = map(int, match.groups()) if match else (0, 0)
    if number >= count:
        raise UserError(
            f"--shard={text} is no shard; "
            "give its number, from 0, and the number of shards: 0/16 to 15/16"
        )
    return number, count


def train_tokenizer(
    data: DataConfig,
    config: TokenizerConfig,
    vocab_size: int,
    folder: Path,
    gigabytes: float,
    *,
    force: bool = False,
) -> str:
    """Write the tokenizer of a store, trained on a sample of the text; return what that was.

    `force` says whether to replace one that is there.
    """
    _refuse_store_without_shards(folder)
    sources = prepare.open_sources(data)
    size, total = sources[0].size, len(sources[0].chunks)
    number = min(total, max(1, round(1e9 * gigabytes * total / max(1, size))))
    chunks = sources[0].sample(number)
    sentences = prepare.training_sentences(sources, data.eval_fraction, chunks)
    vocab_size = vocab_size or prepare.DEFAULT_VOCAB_SIZE
    with replacing(folder / "tokenizer", os.path.isdir if force else None) as path:
        prepare.train_tokenizer(sentences, config, vocab_size).save(path)
        (folder / "store.json").unlink(missing_ok=True)  # of shards of the one that is replaced
    return f"{number:,} of {total:,} chunks of the text, at even distances"


@contextlib.contextmanager
def mirrored(store: str, shard: Shard | None) -> Iterator[Path]:
    """Yield the folder of a store; for a URL a temporary folder, whose new files are sent there.

    The temporary folder has the tokenizer and the record of the shard, where the URL has them.
    """
    if not paths.is_remote(store):
        yield Path(store)
        return
    with tempfile.TemporaryDirectory(prefix="bert-jax-") as temporary:
        folder = Path(temporary)
        remote.fetch(f"{store}/tokenizer", folder / "tokenizer")
        if shard:
            name = f"{shard_folder(folder, shard).relative_to(folder)}/store.json"
            remote.fetch(f"{store}/{name}", folder / name)
        before = set(folder.rglob("*"))
        try:
            yield folder
        except UserError as error:
            refuse(
                paths.is_full(error.__cause__),
                f"{temporary} has no room for what is to be sent to {store}",
                fix="set TMPDIR to a folder with more, and repeat the command",
            )
            raise UserError(str(error).replace(temporary, store)) from error
        files = (p for p in folder.rglob("*") if p.is_file() and p not in before)
        written = [path for path in files if path.name != locks.NAME]
        # Last the record that says that a shard is complete.
        for path in sorted(written, key=lambda path: path.name == "store.json"):
            remote.send(path, f"{store}/{path.relative_to(folder).as_posix()}")


def shard_folder(folder: Path, shard: Shard) -> Path:
    """Return the folder of a shard of a store; UserError for a store without shards."""
    _refuse_store_without_shards(folder)
    path = folder / "shards" / f"{shard[0]:05d}-of-{shard[1]:05d}"
    if os.path.exists(folder / "store.json") and not path.exists():
        raise UserError(f"{folder} is complete without this shard; choose another folder")
    return path


def _refuse_store_without_shards(folder: Path) -> None:
    if store.is_store(folder) and not os.path.isdir(folder / "shards"):
        raise UserError(f"{folder} is a store without shards; choose another folder")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a store that `train_tokenizer` wrote."""
    if not os.path.isdir(folder / "tokenizer"):
        raise UserError(
            f"{folder} has no tokenizer, which all shards need; train one first, on a gigabyte of "
            "the text, by --sample=1, or give --tokenizer=PATH"
        )
    return tokenizer_loading.load(folder / "tokenizer")


def has_other_tokenizer(folder: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a store has a tokenizer, and another one than this."""
    path = folder / "tokenizer"
    return path.is_dir() and tokenizer_loading.load(path).fingerprint != tokenizer.fingerprint


def finish(folder: Path) -> None:
    """Make one store of all shards in a folder, unless it is one already."""
    if os.path.exists(folder / "store.json"):
        return
    try:
        complete(folder)
        with locked(folder, waits=True):
            if not os.path.exists(folder / "store.json"):  # of another process meanwhile
                join(folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error}); make it writable, with room for all shards, "
            "and repeat the command"
        ) from error


def numbered(folder: Path) -> dict[Path, Shard]:
    """Return the folders of the shards of a store in order, with their numbers; no other folder."""
    names = re.compile(r"([0-9]{5})-of-([0-9]{5})")
    found = ((path, names.fullmatch(path.name)) for path in sorted((folder / "shards").glob("*")))
    return {path: (int(match[1]), int(match[2])) for path, match in found if match}


def missing(folder: Path, count: int) -> list[int]:
    """Return the numbers of the shards, of `count`, that are not complete."""
    found = numbered(folder).items()
    complete = {shard for path, shard in found if (path / "store.json").exists()}
    return [number for number in range(count) if (number, count) not in complete]


def complete(folder: Path) -> list[Path]:
    """Return the folders of all shards in order; UserError if one is missing."""
    found = numbered(folder)
    counts = sorted({count for _, count in found.values()})
    if not counts:
        command = f"bert-jax prepare SOURCE {folder} --shard=0/N"
        raise UserError(f"{folder} has no shards; prepare them first: {command}")
    if len(counts) > 1:
        several = " and of ".join(map(str, counts))
        raise UserError(f"{folder}/shards has shards of {several}; remove those of one number")
    if left := missing(folder, counts[0]):
        names = ", ".join(map(str, left[:_MOST_NAMED])) + ", …" * (len(left) > _MOST_NAMED)
        raise UserError(
            f"{len(left)} of {counts[0]} shards of {folder} are missing or unfinished: {names}; "
            f"repeat bert-jax prepare with --shard={left[0]}/{counts[0]}"
        )
    return [path for path, (number, count) in found.items() if number < count]


def check_tokenizer(folder: Path) -> None:
    """Refuse complete shards that were prepared with another tokenizer than their store has."""
    first, *_ = complete(folder)
    if has_other_tokenizer(folder, tokenizer_loading.load(first / "tokenizer")):
        raise UserError(
            f"the shards of {folder} were prepared with another tokenizer than {folder}/tokenizer; "
            "prepare them again, or remove that folder to keep them"
        )


def join(folder: Path) -> None:
    """Make one store of all shards in a folder, which this process has locked."""
    shards = {path: store.read_record(path / "store.json") for path in complete(folder)}
    with json_files.refusing_malformed(folder / "shards/*/store.json", store.REMEDY):
        _join_records(folder, shards)


def _join_records(folder: Path, shards: dict[Path, dict[str, Any]]) -> None:
    identity = _merge_identities(shards)
    first, *_ = shards
    sums = {name: x for name, x in shards[first]["checksums"].items() if "tokenizer/" in name}
    checksums.check(first, sums, store.REMEDY)
    check_tokenizer(folder)
    if checksums.of_files(folder, (folder / "tokenizer").glob("*")) != sums:
        with replacing(folder / "tokenizer", os.path.isdir) as path:
            shutil.copytree(first / "tokenizer", path)
    splits: dict[str, dict[str, Any]] = {}
    for split in store.SPLITS:
        (folder / split).mkdir(exist_ok=True)
        splits[split] = {"tokens": 0, "dtype": shards[first]["splits"][split]["dtype"]}
        for path, record in shards.items():
            tokens, size = path / split / "tokens.bin", record["splits"][split]["tokens"]
            checksums.check_size(tokens, size, store.REMEDY)
            splits[split]["tokens"] += size
            sums[tokens.relative_to(folder).as_posix()] = record["checksums"][f"{split}/tokens.bin"]
        for name in ("sentences", "documents"):
            sums[f"{split}/{name}.bin"] = _join(folder, split, name, shards)
            splits[split][name] = (folder / split / f"{name}.bin").stat().st_size
    counts = {name: sum(r[name] for r in shards.values()) for name in store.CHARACTERS}
    whole = {"identity": identity, "splits": splits, "checksums": sums, **counts}
    whole |= _merge_formats(shards)
    tokenizer = tokenizer_loading.load(folder / "tokenizer")
    has_own_held_out = isinstance(identity["held_out"], dict)  # or is a share of the text
    held_out = f"the held-out text of {folder}" if has_own_held_out else ""
    prepare.check_text(whole, str(folder), tokenizer.kind, held_out)
    sizes = {
        path.name: {split: record["splits"][split]["tokens"] for split in store.SPLITS}
        for path, record in shards.items()
    }
    whole |= {"vocab_size": tokenizer.vocab_size, "shards": sizes}
    json_files.write_record(folder / "store.json", whole)


def _merge_identities(shards: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """Return the identity of the whole store; UserError if shards are of different ones."""
    first, *_ = shards
    names = {"text": "other text or settings", "held_out": "other held-out text"}
    merged = {}
    for name, value in shards[first]["identity"].items():
        values = {path: record["identity"][name] for path, record in shards.items()}
        for path, other in values.items():
            if merge_identities([value, other]) is None:
                raise UserError(
                    f"{path} was prepared from {names.get(name, f'another {name}')} than "
                    f"{first.name}; remove the folder of the wrong one, and repeat"
                )
        merged[name] = merge_identities([*values.values()])
    return merged


def _merge_formats(shards: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """Return what records say of the formats of files; UserError if shards were read otherwise."""
    found = {record["formats"]: path for path, record in shards.items() if "formats" in record}
    if len(found) > 1:
        first, other, *_ = found.values()
        raise UserError(
            f"{other} was prepared from another file format than {first.name}; remove the folder "
            "of the wrong one, and repeat"
        )
    return {"formats": next(iter(found))} if found else {}


def _join(folder: Path, split: str, name: str, shards: dict[Path, dict[str, Any]]) -> int:
    """Write the offsets of all shards as those of one store; return their CRC-32C."""
    file_name, checksum, before = f"{split}/{name}.bin", 0, 0
    with (folder / file_name).open("wb") as file:
        for index, (path, record) in enumerate(shards.items()):
            recorded = {file_name: record["checksums"][file_name]}
            checksums.check(path, recorded, store.REMEDY)
            offsets = np.memmap(path / file_name, np.int64, mode="r")
            # The first offset of a shard is the last one of the shard before.
            for start in range(min(index, 1), len(offsets), _BLOCK):
                data = (offsets[start : start + _BLOCK] + before).tobytes()
                checksum = google_crc32c.extend(checksum, data)
                file.write(data)
            before += int(offsets[-1])
    return checksum

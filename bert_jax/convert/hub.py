"""Models of the Hugging Face hub by name: `hf:OWNER/NAME`, or `hf:OWNER/NAME@REVISION`."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

from bert_jax import console
from bert_jax.console import Level
from bert_jax.convert import (
    config_json,
    huggingface,
    model_card,
    module_folders,
    sentence_transformers,
)
from bert_jax.convert.module_folders import MODULES
from bert_jax.distributed import hosts
from bert_jax.errors import UserError, refuse
from bert_jax.models.exchange import COMPANION_FOLDER
from bert_jax.storage import daemon_thread, paths
from bert_jax.storage.json_files import read_json
from bert_jax.storage.replacement import check_replaceable, replacing
from bert_jax.text import tokenizer_loading

_SMALL_FILES = (
    "config.json",
    f"{COMPANION_FOLDER}/*.json",
    f"{COMPANION_FOLDER}/*.txt",
    "*.model",
    MODULES,
    "*sentence_*.json",
    "[0-9]_*/*.json",
    "[0-9]_*/*.txt",
    *tokenizer_loading.NAMES,
)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
_WEIGHTS += (f"{COMPANION_FOLDER}/model.safetensors", "[0-9]_*/model.safetensors")
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def fetch(name: str, *, weights: bool = True) -> Path:
    """Return the folder of a model, or of its tokenizer alone, downloaded where it is not cached.

    Each host has its own: a cache is shared or not, and processes that share one wait in turn.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    repository, revision = _parse(name)
    with _errors_of(name, "downloaded"):
        path = snapshot_download(repository, revision=revision, allow_patterns=[*_SMALL_FILES])
    folder = Path(path)
    if not weights:
        return folder
    encoder, need_weights = folder, [folder]
    if sentence_transformers.is_sentence_transformers(folder):
        modules = module_folders.read(folder, name)
        encoder = modules["Transformer"]
        need_weights = [modules[kind] for kind in ("Transformer", "Dense") if kind in modules]
    if not (encoder / "config.json").exists():
        _refuse_offline(name)
        raise UserError(f"{name} has no config.json, so it is no model of transformers")
    values = read_json(encoder / "config.json", "choose another model")
    config_json.read_config(values, f"{name}: config.json")  # before a long download
    found, options = None, {"revision": folder.name, "allow_patterns": [*_WEIGHTS]}
    with _errors_of(name, "downloaded"), contextlib.suppress(DryRunError):  # offline
        found = snapshot_download(repository, dry_run=True, **options)
    if found is None:
        is_whole = huggingface.is_huggingface(encoder)
        _warn_if_partial(name, folder, values)
    else:
        with_weights = {(folder / file.filename).parent for file in found}
        is_whole = with_weights.issuperset(need_weights)
    if not is_whole:
        _refuse_offline(name)
        raise UserError(
            f"{name} has no model.safetensors, and a pickle, which could run any code, is not "
            f"read; `hf download {repository} --revision={folder.name} --local-dir=DIR`, then "
            "load DIR: the error says how to convert it"
        )
    missing = [file.file_size or 0 for file in found or () if file.will_download]
    if not missing:
        return folder
    size = f"{sum(missing) / 1e6:,.1f} MB"
    hosts.print_on_main(f"downloading {name} ({size}) to {folder}", Level.RESULTS)
    with _errors_of(name, "downloaded"), console.working("downloading", sum(missing)) as work:
        blobs = folder.parents[1] / "blobs"  # which is where they are written, then linked from
        before = _bytes_in(blobs)
        download = daemon_thread.start(partial(snapshot_download, repository, **options))
        while wait([download], timeout=0.25).not_done:
            work.n = max(0, _bytes_in(blobs) - before)
        download.result()
    return folder


def _refuse_offline(name: str) -> None:
    """Refuse a model of which the cache lacks a file, where the hub is not asked for it."""
    from huggingface_hub import constants

    refuse(
        constants.HF_HUB_OFFLINE,
        f"{name} is not whole in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set",
        fix="unset it to download the model",
    )


def _warn_if_partial(name: str, folder: Path, values: Mapping[str, Any]) -> None:
    """Warn of a cache without what makes an encoder a model of sentence-transformers."""
    if config_json.architecture(values).endswith("Model") and not (folder / MODULES).exists():
        hosts.warn_on_main(
            f"{name} is read from the cache, which has no {MODULES}; if it is a model of "
            "sentence-transformers, its pooling is missing: fetch it while connected"
        )


def _bytes_in(folder: Path) -> int:
    with contextlib.suppress(OSError):  # a file that has got another name meanwhile
        return sum(path.stat().st_size for path in folder.glob("*"))
    return 0


def check_destination(path: str | Path, *, force: bool, private: bool) -> None:
    """Refuse a path that an export may not replace, or the name of a model on the hub."""
    if paths.is_on_hub(path):
        _check_upload(str(path), force=force, private=private)
        return
    refuse(private, "--private (private=True) is for the hub", fix="give hf:OWNER/NAME")
    check_replaceable(paths.on_disk(path), huggingface.is_export if force else None)


def _check_upload(name: str, *, force: bool, private: bool) -> None:
    """Refuse the name of a model that cannot be uploaded."""
    repository, revision = _parse(name)
    if revision or "/" not in repository:
        raise UserError(f"{name} cannot be uploaded to; give hf:OWNER/NAME")
    with _errors_of(name, "uploaded"):
        from huggingface_hub import HfApi, get_token

        if not get_token():
            raise UserError(f"{name} cannot be uploaded without a token; {_LOG_IN}")
        if not HfApi().repo_exists(repository):
            return
        # One without a model may be of an upload that failed.
        is_empty = {*HfApi().list_repo_files(repository)} <= {".gitattributes"}
        if not force and not is_empty:
            told = "choose another name, or --force (force=True) to replace it"
            raise UserError(f"{name} already exists; {told}")
        if private and not HfApi().repo_info(repository).private:
            raise UserError(
                f"{name} is public, and --private (private=True) makes new models alone private; "
                f"make it private at {address(name)}, or choose another name"
            )


def _upload(folder: Path, name: str, *, force: bool, private: bool) -> None:
    repository, _ = _parse(name)
    with _errors_of(name, "uploaded"), console.working("uploading"):
        from huggingface_hub import HfApi

        api = HfApi()
        earlier = [*huggingface.FILES, *(f"{folder}/*" for folder in huggingface.FOLDERS)]
        api.create_repo(repository, private=private or None, exist_ok=True)
        _keep_header(repository, folder / "README.md")
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload a model of bert-jax",
            delete_patterns=earlier if force else None,  # of another tokenizer or kind
        )


def _keep_header(repository: str, card: Path) -> None:
    """Keep what was added to the header of the card that is there, such as the license."""
    from huggingface_hub import HfApi, metadata_load, metadata_save
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with contextlib.suppress(RemoteEntryNotFoundError):  # there is none, which no other error says
        before = metadata_load(HfApi().hf_hub_download(repository, "README.md")) or {}
        own = metadata_load(card) or {}
        tags = before.pop("tags", None)
        added = {name: value for name, value in before.items() if name not in model_card.FIELDS}
        tags = tags if isinstance(tags, list) else []
        tags = [tag for tag in tags if tag not in {*model_card.TAGS, *own["tags"]}]
        metadata_save(card, {**added, **own, "tags": [*own["tags"], *tags]})


@contextlib.contextmanager
def destination(path: str | Path, *, force: bool, private: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes an export at `path`, or is uploaded to the hub."""
    check_destination(path, force=force, private=private)
    if paths.is_on_hub(path):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
            _upload(Path(folder), str(path), force=force, private=private)
    else:
        with replacing(path, huggingface.is_export if force else None) as new:
            new.mkdir()
            yield new


def address(name: str) -> str:
    """Return the page of a model."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{name.removeprefix(paths.HUB).partition('@')[0]}"


def _parse(name: str) -> tuple[str, str | None]:
    """Return the repository and the revision of a name."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    repository, at, revision = name.removeprefix(paths.HUB).partition("@")
    try:
        validate_repo_id(repository)
        if at and not revision:
            raise HFValidationError
    except HFValidationError as error:
        raise UserError(
            f"{name} is not the name of a model of the hub; give {paths.HUB}OWNER/NAME, or "
            f"{paths.HUB}OWNER/NAME@REVISION"
        ) from error
    return repository, revision or None


@contextlib.contextmanager
def _errors_of(name: str, done: str) -> Iterator[None]:
    """Raise what goes wrong with the hub as a UserError; show no warnings and bars of its own."""
    from huggingface_hub import utils as hub

    is_silenced = not hub.are_progress_bars_disabled()
    if is_silenced:
        hub.disable_progress_bars()
    try:
        with console.silenced("huggingface_hub"):
            yield
    except UserError:
        raise
    except Exception as error:  # of the clients of HTTP and of Xet, which raise nearly every kind
        raise UserError(f"{name} {_sentence(error, name, done)}") from error
    finally:
        if is_silenced:
            hub.enable_progress_bars()


def _sentence(error: Exception, name: str, done: str) -> str:
    """Return what is wrong, and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"is gated; ask for access at {address(name)}, and {_LOG_IN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"does not exist, or is private; check the name, or {_LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "does not exist, but the model does; give a branch, a tag or a commit after the @"
    if isinstance(error, errors.LocalEntryNotFoundError):
        is_absent = f"is not in {constants.HF_HUB_CACHE}, and"
        if constants.HF_HUB_OFFLINE:
            return f"{is_absent} HF_HUB_OFFLINE is set; unset it to download the model"
        reason = _reason(error.__cause__ or error)
        return (
            f"{is_absent} {constants.ENDPOINT} cannot be reached ({reason}); check the connection, "
            "and repeat"
        )
    response = getattr(error, "response", None)
    remedy = _LOG_IN if getattr(response, "status_code", 0) in (401, 403) else "repeat it"
    if isinstance(error, OSError) and error.errno:
        remedy = "fix that, or set HF_HOME to another folder"
    elif os.path.expanduser("~") == "~":  # without a home there is no cache
        remedy = "set HF_HOME to a folder"
    return f"cannot be {done} ({_reason(error)}); {remedy}"


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = getattr(error, "server_message", None) or getattr(error, "strerror", None)
    return str(said or (lines or [repr(error)])[0])[:160].rstrip(".")

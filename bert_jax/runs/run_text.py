"""The text of a pretraining run: found, and prepared in its workdir as the run has read it."""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator

from bert_jax.config import TrainConfig
from bert_jax.distributed import hosts
from bert_jax.errors import UserError
from bert_jax.runs.workdir import Workdir
from bert_jax.storage import mirror
from bert_jax.text import mixture, prepare
from bert_jax.text.store import Corpus
from bert_jax.text.tokenizer import Tokenizer

_STORE = "store"  # the folder of a workdir with the tokens of its text


def find(source: str) -> mixture.Parts:
    """Return what a source names on the first host, where plain text has to be."""
    found = hosts.result_from_main(lambda: dataclasses.asdict(mixture.find(source)))
    return mixture.Parts(**found)


def read(
    config: TrainConfig, parts: mixture.Parts, tokenizer: Tokenizer | None, workdir: Workdir
) -> Corpus:
    """Return the text, which the first host prepares for all, or each if they share no disk."""
    folder = workdir.path / _STORE
    # Its record has the size of the vocabulary that was asked for, so that is asked for again.
    if workdir.results.get("has_open_vocabulary"):
        model = dataclasses.replace(config.model, vocab_size=0)
        config = dataclasses.replace(config, model=model)

    def read_own() -> Corpus:
        try:
            return mixture.read(config, parts, tokenizer, folder)
        except prepare.OtherText as error:
            if not workdir.last_step:
                raise
            run = workdir.address
            raise UserError(
                f"{error.found}; restore the text, or continue on the new one by --fork={run} and "
                f"another --workdir, or if this is the text of the run, remove {folder}"
            ) from error

    if parts.is_prepared or mirror.url_of(workdir.path):
        corpus = hosts.run_on_all_hosts(read_own)  # each has a copy, or all see the same folder
    else:
        prepared = hosts.run_on_main(read_own)
        corpus = hosts.run_on_all_hosts(lambda: prepared or mixture.open_prepared(parts, folder))
    hosts.check_same({"the text of data.source": corpus.fingerprint}, "copy it once more")
    return corpus


def has_store(workdir: Workdir) -> bool:
    """Return whether a workdir has the tokens of its text, or a part of them."""
    return (workdir.path / _STORE).exists()


@contextlib.contextmanager
def removed_if_refused(workdir: Workdir, *, is_new: bool) -> Iterator[None]:
    """Remove the whole store of a text, if it is new, where the context refuses the text.

    Of another text than that of a run with checkpoints, it would stand in the way of that one.
    """
    folder = workdir.path / _STORE
    try:
        yield
    except UserError:
        if workdir.last_step and is_new and (hosts.is_main() or mirror.url_of(workdir.path)):
            shutil.rmtree(folder, ignore_errors=True)
        raise

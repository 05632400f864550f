"""Opening a token store: its counts, and damage to it."""

import tarfile
from pathlib import Path

import pytest

from bert_jax.config import DataConfig, TokenizerConfig
from bert_jax.errors import UserError
from bert_jax.text.prepare import prepare
from bert_jax.text.store import is_store, open_store

WRITTEN_BEFORE = Path(__file__).parents[1] / "compatibility/written_by_239187a.tar.xz"
FINGERPRINT = "9805b6a39d5d226dfb4f77f10d5ae6c95b5a78dc7b0aa7af7576c5da2f9efe62"


@pytest.fixture
def folder(tmp_path):
    """A store of two words."""
    (tmp_path / "text.txt").write_text("ab ba ab.\nba.\n\n" * 20)
    data = DataConfig(source=str(tmp_path / "text.txt"), eval_fraction=0.1)
    prepare(data, TokenizerConfig(kind="wordpiece"), 13, tmp_path / "store")
    return tmp_path / "store"


def test_counts_of_documents_and_sentences(folder):
    assert is_store(folder)
    corpus = open_store(folder)
    assert (corpus.train.num_documents, corpus.train.num_sentences) == (18, 36)


def test_a_store_of_an_earlier_version(tmp_path):
    """Its fingerprint is the one that runs on it have recorded."""
    with tarfile.open(WRITTEN_BEFORE) as archive:
        members = [m for m in archive.getmembers() if m.name.startswith("./store/")]
        archive.extractall(tmp_path, members, filter="data")
    corpus = open_store(tmp_path / "store")
    assert corpus.fingerprint == FINGERPRINT
    assert len(corpus.train.tokens) == 7460
    assert corpus.train.num_documents == 54


@pytest.mark.parametrize("name", ["train/tokens.bin", "eval/documents.bin", "store.json"])
def test_damage_is_detected(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="remove the folder to prepare it again"):
        open_store(folder)
    path.unlink()
    with pytest.raises(UserError):
        open_store(folder)

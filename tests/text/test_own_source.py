"""A text source that is not of the package: registered by one line, it does all that others do."""

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from training_runs import assert_same_state

import bert_jax
from bert_jax.commands import main
from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.text.sources import SOURCES, Shard, Source
from bert_jax.text.store import open_store

LETTERS = list("acgt")


class Genome(Source):
    """Random sequences of bases, by the seed in "genome:SEED"."""

    form = "one read a sentence"

    def __init__(self, name: str, data: DataConfig, shard: Shard | None = None):
        super().__init__(name, data, shard)
        self.seed = int(name.partition(":")[2])

    def identity(self) -> dict[str, Any]:
        return {"genome": self.seed}

    def texts(self, chunk: int = 0) -> Iterator[list[str]]:
        generator = np.random.default_rng(self.seed)
        for _ in range(60):
            yield [" ".join(generator.choice(LETTERS, 12)) for _ in range(6)]
        self.position = self.size


@pytest.fixture
def config(tiny_config, tiny_text, monkeypatch, tmp_path):
    monkeypatch.setitem(SOURCES, "genome", Genome)
    monkeypatch.chdir(tmp_path)
    shutil.copy(tiny_text, "text.txt")
    config = copy.deepcopy(tiny_config)
    config.model.num_hidden_layers = 1
    config.steps, config.checkpoint.every = 4, 2
    return config


def test_a_store_is_prepared_from_it(config, tmp_path, capsys):
    flags = ["--tokenizer=wordpiece", "--vocab-size=12", "--eval-fraction=0.1"]
    main._run("bert-jax", ["prepare", "genome:7", "store", *flags], "bert-jax prepare")
    assert "training: " in capsys.readouterr().out
    corpus = open_store(tmp_path / "store")
    assert (corpus.train.num_documents, corpus.eval.num_documents) == (54, 6)
    with pytest.raises(UserError, match="was prepared from other text"):
        main._run("bert-jax", ["prepare", "genome:8", "store", *flags], "bert-jax prepare")
    shard = ["prepare", "genome:7", "other", "--shard=0/2", "--tokenizer=store/tokenizer"]
    with pytest.raises(UserError, match="genome:7 cannot be divided into shards"):
        main._run("bert-jax", shard, "bert-jax prepare")


def test_a_run_on_it_resumes(config, tmp_path):
    config.data.source = "genome:1@1,genome:2@2,text.txt@3"
    bert_jax.pretrain(copy.deepcopy(config), "whole", quiet=True)
    shutil.copytree("whole", "resumed")
    shutil.rmtree("resumed/checkpoints/4")
    bert_jax.pretrain(copy.deepcopy(config), "resumed", quiet=True)
    assert_same_state(tmp_path / "whole", tmp_path / "resumed", 4)

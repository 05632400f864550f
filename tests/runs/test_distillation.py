"""Distillation: a student learns the vectors, or the probabilities, of a teacher."""

import dataclasses
import json

import numpy as np
import pytest

import bert_jax
from bert_jax.config import DataFiles, EmbeddingConfig, FinetuneConfig, OptimizerConfig, TaskConfig
from bert_jax.errors import UserError

OPTIMIZER = OptimizerConfig(name="adamw", learning_rate=1e-2)
WORDS = ["the", "river", "bank", "a", "model", "reads", "token", "layer", "head", "sees"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    draw, folder = np.random.default_rng(0), tmp_path_factory.mktemp("texts")
    # Of one length, so that one program is compiled.
    lines = [" ".join(draw.permutation(WORDS[:5])) for _ in range(46)]
    (folder / "texts.txt").write_text("\n".join(lines) + "\n")
    pairs = [f"{a}\t{b}" for a, b in zip(lines[:8], lines[8:16], strict=True)]
    (folder / "pairs.tsv").write_text("\n".join(["a\tb", *pairs]) + "\n")
    return folder


def run(texts, teacher, workdir, init, **embedding):
    task = TaskConfig(
        "embedding", teacher=str(teacher), embedding=EmbeddingConfig(normalize=False, **embedding)
    )
    files = {"train": str(texts / "texts.txt"), "eval": str(texts / "pairs.tsv")}
    data = DataFiles(**files, text="a,b", max_length=32, batch_size=8)
    config = FinetuneConfig(epochs=8.0, log_every=6, task=task, data=data, optimizer=OPTIMIZER)
    return bert_jax.finetune(config, init, workdir, quiet=True)


def cosines(teacher, bert, texts) -> float:
    first, second = teacher.encode(texts), bert.encode(texts)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return float(((first * second).sum(1) / norms).mean())


def test_vectors_of_plain_text(tmp_path, tiny_run, tiny_bert, texts):
    """Of a teacher with other parameters: the cosines with its vectors rise."""
    generator = np.random.default_rng(1)
    noisy = {**tiny_bert.params}
    shuffled = generator.permutation(len(noisy["bert"]["embeddings"]["word_embeddings"]))
    embeddings = {
        **noisy["bert"]["embeddings"],
        "word_embeddings": noisy["bert"]["embeddings"]["word_embeddings"][shuffled],
    }
    teacher = dataclasses.replace(
        tiny_bert, params={**noisy, "bert": {**noisy["bert"], "embeddings": embeddings}}
    )
    teacher.save(tmp_path / "teacher")
    student = run(texts, tmp_path / "teacher", tmp_path / "run", tiny_run.checkpoint).bert
    lines = (tmp_path / "run" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    losses = [r["loss"] for r in map(json.loads, lines) if r["split"] == "train"]
    assert losses[-1] < 0.3 * losses[0]
    lines = (texts / "texts.txt").read_text().splitlines()
    before, after = (cosines(teacher, bert, lines) for bert in (tiny_bert, student))
    assert after > before
    with pytest.raises(UserError, match=r"vectors of 16 numbers, and the model of 8; set task\.em"):
        run(texts, tmp_path / "teacher", tmp_path / "other", tiny_run.checkpoint, dense=8)


@pytest.mark.slow
def test_probabilities_of_classes(tmp_path, tiny_run, tiny_classifier, tiny_finetuning_config):
    """The labels of the training file are not looked at."""
    path = tmp_path / "train.tsv"
    lines = [f"The {word} bank.\t{label}" for word in WORDS for label in ("first", "second")]
    path.write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    tiny_classifier.save(tmp_path / "teacher")
    task = TaskConfig(labels=("second", "first"), teacher=str(tmp_path / "teacher"))
    config = dataclasses.replace(
        tiny_finetuning_config,
        epochs=10.0,
        task=task,
        data=DataFiles(train=str(path), eval=str(path), max_length=16, batch_size=8),
        optimizer=OPTIMIZER,
    )
    result = bert_jax.finetune(config, tiny_run.checkpoint, tmp_path / "run", quiet=True)
    texts = [line.split("\t")[0] for line in lines]
    wanted, found = (
        np.array([each["probabilities"]["first"] for each in bert.predict(texts)])
        for bert in (tiny_classifier, result.bert)
    )
    np.testing.assert_allclose(found, wanted, atol=0.05)
    task = dataclasses.replace(task, teacher=str(tiny_run.checkpoint))
    config = dataclasses.replace(config, task=task)
    with pytest.raises(UserError, match="has no classes, and the task second, first"):
        bert_jax.finetune(config, tiny_run.checkpoint, tmp_path / "other", quiet=True)

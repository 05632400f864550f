"""A run that begins from a model with another tokenizer."""

import dataclasses
import shutil

import numpy as np
import pytest
from helpers import random_bert, refused

import bert_jax
from bert_jax.config import TokenizerConfig, settings
from bert_jax.runs import vocabulary
from bert_jax.runs.pretrain import start
from bert_jax.runs.vocabulary import with_tokenizer
from bert_jax.text.tokenizer import WordPieceTokenizer


def shuffled(tokenizer: WordPieceTokenizer, seed: int) -> WordPieceTokenizer:
    """Return a tokenizer with the same tokens under other ids."""
    order = np.random.default_rng(seed).permutation(tokenizer.vocab_size)
    tokens = [tokenizer.id_to_token(index) for index in order]
    return WordPieceTokenizer.from_vocabulary(tokens, lowercase=True, strip_accents=False)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_tokens_under_other_ids_give_the_same_model(tiny_bert, seed):
    bert = random_bert(tiny_bert.config, tiny_bert.tokenizer)
    moved = with_tokenizer(bert, shuffled(bert.tokenizer, seed))
    text = "The river bank reads a [MASK] token."
    assert moved.tokenizer.encode([text]) != bert.tokenizer.encode([text])
    np.testing.assert_allclose(moved.encode([text]), bert.encode([text]), atol=1e-6)
    guesses, expected = (each.fill_mask(text, top_k=20) for each in (moved, bert))
    assert [g.token for g in guesses] == [g.token for g in expected]
    np.testing.assert_allclose(
        [g.probability for g in guesses], [g.probability for g in expected], rtol=1e-4
    )


def test_a_new_token_is_the_mean_of_those_that_spell_it(tiny_bert):
    bert = random_bert(tiny_bert.config, tiny_bert.tokenizer)
    old = bert.tokenizer
    tokens = [old.id_to_token(index) for index in range(old.vocab_size)]
    new = WordPieceTokenizer.from_vocabulary(
        [*tokens[:-3], "heads", "日", "##eread"], lowercase=True, strip_accents=False
    )
    moved = with_tokenizer(bert, new)
    (before, bias), (after, new_bias) = (
        (
            np.asarray(each.params["bert"]["embeddings"]["word_embeddings"]),
            np.asarray(each.params["mlm_head"]["bias"]),
        )
        for each in (bert, moved)
    )
    count = old.vocab_size - 3
    np.testing.assert_array_equal(after[:count], before[:count])
    ids = old.encode(["heads"])[0]
    assert len(ids) > 1
    np.testing.assert_allclose(after[count], before[ids].mean(0), atol=1e-7)
    np.testing.assert_allclose(new_bias[count], bias[ids].mean(0), atol=1e-7)
    np.testing.assert_allclose(after[count + 1], before.mean(0), atol=1e-7)
    with refused("no token of the tokenizer can be spelled by those of --init"):
        with_tokenizer(
            bert, WordPieceTokenizer.from_vocabulary([*tokens[:5], "日", "本"], lowercase=True)
        )


def test_a_run_adds_words_and_resumes(tiny_run, tiny_config, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("The heads reads a heads.\n\n" * 60)
    config = dataclasses.replace(
        tiny_config,
        steps=4,
        tokenizer=TokenizerConfig(add=3),
        data=dataclasses.replace(tiny_config.data, source=str(text)),
        checkpoint=bert_jax.CheckpointConfig(every=2),
    )
    with refused("tokenizer.add is 3, and adds tokens to the vocabulary of --init; give --init"):
        bert_jax.pretrain(config, tmp_path / "new")
    with refused("tokenizer.add is 3", "leave it out: a fork keeps its tokenizer"):
        bert_jax.pretrain(config, tmp_path / "new", fork=tiny_run.checkpoint)
    for flag in ("init", "fork"):
        begun_with = {flag: tiny_run.checkpoint, "fields": ["steps", "tokenizer.kind"]}
        with refused(f"tokenizer.kind has no effect, as the tokenizer is that of --{flag}"):
            start(tiny_config, tmp_path / "new", **begun_with)
    path = dataclasses.replace(
        config.tokenizer, add=0, path=str(tiny_run.checkpoint.parents[1] / "tokenizer")
    )
    for name, value in (("kind", "byte_bpe"), ("lowercase", False), ("model_type", "bpe")):
        fields = {"tokenizer": dataclasses.replace(path, **{name: value})}
        with refused(f"tokenizer.{name} ", "no effect, as the tokenizer is that of tokenizer.path"):
            start(
                dataclasses.replace(tiny_config, **fields),
                tmp_path / "new",
                fields=[f"tokenizer.{name}"],
            )
    data = dataclasses.replace(config.data, eval_source=str(text), eval_fraction=0.5)
    with refused("data.eval_fraction 0.5 has no effect beside data.eval_source", "leave one out"):
        given = dataclasses.replace(tiny_config, data=data)
        start(given, tmp_path / "new", fields=["data.eval_fraction"])
    capsys.readouterr()
    whole = bert_jax.pretrain(config, tmp_path / "whole", init=tiny_run.checkpoint)
    tokenizer = whole.bert.tokenizer
    size = tokenizer.vocab_size
    assert tokenizer.id_to_token(size - 1) == "heads"
    printed = capsys.readouterr().out
    assert f"vocabulary {size} tokens: {size - 1} keep the embedding" in printed
    assert "tokenizer.add is 3, and the text has no more than 1 to add" in printed
    assert whole.bert.config.vocab_size == size
    half = dataclasses.replace(config, steps=2)
    bert_jax.pretrain(half, tmp_path / "half", init=tiny_run.checkpoint, quiet=True)
    half = dataclasses.replace(config, steps=4)
    bert_jax.pretrain(half, tmp_path / "half", init=tiny_run.checkpoint, quiet=True)
    again = bert_jax.load(tmp_path / "half")
    assert again.tokenizer.fingerprint == tokenizer.fingerprint
    assert again.config.vocab_size == size
    (tmp_path / "text.txt").write_text("Another text reads.\n\n" * 60)
    with refused("was prepared from other text"):
        bert_jax.pretrain(half, tmp_path / "half", init=tiny_run.checkpoint, quiet=True)


def test_words_of_texts_in_memory_and_a_start_that_was_interrupted(tiny_run, tiny_config, tmp_path):
    config = dataclasses.replace(tiny_config, tokenizer=TokenizerConfig(add=3))
    config.data = dataclasses.replace(config.data, source="")
    old = bert_jax.load(tiny_run.checkpoint).tokenizer
    old.save(tmp_path / "run" / "tokenizer")  # of a run without a checkpoint
    (tmp_path / "run" / "config.json").write_text(settings.to_json(config))
    result = bert_jax.pretrain(
        config, tmp_path / "run", init=tiny_run.checkpoint, texts=["The heads see a head."] * 60
    )
    names = [result.bert.tokenizer.id_to_token(i) for i in range(old.vocab_size, 99)]
    assert "heads" in names


def test_a_run_of_a_store_resumes_without_the_tokenizer_that_it_was_given(
    tiny_config, tiny_run, tmp_path
):
    run = shutil.copytree(tiny_run.checkpoint.parents[1], tmp_path / "run")
    (run / "store").rename(tmp_path / "store")
    config = dataclasses.replace(
        tiny_config,
        steps=tiny_config.steps + 2,
        data=dataclasses.replace(tiny_config.data, source=str(tmp_path / "store")),
        tokenizer=TokenizerConfig(path=str(tmp_path / "gone")),
    )
    began = dataclasses.replace(config, steps=tiny_config.steps)
    (run / "config.json").write_text(settings.to_json(began))
    resumed = start(config, run)
    assert resumed.corpus.tokenizer.fingerprint == tiny_run.bert.tokenizer.fingerprint


def test_a_run_with_a_tokenizer_of_its_own(tiny_bert, tiny_config, tmp_path):
    """At a learning rate of next to nothing its model is that of --init, moved."""
    bert = random_bert(tiny_bert.config, tiny_bert.tokenizer)
    bert.save(tmp_path / "init")
    shuffled(bert.tokenizer, 2).save(tmp_path / "mine")
    config = dataclasses.replace(
        tiny_config,
        tokenizer=TokenizerConfig(path=str(tmp_path / "mine")),
        optimizer=dataclasses.replace(tiny_config.optimizer, learning_rate=1e-12),
    )
    result = bert_jax.pretrain(config, tmp_path / "run", init=tmp_path / "init", quiet=True)
    text = "The river bank reads a token."
    assert result.bert.tokenizer.encode([text]) != bert.tokenizer.encode([text])
    np.testing.assert_allclose(result.bert.encode([text]), bert.encode([text]), atol=1e-5)

    for folder in ("init", "mine"):  # as on a machine that takes the place of another
        (tmp_path / folder).rename(tmp_path / f"{folder} is gone")
    longer = dataclasses.replace(config, steps=config.steps + 2)
    again = bert_jax.pretrain(longer, tmp_path / "run", init=tmp_path / "init", quiet=True)
    assert again.bert.tokenizer.fingerprint == result.bert.tokenizer.fingerprint
    with refused("init does not exist"):
        bert_jax.pretrain(config, tmp_path / "new", init=tmp_path / "init")


def test_rows_that_are_of_no_token_are_in_no_mean():
    values = np.array([[1.0], [3.0], [99.0]])  # a table is often longer than its vocabulary
    found = vocabulary._transferred(values, 0, [[1], []], 2)
    np.testing.assert_array_equal(found, [[3], [2]])

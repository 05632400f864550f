"""What a run prints fits its text: its warnings, its table and its examples."""

import dataclasses
import re
import shlex
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batches.stores import make_store, store_of
from helpers import FakeTokenizer, train_batches

from bert_jax import (
    DataConfig,
    OptimizerConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
    console,
)
from bert_jax.batches import loader
from bert_jax.config.schedule import Stage, make_rate_schedule
from bert_jax.inference.masked_lm import Guess
from bert_jax.objectives import make_objective, masked_lm
from bert_jax.runs import header, report
from bert_jax.tasks import make_task, results
from bert_jax.tasks.multi_label import MultiLabelConfig
from bert_jax.tasks.question_answering import QuestionAnsweringConfig
from bert_jax.text import tokenizer_training
from bert_jax.text.masked_sentences import NUM_SENTENCES, masked_sentences
from bert_jax.text.sentences import MAX_DOCUMENT_SENTENCES
from bert_jax.text.store import Corpus, TokenStore

SENTENCES = {
    "English": "The committee reads every report before the meeting of all members.",
    "Chinese": "人人有平等机会参加本国公务的权利。",
    "Thai": "ทุกคนมีสิทธิที่จะเป็นเจ้าของทรัพย์สินโดยลำพังตนเอง",
    "Arabic": "لكل شخص نفس الحق الذي لغيره في تقلد الوظائف العامة في البلاد",
}


def corpus_of(sentences: list[str], kind: str) -> Corpus:
    """Return documents of one sentence each, with a tokenizer of all the tokens that they have."""
    tokenizer = tokenizer_training.train(sentences * 3, TokenizerConfig(kind=kind), 600)
    ids = [list(map(int, sentence)) for sentence in tokenizer.encode(sentences)]
    store = store_of(np.ones(len(ids), int), np.array(list(map(len, ids))))
    store = TokenStore(np.concatenate(ids).astype(np.uint16), store.sentences, store.documents)
    return Corpus(tokenizer, store, store)


@pytest.mark.parametrize("language", SENTENCES)
@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece", "byte_bpe"])
def test_examples_are_of_any_script(language, kind):
    corpus = corpus_of([SENTENCES[language]] * 3, kind)
    examples = list(masked_sentences(corpus, 100))
    assert len(examples) == 3
    for ids, answer in examples:
        assert ids.count(corpus.tokenizer.mask_id) == 1
        assert any(map(str.isalpha, answer))
        text = corpus.tokenizer.decode_with_masks(ids)
        before, _, after = text.partition("[MASK]")
        if language in ("English", "Arabic"):
            assert before.endswith(" ") or not before
        else:
            assert " " not in (before + after).strip()
    example = report._example(corpus, [ids for ids, _ in examples])
    words = shlex.split(f"bert-jax fill-mask run {example}")
    assert words[3] == corpus.tokenizer.decode_with_masks(examples[0][0])


def test_a_heading_with_its_line_is_no_example_where_there_is_a_sentence():
    heading = "********** statement **********"
    sentence = f"{SENTENCES['English']} It then votes on each."
    corpus = corpus_of([heading, sentence] * NUM_SENTENCES, "wordpiece")
    for ids, _ in masked_sentences(corpus, 100):
        assert "*" not in corpus.tokenizer.decode_with_masks(ids)


@pytest.mark.parametrize(("right", "expected"), [(50, 3), (5, 2), (1, 1), (0, 0)])
def test_masks_that_the_model_knows_come_first(right, expected, monkeypatch, tiny_bert):
    sentences = [([tiny_bert.tokenizer.mask_id, 5 + number], f"▁w{number}") for number in range(50)]

    def guess(_, ids, top_k):
        number = ids[1] - 5
        token = f"▁w{number}" if number >= 50 - right else "▁the"
        return [Guess(token, 0.5, "", 1)] * top_k

    monkeypatch.setattr(report, "fill_masks", guess)
    lines = [lines for _, lines in report._fill_some(tiny_bert, sentences)]
    found = [re.search(r"\[MASK\] = (\w+) 50%, .* \(was (\w+)\)$", each) for each in lines]
    assert [guess == answer for guess, answer in (match.groups() for match in found)] == [
        index < expected for index in range(3)
    ]
    assert "▁" not in "".join(lines)


def warning(sizes, lengths=5, pairs="nsp") -> str:
    """Return the warning for documents of so many sentences of so many tokens."""
    sizes = np.array(sizes)
    store = store_of(sizes, np.full(sizes.sum(), lengths))
    config = TrainConfig(steps=8)
    config.data.pairs, config.data.max_length, config.data.batch_size = pairs, 64, 8
    corpus = Corpus(FakeTokenizer(), store, store)
    statistics = train_batches(corpus, config).statistics()
    return "\n".join(make_objective(config).text_warnings(corpus, statistics))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"sizes": [1] * 190 + [9] * 3}, "98% of the documents are a single sentence"),
        ({"sizes": [9] * 40, "lengths": 70}, "that fit into data.max_length"),
        ({"sizes": [40]}, "the training text is one document"),
        ({"sizes": [MAX_DOCUMENT_SENTENCES] * 2 + [7]}, "no blank lines"),
        ({"sizes": [MAX_DOCUMENT_SENTENCES] * 2, "pairs": "sop"}, "SOP cannot be learned"),
        ({"sizes": [9] * 40}, ""),
        ({"sizes": [40], "pairs": "sop"}, ""),
        ({"sizes": [1] * 200, "pairs": "none"}, ""),
    ],
)
def test_pairs_that_teach_little_are_noticed(text, reason):
    found = warning(**text)
    assert reason in found if reason else not found


def test_held_out_pairs_of_one_document_are_noticed():
    many, one = (store_of(np.array(sizes), np.full(sum(sizes), 5)) for sizes in ([9] * 40, [9]))
    config = TrainConfig(steps=8)
    config.data.max_length, config.data.batch_size = 64, 8
    corpus = Corpus(FakeTokenizer(), many, one)
    statistics = train_batches(corpus, config).statistics()
    (found,) = make_objective(config).text_warnings(corpus, statistics)
    assert "NSP has no true scores: the held-out text is one document" in found


def test_the_padding_of_texts_that_are_shorter_than_a_block():
    """And of a mixture, of which one text is."""
    config = TrainConfig(steps=8)
    config.data.pairs, config.data.max_length = "none", 102
    stores = [store_of(np.array([size]), np.full(size, 5)) for size in (9, 90)]
    short, long = (Corpus(FakeTokenizer(), each, each, weight=0.5) for each in stores)
    mixed = dataclasses.replace(short, mixed=(short, long))
    share = "at length 102, for which a text is too short"
    for corpus, expected in (
        (dataclasses.replace(short, weight=1.0), f"53.9% {share}"),  # 45 tokens and 2 of 102
        (dataclasses.replace(long, weight=1.0), "none, as every sequence is full"),
        (mixed, f"27.0% {share}"),
    ):
        batches = train_batches(corpus, config)
        blocks = batches.block_padding()
        assert report._padding(config, batches.statistics(), blocks) == expected


def test_a_score_that_is_no_better_than_its_baseline_is_marked(capsys, tmp_path):
    corpus = corpus_of([SENTENCES["English"]] * 3, "wordpiece")
    baselines = {"mlm_loss": 0.0, "mlm_accuracy": 0.2, "nsp_accuracy": 0.5}
    scores = {"mlm_loss": -0.0, "mlm_accuracy": 0.3, "nsp_accuracy": 0.5}
    run: Any = SimpleNamespace(
        config=TrainConfig(),
        objective=make_objective(TrainConfig()),
        corpus=corpus,
        workdir=SimpleNamespace(address=tmp_path),
        last_checkpoint=tmp_path,
    )
    batches: Any = SimpleNamespace(progress_of_parts=lambda step: [])
    report.pretraining_end(run, batches, scores, baselines, None)
    table = capsys.readouterr().out.splitlines()[2:5]
    assert [line.endswith("no better than that") for line in table] == [True, False, True]
    assert "-0.000" not in table[0]


def test_baselines_do_not_copy_the_held_out_text(monkeypatch):
    corpus = corpus_of([SENTENCES["English"]] * 5000, "wordpiece")
    tokens = corpus.eval.tokens
    monkeypatch.setattr(masked_lm, "_BLOCK", 1000)
    tracemalloc.start()
    config = TrainConfig(data=DataConfig(pairs="none"))
    found = make_objective(config).baselines(corpus, Stage(128, 256))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < tokens.nbytes
    shares = np.bincount(tokens)[np.unique(tokens)] / len(tokens)
    assert found["mlm_accuracy"] == shares.max()
    assert found["mlm_loss"] == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-9)


def test_epochs():
    shown = [console.epochs(number) for number in (1.0, 40.0, 1e-3)]
    assert shown == ["1 epoch", "40 epochs", "0.001 epochs"]


@pytest.mark.parametrize("path", ["runs/a b", "$(touch pwned)", "a'b;c", "-x", "`id`"])
def test_a_path_in_a_command_is_one_word(path):
    assert shlex.split(console.quoted(path)) == [f"./{path}" if path[0] == "-" else path]


def test_the_header_has_the_batch_the_rate_and_the_memory():
    first, then = Stage(128, 256), Stage(512, 32, first_step=900)
    text = "256 sequences of 128 tokens, 32,768 in all"
    assert header.batch([first], 4) == f"{text}, in 4 microbatches"
    assert header.batch([first, then], 1).startswith(f"{text}; from step 900 32 seq")
    optimizer = OptimizerConfig(name="adamw", learning_rate=3e-3, warmup_fraction=0.1)
    rate = header.rate(make_rate_schedule(optimizer, 4000), optimizer)
    assert rate == "0.003 after a warm-up of 400 steps, then falling to 0; adamw"
    optimizer = dataclasses.replace(optimizer, schedule="wsd", warmup_fraction=0.0)
    rate = header.rate(make_rate_schedule(optimizer, 4000, [(900, 1e-3)]), optimizer)
    assert rate.startswith(
        "0.003, 0.001 from step 900, then constant, falling to 0 from step 3,600"
    )


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece", "byte_bpe"])
@pytest.mark.parametrize(
    ("text", "lowercase", "words"),
    [
        ("A few words", True, ", lower case"),
        ("A few words", False, ""),
        ("AGCT GATTACA", False, ""),
    ],
)
def test_the_header_says_lower_case(kind, text, lowercase, words):
    config = TokenizerConfig(kind=kind, lowercase=lowercase)
    assert header.case(tokenizer_training.train([text] * 20, config, 300)) == words


def test_a_baseline_that_a_fine_tuned_model_does_not_beat_is_marked():
    task = SimpleNamespace(
        metrics=("accuracy",),
        baselines=lambda *_: {"TF-IDF, logistic regression": {"accuracy": 0.7, "f1": 0.1}},
    )

    def run(seed, accuracy):
        return {"seed": seed, "best": {"accuracy": accuracy, "f1": 0.9}, "degenerate": False}

    datasets = SimpleNamespace(train=[], evals={"eval": []})
    runs, random = [run(0, 0.4), run(1, 0.6)], [run(0, 0.3)]
    rows = results.comparison(task, datasets, runs, 0.50004, random)
    assert not results.is_worthless(rows)  # the second run is better
    assert results.is_worthless(results.comparison(task, datasets, runs[:1], 0.50004, random))
    table = results.as_text(rows).splitlines()
    marked = {line.split("  ")[0] for line in table if line.endswith("  no better than that")}
    assert marked == {"best constant prediction", "TF-IDF, logistic regression"}


def test_tuned_settings_are_shown_with_what_they_gain(capsys):
    before, after = MultiLabelConfig(labels=("a", "b")), MultiLabelConfig(labels=("a", "b"))
    after.thresholds = (0.2, 0.3)
    with console.output(console.Level.PROGRESS):
        report.tuned(before, after, {"micro_f1": 0.0}, {"micro_f1": 0.62987})
    assert capsys.readouterr().out == "tuned      task.thresholds: micro_f1 0.0000 to 0.6299\n"
    before, after = QuestionAnsweringConfig(), QuestionAnsweringConfig(null_threshold=-1.25)
    with console.output(console.Level.PROGRESS):
        report.tuned(before, after, {"f1": 0.5}, {"f1": 0.75})
    assert "tuned      task.null_threshold -1.25: f1 0.5000 to 0.7500" in capsys.readouterr().out


def test_the_best_of_rates_that_learn_nothing_is_not_known(capsys):
    tried = [
        {"learning_rate": rate, "scores": {"accuracy": 0.5}, "degenerate": True}
        for rate in (1e-3, 1e-2)
    ]
    task = make_task(TaskConfig(labels=("a", "b")))
    with console.output(console.Level.PROGRESS):
        report.rate_found(1e-3, tried, task, num_scored=10)
    printed = capsys.readouterr().out
    assert "no learning rate is better than a constant prediction" in printed
    assert "one may be better still" not in printed
    tried[0] |= {"scores": {"accuracy": 0.75}, "degenerate": False}
    with console.output(console.Level.PROGRESS):
        report.rate_found(1e-3, tried, task, num_scored=10)
    assert "a smaller one may be better still" in capsys.readouterr().out


def test_the_baseline_of_pairs_is_the_majority():
    config, stage, shares = TrainConfig(steps=8), Stage(64, 16), []
    tokenizer = FakeTokenizer()
    tokenizer.vocab_size = 100_000
    config.data.pairs = "sop"  # of NSP, 1 is the majority on most texts
    for seed in range(6):
        store = make_store(20, seed)
        corpus = Corpus(tokenizer, store, store)
        rows = loader.EvalBatches(corpus, stage, config.data, config.eval_rows)
        labels = [row["next_sentence_label"][row["attention_mask"][:, 0] > 0] for row in rows]
        shares.append(np.concatenate(labels).mean())
        found = make_objective(config).baselines(corpus, stage)["nsp_accuracy"]
        assert found == pytest.approx(max(shares[-1], 1 - shares[-1]))
    assert min(shares) < 0.5 < max(shares)

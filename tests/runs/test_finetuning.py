"""Fine-tuning and `bert-jax predict`, on a task whose answer is one word."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from flax import linen as nn
from helpers import model_config, refused
from training_runs import (
    NUMBERS,
    records,
    run_script,
    without_speeds,
    words,
)
from visible_devices import visible_devices

import bert_jax
from bert_jax import Bert, DataFiles, FinetuneConfig, FinetuningResult, TokenizerConfig, UserError
from bert_jax.batches import loader
from bert_jax.commands.flags import read_config
from bert_jax.config import TaskConfig
from bert_jax.errors import DivergedError, Interrupted
from bert_jax.objectives.sentence_pairs import BertForPreTraining
from bert_jax.runs import finetune as finetuning
from bert_jax.runs import learning_rates, task_run
from bert_jax.tasks.classification import Classification
from bert_jax.tasks.embedding import EmbeddingTaskConfig
from bert_jax.text import tokenizer_training
from bert_jax.training import checkpoint

STEPS = 76  # four epochs of 19
SHORT = "data.max_length=8"  # one padded length, so one program to compile


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Sentences with one of three words, by which they are labelled."""
    generator = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
        text = [NUMBERS[i] for i in generator.integers(3, 10, generator.integers(2, 14))]
        answer = int(generator.integers(3))
        text[generator.integers(len(text))] = NUMBERS[answer]
        examples.append((" ".join(text), f"has {NUMBERS[answer]}"))
    return examples


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    """A folder with a checkpoint of random weights and a task's files."""
    folder = tmp_path_factory.mktemp("task")
    tokenizer = tokenizer_training.train(
        [" ".join(NUMBERS)] * 9, TokenizerConfig(kind="wordpiece"), 66
    )
    config = model_config(vocab_size=66, num_hidden_layers=1, hidden_size=32, initializer_range=0.2)
    model = BertForPreTraining(config)
    params = nn.unbox(model.init_params(jax.random.key(1)))
    Bert(config, params, tokenizer, model).save(folder / "init")
    for name, count, seed in (("train", 300, 0), ("dev", 61, 1), ("test", 30, 2)):
        examples = sentences(count, seed)
        lines = [f"{text}\t{label}" for text, label in examples]
        if name == "test":
            lines = [text for text, _ in examples]
        header = "sentence" if name == "test" else "sentence\tlabel"
        (folder / f"{name}.tsv").write_text("\n".join([header, *lines]) + "\n")
    return folder


def flags(task: Path, *changes: str) -> list[str]:
    config = {
        "data.train": task / "train.tsv",
        "data.eval": task / "dev.tsv",
        "data.max_length": 16,  # two padded lengths, each of which is compiled
        "data.batch_size": 16,
        "epochs": 4.0,
        "log_every": 10,
        "optimizer.learning_rate": 0.01,
    }
    return words(config, changes)


def finetune(
    task: Path,
    workdir: Path,
    *changes: str,
    init: Any = "",
    recipe="finetune/classification",
    **options,
) -> FinetuningResult:
    config = read_config(recipe, flags(task, *changes), FinetuneConfig).config
    return bert_jax.finetune(config, init or task / "init", workdir, **options)


@pytest.fixture(scope="session")
def finished(task, tmp_path_factory) -> tuple[Path, str, FinetuningResult]:
    """An undisturbed run on eight devices: its workdir, what it printed and returned."""
    workdir = tmp_path_factory.mktemp("finetuned") / "run"
    with visible_devices(8), contextlib.redirect_stdout(io.StringIO()) as output:
        result = finetune(task, workdir, f"data.test={task / 'test.tsv'}")
    return workdir, output.getvalue(), result


@pytest.fixture(scope="module")
def script(task, tmp_path_factory) -> tuple[Path, Path]:
    """An undisturbed run of `finetune.py` on one device: its workdir, and the user's cache."""
    folder = tmp_path_factory.mktemp("script")
    code, output, errors = run_script("finetune.py", folder, *script_flags(task, folder / "run"))
    assert (code, errors) == (0, "")
    assert "best constant prediction" in output
    return folder / "run", folder


def script_flags(task: Path, workdir: Path) -> list[str]:
    test = f"data.test={task / 'test.tsv'}"
    recipe = "--config=finetune/classification"
    return [recipe, f"--init={task / 'init'}", f"--workdir={workdir}", *flags(task, test)]


def test_what_a_run_leaves_prints_and_returns(finished):
    workdir, printed, result = finished
    results = json.loads((workdir / "results.json").read_text())
    assert results["scores"]["eval"]["accuracy"] > 0.9
    assert "accuracy" not in results["scores"]["test"]
    assert result.scores == results["scores"]
    assert result.comparison == results["summary"]
    assert list(result.comparison[0]["scores"]) == ["accuracy", "f1", "matthews"]
    assert "3 labels: has one, has two, has zero" in printed
    assert "best constant prediction" in printed
    assert "randomly initialized: classifier" in printed
    assert results["padding"]["after"] < results["padding"]["before"]
    assert (workdir / "confusion.png").read_bytes().startswith(b"\x89PNG")
    lines = list(map(json.loads, (workdir / "predictions.jsonl").read_text().splitlines()))
    right = [line["prediction"] == line["label"] for line in lines]
    assert np.mean(right) == pytest.approx(results["scores"]["eval"]["accuracy"])
    assert len(lines) == 61
    assert len((workdir / "predictions.test.jsonl").read_text().splitlines()) == 30
    logged = records(workdir / "seed-0")
    assert {record["split"] for record in logged} == {"train", "eval"}
    best = max(record["accuracy"] for record in logged if record["split"] == "eval")
    assert best == results["scores"]["eval"]["accuracy"]
    last = logged[-1]
    config = json.loads((workdir / "config.json").read_text())
    assert last["epoch"] == config["epochs"]
    assert 0 < last["learning_rate"] < logged[0]["learning_rate"]
    (constant,) = json.loads((workdir / "seed-0/baselines.json").read_text()).values()
    assert f"{constant:.4f}" in printed.split("best constant prediction")[1]


def test_the_result_is_a_checkpoint_that_predicts_the_same(finished, task, tmp_path, bert_jax_main):
    workdir, _, result = finished
    bert = bert_jax.load(workdir)
    assert bert.task.labels == ("has one", "has two", "has zero")
    assert bert.config.hidden_dropout_prob == 0.1
    jax.tree.map(np.testing.assert_array_equal, bert.params, result.bert.params)
    printed = bert_jax_main("predict", workdir, task / "dev.tsv", f"--output={tmp_path / 'out'}")
    ours, theirs = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (tmp_path / "out.jsonl", workdir / "predictions.jsonl")
    )
    assert len(ours) == len(theirs) > 0
    read = tmp_path / "mine.jsonl"
    read.write_text('{"sentence": "one", "label": "has one"}\n')
    read.chmod(0o444)
    with refused("the predictions would be written over"):
        bert_jax_main("predict", workdir, read, f"--output={tmp_path / 'mine'}")
    assert json.loads(read.read_text())["sentence"] == "one"
    for one, other in zip(ours, theirs, strict=True):
        # Six decimals are written, and another padding may round the last one otherwise.
        probabilities = one.pop("probability"), other.pop("probability")
        assert one == other
        assert probabilities[0] == pytest.approx(probabilities[1], abs=1.01e-6)
    assert "accuracy" in printed


@pytest.mark.devices(8)
def test_the_same_run_again_trains_nothing(finished, task, capsys):
    workdir = finished[0]
    before = (workdir / "results.json").read_text()
    finetune(task, workdir, f"data.test={task / 'test.tsv'}")
    printed = capsys.readouterr().out
    assert printed.startswith(f"finished   {workdir} has trained every seed")
    assert "\nstep " not in printed
    assert (workdir / "results.json").read_text() == before


def test_a_fine_tuned_model_computes_in_the_dtype_asked_for(tiny_finetuning):
    """Its head too; the parameters are as they were."""
    path = tiny_finetuning.checkpoint
    exact, rough = (bert_jax.load(path, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert rough.model.config.dtype == rough.config.dtype == "bfloat16"
    assert rough.params["bert"]["embeddings"]["word_embeddings"].dtype == np.float32
    first, second = (bert.predict(["a river", "the bank"]) for bert in (exact, rough))
    for one, other in zip(first, second, strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=0.02)
    assert [one["probabilities"] for one in first] != [one["probabilities"] for one in second]
    with refused("model.dtype is 'float16'; did you mean bfloat16"):
        bert_jax.load(path, dtype="float16")


@pytest.mark.devices(8)
def test_eight_devices_predict_what_one_does(script, task):
    predictions = bert_jax.load(script[0]).predict(task / "dev.tsv")
    lines = (script[0] / "predictions.jsonl").read_text().splitlines()
    one = [json.loads(line) for line in lines]
    assert [line["prediction"] for line in one] == [each["label"] for each in predictions]
    probabilities = [line["probability"] for line in one], [p["probability"] for p in predictions]
    np.testing.assert_allclose(*probabilities, atol=2e-6)


def test_several_seeds_and_degenerate_ones(task, tmp_path, monkeypatch, capsys):
    """Seed 0 is trained; the others are copies of it with other scores."""
    given, train_seed = [], finetuning.train_seed

    def copied(run, seed, params, folder, stop):
        begins_with = {id(run.params): "init", id(None): "random weights"}[id(params)]
        given.append((folder.name, seed, begins_with))
        first = folder.parent / "seed-0"
        result = train_seed(run, 0, params, first, stop)
        if folder == first:
            return result
        shutil.copytree(first, folder)
        best = result["best"] | {"accuracy": 0.9 if folder.name == "seed-1" else 0.0}
        path = result["checkpoint"].replace("seed-0", folder.name)
        return result | {"seed": seed, "best": best, "checkpoint": path}

    monkeypatch.setattr(finetuning, "train_seed", copied)
    changes = SHORT, "seeds=3", "compare=True", "epochs=1.0", "optimizer.learning_rate=1e-9"
    finetune(task, tmp_path / "run", *changes)
    assert given == [
        *((f"seed-{seed}", seed, "init") for seed in range(3)),
        *((f"random-{seed}", seed, "random weights") for seed in range(3)),
    ]
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["best"] == "seed-1/checkpoints/19"
    assert [run["seed"] for run in results["seeds"]] == [0, 1, 2]
    scores = {row["name"]: row["scores"]["accuracy"] for row in results["summary"]}
    first = results["seeds"][0]
    assert first["degenerate"] == (first["best"]["accuracy"] <= scores["best constant prediction"])
    printed = capsys.readouterr().out
    for name in ("mean", "random weights", "TF-IDF"):
        assert name in printed
    assert scores["TF-IDF, logistic regression"] > 0.9


@pytest.fixture
def start(task, tmp_path) -> Callable[..., Any]:
    """Starts a run of some changes from a model, without training it."""

    def started(*changes: str, init: Bert | None = None) -> Any:
        config = read_config(
            "finetune/classification", flags(task, SHORT, *changes), FinetuneConfig
        ).config
        return finetuning.start(config, init or task / "init", tmp_path / "started")

    return started


def test_the_settings_of_a_run_reach_its_parts(start, monkeypatch):
    optimizers, steps = [], []
    make_optimizer, make_train_step = task_run.make_optimizer, task_run.make_train_step

    def optimizer_of(*arguments, **options):
        optimizers.append(options)
        return make_optimizer(*arguments, **options)

    def step_of(*arguments, **options):
        steps.append(options["steps"])
        return make_train_step(*arguments, **options)

    monkeypatch.setattr(task_run, "make_optimizer", optimizer_of)
    monkeypatch.setattr(task_run, "make_train_step", step_of)
    run = start("layer_decay=0.5", "evaluations=2")
    assert run.eval_every == Fraction(19, 2)
    assert optimizers == [{"layer_decay": 0.5, "freezes_encoder": False}]
    assert steps == [STEPS]
    first, second = (run.new_state(seed) for seed in (0, 1))
    kernels = [state.params["classifier"]["kernel"] for state in (first, second)]
    assert np.abs(kernels[0] - kernels[1]).max() > 0
    assert (jax.random.key_data(first.rng) != jax.random.key_data(second.rng)).any()


def test_a_learning_rate_is_tried_on_a_sample_with_its_own_warmup(start, monkeypatch):
    monkeypatch.setattr(learning_rates, "_MAX_SAMPLE", 100)
    run = start("optimizer.warmup_fraction=0.25")
    sample = learning_rates._sample(run)
    assert len(sample.datasets.train) + len(sample.datasets.evals["sample"]) == 100
    trial = run.at_rate(1e-3, sample)
    assert (run.rate.warmup, run.steps) == (19, STEPS)
    assert trial.steps == 4 * -(-len(sample.datasets.train) // 16)
    assert trial.rate.warmup == round(trial.steps / 4)


def test_which_head_and_which_settings_of_a_task_are_kept(finished, start, tmp_path, monkeypatch):
    bert = finished[2].bert
    task = bert.task
    head = finetuning._head_to_keep
    assert head(FinetuneConfig(task=task), bert) is task
    assert head(FinetuneConfig(task=task, new_head=True), bert) is None
    assert head(FinetuneConfig(task=task, probe="mix"), bert) is None
    # One of vectors takes the encoder alone, as it has no head to confuse with another.
    assert head(FinetuneConfig(task=EmbeddingTaskConfig()), bert) is None
    labels = "task.labels=('has zero','has one','has two')"
    with refused("the order counts"):
        start(labels, init=bert)
    config = FinetuneConfig(task=TaskConfig("token_classification"), data=DataFiles(max_length=32))
    rows = [{"sentence": ["The", "bank"], "label": ["O", "B-X"]}] * 20
    with refused("--init is for classification, the config for token_classification"):
        finetuning.start(config, bert, tmp_path / "tagged", train=rows)
    assert set(start(labels, "new_head=True", init=bert).params) == {"bert"}
    continued = classmethod(lambda *_, new_head: dataclasses.replace(task, metrics=("f1",)))
    monkeypatch.setattr(Classification, "continued", continued)
    assert start(init=bert).settings.task.metrics == ("f1",)


def test_a_run_does_not_resume_from_another_init(finished, task):
    workdir, _, _ = finished
    other = bert_jax.load(task / "init")
    other = dataclasses.replace(other, params=jax.tree.map(lambda x: x + 1, other.params))
    with refused("was trained on other text, with another tokenizer or from another --init"):
        finetune(task, workdir, f"data.test={task / 'test.tsv'}", init=other)


def test_the_best_of_several_learning_rates_is_found_and_trains_as_if_it_were_given(
    task, tmp_path, capsys
):
    changes = SHORT, "epochs=3.0", "seed=3"
    workdir, rates = tmp_path / "found", "optimizer.learning_rate=0.01,1e-9"
    config = read_config(
        "finetune/classification", flags(task, *changes, rates), FinetuneConfig
    ).config
    run = finetuning.start(config, task / "init", workdir)
    # One call after each step: the trial of a rate has 45.
    answers = iter([""] * 50 + ["a signal"])
    with pytest.raises(Interrupted):
        finetuning.train_run(run, lambda: next(answers))
    first = (workdir / "rate-0.01/result.json").stat().st_mtime_ns

    found = finetune(task, workdir, *changes, rates)
    printed = capsys.readouterr().out
    assert "the best of 0.01, 1e-09 (found first)" in printed
    assert "rate       0.01 is the best: 0.01 " in printed
    assert "(accuracy of 60 examples)" in printed
    assert "resuming from step 6" in printed
    assert (workdir / "rate-0.01/result.json").stat().st_mtime_ns == first
    assert not list(workdir.glob("rate-*/checkpoints"))
    tried = json.loads((workdir / "results.json").read_text())["learning_rates"]
    scores = [each["scores"]["accuracy"] for each in tried]
    assert [each["learning_rate"] for each in tried] == [0.01, 1e-9]
    assert scores[0] > scores[1]

    given = finetune(task, tmp_path / "given", *changes, "optimizer.learning_rate=0.01", quiet=True)
    jax.tree.map(np.testing.assert_array_equal, found.bert.params, given.bert.params)
    with refused("optimizer.learning_rate"):
        finetune(task, workdir, *changes, "optimizer.learning_rate=0.01")


def test_a_learning_rate_that_diverges_is_dropped(task, tmp_path, capsys, monkeypatch):
    changes = SHORT, "epochs=1.0", "optimizer.warmup_fraction=0.0", "optimizer.clip_norm=0"
    changes += ("optimizer.weight_decay=0.9",)
    finetune(task, tmp_path / "run", *changes, "optimizer.learning_rate=1e-3,1e9")
    output = capsys.readouterr()
    (dropped,) = re.findall("the learning rate 1e.09 is dropped: .*", output.out + output.err)
    assert "checkpoint" not in dropped  # those are removed
    assert "rate       0.001 is the best: 0.001 0." in output.out
    assert "it is the small" in output.out  # and not the largest
    tried = json.loads((tmp_path / "run/results.json").read_text())["learning_rates"]
    assert [each["learning_rate"] for each in tried if "diverged" in each] == [1e9]
    with refused("belongs to another config"):
        finetune(task, tmp_path / "run", *changes[1:], "epochs=2.0", "optimizer.learning_rate=1e-3")

    def diverges(_run, _seed, _params, folder, *_):
        folder.mkdir(parents=True)
        raise DivergedError("a loss is nan")

    monkeypatch.setattr(learning_rates, "train_seed", diverges)
    with pytest.raises(DivergedError, match="no learning rate has a finite loss; give lower ones"):
        finetune(task, tmp_path / "no", *changes, "optimizer.learning_rate=1e9,1e8", quiet=True)


def test_several_learning_rates_need_examples_to_try_them_on(task, tmp_path):
    (tmp_path / "one.tsv").write_text("sentence\tlabel\nzero one\thas zero\n")
    changes = f"data.train={tmp_path / 'one.tsv'}", "data.batch_size=8"
    head = "task.labels=has zero,has one,has two"
    with refused("optimizer.learning_rate has several rates, and there is one example"):
        finetune(task, tmp_path / "run", *changes, head, "optimizer.learning_rate=1e-3,1e-2")


def test_mnli_has_two_sets_of_each_kind(task, tmp_path):
    folder = tmp_path / "MNLI"
    folder.mkdir()
    names = ["entailment", "neutral", "contradiction"]
    sizes = {"train": 64, "dev_matched": 9, "dev_mismatched": 7, "test_matched": 12}
    for split, count in (sizes | {"test_mismatched": 5}).items():
        labelled = not split.startswith("test")
        lines = ["index\tsentence1\tsentence2" + "\tgold_label" * labelled]
        for i, (text, _) in enumerate(sentences(count, seed=3)):
            first, _, second = text.partition(" ")
            lines.append(f"{i}\t{first}\t{second}" + f"\t{names[i % 3]}" * labelled)
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    changes = SHORT, "epochs=1.0", f"data.train={folder}", "data.eval=none"
    result = finetune(task, tmp_path / "run", *changes, recipe="finetune/glue:mnli", quiet=True)
    assert result.bert.task.labels == ("entailment", "neutral", "contradiction")
    assert list(result.scores) == ["matched", "mismatched", "test_matched", "test_mismatched"]
    assert "accuracy" in result.scores["mismatched"]
    for name, count in {"": 9, ".mismatched": 7, ".test_matched": 12}.items():
        lines = (tmp_path / f"run/predictions{name}.jsonl").read_text().splitlines()
        assert len(lines) == count


def test_early_stopping(task, tmp_path):
    changes = [SHORT, "patience=1", "log_every=1000", "optimizer.warmup_fraction=0.0"]
    changes.append("optimizer.learning_rate=1e-12")  # rounds to none
    finetune(task, tmp_path / "run", *changes, quiet=True)
    evaluated = [r["step"] for r in records(tmp_path / "run/seed-0") if r["split"] == "eval"]
    assert evaluated == [19, 38]
    (tmp_path / "run/seed-0/result.json").unlink()  # of a run that was killed before it
    finetune(task, tmp_path / "run", *changes, quiet=True)
    again = [r["step"] for r in records(tmp_path / "run/seed-0") if r["split"] == "eval"]
    assert again == evaluated


def test_a_probe_leaves_the_encoder_as_it_is(task, tmp_path):
    after = finetune(task, tmp_path / "run", SHORT, "probe=mix", "epochs=1.0", quiet=True).bert
    before = bert_jax.load(task / "init")
    encoder = {k: v for k, v in before.params["bert"].items() if k != "pooler"}
    jax.tree.map(np.testing.assert_array_equal, encoder, after.params["bert"])
    assert np.abs(after.params["mix"]).max() > 0


@pytest.mark.parametrize(
    ("change", "key_words"),
    [
        ("data.text=text", "has no column 'text'; set --config.data.text to"),
        pytest.param(
            "data.batch_size=12", "not a multiple of the 8 devices", marks=pytest.mark.devices(8)
        ),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(
    task, tmp_path, bert_jax_main, change, key_words
):
    command = [*script_flags(task, tmp_path / "run"), f"--config.{change}", "--num_processes=1"]
    with refused(key_words):
        bert_jax_main("finetune", *command)
    assert not list(tmp_path.iterdir())


def test_damaged_results_are_refused_and_lost_ones_are_those_of_the_checkpoints(
    finished, task, tmp_path
):
    workdir = shutil.copytree(finished[0], tmp_path / "run")
    result = workdir / "seed-0/result.json"
    result.write_text(result.read_text().replace('"seed": 0', '"seed": 1'))
    test = f"data.test={task / 'test.tsv'}"
    with pytest.raises(UserError, match=r"result\.json is damaged.* to train it again"):
        finetune(task, workdir, test)
    result.unlink()
    (workdir / "seed-0/metrics.jsonl").unlink()
    finetune(task, workdir, test)
    made, lost = (
        json.loads((w / "seed-0/result.json").read_text()) for w in (workdir, finished[0])
    )
    assert (made["best"], made["checkpoint"]) == (lost["best"], lost["checkpoint"])
    shutil.rmtree(workdir / "seed-0/checkpoints")  # for its space
    with refused("the best of the run, is missing; remove ", "seed-0 to train this seed again"):
        finetune(task, workdir, test)


def test_the_head_of_another_task_is_refused(finished, task, tmp_path, capsys):
    workdir = finished[0]
    labels = "('has zero','has one','has two')"
    with pytest.raises(UserError, match="the order counts"):
        finetune(task, tmp_path / "run", f"task.labels={labels}", init=workdir)
    assert not list(tmp_path.iterdir())
    finetune(task, tmp_path / "run", "epochs=1.0", init=bert_jax.load(workdir))
    assert "randomly initialized: none" in capsys.readouterr().out
    first = next(r for r in records(tmp_path / "run/seed-0") if r["split"] == "train")
    assert first["accuracy"] > 0.8


@pytest.mark.parametrize("last", [0, 1])
def test_the_best_model_is_replaced_without_a_moment_of_none(finished, tmp_path, monkeypatch, last):
    """Killed after any of the renames, the workdir has a complete model to load."""
    workdir, _, result = finished
    copy = shutil.copytree(workdir, tmp_path / "run")
    config = dataclasses.replace(FinetuneConfig(model=result.bert.config), task=result.bert.task)
    rename, renamed = Path.rename, []

    def rename_or_stop(path, target):
        if len(renamed) == last:
            raise KeyboardInterrupt
        renamed.append(target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_or_stop)
    with pytest.raises(KeyboardInterrupt):
        finetuning._write_best(result.bert, config, copy)
    monkeypatch.undo()
    assert bert_jax.load(copy).task.labels == result.bert.task.labels

    if (copy / "best").exists():  # SIGKILL between the renames leaves the other alone
        shutil.rmtree(copy / "best")
    monkeypatch.setattr(checkpoint, "write_params", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        finetuning._write_best(result.bert, config, copy)
    assert bert_jax.load(copy).task.labels == result.bert.task.labels


def test_a_list_of_python_is_the_tuple_of_a_setting(tiny_finetuning_config, tiny_bert, tmp_path):
    """So that the run resumes, whose config has been written and read since."""
    config = dataclasses.replace(tiny_finetuning_config)
    config.task = dataclasses.replace(config.task, labels=["second", "first"])
    rates = dataclasses.replace(config.optimizer, learning_rate=[1e-3, 1e-4])
    config.optimizer = rates
    run = finetuning.start(config, tiny_bert, tmp_path / "run")
    assert run.config.task.labels == ("second", "first")
    assert run.config.optimizer.learning_rates == (1e-3, 1e-4)


def test_a_seed_that_was_stopped_is_the_one_that_was_not(task, tmp_path):
    changes = SHORT, "epochs=0.5", "log_every=2"
    config = read_config("finetune/classification", flags(task, *changes), FinetuneConfig).config
    answers = iter([""] * 3 + ["a signal"])
    run = finetuning.start(config, task / "init", tmp_path / "stopped")
    with pytest.raises(Interrupted):
        finetuning.train_run(run, lambda: next(answers))
    found, whole = (
        finetune(task, tmp_path / name, *changes, quiet=True) for name in ("stopped", "whole")
    )
    jax.tree.map(np.testing.assert_array_equal, found.bert.params, whole.bert.params)
    stopped = without_speeds(tmp_path / "stopped/seed-0")
    assert stopped == without_speeds(tmp_path / "whole/seed-0")


def test_seeds_differ_and_random_weights_are_random(task, tmp_path, monkeypatch):
    first_batches, prefetch = [], loader.prefetch

    def recorded(batches, step):
        first_batches.append(batches[step]["input_ids"].tobytes())
        return prefetch(batches, step)

    monkeypatch.setattr(loader, "prefetch", recorded)
    changes = SHORT, "seeds=2", "compare=True", "epochs=0.1", "optimizer.learning_rate=1e-12"
    finetune(task, tmp_path / "run", *changes, quiet=True)
    init = bert_jax.load(task / "init").params["bert"]["embeddings"]["word_embeddings"]
    seeds = [bert_jax.load(tmp_path / "run" / f"seed-{i}").params for i in range(2)]
    randoms = [bert_jax.load(tmp_path / "run" / f"random-{i}").params for i in range(2)]
    words, one, other = (
        params["bert"]["embeddings"]["word_embeddings"] for params in (seeds[1], *randoms)
    )
    np.testing.assert_allclose(words, init, atol=1e-6)
    assert np.abs(one - init).max() > 0.01
    assert np.abs(one - other).max() > 0.01
    heads = [params["classifier"]["kernel"] for params in seeds]
    assert np.abs(heads[0] - heads[1]).max() > 1e-3
    assert first_batches[0] != first_batches[1]
    assert first_batches[:2] == first_batches[2:]

"""The card of an export is right for each kind of model, and its code runs."""

import contextlib
import copy
import dataclasses
import functools
import json
import re
import shutil
import warnings

import jax
import numpy as np
import pytest
import yaml
from model_folders import TASKS, fine_tuned

import bert_jax
from bert_jax.config import FinetuneConfig
from bert_jax.convert import model_card
from bert_jax.errors import UserError
from bert_jax.tasks import make_task
from bert_jax.training import checkpoint


@pytest.fixture(scope="module")
def exported(golden, tmp_path_factory):
    """The model of a task, or None's, and the card and the folder of its export, made once."""

    @functools.cache
    def of(number):
        bert, folder = golden, tmp_path_factory.mktemp("task")
        if number is not None:
            bert = fine_tuned(golden, TASKS[number])
        return bert, *card(bert, folder), folder

    return of


def card(bert, tmp_path, head=None) -> tuple[dict, str]:
    """The header and the text of the card of an export, "exported"."""
    shutil.rmtree(tmp_path / "exported", ignore_errors=True)
    bert.export(tmp_path / "exported", head)
    _, header, text = (tmp_path / "exported/README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def run_code(text: str, library: str) -> dict:
    """Run the block of a card that has the name of a library; return its variables."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.S) if library in b)
    names: dict = {}
    exec(block, names)
    return names


def copied_run(run, tmp_path):
    return shutil.copytree(run.checkpoint.parents[1], tmp_path / "run") / "checkpoints/2"


def test_a_pretrained_model(tiny_run, tiny_bert, tmp_path, monkeypatch):
    header, text = card(tiny_bert, tmp_path)
    tags = ["bert-jax", "jax", "bert"]
    assert header == {"library_name": "transformers", "pipeline_tag": "fill-mask", "tags": tags}
    scores, baselines = tiny_run.scores, tiny_run.baselines
    loss = f"| {scores['mlm_loss']:.3f} | {baselines['mlm_loss']:.3f} (unigram entropy) |"
    assert f"| MLM loss (nats) {loss}" in text
    assert (
        f"| NSP accuracy | {scores['nsp_accuracy']:.1%} | {baselines['nsp_accuracy']:.1%}" in text
    )
    assert "with 6,722 parameters (`BertForPreTraining`)" in text
    assert "Started from random weights." in text
    trained = r"Pretrained on `text.txt`, \d,\d{3} tokens in 54 documents; 2 of 2 steps\."
    assert re.search(trained, text)
    assert "\ndata.source = 'text.txt'\n" in text
    assert str(tiny_run.checkpoint.parents[1]) not in text
    monkeypatch.chdir(tmp_path)
    assert run_code(text, "bert_jax")["guess"].probability > 0
    # The model that training returns has the same card.
    assert card(tiny_run.bert, tmp_path)[1] == text


def test_the_scores_of_an_encoder_alone(tiny_bert, tmp_path):
    header, text = card(tiny_bert, tmp_path, "none")
    assert header["pipeline_tag"] == "feature-extraction"
    assert "Measured with heads that are not in this repository: mlm_head, nsp_head." in text


def test_other_parameters_have_none_of_the_scores(tiny_run, tiny_bert, tmp_path):
    changed = dataclasses.replace(tiny_bert, params=jax.tree.map(np.zeros_like, tiny_bert.params))
    assert tiny_bert.source
    assert changed.source is None
    assert "held-out" not in card(changed, tmp_path)[1]
    shutil.copytree(tiny_run.checkpoint.parents[1], tmp_path / "run")
    tiny_bert.save(tmp_path / "run/best_model")
    assert "held-out" not in card(bert_jax.load(tmp_path / "run/best_model"), tmp_path)[1]


def test_runs_of_another_kind(tiny_run, tmp_path):
    step = copied_run(tiny_run, tmp_path)
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["init"] is None

    def text(**changes):
        (tmp_path / "run/results.json").write_text(json.dumps(results | changes))
        return card(dataclasses.replace(tiny_run.bert, source=step), tmp_path)

    header, of_hub = text(init="hf:google-bert/bert-base-uncased@v1")
    assert header["base_model"] == "google-bert/bert-base-uncased"
    assert "](https://huggingface.co/google-bert/bert-base-uncased)." in of_hub
    header, of_run = text(init="/home/me/runs/law/checkpoints/9")
    assert "base_model" not in header
    assert "Started from `law`." in of_run
    (tmp_path / "run/results.json").unlink()  # of an earlier version
    _, earlier = card(dataclasses.replace(tiny_run.bert, source=step), tmp_path)
    assert "Started from" not in earlier
    assert re.search(r"\| NSP accuracy \| [\d.]+% \|  \|", earlier)
    assert "Pretrained on `text.txt`; 2 of 2 steps." in earlier


def test_a_step_of_a_run_without_nsp(tiny_bert, tmp_path, monkeypatch):
    read, scores = checkpoint.read_json, {"mlm_loss": 4.0}

    def without_nsp(*args):
        values = read(*args)
        return values | {"steps": 4000, "data": values["data"] | {"pairs": "none"}}

    monkeypatch.setattr(checkpoint, "read_json", without_nsp)
    monkeypatch.setattr(checkpoint, "read_scores", lambda path: scores)
    header, text = card(tiny_bert, tmp_path, "masked-lm")
    assert header["pipeline_tag"] == "fill-mask"
    assert "`BertForMaskedLM`" in text
    assert "NSP accuracy" not in text
    assert "2 of 4,000 steps" in text


def test_a_fine_tuned_model(tiny_finetuning, tmp_path):
    header, text = card(bert_jax.load(tiny_finetuning.checkpoint), tmp_path)
    assert header["pipeline_tag"] == "text-classification"
    assert "Its labels are `first`, `second`." in text
    rate = tiny_finetuning.scores["eval"]["accuracy"]
    assert "|  | accuracy | f1 | matthews |\n" in text
    assert f"\n| this model, on `eval` | {rate:.4f} |" in text
    assert "| best constant prediction | " in text
    expected = (
        "Fine-tuned for classification on `train.tsv`: the best evaluation of at most 1 epoch."
    )
    assert expected in text
    assert card(tiny_finetuning.bert, tmp_path)[1] == text


def test_scores_that_were_tuned_say_so():
    run, row = FinetuneConfig(), {"name": "seed 0", "scores": {"f1": 0.2, "map": 0.7}}
    for f1, title in (
        (0.2, "this model, on `eval`"),
        (0.6, "this model, on `eval`, on which it was"),
    ):
        scores = {"eval": {"f1": f1, "map": 0.7, "loss": 1.0}, "test": {"f1": 0.5, "map": 0.6}}
        results = {"summary": [row], "scores": scores}
        *_, table = model_card._scores(None, run, results, [])
        assert f"| {title}" in table
        assert ("tuned" in table) == (f1 != 0.2)


def test_what_a_model_was_fine_tuned_on(tiny_finetuning_config):
    most = ": the best evaluation of at most 1 epoch."
    for train, held_out, glue, expected in (
        ("a/x.tsv", "b/y.tsv", "", f"`x.tsv`{most} Its held-out examples are those of `y.tsv`."),
        ("", "b/y.tsv", "", f"examples in memory{most} Its held-out examples are those of"),
        ("a/x.tsv", "", "", f"`x.tsv`{most}"),
        ("", "", "sst2", f"`sst2`{most}"),
    ):
        config = copy.deepcopy(tiny_finetuning_config)
        config.data.train, config.data.eval, config.task.glue = train, held_out, glue
        text = " ".join(model_card._training(None, config, {}, ""))
        assert text.startswith(f"Fine-tuned for classification on {expected}")


def test_a_test_set_without_labels_has_no_row_of_scores(tiny_finetuning, tmp_path):
    workdir = shutil.copytree(tiny_finetuning.checkpoint.parent, tmp_path / "run")
    results = json.loads((workdir / "results.json").read_text())
    results.pop("crc32c", None)
    results["scores"]["test"] = {}
    (workdir / "results.json").write_text(json.dumps(results))
    _, text = card(bert_jax.load(workdir / tiny_finetuning.checkpoint.name), tmp_path)
    assert "\n| this model, on `eval` | " in text
    assert "`test`" not in text


def test_a_model_without_a_run(golden, tmp_path, monkeypatch):
    golden.save(tmp_path / "imported")
    for bert in (golden, bert_jax.load(tmp_path / "imported")):
        header, text = card(bert, tmp_path)
        assert "base_model" not in header
        assert "Scores" not in text
        assert "## Training" not in text
    header, _ = card(dataclasses.replace(golden, source="hf:a/b@v1"), tmp_path)
    assert header["base_model"] == "a/b"


def read_examples(bert, examples):
    task = make_task(bert.task)
    return [task.example_from(x, i, bert.data) for i, x in enumerate(examples)]


@pytest.mark.parametrize("number", range(len(TASKS)), ids=lambda number: TASKS[number].kind)
def test_each_task(number, exported, tmp_path, monkeypatch):
    task, (bert, header, text, folder) = TASKS[number], exported(number)
    kind = {"regression": "classification"}.get(task.kind, task.kind)
    kind = kind.replace("_", "-").removeprefix("text-")
    expected = {"classification": "text-classification", "multiple-choice": None}.get(kind, kind)
    assert header.get("pipeline_tag") == expected
    monkeypatch.chdir(folder)
    assert ('"A text.", "Another."' in text) == (task.glue == "mnli")  # what it was trained on
    # And compile nothing.
    monkeypatch.setattr(bert_jax.Bert, "predict", read_examples)
    assert run_code(text, "bert_jax")["bert"].task == task
    header, text = card(bert, tmp_path, "none")
    assert header["pipeline_tag"] == "feature-extraction"
    assert "labels" not in text


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("number", [None, *range(2, len(TASKS))])
def test_the_code_for_transformers(number, exported, monkeypatch):
    pytest.importorskip("transformers")
    _, _, text, folder = exported(number)
    monkeypatch.chdir(folder)
    with warnings.catch_warnings(action="ignore"):
        assert run_code(text, "transformers")["outputs"][0].isfinite().all()


def test_malformed_results_are_refused_or_said(tiny_run, tmp_path):
    bert = dataclasses.replace(tiny_run.bert, source=copied_run(tiny_run, tmp_path))
    path = tmp_path / "run/results.json"
    values = json.loads(path.read_text())
    values.pop("crc32c", None)
    for field in values:
        for value in (None, 1, -1.5, "x", [], [1], {}, {"mlm_loss": "x"}, {"tokens": None}):
            path.write_text(json.dumps({**values, field: value}))
            with contextlib.suppress(UserError):
                bert.export(tmp_path / "exported")
            shutil.rmtree(tmp_path / "exported", ignore_errors=True)


def test_an_address_is_named_without_its_secrets():
    files = "https://host/a.txt?sig=S1, s3://bucket/b.txt?key=S2 ,c.txt"
    assert model_card._short(files) == "a.txt,b.txt,c.txt"

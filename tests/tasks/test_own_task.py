"""Tasks that are added from outside the package: what the others do, they do."""

import dataclasses
import importlib
import json

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import DataFiles, FinetuneConfig, TaskConfig, UserError
from bert_jax.config.fields import TASKS
from bert_jax.tasks import make_task
from bert_jax.tasks.base import Task
from bert_jax.tasks.examples import Example

FILE = '''
"""Several topics of a text."""

import jax.numpy as jnp
import numpy as np
from scipy.special import expit

from bert_jax.config.fields import TASKS
from bert_jax.models.heads import TaskModel
from bert_jax.models.layers import Dense
from bert_jax.tasks.classification import TextTask


class Topics(TextTask):
    """A text has any number of topics. A prediction is the logits, [N]."""

    problem_type = "multi_label_classification"
    default_metrics = known_metrics = ("hamming",)

    def read_label(self, label, where):
        return tuple(label.split("+"))

    def target(self, example):
        is_unknown = np.full(len(self.labels), np.nan)
        has = [topic in example.label for topic in self.labels] if example.label else is_unknown
        return np.array(has, np.float32)

    def collect(self, before, features, index, logits):
        return logits.copy()

    def _share(self, examples, is_topic):
        actual = [[topic in example.label for topic in self.labels] for example in examples]
        return float(np.mean(np.array(actual) == is_topic))

    def score(self, examples, predictions):
        return {"hamming": self._share(examples, np.array(predictions) > 0)}

    def constant_score(self, examples):
        return self._share(examples, np.ones(len(self.labels), bool))

    def to_json(self, example, prediction):
        probabilities = dict(zip(self.labels, expit(prediction).tolist(), strict=True))
        topics = [topic for topic in self.labels if probabilities[topic] > 0.5]
        return {"topics": topics, "probabilities": probabilities}

    def as_line(self, example, result):
        return f"{'+'.join(result['topics']) or 'none':<8}  {example.texts[0]}"


class WideHead(TaskModel):
    """A classifier of the mean over all tokens, behind a layer of its own."""

    def setup(self):
        super().setup()
        size = self.config.hidden_size
        self.wide = Dense(self.config, (size, size), ("embed", "hidden"))

    def __call__(self, input_ids, token_type_ids, attention_mask, dropout_key=None):
        output = self.bert(input_ids, token_type_ids, attention_mask, dropout_key)
        mask = attention_mask[:, :, None]
        mean = (output.last_hidden_state * mask).sum(1) / jnp.maximum(mask.sum(1), 1)
        return self.classifier(jnp.tanh(self.wide(mean))).astype(jnp.float32)


class WideTopics(Topics):
    """As above, with a head that no class of transformers has."""

    model_class = WideHead
    transformers_class = ""


TASKS["topics"], TASKS["wide_topics"] = Topics, WideTopics
'''
KINDS = ("topics", "wide_topics")
EPOCH = 4  # steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The file of the tasks, imported, and their examples, of very different lengths."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_topics.py").write_text(FILE)
    examples = ["The river bank.\triver", "A model reads the token.\tmodel"] * 12
    examples += ["The model reads of a small river, a large bank.\tmodel+river"] * 8
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *examples]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with pytest.raises(UserError, match=r"is 'topics'; .*import the file of your own"):
            make_task(TaskConfig("topics"))
        importlib.import_module("own_topics")
        yield folder
    for kind in KINDS:
        TASKS.pop(kind)


def config(folder, kind: str, **changes) -> FinetuneConfig:
    train = str(folder / "train.tsv")
    data = DataFiles(train=train, eval=train, max_length=32, batch_size=8)
    run = FinetuneConfig(epochs=2.0, task=TaskConfig(kind), data=data)
    return dataclasses.replace(run, **changes)


@pytest.fixture(scope="module", params=KINDS)
def finished(request, folder, shallow_bert):
    """A kind, and the result of an undisturbed run."""
    workdir = folder / request.param
    run = config(folder, request.param)
    return request.param, bert_jax.finetune(run, shallow_bert, workdir, quiet=True)


def test_a_run_and_its_predictions(finished, folder, tmp_path, bert_jax_main):
    kind, result = finished
    bert = bert_jax.load(folder / kind)
    assert (bert.task.kind, bert.task.labels) == (kind, ("model", "river"))
    jax.tree.map(np.testing.assert_array_equal, bert.params, result.bert.params)
    assert ("wide" in bert.params) == (kind == "wide_topics")
    (predicted,) = bert.predict(["The river bank."])
    assert {*predicted["probabilities"]} == {"model", "river"}
    printed = bert_jax_main(
        "predict", folder / kind, folder / "train.tsv", f"--output={tmp_path}/p"
    )
    assert printed.endswith(f"hamming {result.scores['eval']['hamming']:.4f}\n")
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 32
    printed = bert_jax_main("predict", folder / kind, "--text", "The river bank.")
    assert printed.split() == [*["+".join(predicted["topics"]) or "none"], "The", "river", "bank."]
    assert bert.attention("The river bank.").prediction == predicted
    with pytest.raises(UserError, match=r"examples\[0\] is 7; give a text"):
        bert.predict([7])
    plain = Task.as_line(
        make_task(bert.task), Example(None, "a:1", ("A text.",), None), {"topics": ["x"]}
    )
    assert plain == "['x']             A text."


@pytest.mark.parametrize("finished", ["wide_topics"], indirect=True)
def test_an_interrupted_run_resumes_bit_equal(finished, folder, shallow_bert, monkeypatch):
    kind, expected = finished
    score, scored = TASKS[kind].score, []

    def interrupted(*args):
        scored.append(args)
        if len(scored) == 2:
            raise KeyboardInterrupt
        return score(*args)

    run, workdir = config(folder, kind), folder / f"{kind}-again"
    monkeypatch.setattr(TASKS[kind], "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bert_jax.finetune(run, shallow_bert, workdir, quiet=True)
    monkeypatch.undo()
    assert [path.name for path in (workdir / "seed-0/checkpoints").iterdir()] == [str(EPOCH)]
    result = bert_jax.finetune(run, shallow_bert, workdir, quiet=True)
    assert result.scores == expected.scores
    jax.tree.map(np.testing.assert_array_equal, result.bert.params, expected.bert.params)


def test_export_and_import(finished, folder, tmp_path, bert_jax_main):
    kind, result = finished
    printed = bert_jax_main("export", folder / kind, tmp_path / "exported")
    values = json.loads((tmp_path / "exported/config.json").read_text())
    card = (tmp_path / "exported/README.md").read_text()
    again = bert_jax.load(tmp_path / "exported")
    if kind == "wide_topics":  # no class has its head: the encoder alone, and one line says so
        assert "dropped, as BertModel has no place for them: classifier, wide\n" in printed
        jax.tree.map(
            np.testing.assert_array_equal, again.params, {"bert": result.bert.params["bert"]}
        )
        assert "library_name: transformers" in card
        return
    assert values["architectures"] == ["BertForSequenceClassification"]
    assert values["problem_type"] == "multi_label_classification"
    assert values["id2label"] == {"0": "model", "1": "river"}
    assert "bert.predict(" in card
    assert f"| this model, on `eval` | {result.scores['eval']['hamming']:.4f} |" in card
    assert again.task == result.bert.task
    jax.tree.map(np.testing.assert_array_equal, again.params, result.bert.params)
    for name in ("bert_jax_task", "tokenizer_pieces"):  # as another program writes it
        del values[name]
    (tmp_path / "exported/config.json").write_text(json.dumps(values))
    assert bert_jax.load(tmp_path / "exported").task == TaskConfig(
        "topics", labels=("model", "river")
    )


@pytest.mark.parity
@pytest.mark.parametrize("finished", ["topics"], indirect=True)
def test_transformers_loads_an_export(finished, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    bert = finished[1].bert
    bert.export(tmp_path / "exported")
    theirs = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "exported"
    ).eval()
    inputs = {k: torch.tensor(v) for k, v in bert.tokenize(["The river bank."]).items()}
    probabilities = theirs(**inputs).logits[0].sigmoid().tolist()
    (predicted,) = bert.predict(["The river bank."])
    np.testing.assert_allclose(
        probabilities, [*predicted["probabilities"].values()], rtol=0, atol=1e-5
    )

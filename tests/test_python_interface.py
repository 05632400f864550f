"""The Python interface: quiet to the process, plain values in, arrays and plain values out."""

import copy
import dataclasses
import itertools
import json
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import refused, untrained

import bert_jax
from bert_jax import Bert, UserError, console
from bert_jax.errors import TextWarning
from bert_jax.inference import runner
from bert_jax.models.heads import make_encoder
from bert_jax.runs import origin

# Prints what importing bert_jax and loading a model change of a process that has imported the
# libraries below it, and that has flags of its own.
CODE = """
import json, logging, signal, sys, warnings
import flax, grain, jax, optax, orbax.checkpoint, safetensors, sentencepiece, sklearn, tokenizers
from absl import flags
for name in ("workdir", "init", "config"):
    flags.DEFINE_string(name, "", "")
flags.FLAGS(["program", "--workdir=elsewhere"])

def state():
    loggers = {"": logging.root, **logging.root.manager.loggerDict}
    return {
        "flags": sorted(flags.FLAGS),
        "loggers": {
            name: (logger.level, list(map(str, logger.handlers)), logger.disabled)
            for name, logger in loggers.items()
            if isinstance(logger, logging.Logger)
        },
        "hooks": list(map(str, (sys.excepthook, sys.unraisablehook, warnings.showwarning))),
        "warnings": list(map(str, warnings.filters)),
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "argv": list(sys.argv),
        "cache": jax.config.jax_compilation_cache_dir,
    }

before = state()
import bert_jax
bert = bert_jax.load(sys.argv[1])
bert("A river bank.")
after = state()
after["loggers"] = {name: after["loggers"][name] for name in before["loggers"]}
changed = [name for name in before if before[name] != after[name]]
print(json.dumps([changed, "bert_jax.commands.process" in sys.modules, flags.FLAGS.workdir]))
"""

# Prints the handlers of an application that has not set up its logging, after it loads a model.
LOGGING = """
import logging, sys
from bert_jax.tasks import base
import bert_jax.bert
bert_jax.load(sys.argv[1]).save(sys.argv[2])
print(logging.root.handlers, logging.root.level == logging.WARNING)
"""


def run_python(code: str, *words) -> str:
    """Return what a program prints in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def compiled_shapes(monkeypatch) -> set:
    """What a runner compiles: a step, by number, with the shapes of a batch."""
    compile_step, shapes, numbers = runner.compile_step, set(), itertools.count()

    def compile_and_record(*arguments):
        compiled, number = compile_step(*arguments), next(numbers)

        def step(params, batch):
            shapes.add((number, *(array.shape for array in batch.values())))
            return compiled(params, batch)

        return step

    monkeypatch.setattr(runner, "compile_step", compile_and_record)
    return shapes


def test_public_names():
    assert len(bert_jax.__all__) == len(set(bert_jax.__all__))
    for name in bert_jax.__all__:
        assert getattr(bert_jax, name).__doc__
    assert {*bert_jax.__all__} <= {*dir(bert_jax)}  # for completion, before they are imported
    assert bert_jax.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="has no attribute 'Brt'"):
        _ = bert_jax.Brt


def test_importing_and_loading_change_nothing_of_the_process(tiny_run):
    assert json.loads(run_python(CODE, tiny_run.checkpoint)) == [[], False, "elsewhere"]


def test_an_application_without_handlers_is_given_none(tiny_run, tmp_path):
    """Orbax's libraries would add one, and its own would then print each line twice."""
    assert run_python(LOGGING, tiny_run.checkpoint, tmp_path / "saved") == "[] True\n"


def test_tokenize(tiny_bert):
    """It pads to the longest text, and joins and truncates pairs."""
    tokenizer = tiny_bert.tokenizer
    texts = ["the river", "the river bank of the model"]
    arrays = tiny_bert.tokenize(texts)
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}
    for row, text in zip(arrays["input_ids"], texts, strict=True):
        ids = [tokenizer.cls_id, *tokenizer.encode([text])[0], tokenizer.sep_id]
        assert row[: len(ids)].tolist() == ids
        assert (row[len(ids) :] == tokenizer.pad_id).all()
    np.testing.assert_array_equal(arrays["attention_mask"], arrays["input_ids"] != tokenizer.pad_id)
    assert not arrays["token_type_ids"].any()
    first, second = (tokenizer.encode([t])[0] for t in ("the river", "a bank"))
    (types,) = tiny_bert.tokenize("the river", "a bank")["token_type_ids"].tolist()
    assert types == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    (row,) = tiny_bert.tokenize("the river " * 9, "a bank", max_length=16)["input_ids"].tolist()
    assert len(row) == 16
    assert row[-len(second) - 1 :] == [*second, tokenizer.sep_id]


@pytest.mark.parametrize("call", [Bert.tokenize, Bert.__call__, Bert.encode])
def test_texts_that_are_truncated_warn_the_caller(tiny_bert, call):
    with pytest.warns(UserWarning, match="1 of 2 texts are longer than the model's 32") as caught:
        call(tiny_bert, ["the river " * 40, "a bank"])
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_bert.tokenize("the river " * 9, max_length=16)  # as asked for


def test_text_that_the_tokenizer_does_not_know_warns(tiny_bert, tiny_classifier):
    for call in (tiny_bert.encode, tiny_classifier.predict):
        with pytest.warns(TextWarning, match="10% of the tokens are unknown to the") as caught:
            call(["日本語", "中文"])
        assert caught[0].filename == __file__
        call(["The river bank.", "A model reads. \U0001f600"])


def test_texts_in_any_iterable_are_those_of_a_list(tiny_bert):
    texts = ["The river.", "A bank."]
    for given in (iter(texts), np.array(texts), tuple(texts), dict.fromkeys(texts).keys()):
        np.testing.assert_array_equal(tiny_bert.encode(given), tiny_bert.encode(texts))
    assert len(tiny_bert(iter(texts)).last_hidden_state) == 2
    assert tiny_bert.encode([]).shape == (0, 16)


def test_a_column_of_arrow_is_the_list_of_its_texts(tiny_bert):
    pyarrow, texts = pytest.importorskip("pyarrow"), ["one two", "three"]
    expected = tiny_bert.encode(texts)
    for column in (pyarrow.array(texts), pyarrow.table({"text": texts})["text"]):
        np.testing.assert_array_equal(tiny_bert.encode(column), expected)


def test_one_program_serves_texts_of_similar_lengths(tiny_bert, compiled_shapes):
    bert = dataclasses.replace(tiny_bert)
    for text in ("a", "the river", "the river bank"):
        arrays = jax.tree.map(jnp.asarray, bert.tokenize(text))
        output = bert(text, output_hidden_states=True, output_attentions=True)
        assert output.last_hidden_state.shape[:2] == arrays["input_ids"].shape
        apply = make_encoder(bert.config, add_pooling_layer=True).apply
        alone = apply({"params": bert.params["bert"]}, **arrays, output_attentions=True)
        np.testing.assert_allclose(output.last_hidden_state, alone.last_hidden_state, atol=1e-5)
        np.testing.assert_allclose(output.attentions[1], alone.attentions[1], atol=1e-6)
    assert len(compiled_shapes) == 1


def test_few_programs_serve_texts_of_many_lengths(tiny_bert, tiny_classifier, compiled_shapes):
    bert, classifier = dataclasses.replace(tiny_bert), dataclasses.replace(tiny_classifier)
    texts = [" ".join(["the"] * count) for count in range(1, 30)]
    for text in texts:
        bert.encode(text)
        bert.fill_mask(f"[MASK]{text[3:]}")
        classifier.predict(text)
    # Of 16, 24 and 32 tokens each.
    assert len(compiled_shapes) == 9
    bert.encode(texts)
    classifier.predict(texts)
    assert len(compiled_shapes) <= 9 + 3 + 1


def test_a_model_that_was_used_is_pickled_without_its_programs(tiny_bert, tiny_classifier):
    tiny_bert.encode("The river.")
    tiny_bert.fill_mask("The [MASK].")
    read = pickle.loads(pickle.dumps(tiny_bert))
    np.testing.assert_array_equal(read.encode("The river."), tiny_bert.encode("The river."))
    before = tiny_classifier.predict("The river.")
    read = pickle.loads(pickle.dumps(tiny_classifier))
    assert list(read.predict("The river.")) == list(before)


@pytest.mark.parametrize(
    ("kind", "labels", "values"),
    [
        ("classification", ("no", "yes"), ["The river.", ("The river.", "A bank.")]),
        ("regression", (), ["The river.", "A bank."]),
        ("token_classification", ("B-X", "I-X", "O"), [["The", "river"], ["A", "bank", "."]]),
        ("question_answering", (), [{"question": "What?", "context": "The river bank."}]),
        ("multiple_choice", (), [{"context": "The", "choices": ["river", "bank"]}]),
    ],
)
def test_predictions_of_plain_values(tiny_bert, kind, labels, values):
    bert = untrained(tiny_bert, kind, labels)
    for value in values:  # one at a time, as texts and pairs do not mix
        (prediction,) = bert.predict([value])
        json.dumps(prediction)
        if kind == "regression":
            assert isinstance(prediction["value"], float)
        elif kind == "token_classification":
            assert prediction["tokens"] == value
            assert set(prediction["labels"]) <= set(labels)
            assert all(1 / 3 <= p <= 1 for p in prediction["probabilities"])
        elif kind == "question_answering":
            start, end = prediction["start"], prediction["end"]
            assert value["context"][start:end] == prediction["answer"]
        else:
            probabilities = prediction["probabilities"]
            listed = list(probabilities.values()) if labels else probabilities
            assert sum(listed) == pytest.approx(1)
            assert prediction["probability"] == max(listed)
            best = prediction["label"] if labels else prediction["choice"]
            assert probabilities[best] == max(listed)
    with pytest.raises(UserError, match=r"examples\[0\] is 3; give "):
        bert.predict([3])


def test_predictions_are_a_sequence(tiny_classifier, tmp_path):
    """Of any examples; one needs no list."""
    predictions = tiny_classifier.predict(text for text in ["The river.", "A bank.", "A model."])
    assert len(predictions) == 3
    assert predictions[-1] == predictions[2]
    assert predictions[:2] == [predictions[0], predictions[1]]
    assert predictions.scores == {}
    (expected,) = tiny_classifier.predict(["The river."])
    for example in ("The river.", {"sentence": "The river."}):
        assert list(tiny_classifier.predict(example)) == [expected]
    frame = Mock(spec=["columns", "to_dict"], columns=["sentence"])
    frame.to_dict.return_value = [{"sentence": "The river."}] * 2
    assert list(tiny_classifier.predict(frame)) == [expected] * 2
    assert [p.exists() for p in predictions.save(tmp_path / "new" / "folder" / "p")] == [True]


def test_save_and_load(tiny_bert, tiny_classifier, tmp_path):
    for name, bert in {"pretrained": tiny_bert, "classifier": tiny_classifier}.items():
        bert.save(tmp_path / name)
        again = bert_jax.load(tmp_path / name)
        jax.tree.map(np.testing.assert_array_equal, again.params, bert.params)
        assert (again.config, again.task, again.data) == (bert.config, bert.task, bert.data)
        assert repr(again) == repr(bert)
        with pytest.raises(UserError, match="already exists"):
            bert.save(tmp_path / name)
    assert "classification of 2 labels" in repr(tiny_classifier)
    single = dataclasses.replace(tiny_bert.config, num_hidden_layers=1, num_attention_heads=1)
    assert " 1 layer of 16, 1 head, " in repr(dataclasses.replace(tiny_bert, config=single))


def test_a_model_needs_neither_its_folder_nor_the_working_directory(
    tiny_run, tmp_path, monkeypatch
):
    shutil.copytree(tiny_run.checkpoint.parents[1], tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    bert = bert_jax.load("run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    bert.export("whole")
    assert "random weights" in (tmp_path / "elsewhere/whole/README.md").read_text()
    bert_jax.Index.build(bert, output="index", texts=["the bank"], files=None)
    assert bert_jax.Index.load("index").search(["bank"], 1)
    shutil.rmtree(tmp_path / "run")
    bert.export("of_nothing")
    assert "random weights" not in (tmp_path / "elsewhere/of_nothing/README.md").read_text()


@pytest.mark.parametrize("stream", [None, SimpleNamespace(write=lambda text: None)])
def test_an_output_that_is_no_file(tiny_run, monkeypatch, stream):
    """As that of a notebook's or an application's own, or of a service that has none."""
    monkeypatch.setattr(sys, "stderr", stream)
    assert bert_jax.load(tiny_run.checkpoint).encode(["The bank."]).shape == (1, 16)


def test_lines_are_printed_to_an_output_that_only_writes(monkeypatch):
    written: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append))
    console.show("a line", console.Level.RESULTS)
    assert "".join(written) == "a line\n"


@pytest.mark.parametrize(
    "settings",
    [
        {
            "jax_enable_x64": True,
            "jax_numpy_dtype_promotion": "strict",
            "jax_numpy_rank_promotion": "raise",
            "jax_transfer_guard": "disallow",
        },
        {"jax_disable_jit": True},
    ],
)
def test_settings_of_a_host_program_change_nothing(
    tiny_run, tiny_config, tiny_finetuning_config, tmp_path, settings
):
    # For all threads, as environment variables do.
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        run = bert_jax.pretrain(tiny_config, tmp_path / "pretraining", quiet=True)
        bert = bert_jax.load(tiny_run.checkpoint)
        assert bert.encode(["A bank."]).shape == (1, 16)
        assert len(bert.fill_mask("A [MASK].")) == 5
        found = bert_jax.finetune(tiny_finetuning_config, bert, tmp_path / "run", quiet=True)
        assert len(found.bert.predict(["A bank."])) == 1
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    jax.tree.map(np.testing.assert_array_equal, run.bert.params, tiny_run.bert.params)


def test_a_model_without_parameters_is_refused(tiny_bert):
    with refused("the model has no parameters; give params that are not empty"):
        dataclasses.replace(tiny_bert, params={}).encode(["A bank."])


def test_an_index_encodes_no_queries_as_no_rows(tiny_bert, tmp_path):
    index = bert_jax.Index.build(tiny_bert, output=tmp_path / "index", texts=["the bank"])
    assert index.encode([]).shape == (0, 16)


def test_errors_read_as_those_of_the_commands(tiny_bert, tiny_run, bert_jax_main):
    with pytest.raises(UserError) as of_function:
        tiny_bert.fill_mask("no")
    with refused(str(of_function.value)):
        bert_jax_main("fill-mask", tiny_run.checkpoint, "no")


@pytest.fixture
def given(
    tiny_run, tiny_bert, tiny_classifier, tiny_config, tiny_finetuning_config
) -> SimpleNamespace:
    """Models and configs, by short names."""
    configs = {"config": tiny_config, "tuning": tiny_finetuning_config}
    models = {"run": tiny_run.checkpoint, "bert": tiny_bert, "classifier": tiny_classifier}
    return SimpleNamespace(**models, **configs)


def with_tokenizer(config: bert_jax.TrainConfig, **fields: Any) -> bert_jax.TrainConfig:
    return dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, **fields))


def with_positions(config: Any, number: Any) -> Any:
    model = dataclasses.replace(config.model, max_position_embeddings=number)
    return dataclasses.replace(config, model=model)


def with_phase(config: bert_jax.TrainConfig, phase: Any) -> bert_jax.TrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, phases=(phase,)))


@pytest.mark.parametrize(
    ("call", "key_words"),
    [
        (lambda it: it.bert.tokenize([]), "there are no texts"),
        (lambda it: it.bert.tokenize(["a", "b"], ["c"]), "2 texts and 1 second texts"),
        (lambda it: it.bert.tokenize("a", [b"c"]), "text_pairs[0] is b'c'"),
        (lambda it: it.bert({"a": "b"}), "texts is {'a': 'b'}"),
        (lambda it: it.bert.encode(["a", 1.5]), "texts[1] is 1.5"),
        (lambda it: it.bert.encode(None), "texts is None"),
        (lambda it: it.bert.encode("\ud800"), "texts[0] is not Unicode"),
        (lambda it: it.bert.attention(["a"]), "text[0] is ['a']"),
        (lambda it: it.bert.tokenize("a", max_length=33), "max_length is 33"),
        (lambda it: it.bert.tokenize("a", "b", max_length=3), "max_length is 3"),
        (lambda it: it.bert.fill_mask("[MASK] " * 40), "has 42 tokens and the model 32"),
        (lambda it: it.bert.fill_mask("a [MASK]", top_k=0), "top_k is 0"),
        (lambda it: it.bert.predict(["a"]), "no head of a task"),
        (lambda it: it.bert.export("x", head="y"), "head=y does not fit a bert"),
        (lambda it: it.classifier.predict([]), "there are no examples"),
        (lambda it: it.classifier.predict(""), "a text is ''"),
        (lambda it: it.classifier.predict([("a", "b")]), "examples[0] has 2 texts"),
        (lambda it: it.classifier.predict(["a", None]), "examples[1] is None"),
        (lambda it: it.classifier.predict(["a"], batch_size=0), "batch_size is 0"),
        (lambda it: it.classifier.fill_mask("a [MASK]"), "no masked LM head"),
        # A model of an objective of one's own.
        (
            lambda it: dataclasses.replace(it.bert, model=nn.Dense(1)).fill_mask("a [MASK]"),
            "no masked LM head",
        ),
        (lambda it: bert_jax.load(""), "path is empty"),
        (lambda it: bert_jax.pretrain(it.config, ""), "path is empty"),
        (lambda it: bert_jax.pretrain(it.config, "x", init=""), "path is empty"),
        (lambda it: bert_jax.pretrain(it.config, "x", fork=""), "path is empty"),
        (lambda it: bert_jax.finetune(it.tuning, "", "x"), "path is empty"),
        (lambda it: bert_jax.finetune(it.tuning, it.bert, ""), "path is empty"),
        (lambda it: bert_jax.load(None), "a path is None; give the name"),
        (lambda it: it.classifier.predict(["a"], text=3), "text is 3"),
        (
            lambda it: it.classifier.predict([{"body": "a"}]),
            "has no column 'sentence'; set text to one of body",
        ),
        (lambda it: bert_jax.pretrain(it.config, None), "a path is None; give"),
        (lambda it: bert_jax.finetune(it.tuning, 3, "x"), "a path is 3; give"),
        (lambda it: it.bert.save("", force=True), "path is empty"),
        (lambda it: it.bert.export("", force=True), "path is empty"),
        (lambda it: it.bert.attention("the bank").save(""), "path is empty"),
        (lambda it: bert_jax.Index.load(""), "path is empty"),
        (lambda it: bert_jax.Index.build(it.bert, texts=["a"]), "path is empty"),
        (lambda it: bert_jax.Index.build(it.bert, "", "x"), "path is empty"),
        (lambda it: bert_jax.recipe(None), "recipe is None; give one"),
        (lambda it: bert_jax.recipe(""), "recipe is ''; give one"),
        (lambda it: bert_jax.pretrain(None, "x"), "of the class NoneType, not TrainConfig"),
        (lambda it: bert_jax.finetune(it.config, it.bert, "x"), "TrainConfig, not FinetuneConfig"),
        (
            lambda it: bert_jax.pretrain(dataclasses.replace(it.config, optimizer={}), "x"),
            "config.optimizer is of the class dict, not OptimizerConfig",
        ),
        (
            lambda it: bert_jax.pretrain(with_tokenizer(it.config, add=1.5), "x", init=it.run),
            "tokenizer.add is 1.5",
        ),
        (
            lambda it: bert_jax.finetune(with_positions(it.tuning, "1024"), it.bert, "x"),
            "model.max_position_embeddings is '1024'",
        ),
        (
            lambda it: bert_jax.pretrain(with_phase(it.config, {"start": 0.5}), "x"),
            "phases[0] is of the class dict, not Phase",
        ),
    ],
)
def test_mistakes(given, call, key_words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(key_words):
        call(given)
    assert not list(tmp_path.iterdir())


def test_settings_that_do_not_exist(tiny_config, tiny_finetuning_config):
    for config in (tiny_config, tiny_finetuning_config):
        for group in (config, config.model, config.data, config.optimizer):
            with pytest.raises(AttributeError, match="has no attribute 'learnin_rate'"):
                group.learnin_rate = 1e-5


def test_quiet_runs_print_and_draw_nothing_and_install_nothing(
    tiny_config, tiny_finetuning_config, tmp_path, capfd, monkeypatch
):
    def refuse(*_):
        raise AssertionError("a signal handler was installed")

    monkeypatch.setattr(signal, "signal", refuse)
    config = copy.deepcopy(tiny_config)
    config.checkpoint.every, config.eval_every = 1, 2  # checkpoints that have no scores, too
    pretrained = bert_jax.pretrain(config, tmp_path / "run", quiet=True)
    finetuned = bert_jax.finetune(
        tiny_finetuning_config, pretrained.checkpoint, tmp_path / "task", quiet=True
    )
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert not list(tmp_path.rglob("*.png"))
    assert set(pretrained.baselines) < set(pretrained.scores)
    assert pretrained.bert.encode("The river.").shape == (1, 16)
    assert [row["name"] for row in finetuned.comparison][-1] == "best constant prediction"
    assert finetuned.scores["eval"].keys() >= {"accuracy", "f1"}
    assert len(finetuned.bert.predict(["The river."])) == 1


def test_a_recipe_continues_from_a_model_of_another_size(tiny_bert):
    """Its architecture is the checkpoint's; the dropouts that the recipe sets are kept."""
    model = origin.model_config(tiny_bert, bert_jax.recipe("tiny").model)
    assert model.hidden_size == tiny_bert.config.hidden_size
    assert model.hidden_dropout_prob == 0.0
    assert origin.model_config(tiny_bert, bert_jax.recipe("tiny").model, []) == model
    automatic = origin.model_config(tiny_bert, bert_jax.recipe("base").model)
    assert automatic.dtype == "auto"  # of the recipe, until the device resolves it
    default = origin.model_config(tiny_bert, bert_jax.ModelConfig(remat=True))
    assert default == dataclasses.replace(tiny_bert.config, remat=True)


def test_a_label_column_that_no_example_has_is_refused(tiny_classifier):
    rows = [{"sentence": "A river bank.", "label": "first"}]
    with pytest.raises(UserError, match="no example has a label in 'lable'"):
        tiny_classifier.predict(rows, label="lable")
    assert tiny_classifier.predict(rows, label="label").scores["accuracy"] in (0, 1)
    assert not tiny_classifier.predict(["A river bank."], label="label").scores

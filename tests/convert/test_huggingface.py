"""Hugging Face checkpoint directories: loaded, exported and loaded again, or refused."""

import contextlib
import dataclasses
import json
import shlex
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from flax import linen as nn
from flax import traverse_util
from helpers import model_config, random_bert, refused, refuses_to_load, untrained
from make_golden import GOLDEN
from model_folders import (
    TASKS,
    WEIGHTS,
    change_config,
    copied,
    fine_tuned,
    same,
    tensors_of,
    write,
)

import bert_jax
from bert_jax.config import DataFiles, TaskConfig, TokenizerConfig
from bert_jax.convert import names
from bert_jax.models.modernbert import ModernBertConfig
from bert_jax.objectives import pretraining_model
from bert_jax.tasks import task_class
from bert_jax.text import tokenizer_loading, tokenizer_training
from bert_jax.text.tokenizer import WordPieceTokenizer

WORDS = "bert.embeddings.word_embeddings.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the golden BERT, to be changed."""
    return copied("bert", tmp_path / "model")


def without(params, *parts: str):
    flat = traverse_util.flatten_dict(params, sep="/")
    kept = {name: value for name, value in flat.items() if not name.startswith(parts)}
    return traverse_util.unflatten_dict(kept, sep="/")


# The same model in other layouts.


def old_names(folder, tensors):
    endings = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in endings.items():
        tensors = {name.replace(new, old): value for name, value in tensors.items()}
    assert sum(name.endswith("gamma") for name in tensors) == 6
    write(folder, tensors)


def no_prefix(folder, tensors):
    write(folder, {name.removeprefix("bert."): value for name, value in tensors.items()})


def shards(folder, tensors):
    (folder / WEIGHTS).unlink()
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    where = {name: files[i % 3] for i, name in enumerate(sorted(tensors))}
    for file in files:
        write(folder, {n: tensors[n] for n in tensors if where[n] == file}, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def decoder_again(folder, tensors):
    again = {"decoder.weight": tensors[WORDS], "decoder.bias": tensors["cls.predictions.bias"]}
    write(folder, tensors | {f"cls.predictions.{n}": value.copy() for n, value in again.items()})


def double(folder, tensors):
    write(folder, {name: value.astype(np.float64) for name, value in tensors.items()})


def least_config(folder, tensors):
    """Without fields that `transformers` omits, and with an unknown one that is empty."""
    config = json.loads((folder / "config.json").read_text())
    for name in ("model_type", "hidden_act", "layer_norm_eps", "type_vocab_size"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16", "x": []}))


@pytest.mark.parametrize(
    "variant", [old_names, no_prefix, shards, decoder_again, double, least_config]
)
def test_the_same_model_in_another_layout(variant, folder, golden):
    variant(folder, tensors_of(folder))
    loaded = bert_jax.load(folder)
    same(loaded.params, golden.params)
    assert loaded.config == golden.config
    assert loaded.tokenizer.fingerprint == golden.tokenizer.fingerprint
    assert not loaded.unused


def test_half_precision(folder):
    rounded = {n: value.astype(ml_dtypes.bfloat16) for n, value in tensors_of(folder).items()}
    write(folder, rounded)
    actual = dict(names.to_foreign(bert_jax.load(folder).params))
    same(actual, {name: value.astype(np.float32) for name, value in rounded.items()})


def test_an_encoder_alone(folder, golden):
    encoder = {n: v for n, v in tensors_of(folder).items() if n.startswith("bert.")}
    write(folder, encoder)
    loaded = bert_jax.load(folder)
    same(loaded.params, {"bert": golden.params["bert"]})
    with refused("no masked LM head"):
        loaded.fill_mask("the [MASK] fox")
    write(folder, {name: value for name, value in encoder.items() if "pooler" not in name})
    assert "pooler" not in bert_jax.load(folder).params["bert"]


def test_unused_tensors_are_named(folder, golden):
    surplus = {
        "classifier.weight": np.ones((3, 12), np.float32),
        "classifier.bias": np.ones(3, np.float32),
        "bert.embeddings.position_ids": np.arange(20)[None],  # in files of older versions
    }
    write(folder, tensors_of(folder) | surplus)
    loaded = bert_jax.load(folder)
    same(loaded.params, golden.params)
    assert list(loaded.unused) == sorted(surplus)


# Export and load.


def round_trip(bert, path, head=None):
    """Export and load again; check that no other file is left."""
    exported = bert.export(path, head)
    assert json.loads((path / "config.json").read_text())["architectures"] == [
        exported.architecture
    ]
    loaded = bert_jax.load(path)
    assert names.module_names(loaded.params) == names.module_names(bert.params) - set(
        exported.dropped
    )
    assert loaded.config == bert.config
    assert loaded.task == (None if head else bert.task)
    assert type(loaded.model) is type(bert.model) or head
    assert loaded.tokenizer.fingerprint == bert.tokenizer.fingerprint
    assert not loaded.unused
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    return loaded.params


@pytest.mark.parametrize("head", ["masked-lm", "none"])
def test_round_trip_of_a_roberta(head, tmp_path):
    model = copied("roberta", tmp_path / "original" / "model")
    pooler = {"weight": np.eye(12, dtype=np.float32), "bias": np.ones(12, np.float32)}
    pooler = {f"roberta.pooler.dense.{name}": value for name, value in pooler.items()}
    write(model, tensors_of(model) | pooler)
    bert = bert_jax.load(model)
    (tmp_path / "exported").mkdir()
    params = round_trip(bert, tmp_path / "exported" / "out", head)
    same(params, without(bert.params, "mlm_head" if head == "none" else "bert/pooler"))


def test_sinusoidal_positions_are_exported_as_a_table(golden, tmp_path):
    config = dataclasses.replace(golden.config, position_embedding_type="sinusoidal")
    positions = "bert/embeddings/position_embeddings"
    params = without(golden.params, positions)
    bert = dataclasses.replace(golden, config=config, params=params)
    bert.export(tmp_path / "out")
    loaded = bert_jax.load(tmp_path / "out")
    assert loaded.config == golden.config
    text = "the quick brown fox"
    np.testing.assert_allclose(loaded.encode(text), bert.encode(text), rtol=0, atol=1e-5)
    same(without(loaded.params, positions), params)
    table = np.asarray(loaded.params["bert"]["embeddings"]["position_embeddings"])
    angles = np.arange(20)[:, None] / 10000 ** (np.arange(0, 12, 2) / 12)
    np.testing.assert_allclose(table[:, ::2], np.sin(angles), rtol=0, atol=1e-6)
    np.testing.assert_allclose(table[:, 1::2], np.cos(angles), rtol=0, atol=1e-6)


def test_an_export_that_fails_leaves_nothing(golden, tmp_path, monkeypatch):
    for kind in ("relative_key", "relative_key_query"):
        with refused(kind, "transformers 5"):
            bert_jax.load(GOLDEN / kind).export(tmp_path / "out")
    with refused("head=pretraining does not fit a roberta"):
        bert_jax.load(GOLDEN / "roberta").export(tmp_path / "out", "pretraining")
    encoder = dataclasses.replace(golden, params={"bert": golden.params["bert"]})
    with refused("has no mlm_head", "it has bert/pooler"):
        encoder.export(tmp_path / "out", "masked-lm")
    with refused("cannot be written"):
        golden.export("/dev/null/out")
    assert not list(tmp_path.iterdir())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("bert_jax.convert.tokenizer_files.files", full)
        with refused("cannot be written", "No space left"):
            golden.export(tmp_path / "out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    for write_there in (golden.export, golden.save):
        with refused("already exists"):
            write_there(tmp_path / "out")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "mine"]


# Fine-tuned models.


@pytest.fixture(params=["bert", "roberta"], scope="module")
def either(request):
    return bert_jax.load(GOLDEN / request.param)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_round_trip_of_a_task(task, golden, tmp_path):
    bert = fine_tuned(golden, task)
    same(round_trip(bert, tmp_path / "out"), bert.params)


@pytest.mark.parametrize(
    ("number", "probe", "lacks"),
    [
        (None, "", ("bert/pooler", "nsp_head")),
        (None, "", ("mlm_head", "nsp_head")),
        (1, "2", ()),
        (3, "mix", ()),
        (4, "", ()),
    ],
)
def test_round_trip_of_an_own_checkpoint(number, probe, lacks, golden, tmp_path):
    bert = golden if number is None else fine_tuned(golden, TASKS[number], probe)
    assert ("mix" in names.module_names(bert.params)) == (probe == "mix")
    bert = dataclasses.replace(bert, params=without(bert.params, *lacks))
    bert.save(tmp_path / "ours")
    loaded = bert_jax.load(tmp_path / "ours")
    same(loaded.params, bert.params)
    assert (loaded.task, loaded.config) == (bert.task, bert.config)
    assert loaded.model == bert.model or lacks
    assert loaded.tokenizer.fingerprint == golden.tokenizer.fingerprint


@pytest.mark.parametrize(
    ("probe", "head", "key_words"),
    [
        ("", "masked-lm", ["has no mlm_head"]),
        ("", "regression", ["head=regression", "masked-lm"]),
        ("mix", None, ["a probe of 'mix'", "head=none"]),
        ("2", "classification", ["a probe of '2'", "head=none"]),
    ],
)
def test_a_head_that_does_not_fit_is_not_exported(probe, head, key_words, golden, tmp_path):
    bert = fine_tuned(golden, TASKS[0], probe)
    with refused(*key_words):
        bert.export(tmp_path / "out", head)
    assert not list(tmp_path.iterdir())
    params = round_trip(bert, tmp_path / "out", "none")
    same(params, {"bert": bert.params["bert"]})


def foreign(golden, folder: Path, task: TaskConfig, **values) -> bert_jax.Bert:
    """Write a fine-tuned model without the fields that only this package writes."""
    bert = fine_tuned(golden, task)
    bert.export(folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("bert_jax_task", "tokenizer_pieces", "id2label", "label2id", "problem_type"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config | values))
    return bert


SEVERAL = TaskConfig(labels=("a", "b"))
TAGS = TaskConfig("token_classification", labels=("O", "B"))


@pytest.mark.parametrize(
    ("task", "values", "kind", "labels"),
    [
        (SEVERAL, {}, "classification", ("LABEL_0", "LABEL_1")),
        (SEVERAL, {"num_labels": 2}, "classification", ("LABEL_0", "LABEL_1")),
        (SEVERAL, {"id2label": {"1": "x", "0": "y"}}, "classification", ("y", "x")),
        (SEVERAL, {"problem_type": None}, "classification", ("LABEL_0", "LABEL_1")),
        (SEVERAL, {"id2label": {"0": "x"}}, "regression", ("x",)),
        (SEVERAL, {"num_labels": 1, "problem_type": "regression"}, "regression", ()),
        (TAGS, {"id2label": {"0": "O", "1": "I"}}, "token_classification", ("O", "I")),
        (TASKS[4], {"id2label": {"0": "x"}}, "question_answering", ()),
        (TASKS[5], {"id2label": {"0": "x", "1": "x"}}, "multiple_choice", ()),
        # Exported here, then trained again with another program.
        (TAGS, {"bert_jax_task": {"labels": ["O", "B"]}}, TAGS.kind, ("LABEL_0", "LABEL_1")),
        (SEVERAL, {"bert_jax_task": {"n_best": 3}}, "classification", ("LABEL_0", "LABEL_1")),
    ],
)
def test_the_task_of_a_foreign_model(task, values, kind, labels, golden, tmp_path):
    if kind == "regression":
        task = TaskConfig("regression")
    bert = foreign(golden, tmp_path / "model", task, **values)
    loaded = bert_jax.load(tmp_path / "model")
    assert loaded.task == task_class(kind).settings(kind=kind, labels=labels)
    same(loaded.params, bert.params)
    assert not loaded.unused


@pytest.mark.parametrize("name", ["x", "LABEL_0"])
def test_the_number_of_a_foreign_regression_keeps_its_name(name, golden, tmp_path):
    folder, exported = tmp_path / "model", tmp_path / "exported"
    foreign(golden, folder, TaskConfig("regression"), id2label={"0": name})
    bert_jax.load(folder).export(exported)
    values = json.loads((exported / "config.json").read_text())
    assert values["id2label"] == {"0": name}
    assert values["label2id"] == {name: 0}
    assert bert_jax.load(exported).task == bert_jax.load(folder).task


@pytest.mark.parametrize(("task", "longest"), [(SEVERAL, 600), (TAGS, 600), (TASKS[4], 384)])
def test_a_foreign_model_reads_as_many_tokens_as_it_has_positions(task, longest, tmp_path):
    """But for windows of question answering."""
    folder = tmp_path / "model"
    foreign(bert_jax.load(GOLDEN / "bert"), folder, task, max_position_embeddings=600)
    positions = "bert.embeddings.position_embeddings.weight"
    tensors = tensors_of(folder)
    write(folder, tensors | {positions: np.resize(tensors[positions], (600, 12))})
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text())
    for limit, expected in ((40, 40), (None, longest)):
        file.write_text(json.dumps(values | {"model_max_length": limit or 1 << 60}))
        bert = bert_jax.load(folder)
        assert bert.data.max_length == expected
    if task is SEVERAL:
        text = " ".join(["a"] * 500)
        assert bert.tokenize(text)["input_ids"].size > 384
        assert not bert.predict([text]).num_truncated


@pytest.mark.parametrize("problem", ["ranking", "regression"])
def test_only_the_encoder_of_an_unsupported_task_is_loaded(
    problem, either, tmp_path, bert_jax_main
):
    bert = foreign(either, tmp_path / "model", SEVERAL, problem_type=problem)
    loaded = bert_jax.load(tmp_path / "model")
    assert loaded.task is None
    encoder = bert.params["bert"]
    if bert.config.model_type == "roberta":  # whose pooler is a part of the head
        encoder = {name: value for name, value in encoder.items() if name != "pooler"}
    same(loaded.params, {"bert": encoder})
    assert all(name.startswith("classifier.") for name in loaded.unused)
    printed = bert_jax_main("export", tmp_path / "model", tmp_path / "exported")
    assert f"has no place for them: {', '.join(loaded.unused)}\n" in printed


@pytest.mark.parametrize(
    ("kind", "task", "unused"),
    [
        ("bert", TAGS, "bert.pooler.dense.bias"),
        ("roberta", TAGS, "bert.pooler.dense.bias"),
        ("roberta", SEVERAL, "roberta.pooler.dense.bias"),  # the head has one of its own
    ],
)
def test_a_pooler_that_is_not_used(kind, task, unused, tmp_path):
    """Older versions wrote one for every model."""
    bert = foreign(bert_jax.load(GOLDEN / kind), tmp_path / "model", task)
    other = {f"{kind}.pooler.dense.bias": np.ones(12, np.float32)}
    write(tmp_path / "model", tensors_of(tmp_path / "model") | other)
    loaded = bert_jax.load(tmp_path / "model")
    same(loaded.params, bert.params)
    assert loaded.unused == [unused]


LABELS = "id2label must name"
SIZE = "classifier.bias is of shape (2,)"


@pytest.mark.parametrize(
    ("values", "key_words"),
    [
        ({"id2label": {}}, LABELS),
        ({"id2label": {"0": "a"}}, SIZE),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, SIZE),
        ({"id2label": {"1": "a", "2": "b"}}, LABELS),
        ({"id2label": {"0": "a", "01": "b"}}, LABELS),
        ({"id2label": {"0": "a", "1": "a"}}, LABELS),
        ({"id2label": {"0": "a", "1": None}}, LABELS),
        ({"id2label": {"a": 0, "b": 1}}, LABELS),
        ({"num_labels": 0}, "num_labels is 0"),
        ({"num_labels": 10**12}, "num_labels is 1000000000000"),
        ({"num_labels": "2"}, "num_labels is '2'"),
        ({"num_labels": 3}, SIZE),
        ({"bert_jax_task": {"kind": 3}}, "kind is 3"),
        ({"bert_jax_task": {"other": 3}}, "unknown field other"),
        ({"bert_jax_task": [1]}, "holds no fields"),
    ],
)
def test_configs_of_tasks_that_are_refused(values, key_words, golden, tmp_path):
    if "id2label" in values:
        values = {**values, "problem_type": "single_label_classification"}
    foreign(golden, tmp_path / "model", SEVERAL, **values)
    refuses_to_load(tmp_path / "model", key_words)


def test_a_task_without_its_head_is_refused(either, tmp_path):
    foreign(either, tmp_path / "model", SEVERAL)
    tensors = tensors_of(tmp_path / "model")
    of_head = "pooler.dense.bias" if "pooler" in str(tensors) else "classifier.dense"
    for gone in ("classifier", of_head):
        kept = {name: value for name, value in tensors.items() if gone not in name}
        assert len(kept) < len(tensors)
        write(tmp_path / "model", kept)
        refuses_to_load(tmp_path / "model", "has no ", "fetch it again")


@pytest.mark.parametrize("architectures", [None, {}, "Bert", [3]])
def test_unknown_architectures_have_no_task(architectures, folder, golden):
    change_config(folder, architectures=architectures)
    loaded = bert_jax.load(folder)
    same(loaded.params, golden.params)
    assert loaded.task is None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("task", {"kind": "ranking"}, "kind is 'ranking'"),
        ("task", {"kind": "classification"}, "task.labels are []"),
        ("task", {"labels": ["a", "b", "a"]}, "task.labels are ['a', 'b', 'a']"),
        ("task", {"labels": ["a", 2]}, "labels[1] is 2"),
        ("task", {"labels": ["a"]}, "cannot be read"),
        ("task", None, "task is None"),
        ("probe", "9", "probe is '9'"),
        ("probe", "mix", "cannot be read"),
    ],
)
def test_damaged_metadata_of_an_own_checkpoint(field, value, said, golden, tmp_path):
    fine_tuned(golden, SEVERAL).save(tmp_path / "ours")
    path = tmp_path / "ours" / "config" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    (tmp_path / "ours/checksums.json").unlink()  # as in one of an earlier version
    refuses_to_load(tmp_path / "ours", said)


# What is refused.

FEED_FORWARD = "bert.encoder.layer.1.intermediate.dense.weight"
TRANSFORM = "cls.predictions.transform.dense.bias"


def of_type(dtype):
    return lambda tensors: {FEED_FORWARD: tensors[FEED_FORWARD].astype(dtype)}


def other_decoder(tensors):
    decoder = tensors[WORDS].copy()
    decoder[3, 3] += 1e-6
    return {"cls.predictions.decoder.weight": decoder}


@pytest.mark.parametrize(
    ("changed", "key_words"),
    [
        (lambda tensors: {FEED_FORWARD: tensors[FEED_FORWARD].T}, [FEED_FORWARD, "(12, 20)"]),
        (lambda tensors: {FEED_FORWARD: None}, [FEED_FORWARD]),
        (lambda tensors: {TRANSFORM: None}, [TRANSFORM]),
        (lambda tensors: {n: None for n in tensors if "layer.1." in n}, ["1 layers"]),
        (of_type(np.int32), [FEED_FORWARD, "int32"]),
        (of_type(np.bool_), [FEED_FORWARD, "bool"]),
        (other_decoder, ["decoder.weight", "output embeddings"]),
    ],
)
def test_tensors_that_do_not_fit(changed, key_words, folder):
    tensors = tensors_of(folder)
    changed = (tensors | changed(tensors)).items()
    write(folder, {n: np.ascontiguousarray(v) for n, v in changed if v is not None})
    refuses_to_load(folder, *key_words)


@pytest.mark.parametrize("dtype", ["U8", "I64", "F8_E4M3", "F6_E2M3", "C64"])
def test_tensors_of_types_that_numpy_may_lack(dtype, folder):
    name = "bert.encoder.layer.0.output.dense.bias"
    size = {"U8": 1, "F8_E4M3": 1, "F6_E2M3": 6 / 8}.get(dtype, 8)
    write(folder, tensors_of(folder) | {name: np.zeros(int(12 * size), np.uint8)})
    content = (folder / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[name] |= {"dtype": dtype, "shape": [12]}
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    refuses_to_load(folder, name)


def test_layers_without_tensors(folder):
    # The last number agrees with the config; initializing that many layers would take hours.
    number = 10**7
    name = f"bert.encoder.layer.{number - 1}.output.dense.bias"
    write(folder, tensors_of(folder) | {name: np.ones(12, np.float32)})
    change_config(folder, num_hidden_layers=number)
    refuses_to_load(folder, "3 layers", str(number))


TABLE = "roberta.embeddings.position_embeddings.weight"


@pytest.mark.parametrize(
    ("name", "value", "key_words"),
    [
        (TABLE, np.ones((), np.float32), "position_embeddings"),
        (TABLE, np.ones((1, 12), np.float32), "position_embeddings"),
        (TABLE, np.ones(12, np.float32), "position_embeddings"),
        (TABLE, np.ones((18, 12, 1), np.float32), "position_embeddings"),
        ("lm_head.dense.weight", None, "has no lm_head.dense.weight"),
        (
            "lm_head.decoder.weight",
            np.ones((266, 12), np.float32),
            "lm_head.decoder.weight differs from roberta.embeddings.word_embeddings.weight",
        ),
    ],
)
def test_tensors_of_a_roberta_are_named_as_in_the_file(name, value, key_words, tmp_path):
    folder = copied("roberta", tmp_path / "model")
    changed = (tensors_of(folder) | {name: value}).items()
    write(folder, {n: v for n, v in changed if v is not None})
    refuses_to_load(folder, key_words)


def test_a_stack_of_matrices_that_does_not_divide(tmp_path):
    """A ModernBERT's file has one matrix of queries, keys and values."""
    sizes = {"vocab_size": 9, "hidden_size": 12, "intermediate_size": 16}
    config = ModernBertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    model = pretraining_model(config, pairs=False)
    params = nn.unbox(model.init_params(jax.random.key(0)))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcd"]
    tokenizer = WordPieceTokenizer.from_vocabulary(tokens, lowercase=True)
    bert_jax.Bert(config, params, tokenizer, model).export(tmp_path / "model")
    name, tensors = "model.layers.0.attn.Wqkv.weight", tensors_of(tmp_path / "model")
    write(tmp_path / "model", tensors | {name: tensors[name][:-1]})
    refuses_to_load(tmp_path / "model", "is of shape (11, 12)")


def modernbert(**values) -> dict:
    return {"model_type": "modernbert", **values}


@pytest.mark.parametrize(
    ("values", "key_words"),
    [
        (modernbert(norm_bias=True), "norm_bias"),
        (modernbert(layer_types=["full_attention"]), "of 1 layers"),
        (modernbert(layer_types=["full_attention", "x"]), "global layers"),
        (modernbert(layer_types=3), "global layers"),
        (modernbert(classifier_activation="relu"), "classifier_activation"),
        (modernbert(hidden_activation="relu"), "classifier_activation"),
        (modernbert(embedding_dropout=0.5), "embedding_dropout"),
        (modernbert(rope_scaling={"factor": 2.0}), "rope_scaling"),
        (modernbert(rope_parameters={"full_attention": {"rope_type": "yarn"}}), "'yarn'"),
        (modernbert(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "'yarn', 'factor'"),
        (modernbert(rope_parameters={"full": {"rope_theta": 50.0}}), "'full'"),
        (modernbert(rope_parameters=3), "rope_parameters 3"),
        (modernbert(head_dim=6), "head_dim"),
        (modernbert(local_attention=1), "local_attention"),
        (modernbert(local_attention="x"), "local_attention"),
        ({"model_type": "deberta"}, "deberta"),
        ({"model_type": ["bert"]}, "['bert']"),
        ({"hidden_act": "swiglu"}, "swiglu"),
        ({"hidden_act": None}, "hidden_act"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": {"a": 1}}, "hidden_size"),
        ({"type_vocab_size": None}, "type_vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**7}, "10000000"),
        ({"vocab_size": 2**23}, "word_embeddings"),
        ({"vocab_size": 0}, "has a vocab_size of 0"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob"),
        ({"position_embedding_type": "rotary"}, "rotary"),
        ({"is_decoder": True}, "is_decoder"),
        ({"tokenizer_pieces": "x"}, "tokenizer_pieces is 'x'"),
    ],
)
def test_configs_that_are_refused(values, key_words, folder):
    change_config(folder, **values)
    refuses_to_load(folder, key_words)


@pytest.mark.parametrize("padding", [10**12, 30, [1], None])
def test_padding_of_a_roberta(padding, tmp_path):
    folder = copied("roberta", tmp_path / "model")
    change_config(folder, pad_token_id=padding)
    if padding in ([1], None):  # then it is the usual one
        assert bert_jax.load(folder).config.max_position_embeddings == 16
    else:
        refuses_to_load(folder, "max_position_embeddings")


@pytest.mark.parametrize("text", [b"{", b"[1]", b"null", b"[" * 100_000, b"\0", b"\xff\xfe{}"])
def test_a_config_that_is_not_an_object(text, folder):
    (folder / "tokenizer_config.json").write_bytes(text)
    refuses_to_load(folder, "tokenizer_config.json" if text == b"[1]" else "")
    (folder / "config.json").write_bytes(text)
    refuses_to_load(folder, "config.json")


@pytest.mark.parametrize(
    ("name", "change", "key_words"),
    [
        ("config.json", lambda text: '{"model_type": "bert"}', ["has no vocab_size"]),
        ("vocab.txt", lambda text: f"{text}more\n", ["22 tokens", "21 embeddings"]),
        ("vocab.txt", lambda text: text.replace("quick", "brown"), ["the token 'brown' twice"]),
        ("vocab.txt", lambda text: text.replace("[SEP]", "[X]"), ["vocabulary has no [SEP]"]),
        ("vocab.txt", None, ["vocab.txt"]),
    ],
)
def test_files_that_do_not_fit(name, change, key_words, folder):
    text = (folder / name).read_text()
    (folder / name).unlink()
    if change:
        (folder / name).write_text(change(text))
    refuses_to_load(folder, *key_words)


def test_a_truncated_vocabulary(folder):
    """Tables are often rounded up; by how many embeddings is said where these are many."""
    tensors = tensors_of(folder)
    for rows in (128, 300):
        change_config(folder, vocab_size=rows)
        longer = {n: np.zeros((rows, *v.shape[1:]), np.float32) for n, v in tensors.items()}
        write(folder, tensors | {n: longer[n] for n in (WORDS, "cls.predictions.bias")})
        padded = pytest.warns(UserWarning, match="279 of 300 embeddings have no token")
        with padded if rows == 300 else contextlib.nullcontext():
            assert bert_jax.load(folder).tokenizer.vocab_size == 21


def test_a_pickle_is_refused_with_the_way_to_convert_it(folder):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n")
    spaced = folder.rename(folder.with_name("it's mine"))
    message = refuses_to_load(spaced, "pytorch_model.bin", "torch.load", "save_file")
    command = shlex.split(message.partition("is installed: ")[2])
    assert command[-2:] == [str(spaced / WEIGHTS), str(spaced / "pytorch_model.bin")]
    compile(command[2], "the program", "exec")
    (spaced / "pytorch_model.bin").rename(spaced / "pytorch_model-00002-of-00002.bin")
    for name in ("pytorch_model-00001-of-00002.bin", "training_args.bin"):
        (spaced / name).write_bytes(b"")
    message = refuses_to_load(spaced, "pytorch_model-00001-of-00002.bin")
    shards = [str(spaced / f"pytorch_model-0000{number}-of-00002.bin") for number in (1, 2)]
    assert shlex.split(message.partition("is installed: ")[2])[3:] == [
        str(spaced / WEIGHTS),
        *shards,
    ]


@pytest.mark.parametrize(
    "files",
    [
        {"a": "model-00009-of-00009.safetensors"},
        {"a": "../other.safetensors"},
        {"a": "/etc/passwd"},
        {"a": "."},
        {"a": "\0"},
        {"a": "one\ntwo"},
        {"a": 1},
        {},
        ["a"],
    ],
)
def test_an_index_of_files_outside_the_directory(files, folder):
    # A complete model beside the directory must not be read.
    (folder / WEIGHTS).rename(folder.parent / "other.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files}))
    refuses_to_load(folder)


def test_an_empty_directory(tmp_path):
    refuses_to_load(tmp_path)
    refuses_to_load(tmp_path / "none")
    (tmp_path / "config.json").write_text("{}")
    refuses_to_load(tmp_path)


@pytest.mark.parametrize("path", ["pair_head/kernel", "bert/layer_0/adapter/kernel"])
def test_a_module_that_no_class_has_is_refused_by_name(path):
    with refused(path.rpartition("/")[0]):
        names.exchange_of("bert").name_of(path)


@pytest.mark.parametrize(
    ("own", "limit", "expected"),
    [
        *((9, 9, 9), (9, 8, 8), (9, 12, 12), (9, 1 << 60, 9), (9, 999, None)),
        *((999, 8, 8), (999, 999, 999), (None, 8, 8), (999, None, 999)),
    ],
)
def test_the_length_of_an_export_is_what_another_library_has_made_it(
    golden, tmp_path, own, limit, expected
):
    """None is for the number of positions; more of them are windows."""
    most = golden.config.max_position_embeddings
    data = DataFiles(text="a", label="y", max_length=own or most)
    bert = dataclasses.replace(untrained(golden, "classification", ("no", "yes")), data=data)
    bert.export(tmp_path / "exported")
    file = tmp_path / "exported/tokenizer_config.json"
    values = json.loads(file.read_text())
    assert values["model_max_length"] == min(own or most, most)
    file.write_text(json.dumps(values | {"model_max_length": limit or most}))
    assert bert_jax.load(tmp_path / "exported").data.max_length == (expected or most)


def test_an_export_keeps_the_columns_and_the_length_of_its_task(golden, tmp_path):
    """A pair stays a pair, and a text is truncated as by the checkpoint."""
    data = DataFiles(text="a,b", label="y", max_length=9)
    bert = dataclasses.replace(untrained(golden, "classification", ("no", "yes")), data=data)
    bert.export(tmp_path / "exported")
    again = bert_jax.load(tmp_path / "exported")
    assert again.data == data
    rows = [{"a": "fox " * 9, "b": "dog " * 9, "y": "no"}]
    assert again.predict(rows)[0] == bert.predict(rows)[0]
    values = json.loads((tmp_path / "exported/tokenizer_config.json").read_text())
    assert values["model_max_length"] == 9
    with refused("has 1 text and the model was trained on 2 (a and b)"):
        again.predict(["fox"])
    again.export(tmp_path / "twice")
    assert bert_jax.load(tmp_path / "twice").data == data


def test_a_foreign_model_that_is_saved_here_still_takes_texts_and_pairs(golden, tmp_path):
    foreign(golden, tmp_path / "model", SEVERAL)
    bert_jax.load(tmp_path / "model").save(tmp_path / "saved")
    bert = bert_jax.load(tmp_path / "saved")
    assert len(bert.predict(["fox"])) == len(bert.predict([("fox", "dog")])) == 1


def test_a_roberta_whose_padding_is_another_token_of_its_tokenizer(tmp_path):
    """`transformers` would give that token no position, wherever a text has it."""
    folder = copied("roberta", tmp_path / "model")
    change_config(folder, pad_token_id=3)
    refuses_to_load(folder, "pads with")
    change_config(folder, pad_token_id=-1)
    refuses_to_load(folder, "pad_token_id is negative")


def test_weights_are_read_before_an_index_of_older_ones(folder):
    index = {"weight_map": {"old": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    bert_jax.load(folder)
    (folder / "model.safetensors").unlink()
    refuses_to_load(folder, "model-00001-of-00002.safetensors is missing")


@pytest.mark.parametrize(
    ("pair", "is_read"),
    [
        ("<s> $A <s> $B", False),
        ("<s> $A </s> $B", False),
        ("<s> $B </s> $A </s>", False),
        ("$A $B", True),
    ],
)
def test_other_special_tokens_of_two_texts_are_refused(pair, is_read, tmp_path):
    """A tokenizer that says nothing of two texts joins them as its model does."""
    folder = copied("roberta", tmp_path / "model")
    content = tokenizer_loading.load(folder).files()["tokenizer.json"]
    joined = tokenizers.Tokenizer.from_str(content.decode())
    special = [(token, joined.token_to_id(token)) for token in ("<s>", "</s>")]
    joined.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=special
    )
    joined.save(str(folder / "tokenizer.json"))
    if not is_read:
        form = pair.replace("$", "")
        refuses_to_load(folder, f"joins two texts A and B to {form}, and must", "to <s> A </s> B ")
        return
    assert tokenizer_loading.load(folder).separators == 0
    assert bert_jax.load(folder).config.pair_separators == 0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_two_texts_are_joined_as_the_tokenizer_says(tmp_path, count):
    """As one of BERT's beside a RoBERTa, with one separator; not with three."""
    folder = copied("roberta", tmp_path / "model")
    content = tokenizer_loading.load(folder).files()["tokenizer.json"]
    joined = tokenizers.Tokenizer.from_str(content.decode())
    special = [(token, joined.token_to_id(token)) for token in ("<s>", "</s>")]
    joined.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair=f"<s> $A {'</s> ' * count}$B </s>", special_tokens=special
    )
    joined.save(str(folder / "tokenizer.json"))
    if count == 3:
        refuses_to_load(folder, "has 3 separators between two texts; one or two are read")
        return
    bert = bert_jax.load(folder)
    assert bert.config.pair_separators == (1 if count == 1 else 0)
    ids = bert.tokenize(["a"], ["a"])["input_ids"][0].tolist()
    assert ids.count(bert.tokenizer.sep_id) == count + 1


@pytest.mark.parametrize(
    "model",
    [
        {"pair_separators": 2},
        {"pair_separators": 2, "pair_token_types": 2},
        {"model_type": "roberta", "pair_separators": 1, "type_vocab_size": 1},
    ],
)
def test_two_texts_are_joined_as_before_an_export(model, tmp_path):
    """Of a SentencePiece too, whose .model does not say how."""
    text = ["The cat sat on the mat.\nI sat by the river bank.\nThe bank lends money.\n"] * 9
    tokenizer = tokenizer_training.train(text, TokenizerConfig(kind="sentencepiece"), 60)
    config = model_config(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=64, num_hidden_layers=1, **model
    )
    before = random_bert(config, tokenizer)
    before.export(tmp_path / "exported")
    after = bert_jax.load(tmp_path / "exported")
    assert after.config.pair_separators == model["pair_separators"]
    first, second = (bert.tokenize("The cat", "the mat") for bert in (before, after))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])

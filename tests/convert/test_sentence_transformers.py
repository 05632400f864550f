"""Directories of sentence-transformers, written by hand: read, exported, read again, or refused.

What the library itself computes from them is in test_parity_sentence_transformers.py.
"""

import json
import shutil
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import yaml
from fake_hub import TOKEN
from make_golden import GOLDEN

import bert_jax
from bert_jax.config import ModelConfig
from bert_jax.convert import huggingface
from bert_jax.errors import UserError
from bert_jax.runs import origin

TEXTS = ["the quick fox", "", "it rains on the plains of spain while a brown dog jumps over"]
OLD, NEW = "sentence_transformers.models.", "sentence_transformers.base.modules.x."
DENSE = {"in_features": 12, "out_features": 5, "bias": True}
TANH = "torch.nn.modules.activation.Tanh"
SETTINGS = "config_sentence_transformers.json"


def write_json(file: Path, values) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values))


def list_modules(folder: Path, names, paths) -> None:
    entries = zip(names, paths, strict=True)
    write_json(folder / "modules.json", [{"type": name, "path": path} for name, path in entries])


def write(folder: Path, *, encoder="", prefix=NEW, pooling=None, dense=None, normalize=True):
    """The golden BERT, with modules after it."""
    shutil.copytree(GOLDEN / "bert", folder / encoder)
    (folder / encoder / "expected.safetensors").unlink()
    kinds = ["Transformer", "Pooling", *["Dense"] * bool(dense), *["Normalize"] * normalize]
    paths = [encoder, *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    list_modules(folder, [prefix + kind for kind in kinds], paths)
    write_json(folder / "1_Pooling/config.json", pooling or {"pooling_mode": "mean"})
    if dense:
        write_json(folder / "2_Dense/config.json", dense)
        generator = np.random.default_rng(0)
        tensors = {"linear.weight": generator.normal(size=(5, 12)), "linear.bias": np.arange(5.0)}
        tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
        safetensors.numpy.save_file(tensors, folder / "2_Dense/model.safetensors")
    return folder


def refused(folder: Path, *said: str) -> None:
    with pytest.raises(UserError) as caught:
        bert_jax.load(folder)
    for part in said:
        assert part in str(caught.value)


def pooled(bert, texts, pooling: str) -> np.ndarray:
    output = bert(texts)
    hidden = np.asarray(output.last_hidden_state, np.float64)
    mask = bert.tokenize(texts)["attention_mask"][:, :, None]
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "max":
        return np.where(mask, hidden, -np.inf).max(1)
    return (hidden * mask).sum(1) / mask.sum(1)


def check_again(bert, folder: Path) -> None:
    """An export is the same model, bit for bit."""
    bert.export(folder)
    assert huggingface.is_export(folder)
    again = bert_jax.load(folder)
    assert (again.task, again.data, again.unused) == (bert.task, bert.data, [])
    jax.tree.map(np.testing.assert_array_equal, again.params, bert.params)
    bert.export(folder, force=True)


def test_the_older_layout(tmp_path):
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    pooling = {"word_embedding_dimension": 12, **modes, "pooling_mode_max_tokens": False}
    layout = {"encoder": "0_Transformer", "prefix": OLD, "pooling": pooling}
    dense = {**DENSE, "activation_function": TANH}
    folder = write(tmp_path / "old", **layout, dense=dense)
    settings = {"max_seq_length": 9, "do_lower_case": False}
    write_json(folder / "0_Transformer/sentence_roberta_config.json", settings)
    prompts = {"query": "the dog ", "passage": "a fox ", "document": ""}
    write_json(folder / SETTINGS, {"prompts": prompts})
    bert = bert_jax.load(folder)
    assert repr(bert).endswith("wordpiece of 21 tokens, embedding)")
    assert bert.data.max_length == 9
    layer = safetensors.numpy.load_file(folder / "2_Dense/model.safetensors")
    with pytest.warns(UserWarning, match="1 of 3 texts are longer than the model's 9 tokens"):
        vectors = bert.encode(TEXTS, prompt="passage")
    texts = ["a fox the quick fox", "a fox", "a fox it rains on the plains"]
    wanted = np.tanh(pooled(bert, texts, "mean") @ layer["linear.weight"].T + layer["linear.bias"])
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, wanted, rtol=0, atol=1e-5)
    assert bert.task.embedding.query_prompt == "the dog "
    check_again(bert, tmp_path / "exported")
    # A checkpoint keeps it too, with the pooler for a later task.
    bert.save(tmp_path / "saved")
    saved = bert_jax.load(tmp_path / "saved")
    assert (saved.task, saved.data.max_length) == (bert.task, 9)
    jax.tree.map(np.testing.assert_array_equal, saved.params, bert.params)
    assert "pooler" in saved.params["bert"]
    assert origin.model_config(saved, ModelConfig()).hidden_size == 12
    with pytest.raises(UserError, match="no masked LM head"):
        saved.fill_mask("the [MASK]")
    assert saved.attention("the fox").prediction is None


@pytest.mark.parametrize("pooling", ["cls", "max"])
def test_the_newest_layout(pooling, tmp_path):
    folder = write(tmp_path / "new", pooling={"pooling_mode": pooling}, normalize=False)
    write_json(folder / "tokenizer_config.json", {"model_max_length": 1e30})
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
    bert = bert_jax.load(folder)
    assert bert.data.max_length == 20
    vectors = bert.encode(TEXTS)
    np.testing.assert_allclose(vectors, pooled(bert, TEXTS, pooling), rtol=0, atol=1e-5)
    # What is named is what it was: of the encoder, and not normalized.
    means = bert.encode(TEXTS, pooling="mean")
    np.testing.assert_allclose(means, pooled(bert, TEXTS, "mean"), rtol=0, atol=1e-5)
    check_again(bert, tmp_path / "exported")


def test_a_dense_layer_without_bias_or_activation(tmp_path):
    dense = {**DENSE, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    folder = write(tmp_path / "model", dense=dense, normalize=False)
    bert = bert_jax.load(folder)
    assert (bert.task.embedding.dense, bert.task.embedding.dense_activation) == (5, "identity")
    assert not np.asarray(bert.params["dense"]["bias"]).any()
    check_again(bert, tmp_path / "exported")


def test_a_tokenizer_that_lowercases_first(tmp_path):
    folder = write(tmp_path / "model")
    write_json(folder / "tokenizer_config.json", {"do_lower_case": False})
    bert = bert_jax.load(folder)
    assert bert.tokenizer.encode(["THE Fox"])[0] == [bert.tokenizer.unk_id] * 2
    write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})
    bert = bert_jax.load(folder)
    assert bert.tokenizer.decode(bert.tokenizer.encode(["THE Fox"])[0]) == "the fox"
    check_again(bert, tmp_path / "exported")


def test_a_bert_without_a_pooler(tmp_path):
    folder = write(tmp_path / "model")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if ".pooler." not in name}
    kept = {name: x for name, x in kept.items() if name.startswith("bert.")}
    assert len(kept) == len(tensors) - 2 - 7
    safetensors.numpy.save_file(kept, folder / "model.safetensors")
    bert_jax.load(folder).export(tmp_path / "exported")
    written = safetensors.numpy.load_file(tmp_path / "exported/model.safetensors")
    assert {f"bert.{name}" for name in written} == {*kept}


def test_what_is_not_kept_is_named(tmp_path):
    folder = write(tmp_path / "model", normalize=False)
    prompts = {"query": "the ", "document": "a ", "passage": "a ", "topic": "fox ", "none": ""}
    settings = {"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    write_json(folder / SETTINGS, settings)
    lost = "not kept: the prompts topic; query as the prompt of all texts .*; the similarity dot$"
    with pytest.warns(UserWarning, match=lost):
        bert = bert_jax.load(folder)
    own = bert.task.embedding
    assert (own.query_prompt, own.passage_prompt) == ("the ", "a ")
    with pytest.raises(UserError, match="prompt is 'topic'; the model has query and passage"):
        bert.encode("fox", prompt="topic")
    with pytest.raises(UserError, match="the model has none, as it was not trained"):
        bert_jax.load(GOLDEN / "bert").encode("fox", prompt="query")
    unit = write(tmp_path / "unit")  # of which a dot product is the cosine
    with warnings.catch_warnings(action="error"):
        for similarity in ("dot", None):
            write_json(unit / SETTINGS, {"similarity_fn_name": similarity})
            bert_jax.load(unit)


def test_the_card_and_the_commands(tmp_path, bert_jax_main):
    folder = write(tmp_path / "model", dense=DENSE)
    write_json(folder / SETTINGS, {"prompts": {"query": "the "}})
    out = bert_jax_main("export", folder, tmp_path / "exported")
    assert "load it with sentence_transformers.SentenceTransformer('" in out
    _, header, text = (tmp_path / "exported/README.md").read_text().split("---\n", 2)
    header = yaml.safe_load(header)
    assert header["library_name"] == "sentence-transformers"
    assert {"sentence-transformers", "feature-extraction"} <= {*header["tags"]}
    assert "numbers: the mean of the last hidden states, a dense layer, scaled" in text
    assert "Put `the ` before each query." in text
    assert 'model.encode(["A text."], prompt_name="query")' in text
    (tmp_path / "texts").write_text("\n".join(TEXTS))
    bert_jax_main(
        "embed", folder, tmp_path / "texts", f"--output={tmp_path}/v.npz", "--prompt=query"
    )
    wanted = bert_jax.load(folder).encode(TEXTS, prompt="query")
    np.testing.assert_array_equal(np.load(tmp_path / "v.npz")["vectors"], wanted)
    # The encoder alone.
    out = bert_jax_main("export", folder, tmp_path / "alone", "--head=none")
    assert "transformers.BertModel.from_pretrained" in out
    assert "dropped, as BertModel has no place for them: dense" in out
    assert not (tmp_path / "alone/modules.json").exists()
    assert bert_jax.load(tmp_path / "alone").task is None


def change(folder: Path, name: str, **values) -> None:
    """Change a JSON object of a directory; its modules by their kind."""
    content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    write_json(folder / name, content | values)


def modules(folder: Path, *names: str) -> None:
    kinds = (name.rpartition(".")[2] for name in names)
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    list_modules(folder, names, paths[: len(names)])


KNOWN = [f"{OLD}{kind}" for kind in ("Transformer", "Pooling", "Dense", "Normalize")]
BAD = {
    "an unknown module": (
        lambda f: modules(f, *KNOWN[:2], f"{OLD}LayerNorm"),
        f"modules.json has {OLD}LayerNorm; only Transformer, Pooling, and after them perhaps",
    ),
    "of another package": (lambda f: modules(f, "mine.Transformer"), "has mine.Transformer; only"),
    "a second": (lambda f: modules(f, *KNOWN[:3], KNOWN[2]), "models.Dense in '3_Dense'; only"),
    "an order": (
        lambda f: modules(f, *KNOWN[:2], KNOWN[3], KNOWN[2]),
        "modules.json has Transformer, Pooling, Normalize, Dense; only",
    ),
    "no pooling": (lambda f: modules(f, KNOWN[0]), "modules.json has Transformer; only"),
    "no modules": (lambda f: modules(f), "modules.json has no module; only"),
    "another folder": (
        lambda f: write_json(f / "modules.json", [{"type": KNOWN[0], "path": "../x"}]),
        "Transformer in '../x'; only",
    ),
    "the folder above": (
        lambda f: write_json(f / "modules.json", [{"type": KNOWN[0], "path": ".."}]),
        "Transformer in '..'; only",
    ),
    "not a list": (lambda f: write_json(f / "modules.json", {}), "it is not a JSON list"),
    "odd entries": (lambda f: write_json(f / "modules.json", [1]), "modules.json has None; only"),
    "damaged modules": (lambda f: (f / "modules.json").write_text("[{"), "modules.json cannot be"),
    "damaged pooling": (
        lambda f: (f / "1_Pooling/config.json").write_text("{"),
        "1_Pooling/config.json cannot be read",
    ),
    "no 1_Pooling": (lambda f: shutil.rmtree(f / "1_Pooling"), "1_Pooling/config.json cannot be"),
    "an unknown pooling": (
        lambda f: change(f, "1_Pooling/config.json", pooling_mode="lasttoken"),
        "1_Pooling/config.json pools by lasttoken; only mean, cls, max is read",
    ),
    "an older unknown pooling": (
        lambda f: write_json(f / "1_Pooling/config.json", {"pooling_mode_lasttoken": True}),
        "pools by lasttoken; only",
    ),
    "two poolings": (
        lambda f: write_json(
            f / "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
        ),
        "pools by cls and max; only",
    ),
    "a prompt that is not pooled": (
        lambda f: change(f, "1_Pooling/config.json", include_prompt=False),
        "has include_prompt 'False', which is not supported",
    ),
    "sizes that do not fit": (
        lambda f: change(f, "2_Dense/config.json", out_features=6),
        "linear.weight is of shape (5, 12) and the config asks for (6, 12)",
    ),
    "no size": (
        lambda f: change(f, "2_Dense/config.json", out_features="a"),
        "out_features is 'a'",
    ),
    "an activation": (
        lambda f: change(f, "2_Dense/config.json", activation_function="mine.Tanh"),
        "2_Dense/config.json has mine.Tanh; only torch.nn",
    ),
    "a residual": (
        lambda f: change(f, "2_Dense/config.json", use_residual=True),
        "has use_residual 'True', which is not supported",
    ),
    "no weights of the dense layer": (
        lambda f: (f / "2_Dense/model.safetensors").unlink(),
        "2_Dense has no model.safetensors",
    ),
    "no encoder": (lambda f: (f / "config.json").unlink(), "model/config.json cannot be read"),
    "another task": (
        lambda f: change(f, "sentence_bert_config.json", transformer_task="fill-mask"),
        "sentence_bert_config.json has transformer_task 'fill-mask', which",
    ),
    "a length": (
        lambda f: change(f, "sentence_bert_config.json", max_seq_length="x"),
        "the maximum length is 'x'; it must be 3 tokens or more",
    ),
    "prompts": (lambda f: change(f, SETTINGS, prompts=["a"]), "prompts that are no texts by name"),
    "fewer numbers": (lambda f: change(f, SETTINGS, truncate_dim=4), "truncate_dim 4, which is"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, tmp_path):
    folder = write(tmp_path / "model", dense=DENSE)
    break_it, said = BAD[name]
    break_it(folder)
    refused(folder, said)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub 2.4
def test_from_and_to_the_hub(hub, tmp_path, monkeypatch):
    def files(folder):
        found = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    folder = write(tmp_path / "old", encoder="0_Transformer", dense=DENSE)
    write_json(folder / SETTINGS, {"prompts": {"query": "the "}})
    hub.models["me/dense"] = [files(folder)]
    bert, local = bert_jax.load("hf:me/dense"), bert_jax.load(folder)
    assert bert.task == local.task
    jax.tree.map(np.testing.assert_array_equal, bert.params, local.params)
    modules(folder, *KNOWN[:2], f"{OLD}LSTM")
    hub.models["me/lstm"] = [files(folder)]
    with pytest.raises(UserError, match=r"^hf:me/lstm: modules.json has .*LSTM; only"):
        bert_jax.load("hf:me/lstm")
    assert not any("me/lstm" in r and "safetensors" in r for r in hub.requests)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    bert.export("hf:me/new")
    assert {"modules.json", "2_Dense/model.safetensors"} <= {*hub.models["me/new"][-1]}
    jax.tree.map(np.testing.assert_array_equal, bert_jax.load("hf:me/new").params, local.params)
    bert.export("hf:me/new", "none", force=True)  # and nothing of the earlier export is left
    assert not {f for f in hub.models["me/new"][-1] if "modules" in f or "/" in f}

"""Directories of sentence-transformers, written by hand: read, exported, read again, or refused.

What the library itself computes from them is in test_parity_sentence_transformers.py.
"""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import yaml
from fake_hub import TOKEN
from helpers import refused
from make_golden import GOLDEN
from model_folders import copied, same

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


def listed(*names: str, encoder: str = "") -> list[dict[str, str]]:
    """The content of modules.json, for modules of these classes in order."""
    kinds = (name.rpartition(".")[2] for name in names)
    paths = (f"{index}_{kind}" if index else encoder for index, kind in enumerate(kinds))
    entries = enumerate(zip(names, paths, strict=True))
    return [{"name": str(i), "type": name, "path": path} for i, (name, path) in entries]


def write(folder: Path, *, encoder="", prefix=NEW, pooling=None, dense=None, normalize=True):
    """The golden BERT, with modules after it."""
    copied("bert", folder / encoder)
    kinds = ["Transformer", "Pooling", *["Dense"] * bool(dense), *["Normalize"] * normalize]
    modules = listed(*(prefix + kind for kind in kinds), encoder=encoder)
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling/config.json", pooling or {"pooling_mode": "mean"})
    if dense:
        write_json(folder / "2_Dense/config.json", dense)
        generator = np.random.default_rng(0)
        tensors = {"linear.weight": generator.normal(size=(5, 12)), "linear.bias": np.arange(5.0)}
        tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
        safetensors.numpy.save_file(tensors, folder / "2_Dense/model.safetensors")
    return folder


def test_the_older_layout(golden, tmp_path):
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
    wanted = np.tanh(golden.encode(texts) @ layer["linear.weight"].T + layer["linear.bias"])
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, wanted, rtol=0, atol=1e-5)
    assert bert.task.embedding.query_prompt == "the dog "
    # An export is the same model, bit for bit.
    bert.export(tmp_path / "exported")
    assert huggingface.is_export(tmp_path / "exported")
    again = bert_jax.load(tmp_path / "exported")
    assert (again.task, again.data, again.unused) == (bert.task, bert.data, [])
    same(again.params, bert.params)
    bert.export(tmp_path / "exported", force=True)
    # A checkpoint keeps it too, with the pooler for a later task.
    bert.save(tmp_path / "saved")
    saved = bert_jax.load(tmp_path / "saved")
    assert (saved.task, saved.data.max_length) == (bert.task, 9)
    same(saved.params, bert.params)
    assert "pooler" in saved.params["bert"]
    assert origin.model_config(saved, ModelConfig()).hidden_size == 12
    with pytest.raises(UserError, match="no masked LM head"):
        saved.fill_mask("the [MASK]")
    assert saved.attention("the fox").prediction is None
    pair = "the fox", "the dog"
    assert saved.attention(*pair).prediction == saved.predict([pair])[0]
    with pytest.raises(UserError, match="compare texts without"):
        saved.compare(["the [MASK] fox", "the fox"], "fox")


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


KNOWN = [f"{OLD}{kind}" for kind in ("Transformer", "Pooling", "Dense", "Normalize")]
POOLING_CONFIG, DENSE_CONFIG = "1_Pooling/config.json", "2_Dense/config.json"
ENCODER_CONFIG = "sentence_bert_config.json"


MODULES = "modules.json"
BESIDE = [{"type": KNOWN[0], "path": ""}, {"type": KNOWN[1], "path": "x" * 5000}]


@pytest.mark.parametrize(
    ("name", "content", "key_words"),
    [
        (MODULES, listed(*KNOWN[:2], f"{OLD}LayerNorm"), f"modules.json has {OLD}LayerNorm; only"),
        (MODULES, listed("mine.Transformer"), "has mine.Transformer; only"),
        (MODULES, listed(*KNOWN[:3], KNOWN[2]), "models.Dense in '3_Dense'; only"),
        (
            MODULES,
            listed(*KNOWN[:2], KNOWN[3], KNOWN[2]),
            "has Transformer, Pooling, Normalize, Dense; only",
        ),
        (MODULES, listed(KNOWN[0]), "modules.json has Transformer; only"),
        (MODULES, [], "modules.json has no module; only"),
        (MODULES, [{"type": KNOWN[0], "path": "../x"}], "Transformer in '../x'; only"),
        (MODULES, [{"type": KNOWN[0], "path": ".."}], "Transformer in '..'; only"),
        (MODULES, BESIDE, "no folder"),
        (MODULES, {}, "not a JSON list"),
        (MODULES, [1], "has None; only"),
        (MODULES, "[{", MODULES),
        (POOLING_CONFIG, {"pooling_mode_lasttoken": True}, "pools by lasttoken; only"),
        (POOLING_CONFIG, {"pooling_mode": "lasttoken"}, "pools by lasttoken"),
        (POOLING_CONFIG, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
        (POOLING_CONFIG, "[{", POOLING_CONFIG),
        (POOLING_CONFIG, None, POOLING_CONFIG),
        (DENSE_CONFIG, {**DENSE, "out_features": 6}, "of shape (5, 12)"),
        (DENSE_CONFIG, {**DENSE, "out_features": "a"}, "out_features is 'a'"),
        (DENSE_CONFIG, {**DENSE, "activation_function": "mine.Tanh"}, "has mine.Tanh; only"),
        (DENSE_CONFIG, {**DENSE, "use_residual": True}, "use_residual"),
        ("2_Dense/model.safetensors", None, "model.safetensors"),
        ("config.json", None, "config.json"),
        (ENCODER_CONFIG, {"transformer_task": "fill-mask"}, "transformer_task"),
        (ENCODER_CONFIG, {"max_seq_length": "x"}, "the maximum length is 'x'"),
        (SETTINGS, {"prompts": ["a"]}, "prompts that are no texts by name"),
        (SETTINGS, {"truncate_dim": 4}, "truncate_dim 4"),
    ],
)
def test_what_is_refused(name, content, key_words, tmp_path):
    """A content that is text is written as it is; without one the file is missing."""
    path = write(tmp_path / "model", dense=DENSE) / name
    if content is None:
        path.unlink()
    elif isinstance(content, str):
        path.write_text(content)
    else:
        write_json(path, content)
    with refused(key_words):
        bert_jax.load(tmp_path / "model")


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
    same(bert.params, local.params)
    write_json(folder / MODULES, listed(*KNOWN[:2], f"{OLD}LSTM"))
    hub.models["me/lstm"] = [files(folder)]
    with pytest.raises(UserError, match=r"^hf:me/lstm: modules.json has .*LSTM; only"):
        bert_jax.load("hf:me/lstm")
    assert not any("me/lstm" in r and "safetensors" in r for r in hub.requests)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    bert.export("hf:me/new")
    assert {"modules.json", "2_Dense/model.safetensors"} <= {*hub.models["me/new"][-1]}
    same(bert_jax.load("hf:me/new").params, local.params)
    bert.export("hf:me/new", "none", force=True)  # and nothing of the earlier export is left
    assert not {f for f in hub.models["me/new"][-1] if "modules" in f or "/" in f}

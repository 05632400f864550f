"""Models of the hub by name, against a small server that speaks its protocol."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_hub import TOKEN
from helpers import refused, refuses_to_load
from huggingface_hub import constants
from make_golden import GOLDEN
from model_folders import same

import bert_jax
from bert_jax import console
from bert_jax.convert import hub as hub_lib
from bert_jax.text import tokenizer_loading

MODULES = b"""[
 {"type": "sentence_transformers.models.Transformer", "path": ""},
 {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
 {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]"""


def files(name: str) -> dict[str, bytes]:
    paths = (GOLDEN / name).iterdir()
    return {p.name: p.read_bytes() for p in paths if not p.name.startswith("expected")}


def test_a_model_is_downloaded_once_and_then_read_from_the_cache(hub, monkeypatch, capsys):
    unused = {"pytorch_model.bin": b"0", "onnx/model.safetensors": b"0", "README.md": b"0"}
    hub.models["me/bert"] = [files("bert") | unused]
    bert = bert_jax.load("hf:me/bert")
    assert bert.source == "hf:me/bert"
    same(bert.params, bert_jax.load(GOLDEN / "bert").params)
    got = {r.rpartition("/")[2] for r in hub.requests if r.startswith("GET /me/bert/resolve/")}
    assert got == {"config.json", "vocab.txt", "model.safetensors"}
    shown = capsys.readouterr()
    assert re.fullmatch(r"downloading hf:me/bert \(0.0 MB\) to \S+\n", shown.out)
    assert not shown.err
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        hub.requests.clear()
        same(bert_jax.load(Path("hf:me/bert")).params, bert.params)
        assert not any("/resolve/" in request for request in hub.requests)
        assert capsys.readouterr() == ("", "")
    assert not hub.requests
    refuses_to_load("hf:me/other", "hf:me/other is not in", "HF_HUB_OFFLINE is set; unset it")


def test_a_cache_that_may_be_partial(hub, tmp_path, monkeypatch, capsys):
    config = json.dumps(
        {**json.loads(files("bert")["config.json"]), "architectures": ["BertModel"]}
    )
    hub.models["me/bert"] = [{**files("bert"), "config.json": config.encode()}]
    bert_jax.load("hf:me/bert")
    assert "sentence-transformers" not in capsys.readouterr().out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    partial = tmp_path / "partial"
    ignored = shutil.ignore_patterns("trees")  # which transformers does not write
    shutil.copytree(constants.HF_HUB_CACHE, partial, symlinks=True, ignore=ignored)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(partial))
    bert_jax.load("hf:me/bert")
    assert "from the cache, which has no modules.json" in capsys.readouterr().out


def test_a_cache_without_the_weights_is_no_fault_of_the_model(hub, tmp_path, monkeypatch):
    """As `prepare --tokenizer=hf:...` leaves it."""
    hub.models["me/bert"] = [files("bert")]
    hub_lib.fetch("hf:me/bert", weights=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ignored = shutil.ignore_patterns("trees")  # which transformers does not write
    shutil.copytree(constants.HF_HUB_CACHE, tmp_path / "partial", symlinks=True, ignore=ignored)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "partial"))
    refuses_to_load("hf:me/bert", "is not whole in the cache", "HF_HUB_OFFLINE is set; unset it")


def test_nothing_is_said_where_all_is_quiet(hub, capsys, monkeypatch):
    hub.models["me/bert"] = [files("bert")]
    monkeypatch.setattr(console, "is_terminal", lambda stream: True)
    with console.quiet():
        bert_jax.load("hf:me/bert")
    assert capsys.readouterr() == ("", "")


def test_prepare_downloads_the_tokenizer_alone(hub, tmp_path, bert_jax_main):
    hub.models["me/bert"] = [files("bert")]
    text = tmp_path / "text.txt"
    text.write_text(
        "the quick brown fox jumps over a lazy dog\nit rains on plains of spain\n\n" * 9
    )
    bert_jax_main(
        "prepare", text, tmp_path / "store", "--tokenizer=hf:me/bert", "--eval-fraction=0.2"
    )
    stored = tokenizer_loading.load(tmp_path / "store/tokenizer")
    assert stored.fingerprint == tokenizer_loading.load(GOLDEN / "bert").fingerprint
    assert not any("safetensors" in request for request in hub.requests)


def test_a_revision(hub):
    hub.models["me/bert"] = [files("bert"), files("roberta")]
    assert bert_jax.load("hf:me/bert").config.model_type == "roberta"
    first = f"hf:me/bert@{hub.sha('me/bert', 0)}"
    assert bert_jax.load(first).config.model_type == "bert"
    refuses_to_load("hf:me/bert@nix", "hf:me/bert@nix does not exist, but the model does", "a tag")


@pytest.mark.parametrize(
    ("changes", "name", "key_words"),
    [
        ({}, "nix", ["hf:me/nix does not exist, or is private", "hf auth login", "HF_TOKEN"]),
        ({"gated": {"me/bert"}}, "bert", ["is gated; ask for access at http://127.0.0.1"]),
        ({"private": {"me/bert"}}, "bert", ["does not exist, or is private"]),
        ({"truncated": True}, "bert", ["hf:me/bert cannot be downloaded (", "; repeat it"]),
        ({"broken": True}, "other", ["hf:me/other is not in", "cannot be reached", "connection"]),
    ],
)
def test_a_model_that_cannot_be_had(hub, monkeypatch, changes, name, key_words):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.models["me/bert"] = [files("bert")]
    vars(hub).update(changes)
    refuses_to_load(f"hf:me/{name}", *key_words)
    vars(hub).update(gated=set(), private=set(), truncated=False, broken=False)
    assert bert_jax.load("hf:me/bert").config.model_type == "bert"


def test_another_token_and_another_server(hub, monkeypatch):
    hub.models["me/bert"] = [files("bert")]
    hub.private.add("me/bert")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    refuses_to_load("hf:me/bert", "cannot be downloaded (Invalid credentials", "; log in")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert bert_jax.load("hf:me/bert").config.model_type == "bert"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    refuses_to_load("hf:me/other", "http://127.0.0.1:1 cannot be reached ([Errno 111]")


@pytest.mark.parametrize(
    ("changes", "key_words"),
    [
        ({"config.json": b'{"model_type": "llama"}'}, "config.json is of model type 'llama'"),
        ({"model.safetensors": None, "pytorch_model.bin": b"0"}, "hf download me/other"),
        ({"config.json": None}, "has no config.json"),
        (
            {
                "modules.json": MODULES,
                "2_Dense/config.json": b"{}",
                "2_Dense/pytorch_model.bin": b"",
            },
            "has no model.safetensors, and a pickle",
        ),
    ],
)
def test_a_model_of_no_use_is_not_downloaded(hub, changes, key_words):
    found = files("bert") | changes
    hub.models["me/other"] = [{name: data for name, data in found.items() if data is not None}]
    refuses_to_load("hf:me/other", key_words)
    got = [request for request in hub.requests if request.startswith("GET")]
    assert not any(request.endswith((".safetensors", ".bin")) for request in got)


@pytest.mark.parametrize("name", ["", "/", "a/b/c", "a b/c", "me/x@", "../..", "a~b/x", "@v1"])
def test_a_malformed_name(hub, name):
    refuses_to_load(f"hf:{name}", "is not the name of a model of the hub; give hf:OWNER/NAME")
    assert not hub.requests


def test_a_name_that_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("bert-base-uncased", "google-bert/bert-base-uncased"):
        refuses_to_load(
            name, f"checkpoint {name} does not exist; train it first, or give hf:{name} for"
        )
    (tmp_path / "runs").mkdir()
    refuses_to_load("runs/tiny", "does not exist; give a workdir", "or hf:OWNER/NAME")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub 2.4
def test_an_export_is_uploaded_and_downloaded_again(hub, tmp_path, monkeypatch, bert_jax_main):
    with refused("without a token", "hf auth login"):
        bert_jax_main("export", GOLDEN / "bert", "hf:me/new")
    assert not hub.requests
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    out = bert_jax_main("export", GOLDEN / "bert", "hf:me/new", "--private")
    assert f"uploaded to {hub.url}/me/new" in out
    assert hub.private == {"me/new"}
    bert, again = bert_jax.load(GOLDEN / "bert"), bert_jax.load("hf:me/new")
    same(again.params, bert.params)
    bert.export(tmp_path / "exported")
    files = {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    card = hub.models["me/new"][-1].pop("README.md").decode()
    assert 'bert_jax.load("hf:me/new")' in card
    assert 'from_pretrained("me/new")' in card
    del files["README.md"]
    assert hub.models["me/new"][-1] == files
    with refused("already exists", "--force"):
        bert_jax_main("export", GOLDEN / "bert", "hf:me/new")
    before = "license: mit\nbase_model: other/bert\nlibrary_name"  # added, and of an earlier export
    tags = "- jax\n- legal\n- sentence-transformers\n"
    licensed = card.replace("library_name", before).replace("- jax\n", tags).encode()
    others = {"merges.txt": b"of an earlier one", "mine.txt": b"kept"}
    hub.models["me/new"][-1] |= {"README.md": licensed, **others}
    bert.export("hf:me/new", "none", force=True)
    header = hub.models["me/new"][-1]["README.md"].decode().split("---\n")[1]
    assert "license: mit\n" in header
    assert "pipeline_tag: feature-extraction\n" in header
    assert "base_model" not in header
    assert header.endswith("tags:\n- bert-jax\n- jax\n- bert\n- legal\n")
    assert {*hub.models["me/new"][-1]} == {*files, "README.md", "mine.txt"}
    assert bert_jax.load("hf:me/new").encode("a b").shape == (1, 12)
    hub.private.clear()
    with refused("hf:me/new is public", "--private (private=True) makes new models alone private"):
        bert.export("hf:me/new", force=True, private=True)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub 2.4
def test_an_upload_that_failed_is_repeated(hub, monkeypatch):
    """The model that it made on the hub has no files."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    bert = bert_jax.load(GOLDEN / "bert")
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.HfApi.upload_folder", Mock(side_effect=OSError("reset")))
        with refused("hf:me/new cannot be uploaded (reset); repeat it"):
            bert.export("hf:me/new")
    assert hub.models == {"me/new": [{}]}
    bert.export("hf:me/new")
    assert "model.safetensors" in hub.models["me/new"][-1]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub 2.4
def test_a_card_that_cannot_be_read_is_not_replaced(hub, monkeypatch):
    """Its header may have a license, which an upload would remove."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    bert, keep = bert_jax.load(GOLDEN / "bert"), hub_lib._keep_header
    bert.export("hf:me/new")
    before = {**hub.models["me/new"][-1]}

    def keep_while_broken(*arguments) -> None:
        hub.broken = True
        keep(*arguments)

    monkeypatch.setattr(hub_lib, "_keep_header", keep_while_broken)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before a request is repeated
    with refused(f"{hub.url} cannot be reached"):
        bert.export("hf:me/new", "none", force=True)
    assert hub.models["me/new"][-1] == before


@pytest.mark.parametrize(
    ("to", "flags", "key_words"),
    [
        ("hf:new", [], "give hf:OWNER/NAME"),
        ("hf:me/new@main", [], "give hf:OWNER/NAME"),
        ("hf:me/new/x", [], "give hf:OWNER/NAME"),
        ("exported", ["--private"], "--private (private=True) is for the hub"),
    ],
)
def test_a_destination_that_is_none(hub, to, flags, key_words, bert_jax_main):
    with refused(key_words):
        bert_jax_main("export", GOLDEN / "bert", to, *flags)

"""`bert-jax curves`: runs by name, and folders that are none."""

import json
import os

import pytest

from bert_jax import UserError
from bert_jax.commands import curves


def test_runs_of_both_kinds(bert_jax_main, tmp_path):
    for name, metric in (("first", "mlm_loss"), ("tuned/seed-0", "f1"), ("tuned/random-0", "f1")):
        (tmp_path / name).mkdir(parents=True)
        record = {"step": 1, "split": "eval", "tokens": 8, "loss": 2.0, metric: 0.5}
        # The run was killed while it wrote the second line.
        text = json.dumps(record) + '\n{"step": 2, "spl'
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "first/baselines.json").write_text('{"mlm_loss": 6.2}')
    first, output = tmp_path / "first", tmp_path / "curves.svg"
    words = "curves", first, f"{first}/.", tmp_path / "tuned", f"--output={output}"
    assert bert_jax_main(*words) == f"{output}: first, tuned/seed-0, tuned/random-0\n"
    assert output.read_text().startswith("<?xml")
    bert_jax_main("curves", first, "--by=tokens", f"--output={output}")


def test_names_tell_runs_apart(tmp_path):
    paths = [tmp_path / name for name in ("a/tiny", "b/tiny", "b/small")]
    assert curves._names(paths) == ["a/tiny", "b/tiny", "b/small"]
    assert curves._names(paths[1:]) == ["tiny", "small"]
    seeds = [tmp_path / "tuned/seed-0", tmp_path / "tuned/random-0", tmp_path / "tiny"]
    assert curves._names(seeds) == ["tuned/seed-0", "tuned/random-0", "tiny"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("missing", "missing does not exist; give the workdir of a run"),
        ("none", "none has no metrics.jsonl; give the workdir of a run"),
        ("file", "file is a file; give the workdir of a run"),
        ("begun", "begun has no metrics yet; leave it out"),
        ("damaged", r"damaged/metrics.jsonl line 1 is damaged \('split'\); restore the file"),
        ("odd", r"odd/metrics.jsonl is a pipe, not a file; restore it, or leave it out"),
        ("old --by=tokens", "the metrics of .*old do not have tokens; leave it out, or draw by"),
        ("baseless", r"baselines.json is damaged \(a value is not a number\); remove it"),
        ("old --output=curves.txt", r"curves.txt: give a file that ends in .png, .pdf, .svg"),
        ("old --output=no/curves.png", r"no/curves.png cannot be written \(No such file or"),
        ("x\0y", "cannot be read"),
    ],
)
def test_a_mistake_is_named(words, message, bert_jax_main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = '{"step": 1, "split": "train", "loss": 1.0}\n'
    contents = {"begun": '{"ste', "damaged": '{"step": 1}\n', "old": record, "baseless": record}
    for name in ("none", "odd", *contents):
        (tmp_path / name).mkdir()
    for name, content in contents.items():
        (tmp_path / name / "metrics.jsonl").write_text(content)
    os.mkfifo(tmp_path / "odd/metrics.jsonl")
    (tmp_path / "baseless/baselines.json").write_text('{"loss": "1"}')
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message) as caught:
        bert_jax_main("curves", *words.split(" "))
    assert "\n" not in str(caught.value)

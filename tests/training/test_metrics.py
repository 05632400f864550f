"""Means over unequal batches, and a record that survives a kill."""

import errno
import json
import os
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from bert_jax.config import TrainConfig
from bert_jax.errors import UserError
from bert_jax.storage import json_files
from bert_jax.training.metrics import Writer, add_up, means
from bert_jax.training.objective import WeightedSum


def test_means_weigh_each_batch_and_drop_what_has_no_weight():
    first = {"mlm_loss": WeightedSum(6.0, 2.0), "nsp_loss": WeightedSum(1.0, 4.0)}
    second = {"mlm_loss": WeightedSum(1.0, 8.0), "nsp_loss": WeightedSum(1.0, 4.0)}
    first["mlm_accuracy"], second["mlm_accuracy"] = WeightedSum(0.0, 2.0), WeightedSum(5.0, 8.0)
    found = means(add_up([second], add_up([first])), {})
    assert found == {"mlm_loss": 0.7, "nsp_loss": 0.25, "mlm_accuracy": 0.5, "loss": 0.95}
    found = means({"mlm_loss": [1.0, 2.0], "nsp_loss": [0.0, 0.0]}, {})
    assert found == {"mlm_loss": 0.5, "loss": 0.5}


def test_a_record_resumes_from_its_step(tmp_path):
    writer = Writer(tmp_path, 0)
    for step in (10, 20, 30):
        writer.write(step, "train", {"loss": step / 10})
    writer.write(20, "eval", {"loss": 1.5})
    writer.close()
    before = writer.records[-1]["seconds"] + 1000
    path = tmp_path / "metrics.jsonl"
    last = json.dumps({"step": 20, "split": "eval", "loss": 1.5, "seconds": before})
    path.write_text("\n".join([*path.read_text().splitlines()[:-1], last]) + "\n")
    with path.open("a") as file:
        file.write('{"step": 40, "spl')  # killed while it wrote
    writer = Writer(tmp_path, 20)
    assert writer.records[-1]["step"] == 20
    writer.write(30, "train", {"loss": 9.0})
    assert before < writer.records[-1]["seconds"] < before + 100  # which go on
    writer.close()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["split"], r["loss"]) for r in found] == [
        (10, "train", 1.0),
        (20, "train", 2.0),
        (20, "eval", 1.5),
        (30, "train", 9.0),
    ]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_on_a_full_disk_are_said_once(tmp_path, capsys, monkeypatch):
    def full(path, _):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with Writer(tmp_path, 0) as writer, monkeypatch.context() as patch:
        patch.setattr(json_files, "write_bytes", full)
        for step in (10, 20):
            writer.write(step, "eval", {"loss": 1.0})
            writer.draw(0.0)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "curves.png" in line
    assert "(No space left on device); the run continues" in line


@pytest.mark.parametrize(
    "line",
    [b"\xff", b"[]", b"", b"[" * 100_000, b'{"split": "train"}', b'{"step": 1}'],
)
def test_a_damaged_record_is_named(tmp_path, line):
    good = b'{"step": 1, "split": "train", "loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line + b"\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is damaged"):
        Writer(tmp_path, 0)


def test_tensorboard_has_the_config(tmp_path):
    with Writer(tmp_path, 0, TrainConfig(seed=7)) as writer:
        writer.write(4, "eval", {"mlm_accuracy": 0.25})
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert b"| seed | 7 |" in path.read_bytes()


def test_tensorboard_reads_the_events_of_a_resumed_run(tmp_path):
    for step in (0, 10):
        with Writer(tmp_path, step) as writer:
            writer.write(step + 10, "train", {"loss": 1.0 + step})
    records = []
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            records.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    values = [{v.tag: v.simple_value for v in r.summary.value} for r in records]
    found = [
        (r.step, r.session_log.status, v.get("train/loss"))
        for r, v in zip(records, values, strict=True)
        if v.keys() != {"train/seconds"}
    ]
    first = [(0, 0, None), (1, 1, None), (10, 0, 1.0)]
    assert found == [*first, (0, 0, None), (11, 1, None), (20, 0, 11.0)]

"""Means over unequal batches, and a record that survives a kill."""

import json

from bert_jax.training.metrics import Sums, Writer, add, means
from bert_jax.training.objectives import WeightedSum


def test_means_weigh_each_batch():
    first = {
        "mlm_loss": WeightedSum(6.0, 2.0),
        "nsp_loss": WeightedSum(1.0, 4.0),
        "mlm_accuracy": WeightedSum(0.0, 2.0),
    }
    second = {
        "mlm_loss": WeightedSum(1.0, 8.0),
        "nsp_loss": WeightedSum(1.0, 4.0),
        "mlm_accuracy": WeightedSum(5.0, 8.0),
    }
    sums: Sums = {}
    add(sums, first)
    add(sums, second)
    found = means(sums)
    assert found == {"mlm_loss": 0.7, "nsp_loss": 0.25, "mlm_accuracy": 0.5, "loss": 0.95}


def test_a_metric_of_weight_0_is_dropped():
    found = means({"mlm_loss": [1.0, 2.0], "nsp_loss": [0.0, 0.0]})
    assert found == {"mlm_loss": 0.5, "loss": 0.5}


def test_a_record_resumes_from_its_step(tmp_path):
    writer = Writer(tmp_path, 0, {"loss": "loss"})
    for step in (10, 20, 30):
        writer.write(step, "train", {"loss": step / 10})
    writer.write(20, "eval", {"loss": 1.5})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "spl')  # killed while it wrote
    writer = Writer(tmp_path, 20, {"loss": "loss"})
    assert writer.latest["train"]["step"] == 20
    writer.write(30, "train", {"loss": 9.0})
    writer.close()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["split"], r["loss"]) for r in found] == [
        (10, "train", 1.0),
        (20, "train", 2.0),
        (20, "eval", 1.5),
        (30, "train", 9.0),
    ]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

"""The same fine-tuning in PyTorch and transformers, on the same batches: scores and speed.

    python benchmarks/finetuning_peer.py --model=DIR --train=train.tsv --dev=dev.tsv \\
        --seed=0 --output=peer.jsonl

DIR is the folder of a BERT as transformers saves it. The files have a header with the columns
`sentence` and `label`, a number. The sentences of each step are those of finetune.py with this
seed. A line is appended to the output. Its time is that of the train steps, without loading,
tokenizing and evaluation, and without the first two steps if there are more.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, BatchEncoding, BertForSequenceClassification

from bert_jax.batches.buckets import epoch_batches

WARMUP, WEIGHT_DECAY, CLIP_NORM = 0.1, 0.01, 1.0
MAX_LENGTH, BATCH_SIZE = 128, 32
UNTIMED = 2  # steps


def read(path: Path) -> tuple[list[str], list[int]]:
    """Return the sentences and labels of a file."""
    header, *lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    names = header.split("\t")
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in lines]
    return [row["sentence"] for row in rows], [int(row["label"]) for row in rows]


def make_optimizer(
    model: torch.nn.Module, steps: int, rate: float
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """Return AdamW as for BERT, and Google's schedule: step t, from 0, has the rate of t."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        exempt = name.endswith("bias") or "LayerNorm" in name
        (others if exempt else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    warmup = int(WARMUP * steps)
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-6)
    return optimizer, LambdaLR(optimizer, lambda t: t / warmup if t < warmup else 1 - t / steps)


class Batches:
    """Sentences of a file as tensors, padded to the longest of a batch."""

    def __init__(self, path: Path, tokenizer, device: torch.device):
        sentences, self.labels = read(path)
        self._encoded = tokenizer(sentences, truncation=True, max_length=MAX_LENGTH)
        self._tokenizer, self._device = tokenizer, device

    def take(self, rows: Sequence[int]) -> tuple[BatchEncoding, torch.Tensor]:
        """Return the inputs and the labels of some sentences."""
        inputs = {name: [column[row] for row in rows] for name, column in self._encoded.items()}
        padded = self._tokenizer.pad(inputs, padding="longest", return_tensors="pt")
        labels = torch.tensor([self.labels[row] for row in rows])
        return padded.to(self._device), labels.to(self._device)

    def by_length(self, size: int) -> Iterator[list[int]]:
        """Yield all sentences in batches of similar length."""
        lengths = [len(ids) for ids in self._encoded["input_ids"]]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        for begin in range(0, len(order), size):
            yield order[begin : begin + size]

    def of_steps(self, epochs: int, seed: int) -> np.ndarray:
        """Return the sentences of each step, [steps, batch], -1 for none."""
        lengths = np.array([len(ids) for ids in self._encoded["input_ids"]])
        orders = [epoch_batches(lengths, BATCH_SIZE, seed, epoch) for epoch in range(epochs)]
        return np.concatenate(orders)


def train(model, batches: Batches, order: np.ndarray, stop: int, rate: float) -> tuple[float, int]:
    """Train for `stop` of the steps of `order`; return the seconds and examples timed."""
    optimizer, schedule = make_optimizer(model, len(order), rate)
    model.train()
    begin, examples = time.perf_counter(), 0
    for step, rows in enumerate(order[:stop]):
        if step == UNTIMED:
            wait(model.device)
            begin, examples = time.perf_counter(), 0
        inputs, labels = batches.take(rows[rows >= 0].tolist())
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        examples += len(labels)
        if step % 50 == 0:
            print(f"step {step:>5} of {stop}  loss {loss.item():.4f}", flush=True)
    wait(model.device)
    return time.perf_counter() - begin, examples


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def accuracy(model, batches: Batches) -> float:
    """Return the accuracy on all sentences."""
    model.eval()
    right = 0
    for rows in batches.by_length(64):
        inputs, labels = batches.take(rows)
        right += int((model(**inputs).logits.argmax(-1) == labels).sum())
    return right / len(batches.labels)


def main() -> None:
    """Runs one seed, prints the result and appends it."""
    parser = argparse.ArgumentParser(description="Fine-tunes a classifier in PyTorch.")
    for name in ("model", "train", "dev", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, help="stop after so many, on the same schedule")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    batches, held_out = (Batches(p, tokenizer, device) for p in (arguments.train, arguments.dev))
    labels = max(batches.labels) + 1
    model: Any = BertForSequenceClassification.from_pretrained(
        arguments.model, num_labels=labels, dtype=torch.float32
    )
    torch.nn.init.normal_(model.classifier.weight, std=0.02)
    torch.nn.init.zeros_(model.classifier.bias)
    model.to(device)

    order = batches.of_steps(arguments.epochs, arguments.seed)
    steps = min(len(order), arguments.steps or len(order))
    seconds, examples = train(model, batches, order, steps, arguments.learning_rate)
    result = {
        "seed": arguments.seed,
        "accuracy": accuracy(model, held_out),
        "steps": steps,
        "seconds": seconds,
        "examples_per_second": examples / seconds,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__},
    }
    print(json.dumps(result))
    with arguments.output.open("a") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

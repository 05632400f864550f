"""The same training of embeddings in sentence-transformers: speed, memory and scores.

    python benchmarks/embedding_peer.py --model=DIR --train=train.tsv --dev=dev.tsv \\
        --batch=256 --epochs=1 --output=peer.jsonl [--microbatch=64] [--seed=0]

DIR is a directory that sentence-transformers loads, such as `bert-jax export` writes. The files
have a header with the columns `query` and `passage`. Loss, batch, rate, optimizer and warm-up are
those of `bert-jax finetune --config=finetune/embedding`; its trainer, its batches and its padding
are its own. With --microbatch its cached loss is used. A line is appended to the output. The speed
is that of the train steps after the first five. Needs `pip install sentence-transformers[train]`.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import sentence_transformers
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from transformers import TrainerCallback

from bert_jax.config import EmbeddingConfig
from bert_jax.tasks.embedding import Embedding, EmbeddingTaskConfig
from bert_jax.tasks.examples import Example

_UNTIMED = 5  # steps
_SCALE = 20.0  # 1 / temperature


class Timer(TrainerCallback):
    """The seconds of the steps after the first ones."""

    def __init__(self):
        self.steps, self.start, self.seconds = 0, 0.0, 0.0

    def on_step_end(self, args, state, control, **kwargs):
        """Count a step."""
        self.steps += 1
        if self.steps == _UNTIMED:
            self.start = time.perf_counter()
        self.seconds = time.perf_counter() - self.start


def read(path: Path) -> list[tuple[str, str]]:
    """Return the pairs of a file."""
    header, *lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    columns = [header.split("\t").index(name) for name in ("query", "passage")]
    rows = (line.split("\t") for line in lines)
    return [(row[columns[0]], row[columns[1]]) for row in rows]


def score(model: SentenceTransformer, pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Return the scores that `bert-jax finetune` prints."""
    columns = zip(*pairs, strict=True)
    queries, passages = (model.encode(list(texts), normalize_embeddings=True) for texts in columns)
    task = Embedding(EmbeddingTaskConfig(embedding=EmbeddingConfig()))
    examples = [Example(None, "", pair, 1.0) for pair in pairs]
    return task.score(examples, list(zip(queries, passages, strict=True)))


def main() -> None:
    """Train once."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    for name in ("model", "train", "dev", "output"):
        add(f"--{name}", type=Path, required=True)
    add("--batch", type=int, default=256)
    add("--microbatch", type=int, default=0, help="of the cached loss; 0 for the plain one")
    add("--epochs", type=float, default=1.0)
    add("--steps", type=int, default=-1, help="steps in place of epochs")
    add("--rate", type=float, default=4e-3)
    add("--length", type=int, default=64)
    add("--seed", type=int, default=0)
    flags = parser.parse_args()
    train, dev = read(flags.train), read(flags.dev)
    model = SentenceTransformer(str(flags.model), device="cpu")
    model.max_seq_length = flags.length
    names = dict(zip(("query", "passage"), map(list, zip(*train, strict=True)), strict=True))
    options: dict = {"scale": _SCALE}
    if flags.microbatch:
        options["mini_batch_size"] = flags.microbatch
        kind = losses.CachedMultipleNegativesSymmetricRankingLoss
    else:
        kind = losses.MultipleNegativesSymmetricRankingLoss
    timer = Timer()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(flags.output.with_suffix(".run")),
        num_train_epochs=flags.epochs,
        max_steps=flags.steps,
        per_device_train_batch_size=flags.batch,
        learning_rate=flags.rate,
        warmup_steps=0.1,
        weight_decay=0.01,
        adam_epsilon=1e-6,
        max_grad_norm=1.0,
        seed=flags.seed,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
    )
    before = score(model, dev)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(names),
        loss=kind(model, **options),
        callbacks=[timer],
    )
    trainer.train()
    examples = (timer.steps - _UNTIMED) * flags.batch
    record = {
        "seed": flags.seed,
        "batch": flags.batch,
        "microbatch": flags.microbatch,
        "steps": timer.steps,
        "examples_per_second": round(examples / max(timer.seconds, 1e-9), 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "before": before,
        "scores": score(model, dev),
        "threads": torch.get_num_threads(),
        "versions": {
            "torch": torch.__version__,
            "sentence_transformers": sentence_transformers.__version__,
        },
    }
    with flags.output.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()

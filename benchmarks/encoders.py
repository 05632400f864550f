"""Which encoder and objective pays: each trained for the same time on the same cores.

    python benchmarks/encoders.py FOLDER TEXT HELD_OUT REVIEWS ENTITIES --minutes=60 NAME …

TEXT and HELD_OUT are files of a sentence a line; REVIEWS a folder with train.tsv and dev.tsv, and
ENTITIES one with train.conll, dev.conll and test.conll. Each NAME of ENCODERS is pretrained, with
as many steps as the time allows by its speed in a trial, and then fine-tuned on both tasks with
five seeds; the first of each architecture also from random weights. What is done is not done again:
the same command resumes. `--table` prints the results.
"""

import argparse
import dataclasses
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TRIAL_STEPS = 120
# Of all: 10 to 14 M parameters, 4,096 tokens a step, linear decay, no dropout.
_SHARED = """
    --config=base --config.model.vocab_size=0 --config.model.hidden_size=384
    --config.model.num_hidden_layers=4 --config.model.num_attention_heads=6
    --config.model.intermediate_size=1536 --config.model.max_position_embeddings=128
    --config.model.hidden_dropout_prob=0 --config.model.attention_probs_dropout_prob=0
    --config.model.hidden_act=gelu --config.data.max_length=128 --config.data.batch_size=32
    --config.data.phases=[] --config.data.pairs=none --config.optimizer.name=adamw
    --config.optimizer.b2=0.98 --config.optimizer.warmup_fraction=0.05 --config.log_every=100
    --config.eval_every=500 --config.eval_rows=2048 --config.checkpoint.every=500
"""
_MODERN = """
    --config.model.model_type=modernbert --config.model.position_embedding_type=rotary
    --config.model.intermediate_size=1024 --config.model.classifier_pooling=mean
    --config.optimizer.learning_rate=1e-3
"""
_BERT = "--config.optimizer.learning_rate=5e-4 --config.optimizer.warmup_fraction=0.1"
_ELECTRA = f"""
    {_BERT} --config.model.model_type=electra --config.model.embedding_size=128
    --config.model.generator_hidden_size=0.333
"""
_THIRTY = "--config.data.mask_fraction=0.3"


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A row of the table: its title, and its flags beside the shared ones."""

    title: str
    flags: str


ENCODERS = {
    "bert": Encoder("BERT, no NSP, 15%", _BERT),
    "bert_nsp": Encoder("BERT, NSP, 15%", f"{_BERT} --config.data.pairs=nsp"),
    "bert_packed": Encoder(
        "BERT, NSP, packed, 15%", f"{_BERT} --config.data.pairs=nsp --config.data.packing=True"
    ),
    "bert_words": Encoder(
        "BERT, no NSP, whole words, 15%", f"{_BERT} --config.data.whole_word_masking=True"
    ),
    "bert_short": Encoder(
        "BERT, no NSP, 15%, short sequences first",
        f"{_BERT} --config.data.length_warmup_fraction=0.5",
    ),
    "bert_30": Encoder("BERT, no NSP, 30%", f"{_BERT} {_THIRTY}"),
    "modern": Encoder("ModernBERT, 15%", _MODERN),
    "modern_30": Encoder("ModernBERT, 30%", f"{_MODERN} {_THIRTY}"),
    "electra": Encoder("ELECTRA, 15%", _ELECTRA),
    "electra_short": Encoder(
        "ELECTRA, 15%, short sequences first",
        f"{_ELECTRA} --config.data.length_warmup_fraction=0.5",
    ),
}
_TUNING = """
    --config.optimizer.name=adamw --config.optimizer.learning_rate=3e-4 --config.data.max_length=64
    --config.model.dtype=auto
"""


class Benchmark:
    """The runs of a folder."""

    def __init__(self, flags: argparse.Namespace):
        self.flags, self.folder = flags, flags.folder
        self.store = self.folder / "store"

    def call(self, log: Path, *command: str) -> None:
        """Run a command of bert-jax on the cores; keep it and what it prints."""
        pinned = ["taskset", "-c", self.flags.cores] if self.flags.cores else []
        arguments = [*pinned, sys.executable, "-m", "bert_jax.commands", *command]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"$ bert-jax {shlex.join(command)}\n")
            file.flush()
            subprocess.run(arguments, cwd=ROOT, stdout=file, stderr=file, check=True)

    def prepare(self) -> None:
        """Train the tokenizer, and tokenize the text."""
        flags = ["--tokenizer=wordpiece", "--vocab-size=8000", "--cased"]
        held_out = f"--eval-source={self.flags.held_out}"
        text = [str(self.flags.text), str(self.store), held_out]
        self.call(self.folder / "prepare.log", "prepare", *text, *flags)

    def pretrain(self, name: str) -> None:
        """Pretrain an encoder for the time that is set."""
        own = [*shlex.split(_SHARED), *shlex.split(ENCODERS[name].flags)]
        own += [f"--config.data.source={self.store}"]
        folder = self.folder / name
        trial = folder / "trial"
        if not (folder / "steps").exists():
            few = [f"--config.steps={_TRIAL_STEPS}", "--config.log_every=60"]
            self.call(folder / "trial.log", "pretrain", f"--workdir={trial}", *own, *few)
            speed = self.records(trial, "train")[-1]["sequences_per_second"]
            steps = round(self.flags.minutes * 60 * speed / 32)
            (folder / "steps").write_text(str(steps))
        steps = f"--config.steps={(folder / 'steps').read_text()}"
        run = ["pretrain", f"--workdir={folder / 'run'}", *own, steps]
        self.call(folder / "pretraining.log", *run)

    def finetune(self, name: str) -> None:
        """Fine-tune an encoder on both tasks; the first of a kind beside random weights."""
        reviews, entities = self.flags.reviews, self.flags.entities
        init = f"--init={self.folder / name / 'run'}"
        tasks = {
            "reviews": ["--config=finetune/classification", "--config.epochs=2"],
            "entities": ["--config=finetune/ner", "--config.epochs=5"],
        }
        files = {
            "reviews": [reviews / "train.tsv", reviews / "dev.tsv", None],
            "entities": [entities / f"{part}.conll" for part in ("train", "dev", "test")],
        }
        for task, recipe in tasks.items():
            parts = zip(("train", "eval", "test"), files[task], strict=True)
            data = [f"--config.data.{part}={path}" for part, path in parts if path]
            more = [*shlex.split(_TUNING), "--config.seeds=5"]
            more.append(f"--config.compare={name in ('bert', 'modern', 'electra')}")
            workdir = f"--workdir={self.folder / name / task}"
            self.call(
                self.folder / name / f"{task}.log", "finetune", init, workdir, *recipe, *data, *more
            )

    def records(self, run: Path, split: str) -> list[dict[str, float]]:
        """Return the records of a split in a run's metrics."""
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["split"] == split]

    def table(self) -> None:
        """Print what is done so far, as Markdown."""
        columns = "held-out MLM loss", "reviews, accuracy", "random", "entities, F1", "random"
        print(f"| encoder | steps | M tokens | {' | '.join(columns)} |")
        print("|---|---" + "|---" * (len(columns) + 1) + "|")
        for name, encoder in ENCODERS.items():
            folder = self.folder / name
            if not (folder / "run" / "results.json").exists():
                continue
            last = self.records(folder / "run", "eval")[-1]
            cells = [f"{last['step']:,}", f"{last['tokens'] / 1e6:.1f}", f"{last['mlm_loss']:.3f}"]
            for task, metric in (("reviews", "accuracy"), ("entities", "f1")):
                path = folder / task / "results.json"
                results = json.loads(path.read_text()) if path.exists() else {}
                for runs in ("seeds", "random_weights"):
                    cells.append(_mean([run["best"][metric] for run in results.get(runs, ())]))
            print(f"| {encoder.title} | {' | '.join(cells)} |")


def _mean(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name in ("text", "held_out", "reviews", "entities"):
        parser.add_argument(name, type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*ENCODERS, []])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--cores", default="", help="as taskset takes them, such as 0,1")
    parser.add_argument("--table", action="store_true")
    flags = parser.parse_intermixed_args()
    paths = ("folder", "text", "held_out", "reviews", "entities")
    for name in paths:
        setattr(flags, name, getattr(flags, name).resolve())
    benchmark = Benchmark(flags)
    if flags.names:
        benchmark.prepare()
    for name in flags.names:
        benchmark.pretrain(name)
    for name in flags.names:
        benchmark.finetune(name)
    if flags.table:
        benchmark.table()


if __name__ == "__main__":
    main()

"""Time the train step beside those of other implementations, interleaved in one run.

    python benchmarks/peers.py --config=base --config.data.batch_size=8 \\
        --peers=bert-jax,torch,torch-masked --dtypes=float32,bfloat16 --output=peers.json

All have the model, batch size, precision and dropout of the config; bert-jax has its optimizer too,
the others AdamW. Each runs in a process of its own, which waits while another runs. In a round each
runs for `--seconds`. The ratio to bert-jax is taken in each round, and printed with its quartiles.
With `--alone` a process ends before the next one starts, as on a GPU, whose memory each would take;
a peer that fails is dropped.

Peers: `torch`, transformers' BertForPreTraining or ModernBertForMaskedLM, eager; `torch-masked`,
the same with its MLM head on the masked positions alone, as here; `torch-compiled` and
`torch-masked-compiled`, under `torch.compile`; `torch-masked-cudnn` and `torch-masked-flash`,
compiled, with PyTorch's attention by that kernel alone, without a mask; `flax`, the last Flax BERT,
which needs transformers 4: name the Python of such an environment with `--flax_python`. Their
sequences are masked beforehand, those of bert-jax in the step.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import record
from peer_worker import Spec

from bert_jax.commands import process
from bert_jax.commands.flags import read_config
from bert_jax.config import TrainConfig, validation
from bert_jax.config.schedule import make_schedule
from bert_jax.config.settings import to_json
from bert_jax.errors import UserError


class Kind(NamedTuple):
    """A peer's program, with the fields of its `Spec` that differ from those of others."""

    script: str
    head: str
    compile: bool = False
    sdpa: str = ""


PEERS = {
    "bert-jax": Kind("peer_ours.py", "masked"),
    "torch": Kind("peer_torch.py", "full"),
    "torch-masked": Kind("peer_torch.py", "masked"),
    "torch-compiled": Kind("peer_torch.py", "full", compile=True),
    "torch-masked-compiled": Kind("peer_torch.py", "masked", compile=True),
    "torch-masked-cudnn": Kind("peer_torch.py", "masked", compile=True, sdpa="CUDNN_ATTENTION"),
    "torch-masked-flash": Kind("peer_torch.py", "masked", compile=True, sdpa="FLASH_ATTENTION"),
    "flax": Kind("peer_flax.py", "full"),
}
BERT_JAX = "bert-jax"

KINDS = (("bert", True), ("modernbert", False))  # that they have, and whether with sentence pairs
ARGS = argparse.Namespace()  # set by main


def split(text: str) -> list[str]:
    """Return the names of a comma-separated list."""
    return [name for name in text.split(",") if name]


def parse(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this script, and the words that set fields of the config."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="base", help="a recipe (base)")
    parser.add_argument("--peers", type=split, default="bert-jax,torch", help="which; see above")
    parser.add_argument("--dtypes", type=split, default="float32", help="of activations")
    parser.add_argument("--rounds", type=int, default=5, help="rounds")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a turn")
    parser.add_argument("--alone", action="store_true", help="one process after the other")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch; 0: its own choice")
    parser.add_argument("--flax_python", default="", help="a Python with Flax and transformers 4")
    parser.add_argument("--output", default="", help="a JSON file for every figure")
    return parser.parse_known_args(words)


class Peer:
    """A worker process that runs train steps on request."""

    def __init__(self, name: str, spec: Spec):
        script, head, compiled, sdpa = PEERS[name]
        spec = dataclasses.replace(spec, head=head, compile=compiled, sdpa=sdpa)
        python = ARGS.flax_python if name == "flax" else sys.executable
        command = [python, str(Path(__file__).with_name(script)), json.dumps(vars(spec))]
        self.name, self.dtype = name, spec.dtype
        self._batch = f"{spec.batch_size:,} × {spec.max_length:,}"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = self._answer()
        self._steps = 1

    def seconds(self) -> float:
        """Return the seconds of a step, the mean of a turn."""
        assert self._process.stdin
        self._process.stdin.write(f"{self._steps}\n")
        self._process.stdin.flush()
        found = self._answer()["seconds"]
        self._steps = max(1, round(ARGS.seconds / found))
        return found

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        who = f"{self.name} in {self.dtype}"
        if not line:
            if self._process.wait() == -signal.SIGKILL:  # as Linux does where memory is short
                raise UserError(f"{who} was killed: does a batch of {self._batch} fit in memory?")
            raise UserError(f"{who} has ended, for the reason above")
        found = json.loads(line)
        if "does_not_fit" in found:
            raise UserError(
                f"{who}: a batch of {self._batch} does not fit in memory; lower data.batch_size"
            )
        return found


def measure(jobs: Sequence[tuple[str, Spec]]) -> list[tuple[Peer, Sequence[float]]]:
    """Return peers, which have run in turns, with the seconds of a step in each round."""
    peers = []
    for name, spec in jobs:
        print(f"starting {name} in {spec.dtype}", file=sys.stderr, flush=True)
        peers.append(Peer(name, spec))
    for peer in peers:
        peer.seconds()  # a step alone, which says how many make a turn
    seconds = [[peer.seconds() for peer in peers] for _ in range(ARGS.rounds)]
    for peer in peers:
        peer.end()
    return list(zip(peers, zip(*seconds, strict=True), strict=True))


def main() -> None:
    """Run the peers, interleaved, and print a table."""
    global ARGS
    ARGS, words = parse()
    config = read_config(ARGS.config, words, TrainConfig).config
    validation.validate(config)
    unknown = set(ARGS.peers) - PEERS.keys()
    if unknown or BERT_JAX not in ARGS.peers:
        raise UserError(f"--peers are bert-jax and any of {', '.join(list(PEERS)[1:])}")
    if set(ARGS.dtypes) - {"float32", "bfloat16"} or not ARGS.dtypes:
        raise UserError("--dtypes are float32, bfloat16 or both")
    if ARGS.output and not os.access(Path(ARGS.output).absolute().parent, os.W_OK):
        raise UserError(f"--output {ARGS.output} cannot be written there; make the folder first")
    if ARGS.rounds < 1 or not 0 < ARGS.seconds < math.inf:
        raise UserError("--rounds and --seconds must be positive")
    if "flax" in ARGS.peers and not shutil.which(ARGS.flax_python):
        raise UserError("flax needs --flax_python, the Python of an environment that has it")
    kind, has_pairs = config.model.model_type, config.data.pairs != "none"
    theirs = [name for name in ARGS.peers if PEERS[name].script != PEERS[BERT_JAX].script]
    if theirs and (kind, has_pairs) not in KINDS:
        raise UserError(
            f"the peers have no {kind} {'with' if has_pairs else 'without'} sentence pairs; "
            "use --peers=bert-jax, or a config of BERT with them, or of ModernBERT"
        )
    positions = config.model.position_embedding_type
    lacking = ["packed pairs"] if config.data.packing else []
    lacking += [f"{positions} positions"] if positions not in ("absolute", "rotary") else []
    if theirs and lacking:
        raise UserError(
            f"the peers have no {' and no '.join(lacking)}; use --peers=bert-jax, or a config "
            "without"
        )
    phase = make_schedule(config).main_stages[0]
    spec = Spec(
        model=dataclasses.asdict(config.model),
        dtype="",
        head="",
        compile=False,
        sdpa="",
        batch_size=phase.batch_size,
        max_length=phase.max_length,
        max_predictions=phase.max_predictions,
        threads=ARGS.threads,
        config=to_json(config),
    )
    jobs = [
        (name, dataclasses.replace(spec, dtype=dtype))
        for name in ARGS.peers
        for dtype in ARGS.dtypes
    ]
    pairs, failed = [], {}
    for group in [[job] for job in jobs] if ARGS.alone else [jobs]:
        try:
            pairs += measure(group)
        except UserError as error:
            if not ARGS.alone or group[0][0] == BERT_JAX:
                raise
            print(error, file=sys.stderr, flush=True)
            failed[group[0][0]] = str(error)
        if ARGS.output:  # after each peer, so that those of a process that is ended are kept
            each = [
                {"peer": p.name, "dtype": p.dtype, **p.first, "seconds_of_a_step": list(times)}
                for p, times in pairs
            ]
            figures = {"command": sys.argv, "config": json.loads(spec.config), "peers": each}
            figures["failed"] = failed
            Path(ARGS.output).write_text(json.dumps(figures, indent=1) + "\n")
    own = {peer.dtype: times for peer, times in pairs if peer.name == BERT_JAX}
    print(f"{phase.batch_size} x {phase.max_length}, {ARGS.rounds} rounds of {ARGS.seconds:g} s")
    head = ["peer", "dtype", "sequences/s", *(f"bert-jax in {dtype} is faster by" for dtype in own)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for peer, times in pairs:
        rate = phase.batch_size / statistics.median(times)
        ratios = [record.ratio(times, each) for each in own.values()]
        print(f"| {' | '.join([peer.name, peer.dtype, f'{rate:.2f}', *ratios])} |")


if __name__ == "__main__":
    process.run(main, Path(__file__).name)

"""Our train step beside those of other implementations, interleaved in one run.

    python benchmarks/peers.py --config=configs/base.py --config.data.batch_size=8 \\
        --peers=bert-jax,torch,torch-masked --dtypes=float32,bfloat16 --output=peers.json

Model, rows, precision, dropout and optimizer are those of the config for all of them. Each is a
program of its own, which waits while another runs. A round lets each run for `--seconds`, in turns;
the ratio to ours is of each round, and printed with its quartiles.

Peers: `torch`, transformers' BertForPreTraining, eager; `torch-masked`, the same with its head on
the predicted positions alone, as ours; `torch-compiled` and `torch-masked-compiled`, under
`torch.compile`; `flax`, the last Flax BERT, which transformers 4 alone has: give the Python of an
environment with it as `--flax_python`. Their rows are masked beforehand, ours in the step. And our
own step without one of the things that make it fast: `without-` and the name of one of
`peer_worker.TECHNIQUES`.
"""

import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import record
from absl import flags
from peer_worker import TECHNIQUES, Spec

from bert_jax import config as config_lib
from bert_jax.commands import flags as cli
from bert_jax.config import TrainConfig
from bert_jax.errors import UserError
from bert_jax.settings import to_json

PEERS = {
    "bert-jax": ("peer_ours.py", "masked", False),
    "torch": ("peer_torch.py", "full", False),
    "torch-masked": ("peer_torch.py", "masked", False),
    "torch-compiled": ("peer_torch.py", "full", True),
    "torch-masked-compiled": ("peer_torch.py", "masked", True),
    "flax": ("peer_flax.py", "full", False),
    **{f"without-{name}": ("peer_ours.py", name, False) for name in TECHNIQUES},
}
OURS = "bert-jax"

NAMES = flags.DEFINE_list("peers", ["bert-jax", "torch"], "Which; see above.")
DTYPES = flags.DEFINE_list("dtypes", ["float32"], "Of activations and products.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each has its turn.")
SECONDS = flags.DEFINE_float("seconds", 10.0, "Of a turn.")
THREADS = flags.DEFINE_integer("threads", 0, "Of PyTorch on a CPU; 0 for its own choice.")
FLAX_PYTHON = flags.DEFINE_string("flax_python", "", "A Python that has transformers 4 and Flax.")
OUTPUT = flags.DEFINE_string("output", "", "A JSON file for every figure.")


class Peer:
    """A program that runs train steps when it is asked to."""

    def __init__(self, name: str, spec: Spec):
        script, head, compiled = PEERS[name]
        spec = dataclasses.replace(spec, head=head, compile=compiled)
        python = FLAX_PYTHON.value if name == "flax" else sys.executable
        command = [python, str(Path(__file__).with_name(script)), json.dumps(vars(spec))]
        self.name, self.dtype = name, spec.dtype
        self._batch = f"{spec.batch_size:,} × {spec.max_length:,}"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = self._answer()
        self._steps = 1

    def seconds(self) -> float:
        """Returns the seconds of a step, the mean of a turn."""
        assert self._process.stdin
        self._process.stdin.write(f"{self._steps}\n")
        self._process.stdin.flush()
        found = self._answer()["seconds"]
        self._steps = max(1, round(SECONDS.value / found))
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


def main() -> None:
    """Runs the peers in turns, and prints a table."""
    config, _ = cli.read_config(Path(__file__).parents[1] / "configs" / "base.py", TrainConfig)
    config_lib.validate(config)
    unknown = set(NAMES.value) - PEERS.keys()
    if unknown or OURS not in NAMES.value:
        raise UserError(f"--peers are bert-jax and any of {', '.join(list(PEERS)[1:])}")
    if set(DTYPES.value) - {"float32", "bfloat16"} or not DTYPES.value:
        raise UserError("--dtypes are float32, bfloat16 or both")
    if OUTPUT.value and not os.access(Path(OUTPUT.value).absolute().parent, os.W_OK):
        raise UserError(f"--output {OUTPUT.value} cannot be written there; make the folder first")
    if ROUNDS.value < 1 or SECONDS.value <= 0:
        raise UserError("--rounds and --seconds must be positive")
    if "flax" in NAMES.value and not shutil.which(FLAX_PYTHON.value):
        raise UserError("flax needs --flax_python, the Python of an environment that has it")
    _, phase = config_lib.phases(config)[0]
    spec = Spec(
        model=dataclasses.asdict(config.model),
        dtype="",
        head="",
        compile=False,
        batch_size=phase.batch_size,
        max_length=phase.max_length,
        max_predictions=phase.max_predictions,
        threads=THREADS.value,
        config=to_json(config),
    )
    peers = []
    for name in NAMES.value:
        for dtype in DTYPES.value:
            print(f"starting {name} in {dtype}", file=sys.stderr, flush=True)
            peers.append(Peer(name, dataclasses.replace(spec, dtype=dtype)))
    for peer in peers:
        peer.seconds()  # a step alone, which says how many make a turn
    seconds = [[peer.seconds() for peer in peers] for _ in range(ROUNDS.value)]
    for peer in peers:
        peer.end()
    columns = list(zip(*seconds, strict=True))
    pairs = list(zip(peers, columns, strict=True))
    ours = {peer.dtype: times for peer, times in pairs if peer.name == OURS}
    print(f"{phase.batch_size} x {phase.max_length}, {ROUNDS.value} rounds of {SECONDS.value:g} s")
    head = ["peer", "dtype", "rows/s", *(f"ours in {dtype} is faster by" for dtype in ours)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for peer, times in pairs:
        rate = phase.batch_size / statistics.median(times)
        ratios = [record.ratio(times, own) for own in ours.values()]
        print(f"| {' | '.join([peer.name, peer.dtype, f'{rate:.2f}', *ratios])} |")
    if OUTPUT.value:
        each = [
            {"peer": p.name, "dtype": p.dtype, **p.first, "seconds_of_a_step": list(times)}
            for p, times in pairs
        ]
        figures = {"command": sys.argv, "config": json.loads(spec.config), "peers": each}
        Path(OUTPUT.value).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    cli.run(main)

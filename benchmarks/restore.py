"""Time, memory and bytes read to restore a state on other devices than it was saved from.

    python benchmarks/restore.py

Saves BERT-base with its moments (1.3 GB) from 2 × 2 × 2 devices, and restores it on several meshes
and, with two processes, on four devices each. The devices are fake ones. Prints a table in
Markdown; each line is from a process of its own.
"""

import argparse
import dataclasses
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Name: data, fsdp, tensor, processes.
CASES = {
    "1 device": (1, 1, 1, 1),
    "8 devices, data": (8, 1, 1, 1),
    "8 devices, fsdp": (1, 8, 1, 1),
    "3 devices, fsdp": (1, 3, 1, 1),
    "8 devices of 2 processes, fsdp": (1, 8, 1, 2),
}
SAVED = (2, 2, 2, 1)


def main() -> None:
    """Save, and restore in new processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(Path(args.worker[0]), args.worker[1])
        return
    print("| restored on | process | seconds | held, GB | peak memory, GB | bytes read, GB |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        start(folder, "saved", SAVED)
        for name, case in CASES.items():
            start(folder, name, case)


def start(folder: str, name: str, case: tuple[int, int, int, int]) -> None:
    """Run the processes of a case to their end."""
    count, devices = case[3], case[0] * case[1] * case[2] // case[3]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices}"
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", folder, name],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": flags,
                "HOST": f"{port} {count} {number}",
            },
        )
        for number in range(count)
    ]
    if any(process.wait() for process in running):
        raise SystemExit(f"{name}: a process failed")


def work(folder: Path, name: str) -> None:
    """Save or restore in this process, and print a line of the table."""
    import jax
    import numpy as np

    from bert_jax.config import CheckpointConfig, ModelConfig, OptimizerConfig, ParallelConfig
    from bert_jax.config.schedule import make_rate_schedule
    from bert_jax.distributed.mesh import init_sharded, make_layout, make_mesh
    from bert_jax.models.heads import BertForPreTraining
    from bert_jax.text import tokenizer_training
    from bert_jax.training.checkpoint import Checkpoints
    from bert_jax.training.optimizer import make_optimizer
    from bert_jax.training.step import init_state

    port, count, number = map(int, os.environ["HOST"].split())
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    config = ParallelConfig(*CASES.get(name, SAVED)[:3])
    model = BertForPreTraining(ModelConfig(vocab_size=30528))
    optimizer = make_optimizer(OptimizerConfig(), make_rate_schedule(OptimizerConfig(), 10))

    def new_state(key: jax.Array):
        return init_state(model.init_params(key), optimizer, 0)

    like, layout = make_layout(new_state, make_mesh(config), config)
    tokenizer = tokenizer_training.train(["a few words"] * 9, _tokenizer_config(), 25)
    where = folder / "checkpoints"
    checkpoints = Checkpoints(where, CheckpointConfig(), lambda _: {}, tokenizer, lambda _: 0.0)
    if name == "saved":
        checkpoints.save(1, init_sharded(new_state, layout.state, jax.random.key(0)), None)
        checkpoints.close()
        return
    read_before, peak_before, started = read_bytes(), peak(), time.monotonic()
    state = jax.block_until_ready(checkpoints.restore(1, like))
    seconds = time.monotonic() - started
    held = sum(shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards)
    numbers = seconds, held / 1e9, (peak() - peak_before) / 1e9, (read_bytes() - read_before) / 1e9
    assert np.isfinite(jax.device_get(jax.tree.leaves(state.params)[0].addressable_data(0))).all()
    print(f"| {name} | {number} | " + " | ".join(f"{x:.2f}" for x in numbers) + " |", flush=True)
    checkpoints.close()


def _tokenizer_config():
    from bert_jax.config import TokenizerConfig

    return dataclasses.replace(TokenizerConfig(), kind="wordpiece")


def peak() -> int:
    """Return the peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_bytes() -> int:
    """Return how many bytes this process has read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


if __name__ == "__main__":
    main()

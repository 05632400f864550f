"""The train step of this project, for peers.py, which starts this program."""

import json

import jax
import jaxlib.version
import numpy as np
from peer_worker import read_spec, run_peer, serve

from bert_jax.commands.memory import keep_host_memory
from bert_jax.config import TrainConfig
from bert_jax.config.schedule import make_schedule
from bert_jax.config.settings import from_dict
from bert_jax.distributed.mesh import shard_batch
from bert_jax.planning import synthetic


def main() -> None:
    """Builds the model, takes the first steps, and waits to be asked for more."""
    spec = read_spec()
    keep_host_memory()
    config = from_dict(TrainConfig, json.loads(spec.config), "config")
    config.model.dtype = spec.dtype
    phase = make_schedule(config).main_stages[0]
    run = synthetic.checked_setup(config, [phase], jax.devices()[:1])  # as PyTorch has
    step, state = synthetic.train_step(run, config, phase), run.new_state()
    batch = synthetic.random_batch(config, phase)

    def take(steps: int) -> float:
        nonlocal state
        losses = []
        for _ in range(steps):
            state, sums = step(state, shard_batch(run.layout.mesh, batch))
            losses.append(sums["mlm_loss"])
        jax.block_until_ready(state)
        return float(np.mean([each.total / each.weight for each in losses]))

    serve(take, {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__})


if __name__ == "__main__":
    run_peer(main)

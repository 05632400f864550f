"""The train step of this project, for peers.py, which starts this program."""

import json

import jax
import jaxlib.version
import numpy as np
from serve import read_spec, run_peer, serve

from bert_jax import config as config_lib
from bert_jax.config import TrainConfig
from bert_jax.config_json import from_dict
from bert_jax.training import parallel, synthetic


def main() -> None:
    """Builds the model, takes the first steps, and waits to be asked for more."""
    spec = read_spec()
    parallel.keep_host_memory()
    config = from_dict(TrainConfig, json.loads(spec.config), "config")
    config.model.dtype = spec.dtype
    _, phase = config_lib.phases(config)[0]
    mesh = parallel.make_mesh(config.parallel)
    run = synthetic.set_up(config, phase, mesh)
    state = parallel.place(run.new_state, run.layout.state, jax.random.key(config.seed))
    step = parallel.compile_step(
        run.step, config.parallel.mode, run.layout, run.layout.state, ("state", "sums")
    )
    batch = synthetic.rows(config, phase)

    def take(steps: int) -> float:
        nonlocal state
        losses = []
        for _ in range(steps):
            state, sums = step(state, batch)
            losses.append(sums["mlm_loss"])
        jax.block_until_ready(state)
        return float(np.mean([each.value / each.weight for each in losses]))

    serve(take, {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__})


if __name__ == "__main__":
    run_peer(main)

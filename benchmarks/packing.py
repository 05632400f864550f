"""Packing: the share of real tokens, and the tokens per second that are trained on.

    python benchmarks/packing.py STORE [--config.FIELD=VALUE …]

STORE is a token store of `bert-jax prepare`. The default is a BERT of 4 layers of 256 with 8
sequences of 512 tokens. Steps with and without packing alternate, so that a change of the machine's
speed affects both; reading the batches is not timed.
"""

import dataclasses
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bert_jax.batches.loader import TrainBatches
from bert_jax.commands import process
from bert_jax.commands.flags import read_config
from bert_jax.commands.memory import keep_host_memory
from bert_jax.config import TrainConfig, validation
from bert_jax.config.schedule import make_rate_schedule, make_schedule
from bert_jax.distributed.devices import resolve_dtype
from bert_jax.distributed.mesh import compile_step, init_sharded, make_layout, make_mesh
from bert_jax.objectives import make_objective
from bert_jax.text.store import Corpus, open_store
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.step import PRNG, init_state, make_train_step

ROUNDS = 36


def make(config: TrainConfig, corpus: Corpus):
    """Return a function that runs a step and returns its times, and the batches."""
    mesh = make_mesh(config.parallel)
    objective = make_objective(config)
    objective = objective.in_stage(make_schedule(config).main_stages[0], corpus.tokenizer)
    optimizer = make_optimizer(config.optimizer, make_rate_schedule(config.optimizer, config.steps))

    def new_state(key: jax.Array):
        return init_state(objective.model.init_params(key), optimizer, key)

    key = jax.random.key(config.seed, impl=PRNG)
    _, layout = make_layout(new_state, key, mesh, config.parallel)
    state = init_sharded(new_state, layout.state, key)
    train_step = make_train_step(objective, optimizer)
    step = compile_step(train_step, "mesh", layout, outputs=("state", "metrics"))
    batches, number = (
        TrainBatches(corpus, make_schedule(config).stages, config.data, config.seed),
        0,
    )

    def run() -> tuple[float, float]:
        nonlocal state, number
        batch = batches[number]
        number += 1
        begin, work = time.perf_counter(), time.process_time()
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        seconds, work = time.perf_counter() - begin, time.process_time() - work
        return seconds, work

    return run, batches


def main() -> None:
    """Print both speeds and their ratio."""
    store, *words = sys.argv[1:]
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = [f"--config.model.{n}={v}" for n, v in {**sizes, "intermediate_size": 1024}.items()]
    data = ["--config.data.max_length=512", "--config.data.batch_size=8", "--config.data.phases=()"]
    words = [*model, *data, *words]
    keep_host_memory()
    config = read_config("base", words, TrainConfig).config
    validation.validate(config)
    config.model = resolve_dtype(config.model, jax.devices()[0])
    corpus = open_store(Path(store))
    runs, seconds_by_packing = {}, {}
    for packing in (False, True):
        data = dataclasses.replace(config.data, packing=packing)
        runs[packing] = make(dataclasses.replace(config, data=data), corpus)
        seconds_by_packing[packing] = []
    for number in range(ROUNDS + 2):
        for packing, (run, _) in runs.items():
            times = run()
            if number > 1:  # the first steps compile
                seconds_by_packing[packing].append(times)
    device, data = jax.devices()[0], config.data
    print(
        f"{device.device_kind} ({device.platform}), {data.batch_size} × {data.max_length} tokens, "
        f"{config.model.num_hidden_layers} layers of {config.model.hidden_size}, "
        f"{config.model.dtype}; {ROUNDS} steps each, alternating"
    )
    pairs = runs[True][1].statistics()[data.max_length]
    print(f"{'sequences':<10}{'real tokens':>12}{'a step':>9}{'quartiles':>16}{'of the cores':>14}")
    speeds, size = {}, data.batch_size * data.max_length
    for packing, padding in ((False, pairs.padding), (True, pairs.packed_padding)):
        times, works = (np.array(each) for each in zip(*seconds_by_packing[packing], strict=True))
        low, middle, high = (1e3 * q for q in statistics.quantiles(times, n=4))
        # The share over all sequences: that of the few timed ones is off by some percent.
        speeds[packing] = (1 - padding) * size / np.array([np.median(times), np.median(works)])
        print(
            f"{'packed' if packing else 'one pair':<10}{1 - padding:>12.2%}{middle:>6.0f} ms"
            f"{low:>8.0f} –{high:>6.0f}{1e3 * np.median(works):>11.0f} ms"
        )
    by_clock, by_work = speeds[True] / speeds[False]
    print(f"tokens/s {speeds[False][0]:,.0f} and {speeds[True][0]:,.0f}: {by_clock:.2f} times")
    print(f"tokens a second of the cores: {by_work:.2f} times")


if __name__ == "__main__":
    process.run(main, Path(__file__).name)

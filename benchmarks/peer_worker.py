"""Protocol between peers.py and its worker processes: jobs in, timings out.

One of them runs where this project is not installed.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_UNTIMED = 6  # steps that compile, and settle the memory


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a peer is to run.

    Attributes:
      model: a `ModelConfig` as a dictionary.
      dtype: "float32" or "bfloat16".
      head: "full" to score every position, "masked" for the predicted ones.
      compile: by `torch.compile`.
      sdpa: the kernel of PyTorch's attention, by its name there; "" for PyTorch's own choice.
      batch_size: sequences a step.
      max_length: tokens of a sequence.
      max_predictions: masked positions of a sequence.
      threads: of PyTorch; 0 for its own choice.
      config: a `TrainConfig` as JSON.
    """

    model: dict[str, Any]
    dtype: str
    head: str
    compile: bool
    sdpa: str
    batch_size: int
    max_length: int
    max_predictions: int
    threads: int
    config: str


def synthetic(spec: Spec) -> dict[str, np.ndarray]:
    """Returns rows of random pieces without padding, with what is to be predicted of them."""
    random = np.random.default_rng(0)
    shape = (spec.batch_size, spec.max_length)
    ids = random.integers(5, spec.model["vocab_size"], shape)
    count = spec.max_predictions
    positions = np.argsort(random.random(shape), axis=1)[:, :count]
    return {
        "input_ids": ids,
        "token_type_ids": np.tile(np.arange(spec.max_length) * 2 // spec.max_length, (len(ids), 1)),
        "attention_mask": np.ones_like(ids),
        "positions": positions,
        "labels": np.take_along_axis(ids, positions, axis=1),
        "next_sentence_label": random.integers(0, 2, len(ids)),
    }


def read_spec() -> Spec:
    """Returns what the program was started with."""
    return Spec(**json.loads(sys.argv[1]))


def serve(run: Callable[[int], float], versions: Mapping[str, str]) -> None:
    """Answers each number of steps that comes in with the seconds that they took.

    Args:
      run: takes so many steps, waits for them and gives the mean of their losses.
      versions: of what runs them.
    """
    started = time.perf_counter()
    loss = run(_UNTIMED)
    _say({"seconds": time.perf_counter() - started, "loss": loss, "versions": dict(versions)})
    for line in sys.stdin:
        steps = int(line)
        started = time.perf_counter()
        loss = run(steps)
        _say({"seconds": (time.perf_counter() - started) / steps, "loss": loss})


def run_peer(main: Callable[[], None]) -> None:
    """Runs a peer; of a batch for which there is no memory it says so, and ends."""
    try:
        main()
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        _say({"does_not_fit": True})


def _is_out_of_memory(error: Exception) -> bool:
    """Whether it is NumPy's, JAX's or PyTorch's way of saying so, which need not be installed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = ("RESOURCE_EXHAUSTED", "Out of memory", "can't allocate memory")
    return any(each in str(error) for each in words)


def _say(values: Mapping[str, object]) -> None:
    print(json.dumps(values), flush=True)

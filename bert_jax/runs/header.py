"""The lines of a run's header that pretraining and fine-tuning share."""

import platform
import sys
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from bert_jax.config import FinetuneConfig, OptimizerConfig, Phase, TrainConfig
from bert_jax.distributed import hosts
from bert_jax.config.phases import warmup_and_decay
from bert_jax.planning import costs, machine


def versions() -> str:
    """Return the versions of what computes."""
    package = sys.modules[__name__.partition(".")[0]]  # whose module is above this one
    return f"{package.__version__}, JAX {jax.__version__}, Python {platform.python_version()}"


def devices(mesh: Mesh) -> str:
    """Return how many devices of which kind a mesh has."""
    device = mesh.devices.flat[0]
    on_hosts = f" on {hosts.count()} hosts" if hosts.count() > 1 else ""
    platform = "" if device.platform == "cpu" else f" ({device.platform})"
    return f"{mesh.size} × {machine.device_name(device)}{platform}{on_hosts}"


def epochs(number: float) -> str:
    """Return a number of epochs in words."""
    text = f"{number:.1g}"
    if number >= 0.1:
        text = f"{number:,.{1 + (number < 10)}f}".rstrip("0").rstrip(".")
    return "1 epoch" if text == "1" else f"{text} epochs"


def batch(phases: Sequence[tuple[int, Phase]], microbatches: int) -> str:
    """Return the size of a batch, and that of later phases."""

    def sizes() -> Iterator[str]:
        for start, phase in phases:
            tokens = phase.batch_size * phase.max_length
            later = f"from step {start:,} " if start else ""
            length = f"{phase.max_length:,} tokens, {tokens:,} in all"
            yield f"{later}{phase.batch_size:,} sequences of {length}"

    parts = f", in {microbatches} microbatches" if microbatches > 1 else ""
    return f"{'; '.join(sizes())}{parts}"


def rate(config: OptimizerConfig, steps: int, peaks: Sequence[tuple[int, float]] = ()) -> str:
    """Return the schedule of the learning rate in words; `peaks` are those of later phases."""
    warmup, decay = warmup_and_decay(config, steps)
    rises = f" after a warm-up of {warmup:,} steps" if warmup else ""
    then = {
        "linear": "falling to 0",
        "cosine": "falling to 0 as a cosine",
        "constant": "constant",
        "wsd": f"constant, falling to 0 from step {steps - decay:,} on",
    }
    rates = [f"{config.learning_rate:g}", *(f"{x:g} from step {first:,}" for first, x in peaks)]
    rate = ", ".join(rates)
    return f"{rate}{rises}, then {then[config.schedule]}; {config.name}"


def memory(config: TrainConfig | FinetuneConfig, phase: Phase, mesh: Mesh) -> str:
    """Return the least memory of a training step beside what there is."""
    needed = costs.least_memory(config.model, phase, config.optimizer.microbatches, mesh)
    total, available = machine.memory(needed, mesh.local_devices)
    of = f" of {available / 2**30:,.1f} GiB" if available else ""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return f"at least {total / 2**30:,.2f} GiB{of}{'' if is_cpu else ' on each device'}"

"""What the lines of a run's header say, most of it of pretraining and of fine-tuning."""

import platform
import sys
from collections.abc import Iterable

import jax
from jax.sharding import Mesh

from bert_jax.config import ModelConfig, OptimizerConfig
from bert_jax.config.schedule import RateSchedule, Stage
from bert_jax.console import counted
from bert_jax.distributed import hosts
from bert_jax.distributed.devices import device_name
from bert_jax.models.architecture import describe_attention
from bert_jax.text.tokenizer import Tokenizer


def versions() -> str:
    """Return the versions of what computes."""
    package = sys.modules[__name__.partition(".")[0]]  # whose module is above this one
    return f"{package.__version__}, JAX {jax.__version__}, Python {platform.python_version()}"


def devices(mesh: Mesh) -> str:
    """Return how many devices of which kind a mesh has."""
    device = mesh.devices.flat[0]
    on_hosts = f" on {hosts.count()} hosts" if hosts.count() > 1 else ""
    platform = "" if device.platform == "cpu" else f" ({device.platform})"
    return f"{mesh.size} × {device_name(device)}{platform}{on_hosts}"


def attention(model: ModelConfig, mesh: Mesh, stages: Iterable[Stage], *, packed: bool) -> str:
    """Return how the layers of a model attend in each stage, and why not by a kernel."""
    lengths = [stage.max_length for stage in stages]
    return describe_attention(model, mesh.devices.flat[0].platform, lengths, packed=packed)


def case(tokenizer: Tokenizer) -> str:
    """Return that a tokenizer lower-cases text, which a store has decided for all its runs."""
    return ", lower case" if tokenizer.lowers_case else ""


def batch(stages: Iterable[Stage], microbatches: int) -> str:
    """Return the size of a batch in each stage."""
    sizes = []
    for stage in stages:
        later = f"from step {stage.first_step:,} " if stage.first_step else ""
        sizes.append(
            f"{later}{stage.batch_size:,} sequences of {stage.max_length:,} tokens, "
            f"{stage.batch_size * stage.max_length:,} in all"
        )
    parts = f", in {microbatches} microbatches" if microbatches > 1 else ""
    return f"{'; '.join(sizes)}{parts}"


def rate(schedule: RateSchedule, optimizer: OptimizerConfig) -> str:
    """Return the schedule of the learning rate in words."""
    (_, peak), *later = schedule.peaks
    peaks = ", ".join([f"{peak:g}", *(f"{x:g} from step {first:,}" for first, x in later)])
    if len(rates := dict.fromkeys(optimizer.learning_rates)) > 1:
        peaks = f"the best of {', '.join(f'{rate:g}' for rate in rates)} (found first)"
    rises = f" after a warm-up of {counted(schedule.warmup, 'step')}" if schedule.warmup else ""
    then = {
        "linear": "falling to 0",
        "cosine": "falling to 0 as a cosine",
        "constant": "constant",
        "wsd": f"constant, falling to 0 from step {schedule.steps - schedule.decay:,} on",
    }
    return f"{peaks}{rises}, then {then[schedule.kind]}; {optimizer.name}"

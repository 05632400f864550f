"""The devices that a plan is for, none of which need be here: `v5e:16x16`, `h100:16` or `cpu:8`."""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

from bert_jax.config import TrainConfig
from bert_jax.errors import UserError
from bert_jax.planning import chips

# What the compiler of libtpu asks a TPU's host, which there is none of. The type is of no account:
# the topology is named for each plan.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a plan takes no TPU from a process that has it
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
      name: as given.
      devices: abstract ones of a TPU; for GPUs and CPUs as many fake devices of this CPU.
      chip: what the devices can do; None of a CPU.
    """

    name: str
    devices: Sequence[Any]
    chip: chips.Chip | None

    @property
    def is_compiled_for(self) -> bool:
        """Whether the program is the one that the devices would run."""
        return self.chip is None or self.chip.maker == "Google"

    def settled(self, config: TrainConfig) -> TrainConfig:
        """Returns the config in the type that a dtype of "auto" stands for on the devices."""
        from bert_jax.distributed.precision import resolve_dtype

        model = resolve_dtype(config.model, self.devices[0])
        if self.chip and config.model.dtype == "auto":  # all that are known have it
            model = dataclasses.replace(model, dtype="bfloat16")
        return dataclasses.replace(config, model=model)


def read(names: str) -> list[Target]:
    """Returns the devices of a comma-separated list of topologies.

    JAX must not have started: this sets what it reads then.

    Raises:
      UserError: one is not known, or its compiler is not installed.
    """
    parsed = [_parse(name.strip()) for name in names.split(",")]
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    sizes = [int(shape) for _, shape in parsed if "x" not in shape]
    if sizes:
        try:
            jax.config.update("jax_num_cpu_devices", max(sizes))
        except RuntimeError:  # it has started, as it has in tests
            if len(jax.devices("cpu")) < max(sizes):
                raise
    return [_target(kind, shape) for kind, shape in parsed]


def _parse(name: str) -> tuple[str, str]:
    """Returns the kind of chip and the shape, or the number of them."""
    kinds = ", ".join((*chips.CHIPS, "cpu"))
    kind, _, shape = name.lower().partition(":")
    if kind != "cpu" and kind not in chips.CHIPS:
        raise UserError(f"--topology {name}: {kind!r} is not a chip that is known; use {kinds}")
    is_tpu = kind != "cpu" and chips.CHIPS[kind].maker == "Google"
    wanted, example = (
        (r"[1-9]\d*(x[1-9]\d*){1,2}", "4x4, or 4x4x4 for v4 and v5p")
        if is_tpu
        else (r"[1-9]\d*", "8")
    )
    if not re.fullmatch(wanted, shape):
        raise UserError(f"--topology {name}: write it as {kind}:{example}")
    return kind, shape


def _target(kind: str, shape: str) -> Target:
    import jax
    from jax.experimental import topologies

    name, chip = f"{kind}:{shape}", chips.CHIPS.get(kind)
    if "x" not in shape:
        return Target(name, jax.devices("cpu")[: int(shape)], chip)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--topology {name} needs the TPU's compiler: pip install libtpu")
    # Else the two cores of a v4 chip are two devices, as they are not on Cloud TPU.
    options = {"chip_config_name": "megacore"} if kind == "v4" else {}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology {name} is not one: {' '.join(str(error).split())}") from error
    return Target(name, found.devices, chip)

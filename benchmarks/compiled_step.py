"""Compile a train step for an H200 that is not here, and add up what its kernels move.

    python benchmarks/compiled_step.py --config=large --config.data.batch_size=256 --kernels=20

This needs JAX's CUDA packages (`pip install jax[cuda13]`) and no GPU. Each kernel reads its
operands and writes its results once; what the L2 cache holds counts too. So the bytes are for
comparing two forms of a step. State and temporaries together were the peak of a real H200 to 0.3
GiB (records/2026-11-28-h200). Matmuls are not tuned, for which the compiler would have to run them.
"""

import argparse
import collections
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from jax.experimental import topologies

from bert_jax.commands import process
from bert_jax.commands.flags import read_config
from bert_jax.config import TrainConfig, validation
from bert_jax.config.schedule import make_schedule
from bert_jax.errors import UserError
from bert_jax.planning import profile, synthetic

# XLA's description of a GPU to compile for, as of JAX 0.11. Source: the properties that CUDA
# reports of an H200, which are an H100's but for its memory and its L2 cache.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  memory_bandwidth: 4800000000000
  device_memory_size: 141000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }
device_description_str: "NVIDIA H200"
"""


def abstract_devices() -> Sequence[Any]:
    """Return an H200 that programs can be compiled for."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0"
    description = {"topology": "1x1x1", "target_config": _H200}
    try:
        return topologies.get_topology_desc("", "cuda", **description).devices
    except Exception as error:  # of JAX and of the plug-in: each version has its own
        raise UserError(f"no compiler for an H200: {error}; pip install jax[cuda13]") from error


def compile_step(config: TrainConfig, devices: Sequence[Any]) -> Any:
    """Return the compiled step of a config's first phase, on random sequences."""
    config = synthetic.resolve(config, devices[0])
    stage = make_schedule(config).main_stages[0]
    setup = synthetic.checked_setup(config, [stage], devices)
    step = synthetic.train_step(setup, config, stage)
    batch = synthetic.abstract_batch(config, stage, setup.layout.mesh)
    return step.lower(setup.abstract_state, batch).compile()


def entry(program: str) -> dict[str, str]:
    """Return the scope of each operation that the program itself runs, by its name."""
    text = program[program.index("\nENTRY ") :]
    lines = re.findall(r"^  (?:ROOT )?%([\w.-]+) = .*?([a-z][\w-]*)\(.*$", text, re.MULTILINE)
    scopes = dict(re.findall(r'^  (?:ROOT )?%([\w.-]+) = .*op_name="([^"]*)"', text, re.MULTILINE))
    without = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
    return {name: scopes.get(name, "") for name, opcode in lines if opcode not in without}


def main() -> None:
    """Compile a step, and print its memory and its bytes by kind and by kernel."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="base", help="a recipe (base)")
    parser.add_argument("--kernels", type=int, default=0, help="how many to print (0)")
    args, words = parser.parse_known_args()
    config = read_config(args.config, words, TrainConfig).config
    validation.validate(config)
    if config.model.scan_layers or config.optimizer.microbatches > 1:
        raise UserError(
            "what a loop moves is not counted; set neither scan_layers nor microbatches"
        )
    devices, started = abstract_devices(), time.perf_counter()
    compiled = compile_step(config, devices)
    print(f"compiled for {devices[0].device_kind} in {time.perf_counter() - started:.0f} s")
    memory = compiled.memory_analysis()
    print(f"state {memory.argument_size_in_bytes / 2**30:.1f} GiB", end=", ")
    print(f"temporaries {memory.temp_size_in_bytes / 2**30:.1f} GiB")
    program = compiled.as_text()
    known, kinds, kernels = profile.operations(program), collections.Counter(), {}
    for name, scope in entry(program).items():
        kind, size = known[name]
        kinds[kind] += size
        alike = re.sub(r"[._\d]+$", "", name), re.sub(r"\d+", "#", scope)
        count, total = kernels.get(alike, (0, 0))
        kernels[alike] = count + 1, total + size
    print(f"moved {kinds.total() / 1e9:.1f} GB")
    for kind, size in kinds.most_common():
        print(f"  {size / 1e9:8.2f} GB  {kind}")
    most = sorted(kernels.items(), key=lambda pair: -pair[1][1])[: args.kernels]
    for (name, scope), (count, size) in most:
        print(f"{size / 1e9:8.2f} GB  {count:4} × {name}  {scope[-90:]}")


if __name__ == "__main__":
    process.run(main, Path(__file__).name)

"""Print the memory and the hours of plans, as docs/machines.md has them.

    bert-jax plan --config=base --topology=v5e:2x4 --json > base-v5e-8.json
    python benchmarks/machines.py base-v5e-8.json

The hours are those of the whole recipe: the floor of each phase, and FACTOR times it. A name begins
with the recipe.
"""

import json
import sys
from pathlib import Path

from bert_jax.config import recipes
from bert_jax.config.schedule import make_schedule

# An MFU of 40% where the floor is that of compute. NVIDIA's PyTorch code reaches 45% at length 128
# and 69% at 512 with BERT-large on an A100, and ours half of a matmul's speed on a CPU.
FACTOR = 2.5


def describe(path: Path) -> str:
    """Return a row for each phase of a plan, and one for the hours of the whole recipe."""
    plans = json.loads(path.read_text())
    config = recipes.recipe(path.stem.partition("-")[0])
    stages = make_schedule(config).stages
    rows = []
    for plan in plans:
        memory = {use: f"{size / 2**30:.2f}" for use, size in (plan["memory"] or {}).items()}
        step = plan.get("seconds", {}).get("step")
        batch = plan["batch_size"] // (plan["mesh"]["data"] * plan["mesh"]["fsdp"])
        row = [path.stem, plan["max_length"], batch, memory.get("temporaries"), memory.get("total")]
        row += [f"{step * 1e3:.1f} ms" if step else "", f"{plan.get('mfu') or 0:.0%}"]
        rows.append(" | ".join(map(str, row)))
    of_lengths = {plan["max_length"]: plan for plan in plans if plan.get("seconds", {}).get("step")}
    if all(stage.max_length in of_lengths for stage in stages):
        hours = 0.0
        for stage in stages:  # of a length, the batch may grow: a step takes as much longer
            plan = of_lengths[stage.max_length]
            step = plan["seconds"]["step"] * stage.batch_size / plan["batch_size"]
            hours += (stage.end - stage.first_step) * step / 3600
        rows.append(f"{path.stem} | hours at least {hours:,.1f}, expected {FACTOR * hours:,.1f}")
    return "\n".join(rows)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(describe(Path(name)))

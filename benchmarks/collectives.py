"""What devices send each other in a step, beside what each way of sharding needs in theory.

    python benchmarks/collectives.py v5e:4x4 v5e:16x16

Compiles the train step of BERT-base, with 30,528 pieces and in bfloat16, for TPUs that need not be
here (`pip install libtpu`); `--layers` for fewer than its 12. Prints a table in Markdown.
"""

import argparse

from bert_jax.commands import flags as cli
from bert_jax.planning import targets

# Data, fsdp and tensor: parts of the devices; the last is the number of tensor's. ZeRO stage.
STRATEGIES = {
    "data": (-1, 1, 1, 3),
    "fsdp": (1, -1, 1, 3),
    "ZeRO-1": (1, -1, 1, 1),
    "data × tensor": (-1, 1, 4, 3),
    "data × fsdp × tensor": (2, -1, 4, 3),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topologies", nargs="+", metavar="TOPOLOGY")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=8, help="of each copy of the model (8)")
    args = parser.parse_args()
    found = targets.read(",".join(args.topologies))
    print("| devices | sharding | sent, MB | in theory | ratio | collectives |")
    print("|---|---|---|---|---|---|")
    for target in found:
        for name, sizes in STRATEGIES.items():
            print(row(target, name, sizes, args), flush=True)


def row(target, name, sizes, args) -> str:
    """Returns a line of the table."""
    from bert_jax.config import ModelConfig, ParallelConfig, TrainConfig, phases
    from bert_jax.distributed.mesh import make_mesh, num_batch_shards
    from bert_jax.planning import cost
    from bert_jax.planning.theory import needed

    data, fsdp, tensor, zero = sizes
    config = TrainConfig(
        model=ModelConfig(vocab_size=30528, num_hidden_layers=args.layers, dtype="bfloat16"),
        parallel=ParallelConfig(data=data, fsdp=fsdp, tensor=tensor, zero=zero),
    )
    mesh = make_mesh(config.parallel, target.devices)
    config.data.batch_size = args.rows * num_batch_shards(mesh)
    phase = phases(config)[0][1]
    measured = cost.measure(config, phase, mesh)
    sent = sum(each.sent for each in measured.collectives)
    wanted = needed(config, phase, ParallelConfig(*mesh.shape.values(), zero=zero))
    kinds: dict[tuple, list[float]] = {}
    for each in measured.collectives:
        total = kinds.setdefault((each.kind, "+".join(each.axes), each.dtype), [0, 0.0])
        total[0] += each.times
        total[1] += each.sent / 1e6
    largest = sorted(kinds.items(), key=lambda item: -item[1][1])[:5]
    shown = "; ".join(
        f"{count} {kind} over {axes} of {dtype}, {size:,.1f} MB"
        for (kind, axes, dtype), (count, size) in largest
        if size > 0.1
    )
    shape = " × ".join(map(str, mesh.shape.values()))
    return (
        f"| {target.name} | {name} ({shape}) | {sent / 1e6:,.1f} | {wanted / 1e6:,.1f} "
        f"| {sent / wanted:.3f} | {shown} |"
    )


if __name__ == "__main__":
    cli.run(main)

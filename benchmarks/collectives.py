"""What devices send each other in a step, beside what each way of sharding needs in theory.

    python benchmarks/collectives.py v5e:4x4 v5e:16x16

Compiles the train step of BERT-base, with 30,528 pieces and in bfloat16, for TPUs that need not be
here (`pip install libtpu`); `--layers` for fewer than its 12. Prints a table in Markdown.
"""

import argparse

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
    from bert_jax.planning import cost
    from bert_jax.training import parallel

    data, fsdp, tensor, zero = sizes
    config = TrainConfig(
        model=ModelConfig(vocab_size=30528, num_hidden_layers=args.layers, dtype="bfloat16"),
        parallel=ParallelConfig(data=data, fsdp=fsdp, tensor=tensor, zero=zero),
    )
    mesh = parallel.make_mesh(config.parallel, target.devices)
    config.data.batch_size = args.rows * parallel.row_parts(mesh)
    phase = phases(config)[0][1]
    measured = cost.measure(config, phase, mesh)
    sent = sum(each.sent for each in measured.collectives)
    wanted = theory(config, phase, mesh)
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


def theory(config, phase, mesh) -> float:
    """Returns the bytes that a device has to send in a step, in a ring.

    Gradients are added up in float32, parameters gathered in bfloat16 and once; under ZeRO-1 in
    float32, after the update. Along "tensor", a layer adds up its activations twice forward and
    twice backward, and embeddings and head once, in bfloat16; what is looked up in float32.
    """
    import jax
    from flax import linen as nn

    from bert_jax.models.heads import BertForPreTraining
    from bert_jax.training import parallel
    from bert_jax.training.optimizer import make_optimizer
    from bert_jax.training.step import init_state

    model, optimizer = BertForPreTraining(config.model), make_optimizer(config.optimizer, 10)
    data, fsdp, tensor = mesh.shape.values()
    split = parallel.layout(
        lambda key: init_state(model.init_params(key), optimizer, 0), mesh, config.parallel
    )[1].gradients
    shapes = jax.eval_shape(lambda: nn.unbox(model.init_params(jax.random.key(0))))
    total = 0.0
    for shape, where in zip(jax.tree.leaves(shapes), jax.tree.leaves(split), strict=True):
        here = shape.size / (tensor if "tensor" in where.spec else 1)
        if fsdp > 1 and "fsdp" in where.spec:
            gathered = 4 if config.parallel.zero == 1 else 2
            total += (4 + gathered) * here * (fsdp - 1) / fsdp
            total += 2 * 4 * here / fsdp * (data - 1) / data
        else:
            total += 2 * 4 * here * (data * fsdp - 1) / (data * fsdp)
    rows = phase.batch_size / (data * fsdp)
    tokens, size = rows * phase.max_length, config.model.hidden_size
    of_layers = 4 * config.model.num_hidden_layers * tokens * size * 2
    of_ends = tokens * size * 4 + rows * phase.max_predictions * size * 2
    return total + 2 * (of_layers + of_ends) * (tensor - 1) / tensor


if __name__ == "__main__":
    main()

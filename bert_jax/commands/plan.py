"""`bert-jax plan`: reads the config and the topologies, and prints what was found."""

import argparse
import dataclasses
import json
import sys

from bert_jax.commands import flags as cli
from bert_jax.config import TrainConfig
from bert_jax.planning import targets


def run(words: list[str]) -> None:
    """Runs the command with these words of the command line."""
    args, fields = _parser().parse_known_args(words)
    # JAX comes up with what this sets, so it is imported after.
    devices = targets.read(args.topology)
    from bert_jax.planning import plan, search, table

    config = cli.read_config(args.config, fields, TrainConfig).config
    if args.search:
        ranked = [(target, *search.search(config, target, _say)) for target in devices]
        if args.json:
            each = (
                {
                    "topology": target.name,
                    "max_length": phase.max_length,
                    "candidates": [dataclasses.asdict(candidate) for candidate in found],
                }
                for target, phase, found in ranked
            )
            print(json.dumps(list(each), indent=2))
        else:
            print("\n\n".join(table.ranking(*one) for one in ranked))
        return
    plans = plan.make_plans(config, devices, _say, with_largest=not args.quick)
    if args.json:
        print(json.dumps([plan.as_json(each) for each in plans], indent=2))
    else:
        print(table.text(plans))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bert-jax plan",
        description="Compiles the train step of a config for other devices, and prints what it "
        "costs each: memory, operations, what is sent to others, and the least time that follows. "
        "TPUs need `pip install libtpu`. Fields are set as for train.py: --config.model.remat=True",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="such as configs/large.py")
    parser.add_argument(
        "--topology",
        required=True,
        metavar="CHIP:SHAPE",
        help="such as v5e:16x16, v4:4x4x4, h100:16 or cpu:8; several, comma separated",
    )
    parser.add_argument("--search", action="store_true", help="rank meshes and batch sizes instead")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.add_argument("--quick", action="store_true", help="do not look for the largest batch")
    return parser


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)

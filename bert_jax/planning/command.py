"""`bert-jax plan`: reads the config and the topologies, and prints what was found."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from bert_jax import cli
from bert_jax.config import TrainConfig
from bert_jax.planning import targets


def run(args: argparse.Namespace) -> None:
    """Runs the command.

    Args:
      args: `config`, `topology`, `search`, `json` and `quick`, and in `rest` fields of the config.
    """
    # JAX comes up with what this sets, so it is imported after.
    devices = targets.read(args.topology)
    from bert_jax.planning import plan, search, table

    sys.argv[1:] = [f"--config={args.config}", *args.rest]
    config, _ = cli.read_config(Path(args.config), TrainConfig)
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


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)

"""Say what a training step costs on devices that need not be attached.

    bert-jax plan --config=base --topology=v5e-8

Prints whether the step fits, where the memory goes, what is sent over the network, and the least
time that a step takes: by formulas, at once, or with --compile by the compiler, in minutes, of TPUs
(`pip install libtpu`) and CPUs. The default config is BERT-base's.
"""

import argparse
import json

from bert_jax import console
from bert_jax.commands.flags import Parser, add_config, read_config
from bert_jax.config import TrainConfig


def add_arguments(parser: Parser) -> None:
    add_config(parser, "base", TrainConfig)
    add = parser.add_argument
    devices = "such as v5e-8, v4:4x4x4, 8xh100 or cpu:8; several, comma separated"
    add("--topology", required=True, metavar="CHIP:SHAPE", help=devices)
    add("--compile", action="store_true", help="ask the compiler, which takes minutes")
    add("--json", action="store_true", help="print JSON, in bytes and seconds")


def run(args: argparse.Namespace, words: list[str]) -> None:
    from bert_jax.planning import plan
    from bert_jax.planning.topology import read_topologies

    topologies = read_topologies(args.topology, compiles=args.compile)
    config = read_config(args.config, words, TrainConfig).config
    with console.working("planning", says_end=False):
        plans = plan.make_plans(config, topologies, compiles=args.compile)
    print(json.dumps(plans, indent=2) if args.json else plan.as_text(plans))

"""Flags that several commands share: `--config=RECIPE --config.FIELD=VALUE`, and those of hosts."""

import argparse
import typing
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from bert_jax import recipes, settings
from bert_jax.errors import UserError

CHECKPOINT = "a workdir, one of its checkpoints, or a Hugging Face or Google checkpoint directory"


class Recipe(NamedTuple):
    """The config of a recipe, such as "tiny", with the fields that the command line sets."""

    config: Any
    name: str
    model_fields: Sequence[str]  # those of the model that the command line sets


def add_config(parser: argparse.ArgumentParser, default: str, kind: type) -> None:
    """Add `--config` to a parser, and every field of a config to its help."""
    what = f"the name of a recipe, or the path of a Python file with one ({default})"
    parser.add_argument("--config", default=default, metavar="RECIPE", help=what)
    parser.epilog = "Fields of the config, with their values where the recipe does not set them:\n"
    for field in settings.fields(kind()):
        text = field.metadata["help"]
        parser.epilog += f"\n  --config.{field.name}={field.value}\n        {text}"
        if typing.get_origin(field.hint) is Literal:
            parser.epilog += f" ({', '.join(map(str, typing.get_args(field.hint)))})"


def add_fields(parser: argparse.ArgumentParser, config: Any, names: Sequence[str]) -> None:
    """Add a flag for each of some fields of a config, of type str, float or one of its choices."""
    for field in settings.fields(config):
        if field.name in names:
            flag, value = f"--{field.name.replace('_', '-')}", field.value
            choices = typing.get_args(field.hint) or None
            text = f"{field.metadata['help']} ({value or 'none'})"
            parser.add_argument(flag, type=type(value), default=value, choices=choices, help=text)


def read_config(recipe: str, words: Sequence[str], kind: type, own: Any = None) -> Recipe:
    """Return the config of a recipe, or `own`, with the fields that the other words set."""
    path, argument = recipes.find(recipe)
    config = own or recipes.recipe(recipe)
    if not isinstance(config, kind):
        raise UserError(f"recipe {path}: get_config() returns no {kind.__name__}")
    names = [field.name for field in settings.fields(config.model)] if own else []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--config."):
            raise UserError(f"{word!r} is not a flag; fields are set by --config.FIELD=VALUE")
        name, equals, value = word.removeprefix("--config.").partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            equals, value = "=", rest.pop(0)
        settings.override(config, name, value if equals else None)
        if name.startswith("model."):
            names.append(name.removeprefix("model."))
    return Recipe(config, "-".join(filter(None, (path.stem, argument))), names)


def add_run(parser: argparse.ArgumentParser, init: str | None, help: str) -> None:
    """Add the flags of a run: its folder, the checkpoint that it starts from, and its hosts."""
    parser.add_argument("--workdir", help="folder of the run (runs/NAME of the recipe)")
    parser.add_argument("--init", metavar="CHECKPOINT", default=init, help=help)
    add = parser.add_argument_group("several hosts").add_argument
    add("--coordinator_address", metavar="HOST:PORT", help="of process 0")
    add("--num_processes", type=int, metavar="N", help="processes of the run")
    add("--process_id", type=int, metavar="I", help="of this process, from 0")
    wait = "to wait for the other processes (120)"
    add("--connect_timeout", type=float, default=120.0, metavar="SECONDS", help=wait)

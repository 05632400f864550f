"""Flags that several commands share: `--config=RECIPE --config.FIELD=VALUE`, and those of hosts."""

import argparse
import math
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from bert_jax.config import FinetuneConfig, TrainConfig, recipes, settings
from bert_jax.errors import UserError, nearest, renamed

# The fields that `--help` lists; `--help-all` lists all.
_COMMON = {
    TrainConfig: (
        *("steps", "data.source", "data.max_length", "data.batch_size", "tokenizer.kind"),
        *("model.num_hidden_layers", "model.hidden_size", "model.dtype"),
        *("optimizer.learning_rate", "eval_every", "checkpoint.every", "seed"),
    ),
    FinetuneConfig: (
        *("epochs", "data.train", "data.eval", "data.text", "data.label", "task.labels"),
        *("data.max_length", "data.batch_size", "model.dtype"),
        *("optimizer.learning_rate", "seeds", "seed"),
    ),
}

# What each word after "--" begins with while words are parsed; no word of a process can have it.
_NO_FLAG = "\0"


class Recipe(NamedTuple):
    """The config of a recipe, such as "tiny", with the fields that the command line sets."""

    config: Any
    name: str
    fields: Sequence[str] = ()  # their dotted names


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest of the names that it knows.

    `flags` has the flag that sets a field of the config, for messages that name the field. `others`
    says whose words follow --, where a command takes those of another program.
    """

    def __init__(self, **options: Any):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=raw, **options)
        self.flags: dict[str, str] = {}
        self.others = ""
        self._words: Sequence[str] = ()  # before "--"
        self.recipe: tuple[str, type] = ("", object)  # the default, and the type of its config
        self._rare: dict[argparse.Action, str] = {}  # help of flags that `--help-all` alone has

    def hide(self, actions: Sequence[argparse.Action]) -> None:
        """Let `--help-all` alone explain some flags."""
        for action in actions:
            self._rare[action], action.help = action.help or "", argparse.SUPPRESS

    def format_help(self) -> str:
        """Return what most people need, for `--help`."""
        return self._format(self._list_common_fields)

    def format_all_help(self) -> str:
        """Return the help of all flags and fields, for `--help-all`."""
        for action, text in self._rare.items():
            action.help = text
        self.usage = None  # which was made when the words were read
        return self._format(self._list_fields)

    def _format(self, list_fields: Callable[[Any, str], str]) -> str:
        """Begin with what the command does and an example, as argparse does not."""
        about, self.description = (self.description or "").strip(), None
        if self.recipe[0]:
            self.epilog = list_fields(*self._named_recipe(*self.recipe))
        return f"{about}\n\n{super().format_help()}"

    def _named_recipe(self, default: str, kind: type) -> tuple[Any, str]:
        """Return the config of the recipe that the command names, and its name."""
        words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        words.add_argument("--config", nargs="?", default=default)
        recipe = words.parse_known_args()[0].config or default
        return read_config(recipe, [], kind).config, recipe

    def _list_common_fields(self, config: Any, recipe: str) -> str:
        """Return a line for each field that most people set, with its value."""
        text = f"Some fields of the config, with the values of --config={recipe}:\n\n"
        fields = {field.name: field for field in settings.fields(config)}
        for name in _COMMON[self.recipe[1]]:
            flag = f"--config.{name}={settings.as_text(fields[name].value)}"
            text += f"  {flag:<40} {fields[name].metadata['help']}\n"
        return f"{text}\n`{self.prog} --help-all` lists every flag and every field."

    def _list_fields(self, config: Any, recipe: str) -> str:
        """Return each field with its value and meaning."""
        text = f"Fields of the config, with the values of --config={recipe}:\n"
        defaults = settings.defaults(config)
        for field in settings.fields(config):
            value = settings.as_text(field.value)
            text += f"\n  --config.{field.name}={value}\n        {field.metadata['help']}"
            if typing.get_origin(field.hint) is Literal:
                text += f" ({', '.join(map(str, typing.get_args(field.hint)))})"
            if field.value != defaults[field.name]:
                text += f" (default: {settings.as_text(defaults[field.name])})"
        return text

    def parse(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the arguments, and the other words: fields of the config, or another program's.

        A file or a text may come after a flag, and begin with a hyphen after "--".
        """
        end = words.index("--") if "--" in words else len(words)
        self._words, after = words[:end], words[end + 1 :]
        texts = [] if self.others else [f"{_NO_FLAG}{word}" for word in after]
        arguments = argparse.Namespace(parser=self)
        arguments, rest = self.parse_known_intermixed_args([*self._words, *texts], arguments)
        rest = [word.removeprefix(_NO_FLAG) for word in rest]
        self.check(rest)
        return arguments, [*rest, *(after if self.others else ())]

    def error(self, message: str) -> NoReturn:
        """Raise UserError, which names an unknown flag rather than what argparse makes of it."""
        known = self._option_string_actions
        flags = [word for word in self._words if re.match(r"-[^\d.]", word)]  # no number
        self.check([word for word in flags if word.partition("=")[0] not in known])
        raise UserError(f"{message}; see `{self.prog} --help`")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse an empty value, as of an unset shell variable; of texts, their command does."""
        flag = "/".join(action.option_strings) or action.metavar or action.dest
        arg_strings = [word.removeprefix(_NO_FLAG) for word in arg_strings]
        if "" in arg_strings and action.type in (None, str):
            raise UserError(f"{flag} is empty; give a value, or leave it out")
        return super()._get_values(action, arg_strings)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print, and raise an error of the output, which argparse ignores."""
        print(message, end="", file=file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            flag = "/".join(action.option_strings) or "command"
            every = f"choose one of {', '.join(names)}"
            raise UserError(f"{flag} {value!r} is unknown; {nearest(str(value), names, every)}")

    def check(self, words: Sequence[str]) -> None:
        """Refuse the first of the remaining words that no field of the config accounts for."""
        fields = settings.names(self.recipe[1]) if self.recipe[0] else []
        for word in words:
            name, equals, value = word.partition("=")
            if fields and (not name.startswith("--") or name.startswith("--config.")):
                continue
            if not word.startswith("-"):
                raise UserError(
                    f"{word!r} is one word too many; put quotes around text with spaces"
                )
            names = settings.spellings(fields, equals + value)
            for flag in self._option_string_actions:
                names[flag.strip("-").replace("-", "_")] = flag + equals + value
            otherwise = f"{'--help-all' if fields else '--help'} lists the flags"
            otherwise = self.others or f"{otherwise}, and a word after -- is none"
            if name == "--config" or name.startswith("--config."):
                otherwise = "a recipe and its fields are for pretrain, finetune, plan and benchmark"
            hint = nearest(name.strip("-").replace("-", "_"), names, otherwise)
            raise UserError(f"{word!r} is not a flag; {hint}")

    def in_its_words(self, message: str) -> str:
        """Return a message with the flag of each field that it names."""
        # Now, not before: reading a recipe imports settings with fields of their own.
        fields = settings.names(self.recipe[1]) if self.recipe[0] else []
        flags = self.flags | {name: f"--config.{name}" for name in fields if "." in name}
        return renamed(message, flags)


def add_config(parser: Parser, default: str, kind: type) -> None:
    """Add `--config` to a parser, whose help then lists every field of a config."""
    what = f"the name of a recipe, or the path of a Python file with one ({default})"
    parser.add_argument("--config", default=default, metavar="RECIPE", help=what)
    all_help = "show every flag, and every field of the config, and exit"
    parser.add_argument("--help-all", action=_HelpAll, help=all_help)
    parser.recipe = default, kind


class _HelpAll(argparse.Action):
    """Print the help of all flags and fields, and exit."""

    def __init__(self, **options: Any):
        super().__init__(nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: Any, *arguments: Any) -> None:
        print(parser.format_all_help(), end="")
        parser.exit()


def add_fields(parser: argparse.ArgumentParser, config: Any, names: Sequence[str]) -> None:
    """Add a flag for each of some fields of a config, of type str, float or one of its choices."""
    for field in settings.fields(config):
        if field.name in names:
            flag, value = f"--{field.name.replace('_', '-')}", field.value
            choices = typing.get_args(field.hint) or None
            text = f"{field.metadata['help']} ({settings.as_text(value)})"
            parser.add_argument(flag, type=type(value), default=value, choices=choices, help=text)


def read_config(recipe: str, words: Sequence[str], kind: type, own: Any = None) -> Recipe:
    """Return the config of a recipe, or `own`, with the fields that the other words set."""
    path, argument = recipes.find(recipe)
    config = own or recipes.recipe(recipe, kind)
    rest, values = list(words), []
    while rest:
        word = rest.pop(0)
        if not word.startswith("--config."):
            raise UserError(f"{word!r} is not a flag; fields are set by --config.FIELD=VALUE")
        name, equals, value = word.removeprefix("--config.").partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            equals, value = "=", rest.pop(0)
        values.append((name, value if equals else None))
    settings.override_all(config, values)
    fields = [name for name, _ in values]
    if own:  # of which every field of the model is set
        fields += [f"model.{field.name}" for field in settings.fields(config.model)]
    return Recipe(config, "-".join(filter(None, (path.stem, argument))), fields)


def add_data_dir(parser: argparse.ArgumentParser) -> argparse.Action:
    """Add the flag for the folder of TensorFlow datasets, which `main` sets for TFDS."""
    what = "where tfds:NAME is or will be prepared (TFDS_DATA_DIR, or ~/tensorflow_datasets)"
    return parser.add_argument("--data-dir", metavar="FOLDER", help=what)


def add_run(parser: Parser, init: str | None, help: str) -> None:
    """Add the flags of a run: its folder, the checkpoint that it starts from, and its hosts."""
    parser.add_argument("--workdir", help="folder of the run (runs/NAME of the recipe)")
    parser.add_argument("--init", metavar="CHECKPOINT", default=init, help=help)
    data_dir = add_data_dir(parser)
    add = parser.add_argument_group("several hosts").add_argument
    wait = "to wait for the other processes (120)"
    actions = [
        data_dir,
        add("--coordinator_address", metavar="HOST:PORT", help="of process 0"),
        add("--num_processes", type=int, metavar="N", help="processes of the run"),
        add("--process_id", type=int, metavar="I", help="of this process, from 0"),
        add("--connect_timeout", type=seconds, default=120.0, metavar="SECONDS", help=wait),
    ]
    parser.hide(actions)


def seconds(text: str) -> float:
    """Return the time that `--connect_timeout` names."""
    value = float(text)
    if not 0 < value < math.inf:
        raise UserError(f"--connect_timeout {text} is no time; give seconds above 0")
    return value

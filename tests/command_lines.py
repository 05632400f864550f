"""Command lines, as pages and scripts show them: split, and checked without being run."""

import contextlib
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from bert_jax.commands import flags, main
from bert_jax.config import FinetuneConfig, TrainConfig
from bert_jax.config.validation import validate, validate_finetuning
from bert_jax.planning import topology

ROOT = Path(__file__).parents[1]
SCRIPTS = {"train.py": "pretrain", "finetune.py": "finetune"}
_VALIDATE = {TrainConfig: validate, FinetuneConfig: validate_finetuning}


def split(bash: str) -> list[list[str]]:
    """Return the words of each command, without what it sets in the environment."""
    found: list[list[str]] = []
    line = ""
    for part in bash.replace("\\\n", " ").splitlines():
        line += part
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        try:
            all_words = list(lexer)
        except ValueError:  # a quoted word goes on in the next line
            line += "\n"
            continue
        for ends, words in itertools.groupby(all_words, lambda word: set(word) <= set("|&;")):
            words = list(itertools.dropwhile(re.compile(r"[A-Za-z_]+=").match, words))
            found += [words] if words and not ends else []
        line = ""
    return found


def bert_jax_words(words: list[str]) -> list[str]:
    """Return what follows `bert-jax` in a command, up to a redirection; nothing for another."""
    words = list(itertools.takewhile(lambda word: word not in ("<", ">"), words))
    if words[0] == "python" and words[1:2] and words[1] in SCRIPTS:
        return [SCRIPTS[words[1]], *words[2:]]
    return words[1:] if words[0] == "bert-jax" else []


@contextlib.contextmanager
def stdin_from(descriptor: int) -> Iterator[None]:
    """Read a file or a pipe as standard input."""
    saved = os.dup(0)
    os.dup2(descriptor, 0)
    try:
        yield
    finally:
        os.dup2(saved, 0)
        os.close(saved)


def check(words: list[str], bert_jax_main: Callable, monkeypatch) -> None:
    """Refuse flags that the command does not have, and fields that are not valid together."""
    parsed = []
    with monkeypatch.context() as patched:
        module = main.import_command(words[0])
        patched.setattr(module, "run", lambda *args: parsed.append(args))
        bert_jax_main(*words)
    ((args, rest),) = parsed
    for name in filter(None, getattr(args, "topology", "").split(",")):
        topology.parse(name)
    default, kind = args.parser.recipe
    if default:
        # Without --config a run has its own: on these pages, that of the recipe it is named after.
        run = getattr(args, "fork", None) or getattr(args, "workdir", None) or ""
        own = Path(run.partition("@")[0]).name
        recipe = args.config or (own if (ROOT / f"configs/{own}.py").exists() else default)
        _VALIDATE[kind](flags.read_config(recipe, rest, kind).config)

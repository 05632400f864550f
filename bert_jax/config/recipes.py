"""Recipes: Python files whose `get_config()` returns a config, found by name."""

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, overload

from bert_jax.config.fields import MODEL_TYPES, POSITIONS, TASKS, FinetuneConfig, TrainConfig
from bert_jax.config.settings import resolve
from bert_jax.errors import UserError, nearest

_PACKAGE = Path(__file__).parents[1]
# A wheel has the recipes inside the package; a clone has them beside it.
_FOLDER = next(p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir())
_Config = TypeVar("_Config", TrainConfig, FinetuneConfig)
_KINDS = {TrainConfig: "pretraining", FinetuneConfig: "fine-tuning"}
_files: set[Path] = set()  # of the recipes that this process has run


@overload
def recipe(name: str) -> Any: ...
@overload
def recipe(name: str, kind: type[_Config]) -> _Config: ...


def recipe(name: str, kind: type = object) -> Any:
    """Return the config of a recipe, to be changed and passed to `pretrain` or `finetune`.

    Args:
      name: such as "tiny", "finetune/squad" or "finetune/glue:mrpc"; or the path of a file.
      kind: `TrainConfig` or `FinetuneConfig`, which a type checker then knows the config to be.

    Raises:
      UserError: there is no such recipe, it cannot be run, or it is of another kind.

    >>> recipe("tiny", TrainConfig).model.hidden_size
    128
    """
    path, argument = find(name)
    if path.suffix == ".json":
        such = "tiny" if kind is TrainConfig else "finetune/classification"
        raise UserError(f"{path} is no recipe, which is a Python file; name one, such as {such}")
    try:
        _files.add(path.absolute())
        with _imports_beside(path):
            get_config = runpy.run_path(str(path))["get_config"]
            config = get_config(argument) if argument else get_config()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever the recipe's own Python raises
        words = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        reason = " ".join(words.split()) or type(error).__name__
        raise UserError(f"recipe {path} cannot be read: {reason}") from error
    if not isinstance(config, kind):
        what = _KINDS.get(type(config))
        remedy = f"it is a recipe of {what}; choose another" if what else "correct it"
        raise UserError(f"recipe {path}: get_config() returns no {kind.__name__}; {remedy}")
    return config


@contextlib.contextmanager
def _imports_beside(path: Path) -> Iterator[None]:
    """Let a recipe import files that are in its folder, such as an encoder of the user's own."""
    folder, registries = str(path.absolute().parent), (MODEL_TYPES, POSITIONS, TASKS)
    known = [{**registry} for registry in registries]
    sys.path.append(folder)
    try:
        yield
        for registry, before in zip(registries, known, strict=True):
            for name in [name for name in registry if registry[name] is not before.get(name)]:
                registry[name] = resolve(registry, name)  # it may be of an object in such a file
    finally:
        sys.path[:] = [each for each in sys.path if each is not folder]  # an equal one stays


def source_files() -> set[Path]:
    """Return the user's own Python files that this process has run, as far as they are known.

    They are the recipes, the program, and the modules in the folders of these.
    """
    modules = (getattr(each, "__file__", None) for each in [*sys.modules.values()])
    loaded = {Path(file).absolute() for file in modules if file and file.endswith(".py")}
    program = Path(getattr(sys.modules["__main__"], "__file__", None) or "").absolute()
    folders = {path.parent for path in _files | (loaded & {program})}
    beside = {path for path in loaded if not folders.isdisjoint(path.parents)}
    return {
        path
        for path in _files | beside
        if "site-packages" not in path.parts and _PACKAGE not in path.parents and path.is_file()
    }


def find(name: str) -> tuple[Path, str]:
    """Return the file of a recipe, and what follows a colon in its name."""
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(name, str) or not name:
        raise UserError(f"the name of a recipe is {name!r}; give one such as 'tiny', or a file")
    stem, _, argument = name.partition(":")
    if os.path.isfile(_FOLDER / f"{stem}.py"):
        return _FOLDER / f"{stem}.py", argument
    whole, before_colon = map(os.path.expanduser, (name, stem))
    if os.path.isfile(whole):  # whose path may have a colon
        return Path(whole), ""
    if os.path.isfile(before_colon):
        return Path(before_colon), argument
    names = [p.relative_to(_FOLDER).with_suffix("").as_posix() for p in _FOLDER.rglob("*.py")]
    word = stem.removesuffix(".py").removeprefix("configs/")
    hint = nearest(word, names, f"there are {', '.join(sorted(names))}")
    raise UserError(f"--config={name}: no such recipe or file; {hint}")

"""How every command reads its flags and its config, and how it ends."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_jax.errors import CommandError, UserError
from bert_jax.settings import flatten


def run(main: Callable[[], None]) -> None:
    """Runs a command; an error of the user's, or of training, is one line and an exit code."""
    try:
        main()
    except CommandError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Not sys.exit: threads that still read a damaged checkpoint would print what they think of
        # it. All that has to be closed has been, on the error's way here.
        os._exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, such as `head`, has had enough
        sys.stderr.close()
        sys.exit(1)


def read_config(default: Path, kind: type) -> tuple[Any, str]:
    """Parses the command line's absl flags: `--config=FILE` and `--config.FIELD=VALUE` among them.

    Args:
      default: the config file where none is given.
      kind: what it must give, `TrainConfig` or `FinetuneConfig`.

    Returns:
      The config, and the name of its file without its folder and `.py`.

    Raises:
      UserError: a flag or a field is unknown, a value is of another type, or the file is not there.
    """
    from absl import flags
    from ml_collections import config_flags

    args = sys.argv[1:]
    # The file must come before its fields, and is wanted even where only a field is given.
    given = next((i for i, a in enumerate(args) if a in ("--config", "-config")), None)
    if given is not None and given + 1 < len(args):
        args[given : given + 2] = [f"--config={args[given + 1]}"]
    files = [a for a in args if a.startswith("--config=")] or [f"--config={default}"]
    sys.argv[1:] = [*files, *(a for a in args if a not in files)]  # where config_flags looks
    path, _, argument = files[-1].removeprefix("--config=").partition(".py:")
    path += ".py" if argument else ""
    if {"-h", "--help", "-help", "--helpfull"} & set(args):
        _print_help(kind)
        sys.exit(0)
    if not Path(path).is_file():
        raise UserError(f"config {path} does not exist; give a Python file, as those in configs/")
    try:
        holder = config_flags.DEFINE_config_file("config", help_string="A recipe in configs/.")
        rest = flags.FLAGS(sys.argv)[1:]
        config = holder.value
        if not isinstance(config, kind):
            raise TypeError(f"get_config() of {path} gives no {kind.__name__}")
    except flags.Error as error:
        raise UserError(f"{' '.join(str(error).split())}; --help lists the flags") from error
    except Exception as error:  # whatever running the config's own Python raises
        reason = " ".join(str(error).strip("\"'").split()) or type(error).__name__
        raise UserError(f"{reason}; bert_jax/config.py lists the fields") from error
    if rest:
        raise UserError(f"{rest[0]!r} is not a flag; write --config.FIELD=VALUE")
    return config, "-".join(filter(None, (Path(path).stem, argument)))


def fields_given(prefix: str) -> list[str]:
    """Returns the fields of a config that the command line sets, such as "dtype" of "model."."""
    found = (re.match(rf"--?config\.{re.escape(prefix)}(\w+)", arg) for arg in sys.argv)
    return [match[1] for match in found if match]


def _print_help(kind: type) -> None:
    """Prints the calling program's own account of itself, and every field of a config."""
    print(sys.modules["__main__"].__doc__)
    print("Fields, with their values where neither the recipe nor the command line sets them:\n")
    for name, value in flatten(kind()).items():
        print(f"  --config.{name}={value}")

"""Checkpoints: the state, the config and the tokenizer, each checkpoint complete by itself."""

import contextlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import traverse_util
from orbax.checkpoint import checkpoint_managers

from bert_jax.config import CheckpointConfig
from bert_jax.distributed import hosts
from bert_jax.errors import UserError
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.step import TrainState

_ITEMS = ("state", "config", "tokenizer")
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file that it writes


class Checkpoints:
    """The checkpoints of a run, written while training goes on.

    Each of several hosts writes what its devices hold, in the folder that all share; any number of
    hosts and devices reads it.

    Args:
      folder: where each checkpoint has a folder, named by its step.
      config: which are kept.
      description: the run's config, as JSON.
      tokenizer: the run's tokenizer.
      rank: of what an evaluation gave, the greater the better; the best one is kept.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        description: dict[str, Any],
        tokenizer: Tokenizer,
        rank: Callable[[Mapping[str, float]], float],
    ):
        self.folder, self.rank = folder.absolute(), rank
        latest = checkpoint_managers.LatestN(config.keep)
        best = checkpoint_managers.BestN(
            get_metric_fn=rank, n=1, keep_checkpoints_without_metrics=False
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=_ITEMS,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.AnyPreservationPolicy([latest, best]),
                best_fn=rank,  # without which what was evaluated is forgotten at the end
            ),
        )
        self._config = ocp.args.JsonSave(description)
        self._tokenizer = ocp.args.JsonSave(tokenizer.to_json())

    def save(self, step: int, state: TrainState, held_out: dict[str, float] | None) -> None:
        """Begins to write a checkpoint, unless there is one of this step.

        Args:
          step: its name.
          state: of the run.
          held_out: means over the held-out text, if it has just been evaluated.
        """
        if hosts.broadcast_from_main(lambda: step in self._manager.all_steps()):
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), config=self._config, tokenizer=self._tokenizer
        )
        self._manager.save(step, args=items, metrics=held_out)

    def latest(self) -> int | None:
        """Returns the step of the latest complete checkpoint, as the first host sees it."""
        return hosts.broadcast_from_main(self._manager.latest_step)

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Reads a checkpoint's state onto the devices of `like`, an abstract state.

        Raises:
          UserError: the checkpoint is damaged, or of another model.
        """
        with _reading(self.folder / str(step)):
            items = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            return self._manager.restore(step, args=items)["state"]

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.close()


_CHECKPOINT = "a workdir, one of its checkpoints, or a directory of Hugging Face's or Google's"


def find(path: str | Path) -> Path:
    """Returns the checkpoint that `path` means: itself, or the best or latest one of a workdir.

    Raises:
      UserError: there is none.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist; give {_CHECKPOINT}")
    # Fine-tuning leaves best, and best.new where it was killed between two renames.
    for folder in (path, path / "best", path / "best.new"):
        if (folder / "state").is_dir():
            return folder
    for folder in (path / "checkpoints", path):
        steps = [p for p in folder.glob("*") if p.name.isdigit() and (p / "state").is_dir()]
        if steps:
            return max(steps, key=lambda p: int(p.name))
    raise UserError(f"{path} holds no checkpoint; give {_CHECKPOINT}")


def write_params(
    path: Path, params: Any, description: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """Writes a checkpoint of parameters alone, which `read_params` reads, at once or not at all.

    Args:
      path: the checkpoint; nothing may be there.
      params: of the model.
      description: the config, as JSON.
      tokenizer: of the model.
    """
    items = ocp.args.Composite(
        state=ocp.args.PyTreeSave({"params": params}),
        config=ocp.args.JsonSave(description),
        tokenizer=ocp.args.JsonSave(tokenizer.to_json()),
    )
    state = ocp.PyTreeCheckpointHandler(save_concurrent_gb=_concurrent_gb(params))
    text = ocp.JsonCheckpointHandler()
    items_handler = ocp.CompositeCheckpointHandler(state=state, config=text, tokenizer=text)
    with ocp.Checkpointer(items_handler) as writer:
        writer.save(path.absolute(), args=items)


def read_json(checkpoint: Path, item: str) -> dict[str, Any]:
    """Returns the config or the tokenizer of a checkpoint.

    Raises:
      UserError: the checkpoint lacks it, or is damaged.
    """
    try:
        return json.loads((checkpoint / item / "metadata").read_text())
    except (OSError, ValueError) as error:
        raise _damaged(checkpoint, error) from error


def read_params(checkpoint: Path, like: Any, optional: Sequence[str] = ()) -> Any:
    """Reads a checkpoint's parameters alone, as arrays like the abstract ones of `like`.

    Args:
      checkpoint: as `find` gives it.
      like: nested dictionaries of the shapes wanted.
      optional: parts, such as "bert/pooler", that are left out where the checkpoint lacks them.

    Raises:
      UserError: the checkpoint is damaged, or of another model.
    """
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    folder = checkpoint.absolute() / "state"
    absent = tuple(f"{part}/" for part in optional)
    with _reading(checkpoint):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            described = reader.metadata(folder).item_metadata
        if described is None:
            raise ValueError("what its state holds is not known")
        stored: Any = traverse_util.flatten_dict(described.tree["params"], sep="/")
        absent = tuple(part for part in absent if not any(name.startswith(part) for name in stored))
        wanted = {}
        asked: Any = traverse_util.flatten_dict(like, sep="/")
        for name, leaf in asked.items():
            if name.startswith(absent):
                continue
            # Orbax reads what it is asked for, whatever the shape of what is there.
            if tuple(stored[name].shape) != leaf.shape:
                raise ValueError(f"{name} is {stored[name].shape}")
            wanted[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        target = {"params": traverse_util.unflatten_dict(wanted, sep="/")}
        handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_concurrent_gb(target))
        with ocp.Checkpointer(handler) as reader:
            restored = reader.restore(
                folder,
                args=ocp.args.PyTreeRestore(
                    item=target,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                    partial_restore=True,
                ),
            )
    return restored["params"]


def _concurrent_gb(params: Any) -> Any:
    """Returns what may be read or written at a time, so that memory stays near the parameters'.

    Orbax refuses an array larger than it. Declared as whole numbers, it takes any.
    """
    largest = max(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))
    return max(0.1, 1.1e-9 * largest)


@contextlib.contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Makes an error of reading one of the user's, and the only thing that is printed of it.

    At the first error Orbax closes its event loop. TensorStore's other reads, which end later, find
    it closed, and Python would print as much of each, and what they found that nobody asked for.
    """
    sys.unraisablehook = _unless_late
    level = _asyncio.level
    _asyncio.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # TensorStore and Orbax raise nearly every kind
        raise _damaged(checkpoint, error) from error
    sys.unraisablehook = _unraisable
    _asyncio.setLevel(level)


_unraisable = sys.unraisablehook
_asyncio = logging.getLogger("asyncio")


def _unless_late(unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        _unraisable(unraisable)


def _damaged(checkpoint: Path, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [repr(error)])[0][:160]
    return UserError(
        f"checkpoint {checkpoint} cannot be read ({reason}); move it away to go on from an earlier "
        "one"
    )

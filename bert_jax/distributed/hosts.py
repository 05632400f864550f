"""The processes of a run, on one host or on many: how they meet, agree, and end as one.

JAX's own runtime joins their devices; what they tell each other goes by `line`.
"""

import dataclasses
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jaxlib.version
from absl import flags

from bert_jax.distributed import line as line_lib
from bert_jax.distributed.line import Line
from bert_jax.errors import CommandError, Interrupted, UserError
from bert_jax.settings import flatten

ADDRESS = flags.DEFINE_string("coordinator_address", None, "HOST:PORT of process 0.")
PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes the run has.")
PROCESS = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")
TIMEOUT = flags.DEFINE_float("connect_timeout", 120.0, "Seconds to wait for the other processes.")

# One of these is set where a pod of Kubernetes may be one of several processes.
_OF_SEVERAL_PODS = {
    "JOB_COMPLETION_INDEX",
    "OMPI_MCA_orte_hnp_uri",
    "SLURM_JOB_ID",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_ADDRESSES_PATH",
    "TPU_WORKER_HOSTNAMES",
}

T = TypeVar("T")
_line: Line | None = None
_checkpoints: Path | None = None


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of this process in a run.

    Attributes:
      address: HOST:PORT of the first process.
      number: of processes.
      index: of this one.
      devices: numbers of the host's devices that are its own; None for all.
    """

    address: str
    number: int
    index: int
    devices: Sequence[int] | None = None


def connect() -> None:
    """Joins the processes of the run, if there are several; before anything else is asked of JAX.

    They are those of the flags, or of the cluster that JAX detects: a TPU pod, Slurm, Kubernetes
    or Open MPI.

    Raises:
      UserError: a flag is missing or wrong.
      HostLost: not all processes come.
    """
    global _line
    place = _place_by_flags()
    if place is None and PROCESSES.value is None:  # which may be 1, whatever the cluster
        place = _place_in_cluster()
    if place is None:
        return
    if place.index == 0:
        _line = line_lib.receive_all(place.address, place.number, TIMEOUT.value, _advice)
    else:
        _line = line_lib.call(place.address, place.number, place.index, TIMEOUT.value, _advice)
    devices = place.devices
    if _line.names.count(_line.names[place.index]) == 1:
        devices = None  # under Slurm JAX gives a process one device, were it alone on its host
    jax.distributed.initialize(
        place.address,
        place.number,
        place.index,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        shutdown_timeout_seconds=30,  # all have agreed to end when this begins
    )


def _place_by_flags() -> _Place | None:
    address, number, index = ADDRESS.value, PROCESSES.value, PROCESS.value
    if number == 1 or (address is None and number is None and index is None):
        return None
    if address is None or number is None or index is None:
        raise UserError(f"the processes of a run need all of {_FLAGS}")
    if not 0 <= index < number:
        raise UserError(f"--process_id is {index} of --num_processes {number}; they count from 0")
    line_lib.port_of(address)
    return _Place(address, number, index)


_FLAGS = "--coordinator_address, --num_processes and --process_id"


def _place_in_cluster() -> _Place | None:
    """Returns the place that JAX's own detection finds; None for a process on its own."""
    # Two that the detection does not know: a shell in a Slurm allocation, where SLURM_NTASKS counts
    # what srun has yet to start; and a pod that belongs to no indexed job.
    if os.environ.get("SLURM_STEP_NUM_TASKS") == "1":
        return None
    if "KUBERNETES_SERVICE_HOST" in os.environ and not _OF_SEVERAL_PODS & set(os.environ):
        return None
    # jax.distributed.initialize() would detect the same, but aborts where a process does not come,
    # and tells nobody the address: the processes must meet before. There is no public name for it.
    from jax._src.clusters import ClusterEnv

    try:
        address, number, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, int(TIMEOUT.value)
        )
    except Exception as error:  # of whatever client the cluster needs
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"the cluster that this host seems to be of cannot be used ({reason}); give {_FLAGS}, "
            "or --num_processes=1 to run here alone"
        ) from error
    if address is None or number is None or index is None or number == 1:
        return None
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        devices = None  # it goes before what was detected
    return _Place(address, number, index, devices)


def count() -> int:
    """Returns the number of processes."""
    return len(_line.names) if _line else 1


def is_main() -> bool:
    """Whether this is the process that prints, and writes what only one may write."""
    return _line is None or _line.index == 0


def print_on_main(text: str) -> None:
    """Prints a line, on the first process alone."""
    if is_main():
        print(text, flush=True)


def gather(value: Any) -> list[Any]:
    """Returns what each process gives, as JSON can hold it, in their order, once all have."""
    return _line.gather(value) if _line else [value]


def broadcast_from_main(find: Callable[[], T]) -> T:
    """Returns on every process what the first one finds, which JSON must be able to hold."""
    return gather(find() if is_main() else None)[0]


def run_on_all_hosts(action: Callable[[], T]) -> T:
    """Runs an action on every process, and returns what it gives here once all have run it.

    Raises:
      UserError: it failed on one of them; the line names that host and its reason.
    """
    if _line is None:
        return action()
    result: Any = None
    error = None
    try:
        result = action()
    except CommandError as caught:
        error = caught
    found = _line.gather(error and str(error))
    if all(text is None for text in found):
        return result
    if len(set(found)) == 1:  # nothing to do with any one host
        raise UserError(found[0]) from error
    texts = [f"{_line.name(i)}: {text}" for i, text in enumerate(found) if text is not None]
    raise UserError("; ".join(texts)) from error


def check_same(values: Mapping[str, Any], do: str) -> None:
    """Refuses to go on where a value is not the same on all processes.

    Args:
      values: by name.
      do: what mends it.

    Raises:
      UserError: one is not the same; the line names it and a host.
    """
    if _line is None:
        return
    first, *others = gather({k: json.dumps(v, default=repr) for k, v in values.items()})
    for who, theirs in enumerate(others, 1):
        for name in first | theirs:
            here, there = first.get(name), theirs.get(name)
            if here != there:
                raise UserError(
                    f"the hosts differ: {name} is {here} on {_line.name(0)} and {there} on "
                    f"{_line.name(who)}; {do}"
                )


def check_same_run(config: Any, **given: Any) -> None:
    """Refuses processes whose config, other flags, code, JAX or devices differ.

    Raises:
      UserError: they do; the line names what differs, and a host.
    """
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parents[1].rglob("*.py")), Path(sys.argv[0])]:
        digest.update(path.name.encode() + path.read_bytes())
    devices = jax.local_devices()
    values = {
        "the code": digest.hexdigest()[:16],
        "the version of JAX": f"{jax.__version__}, jaxlib {jaxlib.version.__version__}",
        **{f"--{name}": value for name, value in given.items()},
        **flatten(config),
        "what devices there are": f"{len(devices)} × {devices[0].device_kind}",
    }
    check_same(values, "start the same command with the same code on each")


def keep_checkpoints_in(folder: Path) -> None:
    """Notes where the run's checkpoints are, for the message when a host is lost."""
    global _checkpoints
    _checkpoints = folder


def _advice() -> str:
    there = _checkpoints.iterdir() if _checkpoints and _checkpoints.exists() else ()
    steps = [int(path.name) for path in there if path.name.isdigit()]
    kept = f"the last checkpoint, {_checkpoints}/{max(steps)}" if steps else "the beginning"
    return f"start the command again on all hosts: it goes on from {kept}"


def run(main: Callable[[], None]) -> None:
    """Runs a command as one of several processes: they end together.

    An error on one of them that the others do not have stops these too, with its message.
    """
    try:
        main()
    except Interrupted:
        _leave(0)  # as all have agreed to; each takes as long as its checkpoint does
        raise
    except CommandError as error:
        _leave(error.exit_code, str(error))
        raise
    except KeyboardInterrupt:
        if not _leave(130, "interrupted"):
            line_lib.end_at_once("interrupted", 130)
        raise
    except Exception as error:
        if _line is None:
            raise
        # A collective fails where another process is lost, which the line will tell.
        time.sleep(line_lib.GRACE / 2)
        traceback.print_exc()
        _leave(1, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        os._exit(1)
    _leave(0)


def _leave(code: int, reason: str = "") -> bool:
    """Ends with the other processes, and returns whether all of them have come to an end."""
    if _line is None:
        return True
    if not _line.leave(code, reason):
        return False  # JAX would wait for the others
    jax.distributed.shutdown()
    return True

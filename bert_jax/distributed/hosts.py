"""Multi-host runs: connect the processes, exchange small values, end together.

JAX's distributed runtime connects them. The values are in the key-value store of its coordination
service in process 0: unlike a collective it can be waited for by the hour, and needs no devices.
"""

import hashlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import jaxlib.version

# There is no public name for the client of the coordination service. Orbax uses this one too.
from jax._src.distributed import global_state

from bert_jax import console
from bert_jax.config import recipes
from bert_jax.config.settings import flatten
from bert_jax.console import Level
from bert_jax.errors import CommandError, HostLost, Interrupted, TrainingError, UserError
from bert_jax.storage.json_files import write_text

# JAX takes a process for lost after so long without a sign of it, and aborts the others.
HEARTBEAT_SECONDS = 30
# A process has so long to report an error of its own before another one's error ends it.
_GRACE_SECONDS = 2.0
_STOPPED = "bert_jax/stopped"
_KINDS = {kind.exit_code: kind for kind in (UserError, TrainingError, Interrupted, HostLost)}

T = TypeVar("T")
_calls = itertools.count()
_watcher: threading.Thread | None = None
_ending = threading.Lock()  # taken by the thread that ends this process, and never released


def connect(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    connect_timeout: float = 120.0,
) -> None:
    """Connect the processes of the run, if there are several, before JAX is used."""
    global _watcher
    # On a TPU pod, under Slurm, in Kubernetes and under Open MPI nothing need be said.
    detect = coordinator_address is None and num_processes is None and process_id is None
    if num_processes == 1 or (detect and _runs_alone()):
        return
    if coordinator_address:
        _check_address(coordinator_address, bind=process_id == 0)
    text = (
        f"not all processes connected to {coordinator_address or 'process 0'} within "
        f"{connect_timeout:g} s; start them, or check --num_processes, --process_id and the port"
    )
    # At its own timeout JAX aborts with a C++ trace. This one comes first.
    timer = threading.Timer(connect_timeout, _exit, [text, HostLost.exit_code])
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            # All devices. By default JAX would choose one.
            local_device_ids=[] if _has_whole_node() else None,
            cluster_detection_method=None if detect else "deactivate",
            initialization_timeout=int(connect_timeout) + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except Exception as error:  # a cluster's own client may raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if detect and reason.startswith("coordinator_address"):
            return  # JAX detected no cluster
        address = global_state.coordinator_address or "other processes"
        # What a cluster does not say yet, it may say later.
        is_refused = "API Error: 40" in reason  # 401 and 403 of Kubernetes: a right is missing
        is_mistake = not detect or is_refused or isinstance(error, ValueError | TypeError)
        raise (UserError if is_mistake else HostLost)(
            f"cannot connect to {address} ({reason}); set all of --coordinator_address, "
            "--num_processes and --process_id, or --num_processes=1 to run this process alone"
        ) from error
    finally:
        timer.cancel()
    if count() == 1:  # a cluster of one
        jax.distributed.shutdown()
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:  # of Python, in place of JAX's, which only notes the signal
            signal.signal(signal.SIGTERM, handler)
        return
    _watcher = threading.Thread(target=_watch, daemon=True)
    _watcher.start()
    check_same({"--num_processes": count()}, "start all with the same number")


def _check_address(address: str, *, bind: bool) -> None:
    """Check that an address is HOST:PORT and, on process 0, that the port is free."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--coordinator_address is {address!r}; set HOST:PORT of process 0")
    try:
        if bind:  # JAX may crash if it cannot
            socket.create_server(("", int(port))).close()
    except OSError as error:
        raise UserError(f"cannot open port {port} ({error}); choose another one") from error


def _runs_alone() -> bool:
    """Return whether this process is alone, though JAX would detect a cluster."""
    # Under Slurm, the daemons of mpirun are a step of their own.
    if size := os.environ.get("OMPI_COMM_WORLD_SIZE"):
        return size == "1"
    # In a shell of a Slurm allocation SLURM_NTASKS counts what srun has yet to start.
    if os.environ.get("SLURM_STEP_NUM_TASKS") == "1":
        return True
    several = ("JOB_COMPLETION_INDEX", "OMPI_", "SLURM_JOB_ID", "TPU_")
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    return is_pod and not any(name.startswith(several) for name in os.environ)


def _has_whole_node() -> bool:
    """Return whether this is the only process of Slurm or Open MPI on its node.

    Not where the user has set which devices are its own, in a variable that JAX reads.
    """
    if os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return False
    if local := os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        return local == "1"
    nodes = os.environ.get("SLURM_STEP_NUM_NODES", "")
    return nodes == os.environ.get("SLURM_STEP_NUM_TASKS")


def count() -> int:
    """Return the number of processes."""
    return global_state.num_processes


def is_main() -> bool:
    """Return whether this is process 0, which prints and writes what only one may write."""
    return global_state.process_id == 0


def print_on_main(text: str, level: Level = Level.PROGRESS) -> None:
    """Print a line on process 0."""
    if is_main():
        console.show(text, level)


def warn_on_main(text: str) -> None:
    """Print a warning on process 0."""
    if is_main():
        console.warn(text)


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, as JSON, once all have made the same calls as this."""
    if count() == 1:
        return [value]
    key = f"bert_jax/{next(_calls)}"
    if not is_main():
        _set(f"{key}/{global_state.process_id}", value)
    return broadcast_from_main(
        lambda: [value, *(_get(f"{key}/{index}") for index in range(1, count()))]
    )


def broadcast_from_main(function: Callable[[], T]) -> T:
    """Return on every process what the function returns on process 0, which must be JSON."""
    if count() == 1:
        return function()
    key = f"bert_jax/{next(_calls)}"
    if is_main():
        _set(key, function())
    return _get(key)


def run_on_all_hosts(action: Callable[[], T]) -> T:
    """Return an action's result once all processes have run it; raise an error of one on all.

    What is raised ends each process with the exit code of the first that failed.
    """
    if count() == 1:
        return action()
    result: Any = None
    error = None
    try:
        result = action()
    except CommandError as caught:
        error = caught
    outcomes = gather([socket.gethostname(), error and str(error), error and error.exit_code])
    texts = [text for _, text, _ in outcomes]
    if not any(texts):
        return result
    kind = next(_KINDS[code] for *_, code in outcomes if code)
    if len(set(texts)) == 1:  # the same mistake on all hosts
        raise kind(texts[0]) from error
    failed = [f"host {i} ({name}): {text}" for i, (name, text, _) in enumerate(outcomes) if text]
    raise kind("; ".join(failed)) from error


def write_on_main(path: Path, content: str) -> None:
    """Write a file under a temporary name and rename it; only the first host does."""
    if is_main():
        write_text(path, content)


def run_on_main(action: Callable[[], T]) -> T | None:
    """Run an action on process 0 alone while the others wait; raise an error of it on all."""
    return run_on_all_hosts(lambda: action() if is_main() else None)


def result_from_main(action: Callable[[], T]) -> T:
    """Return on every process what `run_on_main` returns on process 0, which must be JSON."""
    result: Any = run_on_main(action)
    return broadcast_from_main(lambda: result)


def check_same(values: Mapping[str, Any], fix: str) -> None:
    """Refuse named values that differ between processes; `fix` is what to do about it."""
    texts = {name: json.dumps(value, default=repr) for name, value in values.items()}
    (main_host, main), *others = gather([socket.gethostname(), texts])
    for index, (host, other) in enumerate(others, 1):
        for name in main | other:
            if main.get(name) != other.get(name):
                first = f"{main.get(name)} on host 0 ({main_host})"
                second = f"{other.get(name)} on host {index} ({host})"
                raise UserError(f"the hosts differ: {name} is {first} and {second}; {fix}")


def check_same_command(config: Any, flags: Mapping[str, Any]) -> None:
    """Check that the config, other flags, code, JAX and devices are the same on all processes.

    It is the first thing that a run does: what it waits for next may depend on its settings.
    """
    if count() == 1:
        return
    devices = jax.local_devices()
    values = {
        "the code of bert_jax": _digest(Path(__file__).parents[1].rglob("*.py")),
        "the code of the recipe, or of files beside it": _digest(recipes.source_files()),
        **{f"--{name}": value and str(value) for name, value in flags.items()},
        **flatten(config),
    }
    check_same(values, "start the same command with the same code on each")
    versions = f"{jax.__version__}, jaxlib {jaxlib.version.__version__}"
    check_same({"the version of JAX": versions}, "install the same one on each")
    number_and_kind = f"{len(devices)} × {devices[0].device_kind}"
    check_same({"the number and kind of devices": number_and_kind}, "use hosts of the same devices")


def _digest(files: Iterable[Path]) -> str:
    """Return a hash of files by their names and contents, wherever they are."""
    contents = sorted((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files)
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]


def run(main: Callable[[], None]) -> None:
    """Run a command as one of several processes, which an error on one of them ends together."""
    try:
        main()
    except Interrupted:  # raised by all, after the same step
        _disconnect()
        raise
    except (CommandError, KeyboardInterrupt) as error:
        _disconnect(str(error) or "interrupted", getattr(error, "exit_code", 130))
        raise
    except Exception as error:
        if count() == 1:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if not _ending.locked():
            # A collective fails where another process is lost: then JAX aborts this one too.
            note = f"if another host was lost, JAX aborts within {HEARTBEAT_SECONDS} s"
            print(f"{reason}; {note}", file=sys.stderr, flush=True)
            time.sleep(HEARTBEAT_SECONDS + 10)
            traceback.print_exc()
        _disconnect(reason, 1)
        os._exit(1)
    _disconnect()


def _disconnect(reason: str = "", code: int = 0) -> None:
    """Disconnect from the other processes: when all have come to the end, or to end them too."""
    if count() == 1:
        return
    if code == 0:
        gather(None)
    _ending.acquire()
    if code != 0:
        _set(_STOPPED, [global_state.process_id, socket.gethostname(), reason, code])
    _shut_down()
    if _watcher and code == 0:
        _watcher.join(HEARTBEAT_SECONDS)  # Python aborts if it ends while a thread is within JAX


def _watch() -> None:
    """End this process when another one has stopped with an error."""
    try:
        index, host, reason, code = _get(_STOPPED, 7 * 24 * 3600)
    except jax.errors.JaxRuntimeError:
        return  # disconnected
    time.sleep(_GRACE_SECONDS)
    _ending.acquire()
    _shut_down()
    _exit(f"host {index} ({host}) stopped: {reason}", code)


def _shut_down() -> None:
    with suppress(jax.errors.JaxRuntimeError):  # another process was lost
        jax.distributed.shutdown()


def _set(key: str, value: Any) -> None:
    client: Any = global_state.client
    client.key_value_set(key, json.dumps(value), allow_overwrite=True)


def _get(key: str, seconds: int = 5) -> Any:
    """Return a value once it is set. Signals are noticed only every so many seconds."""
    client: Any = global_state.client
    while True:
        try:
            return json.loads(client.blocking_key_value_get(key, 1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _exit(text: str, code: int) -> NoReturn:
    """End the process with a line on stderr, whatever its main thread waits for."""
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)
    os._exit(code)

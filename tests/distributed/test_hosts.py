"""Several processes on this machine, as on several hosts: they agree, fail, are lost and resume."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jax
import numpy as np
import pytest
from helpers import model_config, random_bert, refused
from jax._src import distributed
from training_runs import pretraining_flags, read_state, records

from bert_jax.commands import main as commands
from bert_jax.config import DataConfig, TokenizerConfig
from bert_jax.distributed import hosts as hosts_lib
from bert_jax.errors import HostLost, TrainingError, UserError
from bert_jax.text import prepare as prepare_lib
from bert_jax.text.store import open_store

ROOT = Path(__file__).parents[2]
STEPS = 16
HEARTBEAT = 8  # seconds, of runs in which a host is killed


@pytest.fixture(scope="module")
def store(tiny_text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "store"
    data = DataConfig(source=str(tiny_text), eval_fraction=0.1)
    prepare_lib.prepare(data, TokenizerConfig(kind="wordpiece"), 66, folder)
    return folder


def train(store: Path | str, workdir: Path | str) -> list[str]:
    changes = [f"steps={STEPS}", "log_every=1", f"eval_every={STEPS}", "checkpoint.every=4"]
    flags = pretraining_flags(store, *changes, "parallel.fsdp=2")
    return [str(ROOT / "train.py"), f"--workdir={workdir}", *flags]


class Host:
    """A process that prints to files."""

    running: ClassVar[list["Host"]] = []

    def __init__(self, command: list[str], devices: int, folder: Path, **environment: str):
        flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
        self._files = [folder.parent / f"{len(self.running)}.{name}" for name in ("out", "err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={
                    **os.environ,
                    "XLA_FLAGS": flags,
                    "PYTHONPATH": f"{folder}:{ROOT}",
                    **environment,
                },
                stdout=out,
                stderr=err,
                cwd=folder,
            )
        self.running.append(self)

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + 240
        while not (match := re.search(pattern, self.out)):
            assert self.process.poll() is None, self.out + self.err
            assert time.monotonic() < deadline, self.out
            time.sleep(0.02)
        return match


@pytest.fixture
def folder(tmp_path):
    """A folder to start processes in; none of them outlives the test."""
    folder = tmp_path / "folder"
    folder.mkdir()
    # tensorboardX imports PyTorch where it is installed, which takes seconds.
    (folder / "torch.py").write_text("raise ImportError")
    yield folder
    for host in Host.running:
        host.process.kill()
        host.process.wait()
    Host.running.clear()


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def start(command: list[str], devices: int, *folders: Path, own: str = "") -> list[Host]:
    """Start a process in each folder, told by flags who it is; the last has a flag of its own."""
    number = len(folders)
    flags = [f"--coordinator_address=localhost:{free_port()}", f"--num_processes={number}"]
    commands = [[*command, *flags, f"--process_id={i}"] for i in range(number)]
    commands[-1] += [own] if own else []
    return [Host(each, devices, folder) for each, folder in zip(commands, folders, strict=True)]


def start_in_slurm(command: list[str], number: int, devices: int, folder: Path) -> list[Host]:
    """Start processes as srun does, where nothing but the environment tells them who they are."""
    common = {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(number),
        "SLURM_STEP_NUM_TASKS": str(number),
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    return [
        Host(command, devices, folder, **common, SLURM_PROCID=str(i), SLURM_LOCALID=str(i))
        for i in range(number)
    ]


def end(hosts: list[Host]) -> tuple[list[int], list[list[str]]]:
    """Return the exit codes of processes, and the lines of this program's own on stderr."""
    codes = [host.process.wait(timeout=240) for host in hosts]
    lines = [host.err.splitlines() for host in hosts]
    return codes, [[text for text in each if text.split(":")[0].endswith(".py")] for each in lines]


def params(workdir: Path) -> dict[str, np.ndarray]:
    state = read_state(workdir, STEPS)
    return {name: value for name, value in state.items() if "params" in name.partition("]")[0]}


SHORT_HEARTBEAT = f"""
import runpy, sys
from bert_jax.distributed import hosts
hosts.HEARTBEAT_SECONDS = {HEARTBEAT}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_killed_stopped_and_resumed_elsewhere(store, folder, tmp_path):
    """Killed and stopped on two hosts, ended on one: as two do that are left alone."""
    command = train(store, tmp_path / "run")
    killed = start(["-c", SHORT_HEARTBEAT, *command], 2, folder, folder)
    killed[0].wait_for("step 4/")
    while not (tmp_path / "run/checkpoints/4").exists():  # until then its name is a temporary one
        assert killed[0].process.poll() is None, killed[0].err
        time.sleep(0.02)
    killed[1].process.send_signal(signal.SIGKILL)
    since = time.monotonic()
    # While the heartbeat is awaited.
    whole = start(train(store, tmp_path / "whole"), 2, folder, folder)
    codes, lines = end(killed)
    assert codes == [-signal.SIGABRT, -signal.SIGKILL], lines
    assert time.monotonic() - since < HEARTBEAT + 10
    # By JAX's heartbeat, or before it by a sum over the hosts, which the killed one has left.
    assert "unhealthy" in killed[0].err or "gloo" in killed[0].err

    stopped = start_in_slurm(command, 2, 2, folder)
    step = int(stopped[0].wait_for(r"from step (\d+)")[1])  # before its first step
    stopped[1].process.send_signal(signal.SIGTERM)
    codes, lines = end(stopped)
    assert codes == [75, 75], lines
    assert lines[0] == lines[1]
    assert lines[0][0].startswith("train.py: a signal to one of the hosts after step ")
    saved = max(int(path.name) for path in (tmp_path / "run/checkpoints").iterdir())
    assert 4 <= step <= saved < STEPS

    resumed = Host(command, 4, folder)
    codes, lines = end([*whole, resumed])
    assert codes == [0, 0, 0], lines
    assert f"from step {saved}" in resumed.out
    assert ") on 2 hosts, mesh (data 2, fsdp 2" in whole[0].out
    assert "NSP accuracy" in whole[0].out
    assert "step" not in whole[1].out

    values, expected = params(tmp_path / "run"), params(tmp_path / "whole")
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-5, err_msg=name)
    for one, other in zip(records(tmp_path / "run"), records(tmp_path / "whole"), strict=True):
        assert (one["step"], one["split"]) == (other["step"], other["split"])
        for name in ("loss", "mlm_accuracy", "nsp_accuracy"):
            assert one[name] == pytest.approx(other[name], rel=1e-5)


SCRIPT = """
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from bert_jax.commands import process
from bert_jax.config import ParallelConfig
from bert_jax.errors import UserError
from bert_jax.distributed import hosts
from bert_jax.distributed.mesh import make_mesh, process_indices

address, number, index = (word.split("=")[1] for word in sys.argv[-3:])


def check_slices(mesh):
    batch = np.arange(48).reshape(16, 3)
    local = batch[process_indices(mesh, 16)]
    sharding = NamedSharding(mesh, P(("data", "fsdp")))
    array = jax.make_array_from_process_local_data(sharding, local)
    assert array.shape == batch.shape
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, batch[shard.index])
    return len(local)


def fail_on_the_second():
    if not hosts.is_main():
        raise UserError("the file is missing")


def agree():
    assert hosts.gather(hosts.is_main()) == [True, False]
    assert hosts.broadcast_from_main(lambda: "first" if hosts.is_main() else "second") == "first"
    assert hosts.run_on_all_hosts(lambda: 7) == 7
    try:
        hosts.run_on_all_hosts(fail_on_the_second)
    except UserError as error:
        print("told", error, flush=True)
    shapes = [(8, 1, 1), (2, 2, 2), (1, 2, 4), (1, 1, 8)]
    read = [check_slices(make_mesh(ParallelConfig(*shape))) for shape in shapes]
    mixed = [d for pair in zip(jax.devices()[:4], jax.devices()[4:]) for d in pair]
    read.append(check_slices(make_mesh(ParallelConfig(), mixed)))
    print("read", read, flush=True)


def main():
    hosts.connect(address, int(number), int(index))
    if "fail" in sys.argv:
        agree()
        fail_on_the_second()
    print("connected", flush=True)
    time.sleep(60 if hosts.is_main() else 0)
    hosts.gather(None)


process.run(lambda: hosts.run(main), "script.py")
"""


def test_agreement_and_an_error_of_one_host(folder):
    (folder / "script.py").write_text(SCRIPT)
    two = start(["script.py", "fail"], 4, folder, folder)
    codes, lines = end(two)
    name = socket.gethostname()
    for host in two:
        assert f"told host 1 ({name}): the file is missing" in host.out
        # Of 16 sequences: on a mesh of 1 × 1 × 8 every process needs all.
        assert "read [8, 8, 8, 16, 8]" in host.out
    assert codes == [2, 2]
    assert lines[0] == [f"script.py: host 1 ({name}) stopped: the file is missing"]
    assert lines[1] == ["script.py: the file is missing"]


def test_the_loss_of_the_first_host(folder):
    """The coordination service is in it: JAX aborts the others at once."""
    (folder / "script.py").write_text(SCRIPT)
    two = start(["script.py"], 1, folder, folder)
    for host in two:
        host.wait_for("connected")
    two[0].process.send_signal(signal.SIGKILL)
    since = time.monotonic()
    assert end(two)[0] == [-signal.SIGKILL, -signal.SIGABRT]
    assert time.monotonic() - since < HEARTBEAT


@pytest.mark.parametrize("differs", ["config", "vocabulary", "files"])
def test_hosts_that_differ(tiny_text, store, folder, tmp_path, differs):
    """Both stop with the same line: in a field of the config, or where one lacks the store."""
    (folder / "store").symlink_to(store)
    (tmp_path / "other").mkdir()
    folders = (folder, tmp_path / "other") if differs == "files" else (folder, folder)
    command = [*train("store", tmp_path / "run"), "--config.parallel.fsdp=1"]
    if differs == "vocabulary":
        config = model_config(vocab_size=66, num_hidden_layers=1)
        random_bert(config, open_store(store).tokenizer).save(folder / "init")
        command += ["--init=init", f"--config.data.source={tiny_text}"]
    fields = {"config": "optimizer.b1=0.8", "vocabulary": "tokenizer.add=5"}
    own = f"--config.{fields[differs]}" if differs in fields else ""
    codes, lines = end(start(command, 1, *folders, own=own))
    assert codes == [2, 2]
    assert lines[0] == lines[1]
    name = socket.gethostname()
    message = {
        "config": f"the hosts differ: --config.optimizer.b1 is 0.9 on host 0 ({name}) and 0.8 on",
        "vocabulary": f"differ: --config.tokenizer.add is 0 on host 0 ({name}) and 5 on host 1",
        "files": f"train.py: host 1 ({name}): data source store does not exist",
    }
    assert message[differs] in lines[0][0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("has_store", [True, False])
def test_a_store_that_differs_beside_plain_text(tiny_text, store, folder, tmp_path, has_store):
    """Plain text is on host 0 alone; of the store each host has to have a copy."""
    (folder / "store").symlink_to(store)
    (folder / "text.txt").write_bytes(tiny_text.read_bytes() + b"The end.\n")
    (tmp_path / "other").mkdir()
    tokenizer = open_store(store).tokenizer
    data = DataConfig(source=str(tiny_text), eval_fraction=0.2)
    if has_store:
        prepare_lib.prepare(data, tokenizer, 66, tmp_path / "other/store")
    command = train("store@0.5,text.txt@0.5", tmp_path / "run")
    codes, lines = end(start(command, 1, folder, tmp_path / "other"))
    assert codes == [2, 2], lines
    assert lines[0] == lines[1]
    message = "the hosts differ: the text of --config.data.source is "
    if not has_store:
        message = f"host 1 ({socket.gethostname()}): data source store does not exist"
    assert message in lines[0][0]


@pytest.mark.slow
def test_fine_tuning_on_two_hosts(store, folder, monkeypatch):
    """Every example is predicted once, and as the checkpoint does by itself."""
    config = model_config(vocab_size=66, num_hidden_layers=1)
    random_bert(config, open_store(store).tokenizer).save(folder / "init")
    for name, count in (("train", 12), ("eval", 7)):
        lines = [f"{'river bank' if i % 2 else 'token'}\t{i % 2}\n" for i in range(count)]
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    fields = ["data.train=train.tsv", "data.eval=eval.tsv", "data.max_length=8", "epochs=1"]
    fields += ["data.batch_size=4", "optimizer.learning_rate=0.01"]
    recipe = ROOT / "configs/finetune/classification.py"
    command = [str(ROOT / "finetune.py"), f"--config={recipe}", "--init=init", "--workdir=run"]
    command += [f"--config.{field}" for field in fields]
    assert end(start(command, 1, folder, folder)) == ([0, 0], [[], []])
    words = ["bert-jax", "predict", "run", "eval.tsv", "--output=again"]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", words)
    commands.main()
    of_two, again = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("run/predictions.jsonl", "again.jsonl")
    )
    assert len(of_two) == 7
    for one, other in zip(of_two, again, strict=True):
        assert one["prediction"] == other["prediction"]
        assert one["probability"] == pytest.approx(other["probability"], rel=1e-4)


@pytest.mark.parametrize("kind", [UserError, TrainingError])
def test_an_error_of_one_host_keeps_its_kind(monkeypatch, kind):
    def fail():
        raise kind("the disk is full")

    monkeypatch.setattr(hosts_lib, "count", lambda: 2)
    monkeypatch.setattr(hosts_lib, "gather", lambda value: [["first", None, None], value])
    with pytest.raises(kind, match=r"host 1 \(.*\): the disk is full"):
        hosts_lib.run_on_all_hosts(fail)


def test_a_host_that_does_not_come(folder):
    program = "from bert_jax.distributed import hosts; hosts.connect('localhost:{}', 2, {}, 1.0)"
    ports = [free_port(), free_port()]
    two = [Host(["-c", program.format(ports[i], i)], 1, folder) for i in range(2)]
    codes, _ = end(two)
    assert codes == [69, 69]  # a cluster starts it again
    for host, port in zip(two, ports, strict=True):
        (line,) = host.err.splitlines()
        assert f"not all processes connected to localhost:{port} within 1 s" in line


@pytest.fixture
def state(monkeypatch):
    """JAX's state of a process that is not connected, as it is again after the test."""
    for name in ("process_id", "num_processes", "coordinator_address"):
        monkeypatch.setattr(hosts_lib.global_state, name, getattr(hosts_lib.global_state, name))
    # The public one refuses to work once JAX has been used.
    monkeypatch.setattr(jax.distributed, "initialize", hosts_lib.global_state.initialize)


def test_a_port_that_is_taken(state):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot open port {port} .*; choose another one"):
            hosts_lib.connect(f"localhost:{port}", 2, 0)


@pytest.mark.parametrize(
    ("arguments", "key_words"),
    [
        (("localhost", 2, 0), "'localhost'; set HOST:PORT of process 0"),
        (("localhost:8476", 2, 2), "process_id=2, num_processes=2"),
        (("localhost:²", 2, 0), "'localhost:²'; set HOST:PORT of process 0"),
        (("localhost:8476", None, 1), "set all of --coordinator_address"),
    ],
)
def test_wrong_arguments(state, arguments, key_words):
    with refused(key_words):
        hosts_lib.connect(*arguments)


@pytest.mark.parametrize(
    ("environment", "is_alone", "has_node"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, False, True),
        ({"OMPI_COMM_WORLD_SIZE": "24", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, False, False),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True, True),
        ({}, True, True),
    ],
)
def test_mpirun_within_slurm(monkeypatch, environment, is_alone, has_node):
    """Its daemons are a step of one task on each node."""
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (step | environment).items():
        monkeypatch.setenv(name, value)
    assert hosts_lib._runs_alone() == is_alone
    assert hosts_lib._has_whole_node() == has_node


def test_a_cluster_of_one_ends_by_sigterm():
    """JAX's handler, which connecting installs, only notes the signal."""
    code = (
        "import os, signal, time; from bert_jax.distributed import hosts; "
        "hosts._runs_alone = lambda: False; hosts.connect(); "  # as on a TPU, which may be alone
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)"
    )
    rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    rank |= {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    rank |= {"OMPI_MCA_orte_hnp_uri": f"1.0;tcp://127.0.0.1:{free_port()}"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **rank})
    assert done.returncode == -signal.SIGTERM


SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (SLURM, ("node07:62674", 2, None)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "12"}, ("node07:62674", 2, "0")),  # four on each node
        ({**SLURM, "JAX_LOCAL_DEVICE_IDS": "1"}, ("node07:62674", 2, "1")),  # by the user
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),  # salloc's shell
        ({"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"}, None),  # sbatch's
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
)
def test_the_place_in_a_cluster(monkeypatch, state, environment, place):
    clusters = ("SLURM_", "KUBERNETES_", "JAX_COORD", "OMPI_", "TPU_", "JOB_COMPLETION_INDEX")
    for name in [name for name in os.environ if name.startswith(clusters)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def connect_client(address: str, index: int, **_: object) -> None:
        raise ConnectionError(f"as process {index}")

    runtime = SimpleNamespace(get_distributed_runtime_client=connect_client)
    monkeypatch.setattr(distributed, "_jax", runtime)
    updates: dict[str, str] = {}
    monkeypatch.setattr(distributed.config, "update", updates.__setitem__)
    if place is None:
        hosts_lib.connect()
        assert hosts_lib.count() == 1
    else:
        address, index, devices = place
        with pytest.raises(HostLost, match=f"cannot connect to {address} .as process {index}"):
            hosts_lib.connect()
        assert updates.get("jax_cuda_visible_devices") == devices

"""Several processes on this machine, as on several hosts: killed, stopped, misled, and agreed."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags as absl_flags
from flax import linen as nn
from flax import traverse_util
from helpers import model_config

from bert_jax import bert as pretrained
from bert_jax.commands import flags as cli
from bert_jax.config import DataConfig, TokenizerConfig
from bert_jax.distributed import hosts as hosts_lib
from bert_jax.distributed import line as line_lib
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForPreTraining
from bert_jax.text import prepare as prepare_lib
from bert_jax.text.store import open_store

ROOT = Path(__file__).parents[2]
STEPS = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """Sentences of ten words."""
    folder = tmp_path_factory.mktemp("text")
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    generator = np.random.default_rng(0)
    with (folder / "text.txt").open("w") as file:
        for _ in range(60):
            for _ in range(6):
                file.write(" ".join(generator.choice(words, generator.integers(4, 10))) + "\n")
            file.write("\n")
    data = DataConfig(source=str(folder / "text.txt"), eval_fraction=0.1)
    prepare_lib.prepare(data, TokenizerConfig(kind="wordpiece"), 66, folder / "store")
    return folder / "store"


def train(store: Path | str, workdir: Path | str) -> list[str]:
    config = {
        "steps": STEPS,
        "log_every": 1,
        "eval_every": STEPS,
        "model.vocab_size": 66,
        "model.hidden_size": 16,
        "model.num_hidden_layers": 1,
        "model.num_attention_heads": 2,
        "model.intermediate_size": 32,
        "model.max_position_embeddings": 32,
        "data.source": store,
        "data.max_length": 32,
        "data.batch_size": 16,
        "optimizer.learning_rate": 1e-3,
        "checkpoint.every": 4,
        "parallel.fsdp": 2,
    }
    given = [f"--config.{name}={value}" for name, value in config.items()]
    return [str(ROOT / "train.py"), f"--workdir={workdir}", *given]


class Host:
    """A process, with what it prints and when."""

    running: ClassVar[list["Host"]] = []

    def __init__(self, words: list[str], devices: int, cwd: Path, **environment: str):
        flags = f"--xla_force_host_platform_device_count={devices}"
        flags += " --xla_backend_optimization_level=0"  # half of the time is the compiler's
        self.process = subprocess.Popen(
            [sys.executable, *words],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": flags,
                "PYTHONPATH": str(ROOT),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self.ended = 0.0
        self._readers = [
            threading.Thread(target=self._read, args=pair)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()
        self.running.append(self)

    def _read(self, stream, lines: list[str]) -> None:
        for line in stream:
            lines.append(f"{time.monotonic():.1f} {line}")
        stream.close()
        self.ended = time.monotonic()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 240
        while not any(text in line for line in self.out):
            assert self.process.poll() is None, "".join(self.err)
            assert time.monotonic() < deadline, "".join(self.out)
            time.sleep(0.01)

    def end(self) -> tuple[int, list[str]]:
        """Returns its exit code, and the lines of this program's own on stderr."""
        code = self.process.wait(timeout=240)
        for reader in self._readers:
            reader.join()
        said = [line.split(" ", 1)[1].rstrip("\n") for line in self.err]
        return code, [line for line in said if line.split(":")[0].endswith(".py")]


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    for host in Host.running:
        host.process.kill()
        host.process.wait()
    Host.running.clear()


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def start(words: list[str], number: int, devices: int, cwd: Path) -> list[Host]:
    """Starts processes that are told by flags who they are."""
    more = [f"--coordinator_address=localhost:{free_port()}", f"--num_processes={number}"]
    return [Host([*words, *more, f"--process_id={i}"], devices, cwd) for i in range(number)]


def end(hosts: list[Host]) -> tuple[list[int], list[list[str]]]:
    """Returns the exit codes of processes, and the lines that they ended with."""
    found = [host.end() for host in hosts]
    return [code for code, _ in found], [lines for _, lines in found]


def under_slurm(words: list[str], number: int, devices: int, cwd: Path) -> list[Host]:
    """Starts processes as srun does, where nothing but the environment tells them who they are."""
    common = {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(number),
        "SLURM_STEP_NUM_TASKS": str(number),
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    return [
        Host(words, devices, cwd, **common, SLURM_PROCID=str(i), SLURM_LOCALID=str(i))
        for i in range(number)
    ]


def records(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def params(workdir: Path) -> dict[str, np.ndarray]:
    path = workdir / "checkpoints" / str(STEPS) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        names = reader.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        state = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return traverse_util.flatten_dict(state["params"], sep="/")


def test_lost_stopped_and_resumed_on_other_hosts(store, tmp_path, monkeypatch):
    """Killed on four hosts, stopped on two, ended on two others: as if nothing had happened."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    command = train(store, tmp_path / "run")
    four = start(command, 4, 2, tmp_path)
    four[0].wait_for("step 6/")
    killed = time.monotonic()
    four[2].process.send_signal(signal.SIGKILL)
    codes, lines = end(four)
    assert codes == [69, 69, -signal.SIGKILL, 69]
    for host, said in zip(four, lines, strict=True):
        if host is not four[2]:
            assert host.ended - killed < 15
            (line,) = said
            name = socket.gethostname()
            assert line.startswith(f"train.py: host 2 ({name}) was lost; start the command again")
            assert f"goes on from the last checkpoint, {tmp_path}/run/checkpoints/" in line

    two = start(command, 2, 4, tmp_path)
    two[0].wait_for("resuming from step 4")  # before its first step
    two[1].process.send_signal(signal.SIGTERM)
    codes, lines = end(two)
    assert codes == [75, 75]
    ((first,), (second,)) = lines
    assert first == second
    assert first.startswith("train.py: SIGTERM or SIGINT on one of the hosts after step ")
    saved = max(int(p.name) for p in (tmp_path / "run/checkpoints").iterdir())

    slurm = under_slurm(command, 2, 4, tmp_path)
    codes, lines = end(slurm)
    assert codes == [0, 0], lines
    assert any(f"resuming from step {saved}" in line for line in slurm[0].out)
    assert any("8 × cpu (cpu) on 2 hosts, mesh (data 4, fsdp 2" in line for line in slurm[0].out)
    assert any("NSP accuracy" in line for line in slurm[0].out)
    assert not any("step" in line or "devices" in line for line in slurm[1].out)
    (tmp_path / "log.txt").write_text(log({"four": four, "two": two, "slurm": slurm}))

    alone = Host(train(store, tmp_path / "alone"), 8, tmp_path)
    assert alone.end() == (0, [])
    found, wanted = params(tmp_path / "run"), params(tmp_path / "alone")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=name)
    for one, other in zip(records(tmp_path / "run"), records(tmp_path / "alone"), strict=True):
        assert (one["step"], one["split"]) == (other["step"], other["split"])
        for name in ("loss", "mlm_accuracy", "nsp_accuracy"):
            assert one[name] == pytest.approx(other[name], rel=1e-5)


def log(runs: dict[str, list[Host]]) -> str:
    """Returns what each process of some runs printed, with the seconds from the first line on."""
    lines = []
    for name, hosts in runs.items():
        for index, host in enumerate(hosts):
            for text in [*host.out, *host.err]:
                stamp, said = text.split(" ", 1)
                lines.append((float(stamp), f"{name} host {index}: {said}"))
            lines.append((host.ended, f"{name} host {index} ended: {host.process.returncode}\n"))
    lines.sort(key=lambda line: line[0])
    return "".join(f"{stamp - lines[0][0]:7.1f} {text}" for stamp, text in lines)


SCRIPT = """
import sys
import time

import jax
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec as P

from bert_jax import cli
from bert_jax.config import ParallelConfig
from bert_jax.errors import UserError
from bert_jax.distributed import hosts
from bert_jax.distributed.mesh import make_mesh, process_slices


def check_rows(mesh):
    whole = np.arange(48).reshape(16, 3)
    own = np.concatenate([whole[low:high] for low, high in process_slices(mesh, 16)])
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    made = jax.make_array_from_process_local_data(rows, own)
    assert made.shape == whole.shape
    for shard in made.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
    return len(own)


def fail_on_the_second():
    if not hosts.is_main():
        raise UserError("it is not here")
    return 7


def main():
    flags.FLAGS(sys.argv)
    hosts.connect()
    assert hosts.gather(hosts.is_main()) == [True, False]
    assert hosts.broadcast_from_main(lambda: "first" if hosts.is_main() else "second") == "first"
    assert hosts.run_on_all_hosts(lambda: 7) == 7
    try:
        hosts.run_on_all_hosts(fail_on_the_second)
    except UserError as error:
        print("told", error, flush=True)
    shapes = [(8, 1, 1), (2, 2, 2), (1, 2, 4), (1, 1, 8)]
    read = [check_rows(make_mesh(ParallelConfig(*shape))) for shape in shapes]
    mixed = [d for pair in zip(jax.devices()[:4], jax.devices()[4:]) for d in pair]
    read.append(check_rows(make_mesh(ParallelConfig(), mixed)))
    print("read", read, flush=True)
    hosts.gather(None)
    time.sleep(60)


cli.run(lambda: hosts.run(main))
"""


def test_rows_agreement_and_the_loss_of_the_first_host(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    two = start([str(tmp_path / "script.py")], 2, 4, tmp_path)
    for host in two:
        # Of 16 rows: on a mesh of 1 × 1 × 8 every process needs all.
        host.wait_for("read [8, 8, 8, 16, 8]")
        assert any(f"told host 1 ({socket.gethostname()}): it is not here" in s for s in host.out)
    killed = time.monotonic()
    two[0].process.send_signal(signal.SIGKILL)
    codes, lines = end(two)
    assert codes == [-signal.SIGKILL, 69]
    assert two[1].ended - killed < 15
    assert len(lines[1]) == 1
    assert "was lost; start the command again on all hosts: it goes on from the" in lines[1][0]


FAILS = """
import sys

from absl import flags

from bert_jax import cli
from bert_jax.errors import UserError
from bert_jax.training import hosts


def main():
    flags.FLAGS(sys.argv)
    hosts.connect()
    if not hosts.is_main():
        raise UserError("no such file")
    hosts.gather(None)


cli.run(lambda: hosts.run(main))
"""


def test_an_error_of_one_host_alone_stops_the_others(tmp_path):
    (tmp_path / "script.py").write_text(FAILS)
    codes, lines = end(start([str(tmp_path / "script.py")], 2, 1, tmp_path))
    assert codes == [2, 2]
    name = socket.gethostname()
    assert lines[0] == [f"script.py: host 1 ({name}) stopped: no such file"]
    assert lines[1] == ["script.py: no such file"]


def test_hosts_with_other_configs(store, tmp_path):
    command = train(store, tmp_path / "run")
    two = []
    address = f"--coordinator_address=localhost:{free_port()}"
    for index, more in enumerate(([], ["--config.optimizer.b1=0.8"])):
        words = [*command, *more, address, "--num_processes=2", f"--process_id={index}"]
        two.append(Host(words, 1, tmp_path))
    codes, lines = end(two)
    assert codes == [2, 2]
    assert lines[0] == lines[1]
    assert "the hosts differ: optimizer.b1 is 0.9 on host 0 (" in lines[0][0]
    assert ") and 0.8 on host 1 (" in lines[0][0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_fine_tuning_on_two_hosts(store, tmp_path, monkeypatch):
    """Every example is predicted once, and as the checkpoint does by itself."""
    tokenizer = open_store(store).tokenizer
    config = model_config(vocab_size=66, num_hidden_layers=1)
    model = BertForPreTraining(config)
    weights = nn.unbox(jax.jit(model.init_params)(jax.random.key(0)))
    pretrained.save(pretrained.Bert(config, weights, tokenizer, model), tmp_path / "init")
    for name, count in (("train", 12), ("eval", 7)):
        lines = [f"{'one two' if i % 2 else 'nine'}\t{i % 2}\n" for i in range(count)]
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    settings = {
        "data.train": "train.tsv",
        "data.eval": "eval.tsv",
        "data.max_length": 8,
        "data.batch_size": 4,
        "epochs": 1,
        "optimizer.learning_rate": 0.01,
    }
    recipe = ROOT / "configs/finetune/classification.py"
    command = [str(ROOT / "finetune.py"), f"--config={recipe}", "--init=init", "--workdir=run"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    assert end(start(command, 2, 1, tmp_path)) == ([0, 0], [[], []])
    words = ["bert-jax", "predict", "run", "eval.tsv", "--output=again"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", words)
    cli.main()
    of_two, again = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("run/predictions.jsonl", "again.jsonl")
    )
    assert len(of_two) == 7
    for one, other in zip(of_two, again, strict=True):
        assert one["prediction"] == other["prediction"]
        assert one["probability"] == pytest.approx(other["probability"], rel=1e-4)


def test_a_host_that_lacks_the_store(store, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "store").symlink_to(store)
    command = [*train("store", tmp_path / "run"), "--num_processes=2", "--config.parallel.fsdp=1"]
    command.append(f"--coordinator_address=localhost:{free_port()}")
    two = [Host([*command, f"--process_id={i}"], 1, folder) for i, folder in enumerate(folders)]
    codes, lines = end(two)
    assert codes == [2, 2]
    assert lines[0] == lines[1]
    name = socket.gethostname()
    assert lines[0][0].startswith(f"train.py: host 1 ({name}): data source store does not exist")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_does_not_come(store, tmp_path, index):
    address = f"localhost:{free_port()}"
    words = [f"--coordinator_address={address}", "--num_processes=2", f"--process_id={index}"]
    code, lines = Host([*train(store, "run"), *words, "--connect_timeout=2"], 1, tmp_path).end()
    assert code == 69  # a cluster starts it again
    assert len(lines) == 1
    assert address in lines[0]
    assert ("of 2 processes, 1 did not come" in lines[0]) == (index == 0)
    assert ("cannot be reached" in lines[0]) == (index == 1)
    assert list(tmp_path.iterdir()) == []


def meet(*of_others: tuple[int, int]) -> list[str]:
    """Has a process 0 of three called by others, each (index, number); returns their errors."""
    address, found = f"localhost:{free_port()}", []

    def run(act, *args) -> None:
        try:
            act(address, *args, 3.0, str)
        except UserError as error:
            found.append(str(error))

    calls = [(line_lib.receive_all, 3), *((line_lib.call, n, i) for i, n in of_others)]
    threads = [threading.Thread(target=run, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_processes_that_do_not_fit():
    found = meet((1, 4))
    assert len(found) == 2
    assert "process 1 of 4" in found[0]
    assert found[0] == found[1]
    assert all("mend --num_processes and --process_id" in text for text in meet((1, 3), (1, 3)))


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(UserError, match="cannot be opened on this host"):
            line_lib.receive_all(address, 2, 1.0, str)


SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        (SLURM, ("node07:62674", 3, 2)),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # salloc's shell
        ({"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"}, None),  # sbatch's
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
)
def test_the_place_in_a_cluster(monkeypatch, environment, found):
    clusters = ("SLURM_", "KUBERNETES_", "JAX_COORD", *hosts_lib._OF_SEVERAL_PODS)
    for name in [name for name in os.environ if name.startswith(clusters)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    absl_flags.FLAGS.mark_as_parsed()
    place = hosts_lib._place_in_cluster()
    assert (place and (place.address, place.number, place.index)) == found

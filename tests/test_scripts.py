"""The scripts in examples/, and the docs' commands on many devices, as far as one machine can."""

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from absl import flags
from training.test_hosts import SLURM

from bert_jax import config as config_lib
from bert_jax import settings
from bert_jax.commands import flags as cli
from bert_jax.config import FinetuneConfig, TrainConfig
from bert_jax.distributed import hosts
from bert_jax.planning import targets

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch"))
DOCS = [ROOT / f"docs/{name}.md" for name in ("scaling", "hosts", "benchmark")]
KINDS = {"train.py": TrainConfig, "finetune.py": FinetuneConfig}
DEFAULTS = {"train.py": "configs/tiny.py"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_syntax(path):
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--exclude=SC1091", path], check=True)


def gke() -> tuple[dict, dict, dict, dict]:
    """Returns the claim and the set of jobs, and of the latter the job's and the pod's specs."""
    claim, job_set = yaml.safe_load_all((EXAMPLES / "gke.yaml").read_text())
    (job,) = job_set["spec"]["replicatedJobs"]
    return claim, job_set, job["template"]["spec"], job["template"]["spec"]["template"]["spec"]


def test_gke():
    claim, job_set, job, pod = gke()
    assert (claim["kind"], job_set["kind"]) == ("PersistentVolumeClaim", "JobSet")
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (mount,) = container["volumeMounts"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mount["name"] == volume["name"]
    inside = [w for w in container["command"] if f"={mount['mountPath']}/" in w]
    assert [w.split("=")[0] for w in inside] == ["--workdir", "--config.data.source"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert pod["restartPolicy"] == "Never"  # without which Kubernetes takes no such policy
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert int(rows) * int(columns) == job["parallelism"] * chips == job["completions"] * chips
    said = (EXAMPLES / "gke.yaml").read_text().split("apiVersion")[0]
    assert f"jobset-name={job_set['metadata']['name']}," in said


def test_the_image_has_what_training_needs():
    text = (EXAMPLES / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for word in line.split()]
    assert all((ROOT / word).exists() for word in copied)
    assert {"bert_jax", "configs", "pyproject.toml", "train.py"} <= set(copied)


def commands() -> list[list[str]]:
    """Returns each command of this package, in the examples and in the docs' blocks of bash."""
    texts = [path.read_text() for path in SCRIPTS]
    for path in DOCS:
        texts += re.findall(r"^```bash\n(.*?)^```", path.read_text(), re.M | re.S)
    found = [gke()[-1]["containers"][0]["command"][1:]]
    for line in "\n".join(texts).replace("\\\n", " ").splitlines():
        if re.search(r"\b(train\.py|finetune\.py|bert-jax) ", line):
            words = shlex.split(line, comments=True)
            first = next((i for i, w in enumerate(words) if w in (*KINDS, "bert-jax")), len(words))
            last = next((i for i, w in enumerate(words) if i > first and w == "||"), len(words))
            found += [words[first:last]] if words[first:last] else []
    return found


def test_every_command_is_one(capsys, monkeypatch):
    found = commands()
    assert {words[0] for words in found} == {*KINDS, "bert-jax"}
    assert len(found) >= 12
    for words in found:
        if words[0] == "bert-jax":
            monkeypatch.setattr(sys, "argv", [*words[:2], "--help"])
            with pytest.raises(SystemExit):
                cli.main()
            known = set(re.findall(r"--([a-z-]+)", capsys.readouterr().out))
            kind = TrainConfig
        else:
            text = (ROOT / words[0]).read_text()
            known = {"config", *re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', text)}
            known |= {f.name for f in flags.FLAGS.flags_by_module_dict()[hosts.__name__]}
            kind = KINDS[words[0]]
        given: dict[str, str] = {}
        fields: dict[str, str] = {}
        for word in words:
            if word.startswith("--"):
                name, _, value = word[2:].partition("=")
                of = fields if name.startswith("config.") else given
                of[name.removeprefix("config.")] = value
        assert given.keys() <= known, words
        if words[1] != "prepare":
            _check(given.get("config", DEFAULTS.get(words[0], "")), fields, kind)
        for name in filter(None, given.get("topology", "").split(",")):
            targets._parse(name)


def _check(recipe: str, fields: dict[str, str], kind: type) -> None:
    """Checks that a recipe gives a config, and that the fields set make a valid one."""
    path, _, argument = recipe.partition(":")
    spec = importlib.util.spec_from_file_location("recipe", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*filter(None, [argument]))
    assert isinstance(config, kind)
    for name, value in fields.items():
        *groups, last = name.split(".")
        holder = config
        for group in groups:
            holder = getattr(holder, group)
        before = getattr(holder, last)
        setattr(holder, last, value if isinstance(before, str) else ast.literal_eval(value))
    if kind is TrainConfig:
        config_lib.validate(config)


def test_every_field_named_is_one():
    known = settings.flatten(TrainConfig()) | settings.flatten(FinetuneConfig())
    for path in (*SCRIPTS, *DOCS, EXAMPLES / "gke.yaml"):
        text = path.read_text()
        named = re.findall(r"--config\.([\w.]+)", text)
        named += re.findall(r"`((?:parallel|model|data|optimizer|checkpoint)\.[a-z_]+)\b", text)
        assert set(named) - {"FIELD"} <= known.keys(), path.name
        for name in re.findall(r"examples/[\w.]+", text):
            assert (ROOT / name).exists(), name


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(script: Path, folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    """Runs a script among programs that stand in for others; returns its code, and what it calls.

    They are in `folder`/bin.
    """
    for name in ("gcloud", "scontrol", "pip", "bert-jax", "sudo", "uv", "curl"):
        if not (folder / "bin" / name).exists():
            write_program(folder / "bin" / name, f'#!/bin/bash\necho {name} "$@" >> "$CALLS"\n')
    write_program(folder / "bin/sleep", "#!/bin/bash\n")
    path = f"{folder}/bin:{os.environ['PATH']}"
    place = {"PATH": path, "CALLS": str(folder / "calls"), "HOME": str(folder)}
    (folder / "calls").write_text("")
    done = subprocess.run(
        ["bash", script, *words],
        cwd=folder,
        env={**os.environ, **place, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "No such file" not in done.stderr + done.stdout, done.stderr
    return done.returncode, (folder / "calls").read_text()


# As srun does with a batch script's command, on two nodes.
SRUN = """#!/bin/bash
[[ $1 == --cpus-per-task=32 ]] || exit 99
shift
for i in 0 1; do SLURM_PROCID=$i SLURM_STEP_NUM_TASKS=2 "$@" & done
wait -n || exit
wait -n
"""
PLACE = f"""#!{sys.executable}
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from absl import flags
from bert_jax.training import hosts
flags.FLAGS.mark_as_parsed()
place = hosts._place_in_cluster()
with open(f"process-{{place.index}}.json", "w") as file:
    json.dump([sys.argv[1:], place.address, place.number], file)
sys.exit(int(os.environ["CODE"]))
"""
CODE = '#!/bin/bash\nexit "$CODE"\n'


def test_slurm(tmp_path):
    """The processes find each other; what can go on is queued again, a mistake is not."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    write_program(tmp_path / "bin/srun", SRUN)
    write_program(tmp_path / "bin/python", PLACE)
    of_job = {**SLURM, "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "32"}
    script = EXAMPLES / "slurm.sbatch"
    assert run(script, tmp_path, **of_job, CODE="0") == (0, "")
    for index in range(2):
        words, address, number = json.loads((tmp_path / f"process-{index}.json").read_text())
        assert (words[0], address, number) == ("train.py", "node07:62674", 2)
    write_program(tmp_path / "bin/python", CODE)
    again = "scontrol requeue 1234\n"
    for code, calls in {2: "", 1: "", 69: again, 75: again, 134: again, 137: again}.items():
        assert run(script, tmp_path, **of_job, CODE=str(code)) == (code, calls)
    of_job["SLURM_RESTART_COUNT"] = "100"
    assert run(script, tmp_path, **of_job, CODE="69") == (69, "")


# What is described comes line by line from a file, and so do the exit codes of training.
GCLOUD = """#!/bin/bash
next() { head -n 1 "$1"; sed -i 1d "$1"; }
echo "$*" >> "$CALLS"
case "$*" in
  *" describe "*) state=$(next states); [[ $state ]] && echo "$state" ;;
  *tpu_host.sh*) exit "$(next codes)" ;;
esac
"""


@pytest.mark.parametrize(("last", "code"), [("0", 0), ("102", 102)])
def test_tpu_pod(tmp_path, last, code):
    """Preempted in the second attempt; another slice is asked for, and goes on."""
    write_program(tmp_path / "bin/gcloud", GCLOUD)
    write_program(tmp_path / "bin/git", "#!/bin/bash\n")
    states = ["", "WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE", "SUSPENDED", "", "ACTIVE"]
    (tmp_path / "states").write_text("\n".join(states) + "\n")
    (tmp_path / "codes").write_text(f"69\n255\n{last}\n")
    found, calls = run(EXAMPLES / "tpu_pod.sh", tmp_path)
    assert found == code
    done = re.findall(r"compute tpus (?:queued-resources|tpu-vm) (\w+)", calls)
    attempt = ["describe", "scp", "ssh", "ssh"]
    wanted = ["describe", "create", "describe", *attempt, *attempt, "describe", "delete"]
    wanted += ["describe", "create", *attempt, *(["delete"] if code == 0 else [])]
    assert done == wanted
    for line in calls.splitlines():
        assert " --zone=us-west4-a" in line
        assert (" --worker=all" in line) == (" tpu-vm " in line)


@pytest.mark.parametrize(("code", "given"), [(0, 0), (1, 101), (2, 102), (69, 69)])
def test_tpu_host(tmp_path, code, given):
    script = tmp_path / "bert-jax/examples/tpu_host.sh"
    write_program(script, (EXAMPLES / "tpu_host.sh").read_text())
    write_program(tmp_path / "bin/mountpoint", "#!/bin/bash\nexit 1\n")
    write_program(tmp_path / "bin/pkill", "#!/bin/bash\nexit 1\n")
    write_program(tmp_path / ".local/bin/uv", '#!/bin/bash\necho uv "$@" >> "$CALLS"\n')
    write_program(tmp_path / "bert-jax/.venv/bin/python", CODE)
    found, calls = run(script, tmp_path, "10.0.0.2:/share", CODE=str(code))
    assert found == given
    assert "sudo mount -t nfs 10.0.0.2:/share /mnt/bert\n" in calls
    assert calls.endswith("uv pip install --quiet -e .[tpu]\n")


def test_node(tmp_path):
    script = tmp_path / "examples/node.sh"
    write_program(script, (EXAMPLES / "node.sh").read_text())
    write_program(tmp_path / "bin/python", '#!/bin/bash\necho python "$@" >> "$CALLS"\n')
    code, calls = run(script, tmp_path)
    assert code == 0
    assert [line.split()[:2] for line in calls.splitlines()] == [
        ["pip", "install"],
        ["bert-jax", "prepare"],
        ["python", "train.py"],
    ]

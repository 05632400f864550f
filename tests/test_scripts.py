"""The scripts in examples/ and benchmarks/, as far as one machine can."""

import ast
import importlib
import re
import shutil
import subprocess
import types
from pathlib import Path

import command_lines
import pytest
import yaml

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch"))
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_syntax(path):
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--exclude=SC1091", path], check=True)


def gke() -> tuple[dict, dict, dict, dict]:
    """Return the volume claim, the set of jobs, and the specs of its job and its pod."""
    claim, _ = yaml.safe_load_all((EXAMPLES / "volume.yaml").read_text())
    job_set = yaml.safe_load((EXAMPLES / "gke.yaml").read_text())
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
    assert pod["restartPolicy"] == "Never"  # Kubernetes requires it for such a policy
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert int(rows) * int(columns) == job["parallelism"] * chips == job["completions"] * chips
    comment = (EXAMPLES / "gke.yaml").read_text().split("apiVersion")[0]
    assert f"jobset-name={job_set['metadata']['name']}," in comment


def prepare_job() -> tuple[dict, dict]:
    """Return the specs of the job that prepares shards and of its pod."""
    job = yaml.safe_load((EXAMPLES / "prepare.yaml").read_text())["spec"]
    return job, job["template"]["spec"]


def test_shards():
    """Each task prepares the shard of its number, of as many as there are tasks."""
    job, pod = prepare_job()
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == gke()[0]["metadata"]["name"]
    assert container["command"][-1] == f"--shard=$({container['env'][0]['name']})/256"
    assert job["completions"] == 256 >= job["parallelism"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    text = (EXAMPLES / "prepare.sbatch").read_text()
    assert "#SBATCH --array=0-255\n" in text
    assert text.endswith('--shard="$SLURM_ARRAY_TASK_ID/256"\n')


def test_the_image_has_what_training_needs():
    text = (EXAMPLES / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for word in line.split()]
    assert all((ROOT / word).exists() for word in copied)
    assert {"bert_jax", "configs", "pyproject.toml", "train.py"} <= set(copied)


def commands() -> list[list[str]]:
    """Return what follows `bert-jax` in each command of the examples."""
    commands = [pod["containers"][0]["command"] for pod in (gke()[-1], prepare_job()[-1])]
    for path in SCRIPTS:
        for words in command_lines.split(path.read_text()):
            names = [word.rpartition("/")[2] for word in words]
            first = next((i for i, n in enumerate(names) if n in ("python", "bert-jax")), None)
            commands += [] if first is None else [names[first : first + 1] + words[first + 1 :]]
    return list(filter(None, map(command_lines.bert_jax_words, commands)))


def test_every_command_is_valid(bert_jax_main, monkeypatch):
    listed = commands()
    assert len(listed) == 7
    for words in listed:
        command_lines.check(words, bert_jax_main, monkeypatch)


def exit_of(script: str, code: int, restarts: int = 0) -> tuple[int, str]:
    """Return what a script exits with, and prints, once training has ended with a code."""
    text = (EXAMPLES / script).read_text()
    text = "set -euo pipefail\n" + text[text.index("case $code in") :]
    done = subprocess.run(
        ["bash", "-c", f"scontrol() {{ echo $1; }}\ncode={code}\n{text}"],
        env={"SLURM_JOB_ID": "1234", "SLURM_RESTART_COUNT": str(restarts)},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


def blocks() -> list[str]:
    """Return the commands of docs/machines.md that go from the text to the model."""
    text = (ROOT / "docs/machines.md").read_text(encoding="utf-8")
    section = text.split("## From the text to the model")[1].split("\n## ")[0]
    return re.findall(r"^```bash\n(.*?)^```", section, re.M | re.S)


def run_block(block: str, folder: Path) -> list[list[str]]:
    """Run a block where every program but bash is a stand-in; return the words of each call."""
    programs, log = folder / "programs", folder / "calls"
    programs.mkdir()
    for name in ("gcloud", "git", "ssh", "rsync", "kubectl", "docker", "bert-jax", "sleep"):
        # A slice that is asked for is there, and the log ends each word by NUL, each call by two.
        program = programs / name
        program.write_text(
            "#!/bin/sh\n"
            f'{{ printf "%s\\0" "{name}" "$@"; printf "\\0"; }} >> {log}\n'
            'case "$*" in *describe*) echo ACTIVE ;; *terminalState*) echo Completed ;; esac\n'
        )
        program.chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=ROOT, env=environment, check=True)
    calls = log.read_text().split("\0\0")
    return [call.split("\0") for call in calls if call]


@pytest.mark.parametrize("index", range(4))
def test_a_block_from_the_text_to_the_model(index, tmp_path, bert_jax_main, monkeypatch):
    """The run is fetched last, from where the training that the block starts has written it."""
    calls = run_block(blocks()[index], tmp_path)
    texts = [" ".join(call) for call in calls]
    trains = [
        n for n, text in enumerate(texts) if re.search(r"pretrain|examples/(tpu|sl|gke)", text)
    ]
    fetches = [n for n, text in enumerate(texts) if re.search(r"runs/\w+ runs", text)]
    assert len(trains) == len(fetches) == 1
    assert trains < fetches
    ours = [call[1:] for call in calls if call[0] == "bert-jax"]
    for call in calls:
        for words in command_lines.split(call[-1]) if "/bert-jax " in call[-1] else []:
            if (program := ".venv/bin/bert-jax") in words:  # on a host
                rest = words[words.index(program) + 1 :]
                ours.append(command_lines.bert_jax_words(["bert-jax", *rest]))
    assert len(ours) == (2, 0, 1, 0)[index]
    for words in ours:
        command_lines.check(words, bert_jax_main, monkeypatch)


def test_exit_codes():
    """A mistake ends a job; a run that was saved, lost a host or was killed starts again."""
    for code in (0, 1, 2):
        assert exit_of("slurm.sbatch", code) == (code, "")
    for code in (69, 75, 134, 137):
        assert exit_of("slurm.sbatch", code) == (code, "requeue")
    assert exit_of("slurm.sbatch", 134, restarts=100) == (134, "")
    # tpu_pod.sh ends with these, and starts again with the others.
    codes = {code: exit_of("tpu_host.sh", code)[0] for code in (0, 1, 2, 69, 75, 134)}
    assert codes == {0: 0, 1: 101, 2: 102, 69: 69, 75: 75, 134: 134}
    assert "0 | 101 | 102) break" in (EXAMPLES / "tpu_pod.sh").read_text()


def package_attributes(tree: ast.AST) -> dict[str, str]:
    """Return the names of a script that stand for modules of the package, and these modules."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {name: module for name, module in modules.items() if module.startswith("bert_jax")}


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_benchmarks_use_what_the_package_has(path):
    """Their other imports may be missing here, such as PyTorch, so that no script is run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = package_attributes(tree)
    found = {}
    for name, full_name in used.items():
        module, _, attribute = full_name.rpartition(".")
        if module and hasattr(parent := importlib.import_module(module), attribute):
            found[name] = getattr(parent, attribute)
        else:
            found[name] = importlib.import_module(full_name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            value = found.get(node.value.id)
            if isinstance(value, types.ModuleType):
                assert hasattr(value, node.attr), f"{node.value.id}.{node.attr}"

"""The scripts in examples/, and the docs' commands on many devices, as far as one machine can."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bert_jax import config as config_lib
from bert_jax import settings
from bert_jax.commands import flags, main
from bert_jax.config import FinetuneConfig, TrainConfig
from bert_jax.planning import topology

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch"))
DOCS = [ROOT / f"docs/{name}.md" for name in ("scaling", "hosts", "speed", "runs")]
COMMANDS = {"train.py": "pretrain", "finetune.py": "finetune"}
KINDS = (TrainConfig, FinetuneConfig)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_syntax(path):
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--exclude=SC1091", path], check=True)


def gke() -> tuple[dict, dict, dict, dict]:
    """Return the volume claim, the set of jobs, and the specs of its job and its pod."""
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
    assert pod["restartPolicy"] == "Never"  # Kubernetes requires it for such a policy
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert int(rows) * int(columns) == job["parallelism"] * chips == job["completions"] * chips
    comment = (EXAMPLES / "gke.yaml").read_text().split("apiVersion")[0]
    assert f"jobset-name={job_set['metadata']['name']}," in comment


def test_the_image_has_what_training_needs():
    text = (EXAMPLES / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for word in line.split()]
    assert all((ROOT / word).exists() for word in copied)
    assert {"bert_jax", "configs", "pyproject.toml", "train.py"} <= set(copied)


def commands() -> list[list[str]]:
    """Return each command of this package in the examples and in the docs' blocks of bash."""
    texts = [path.read_text() for path in SCRIPTS]
    for path in DOCS:
        texts += re.findall(r"^```bash\n(.*?)^```", path.read_text(), re.M | re.S)
    commands = [gke()[-1]["containers"][0]["command"][1:]]
    for line in "\n".join(texts).replace("\\\n", " ").splitlines():
        if re.search(r"\b(train\.py|finetune\.py|bert-jax) ", line):
            words = shlex.split(line, comments=True)
            programs = (*COMMANDS, "bert-jax")
            first = next((i for i, w in enumerate(words) if w in programs), len(words))
            last = next((i for i, w in enumerate(words) if i > first and w == "||"), len(words))
            commands += [words[first:last]] if words[first:last] else []
    return commands


def test_every_command_is_valid(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    listed = commands()
    assert len(listed) >= 12
    named = [COMMANDS.get(program) or words[0] for program, *words in listed]
    assert {"prepare", "pretrain", "finetune", "plan", "benchmark"} <= set(named)
    for command, (_, *words) in zip(named, listed, strict=True):
        monkeypatch.setattr(sys, "argv", ["bert-jax", command, "--help"])
        with pytest.raises(SystemExit):
            main.main()
        known = set(re.findall(r"--([a-z_-]+)", capsys.readouterr().out))
        fields = [word for word in words if word.startswith("--config.")]
        options = [w[2:].split("=") for w in words if w.startswith("--") and w not in fields]
        values = {option[0]: option[-1] for option in options}
        assert values.keys() <= known, words
        for name in filter(None, values.get("topology", "").split(",")):
            topology.parse(name)
        if fields or "config" in values:
            kind = FinetuneConfig if command == "finetune" else TrainConfig
            recipe = flags.read_config(values.get("config", "tiny"), fields, kind)
            if kind is TrainConfig:
                config_lib.validate(recipe.config)


def test_every_field_named_exists():
    known = {field.name for kind in KINDS for field in settings.fields(kind())}
    for path in (*SCRIPTS, *DOCS, EXAMPLES / "gke.yaml"):
        text = path.read_text()
        named = re.findall(r"--config\.([\w.]+)", text)
        named += re.findall(r"`((?:parallel|model|data|optimizer|checkpoint)\.[a-z_]+)\b", text)
        assert set(named) - {"FIELD"} <= known, path.name
        for name in re.findall(r"examples/[\w.]+", text):
            assert (ROOT / name).exists(), name


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

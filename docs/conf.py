"""The documentation as a site: `sphinx-build -W -n docs docs/_build`, with the `docs` extra."""

import os
import re
import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import bert_jax  # noqa: E402

_metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "bert-jax"
release = version = bert_jax.__version__
extensions = ["myst_parser"]
exclude_patterns = ["_build", "images"]
source_suffix = {".md": "markdown"}
highlight_language = "text"
nitpicky = True
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"bert-jax {release}"
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
        path = path.relative_to(ROOT).as_posix()
        if app.config.repository:
            return f"[{text}]({app.config.repository}/blob/main/{path}{anchor and '#' + anchor})"
        if path.endswith(text.strip("`")):
            return f"`{path}`"
        in_brackets = match.string[: match.start()].endswith("(")
        return f"{text}: `{path}`" if in_brackets else f"{text} (`{path}`)"

    fence = r"^(?:```.*?^```|~~~.*?^~~~)"
    parts = re.split(f"({fence})", source[0], flags=re.M | re.S)
    parts[::2] = [re.sub(r"(?<!!)\[([^][]*)\]\((\.\./[^()\s]*)\)", replace, p) for p in parts[::2]]
    source[0] = "".join(parts)


def setup(app):
    """Register what the site has beside Sphinx's own."""
    app.add_config_value("repository", "", "env")
    app.connect("source-read", link_files)

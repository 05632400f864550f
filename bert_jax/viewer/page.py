"""Pages for a browser: one HTML file with its style, its program and its numbers."""

import base64
import gzip
import html
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.storage.paths import file_to_write, on_disk
from bert_jax.storage.replacement import check_replaceable, replacing

_FOLDER = Path(__file__).parent
_VIEWS = ("heads", "heatmap", "model", "neuron", "layers", "masked", "patterns")
_PROGRAM = ("page.js", *(f"page.{name}.js" for name in _VIEWS))
# Browsers read a page of so many bytes of numbers in seconds, and a much larger one not at all.
MAX_BYTES = 200_000_000


def render(data: Mapping[str, Any], arrays: Mapping[str, bytes]) -> str:
    """Return a page.

    Its numbers are in `<script>` elements that a browser does not run: "data" is JSON, and each of
    the arrays has an element with its name as id: base64 of gzip of its bytes.
    """
    # In JSON no tag can start, and a text cannot end the script.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    scripts = [f'<script type="application/json" id="data">{text}</script>']
    for name, content in arrays.items():
        packed = base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()
        scripts.append(f'<script type="application/octet-stream" id="{name}">{packed}</script>')
    page = _read("page.html")
    style, program = _read("page.css"), "\n".join(map(_read, _PROGRAM))
    for name, content in (("STYLE", style), ("PROGRAM", program), ("NUMBERS", "\n".join(scripts))):
        page = content.join(page.split(f"<!-- {name} -->", 1))
    return page


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def frame(page: str) -> str:
    """Return a page as an element of a notebook."""
    style = "width: 100%; height: 48rem; border: 0"
    return f'<iframe srcdoc="{html.escape(page)}" style="{style}"></iframe>'


def check_file(path: str | Path) -> None:
    """Refuse a path that is no file's: that of a folder, which is there or ends in a slash."""
    if os.path.isdir(on_disk(path)) or str(path).endswith("/"):
        raise UserError(f"{path} is a folder; give the path of a file")


def check_output(path: str | Path, *, force: bool) -> None:
    """Refuse a path that exists, unless `force`, or is in no folder that can be written."""
    check_file(path)
    check_replaceable(file_to_write(path), os.path.isfile if force else None)


def write(path: str | Path, content: str, *, force: bool) -> int:
    """Write a file and return its bytes."""
    check_output(path, force=force)
    data = content.encode("utf-8", "replace")
    with replacing(path, os.path.isfile if force else None) as new:
        new.write_bytes(data)
    return len(data)

"""The page as a file: what is in it, and what is not."""

import base64
import dataclasses
import gzip
import json
import re

import numpy as np
import pytest
from views import random_view

HOSTILE = [
    "[CLS]",
    "<script>alert(1)</script>",
    "</script>",
    "<!-- NUMBERS -->",
    "\"'&<b>",
    "\\u003c",
]


@pytest.fixture(scope="module")
def view():
    return random_view(HOSTILE, relative=True)


@pytest.fixture(scope="module")
def content(view, tmp_path_factory):
    return saved(view, tmp_path_factory.mktemp("page"))


def saved(view, folder) -> str:
    path = folder / "page.html"
    view.save(path)
    return path.read_text(encoding="utf-8")


def elements(content: str) -> dict[str, str]:
    return dict(
        re.findall(r'<script type="application/[a-z-]+" id="([^"]+)">(.*?)</script>', content)
    )


def test_fetches_nothing(content):
    own = content.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|\bsrc=|url\(|@import|fetch\(|XMLHttpRequest|import\(", own)
    assert "default-src 'none'" in content
    assert "<!-- STYLE -->" not in content
    assert "<!-- PROGRAM -->" not in content


def test_texts_cannot_end_their_script(content):
    """The tags of the page are its own: none is of a text."""
    data = elements(content)["data"]
    assert "<" not in data
    assert json.loads(data)["texts"][0]["tokens"] == HOSTILE
    assert content.count("</script>") == content.count("<script")


def test_what_a_window_hides_is_in_the_range_of_float16(view, tmp_path):
    """As in a ModernBERT: -10,000, times the root of a head of 64."""
    scores = np.full_like(view.position_scores, -80_000.0)
    with np.errstate(all="raise"):
        content = saved(dataclasses.replace(view, position_scores=scores), tmp_path)
    layer = gzip.decompress(base64.b64decode(elements(content)["layer-0-2"]))
    assert np.float16(-65504).tobytes() * 9 in layer


def test_layers_hold_the_arrays(view, content):
    packed = elements(content)
    length, (layers, heads, _, size) = len(HOSTILE), view.queries.shape
    assert set(packed) == {"data", *(f"layer-0-{i}" for i in range(layers + 1))}
    layer = gzip.decompress(base64.b64decode(packed["layer-0-2"]))
    fields = np.dtype(
        [
            ("cosines", "<i2", (length, length)),
            ("queries", "<f2", (heads, length, size)),
            ("keys", "<f2", (heads, length, size)),
            ("positions", "<f2", (heads, length, length)),
            ("largest", "<f2", (heads, length)),
            ("maps", "u1", (heads, length, length)),
        ]
    )
    (read,) = np.frombuffer(layer, fields)
    similarities = view.similarities()[2]
    np.testing.assert_allclose(read["cosines"] / 32767, similarities, rtol=0, atol=0.6 / 32767)
    for name, array in (("queries", view.queries), ("keys", view.keys)):
        np.testing.assert_allclose(read[name], array[1], rtol=2**-11, atol=1e-7)
    np.testing.assert_allclose(read["positions"], view.position_scores[1], rtol=2**-11, atol=1e-7)
    maps = read["maps"] / 255 * read["largest"][..., None].astype(np.float32)
    half_step = view.maps[1].max(-1, keepdims=True) / 510
    assert (np.abs(maps - view.maps[1]) <= 1.3 * half_step).all()


def test_even_attention_of_a_long_text_is_not_lost(tmp_path):
    """1 / 512 is less than half a 255th."""
    length = 512
    maps = np.full((1, 1, length, length), 1 / length, np.float32)
    vectors = np.zeros((1, 1, length, 2), np.float32)
    view = random_view(["a"] * length, layers=1, heads=1, maps=maps, queries=vectors, keys=vectors)
    layer = gzip.decompress(base64.b64decode(elements(saved(view, tmp_path))["layer-0-1"]))
    assert layer[-length:] == b"\xff" * length


def test_in_a_notebook_the_page_is_one_attribute(view):
    shown = view._repr_html_()
    assert shown.startswith("<iframe ")
    assert shown.count("<") == 2

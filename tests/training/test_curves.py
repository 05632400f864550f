"""Pictures of runs: the loss is largest, and any runs fit into one picture."""

import pytest

from bert_jax.training import curves
from bert_jax.training.curves import Run


def run(name: str, steps: int, nsp: bool, **counters) -> Run:
    records = []
    for step in range(10, steps + 1, 10):
        common = {"step": step, **counters, "loss": 2.0, "mlm_loss": 1.5, "mlm_accuracy": 0.3}
        common |= {"nsp_accuracy": 0.5} if nsp else {}
        records.append(common | {"split": "train", "gradient_norm": 1.0, "learning_rate": 1e-3})
        if step % 20 == 0:
            records.append(common | {"split": "eval", "sequences_per_second": 3.0})
    return Run(name, records, {"mlm_loss": 6.0, "mlm_accuracy": 0.05})


def drawn(monkeypatch, tmp_path, runs, **options):
    """Draw runs; return the figure."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw))
    )
    curves.draw(tmp_path / "curves.png", runs, **options)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    return figures[0]


def test_a_run(monkeypatch, tmp_path):
    figure = drawn(monkeypatch, tmp_path, [run("runs/a $b$ \x1b", 40, True)])
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == [
        "MLM loss (nats)",
        "MLM accuracy",
        "NSP accuracy",
        "learning rate",
        "gradient norm",
    ]
    sizes = {
        title: axes.get_position().width * axes.get_position().height
        for title, axes in panels.items()
    }
    assert max(sizes, key=sizes.__getitem__) == "MLM loss (nats)"
    assert figure.get_suptitle() == r"runs/a \$b\$ ?"
    assert len(panels["MLM loss (nats)"].lines) == 3  # training, held-out, baseline
    assert len(panels["NSP accuracy"].lines) == 2
    figure.canvas.draw()
    labels = [label.get_text() for label in panels["MLM accuracy"].get_yticklabels()]
    assert all(label.endswith("%") for label in labels)
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["training", "held-out", "without a model"]


def test_runs_of_unequal_lengths_and_metrics(monkeypatch, tmp_path):
    runs = [run("_a", 40, True, tokens=3), run("b" * 99, 90, False), run("运行", 10, False)]
    figure = drawn(monkeypatch, tmp_path, runs)
    names = [text.get_text() for text in figure.legends[0].get_texts()][:3]
    assert names == [" _a", "…" + "b" * 60, "运行"]
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert len(panels["NSP accuracy"].lines) == 2
    assert "loss" not in panels
    tuned = Run("tuned", [{"step": 1, "split": "eval", "loss": 1.0, "f1": 0.5}], {})
    titles = [axes.get_title() for axes in drawn(monkeypatch, tmp_path, [*runs, tuned]).axes]
    assert titles[:2] == ["MLM loss (nats)", "loss"]
    figure = drawn(monkeypatch, tmp_path, runs, by="tokens")
    assert len(figure.axes[0].lines) == 3


def test_the_end_table():
    scores = {"mlm_loss": 1.5, "mlm_accuracy": 0.25, "matthews": 0.5, "sequences_per_second": 3.0}
    assert curves.table(scores, {"mlm_loss": 6.0, "mlm_accuracy": 0.05}).splitlines()[2:] == [
        "| MLM loss (nats) | 1.500 | 6.000 |",
        "| MLM accuracy | 25.0% | 5.0% |",
        "| matthews | 0.500 |  |",
    ]


@pytest.mark.parametrize("count", range(1, 9))
def test_panels_fill_the_figure(count):
    from matplotlib.figure import Figure

    figure = Figure()
    panels = list(curves._panels(figure, count))
    assert len(panels) == count
    boxes = [axes.get_subplotspec() for axes in panels]
    cells = sum(len(box.rowspan) * len(box.colspan) for box in boxes)
    rows, columns = boxes[0].get_gridspec().get_geometry()
    assert cells == rows * columns

"""Pictures of a run: every metric has a panel, and the loss the first one."""

import pytest

from bert_jax.training import curves


def records(metrics: dict[str, float]) -> list[dict]:
    """Four logs and two evaluations of a run."""
    found = []
    for step in range(10, 50, 10):
        common = {"step": step, **metrics}
        found.append(common | {"split": "train", "gradient_norm": 1.0, "learning_rate": 1e-3})
        if step % 20 == 0:
            found.append(common | {"split": "eval", "sequences_per_second": 3.0})
    return found


BASELINES = {"mlm_loss": 6.0, "mlm_accuracy": 0.05}
TITLES = {
    "mlm_loss": "MLM loss (nats)",
    "mlm_accuracy": "MLM accuracy",
    "nsp_accuracy": "NSP accuracy",
}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw a run and return the figure."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig

    def save_and_keep(figure, *args, **options):
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", save_and_keep)

    def draw(name, metrics, changes=(), logs=None):
        path, found = tmp_path / "curves.png", records(metrics)[:logs]
        curves.draw(path, name, found, BASELINES, TITLES, changes)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert [each.name for each in tmp_path.iterdir()] == ["curves.png"]
        return figures[-1]

    return draw


def test_a_run(drawn):
    metrics = {"loss": 2.0, "mlm_loss": 1.5, "mlm_loss/wiki": 1.4, "nsp_accuracy": 0.5}
    figure = drawn("runs/a $b$ \x1b", metrics | {"mlm_accuracy": 0.3})
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == [*TITLES.values(), "learning rate", "gradient norm"]
    assert figure.get_suptitle() == r"runs/a \$b\$ ?"
    assert len(panels["MLM loss (nats)"].lines) == 3  # training, held-out, baseline
    assert len(panels["NSP accuracy"].lines) == 2
    figure.canvas.draw()
    labels = [label.get_text() for label in panels["MLM accuracy"].get_yticklabels()]
    assert all(label.endswith("%") for label in labels)
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["training", "held-out", "without a model"]


def test_changes_of_length_are_marked(drawn):
    figure = drawn("run", {"mlm_loss": 1.5}, changes=[5, 15, 1000])  # the records are of 10 to 40
    for axes in figure.axes:
        marks = [line for line in axes.lines if line.get_label() == "another length"]
        assert [line.get_xdata()[0] for line in marks] == [15]
    figure.canvas.draw()
    assert all(tick.get_text().isdigit() for tick in axes.get_xticklabels())
    heights = {axes.get_title(): axes.get_subplotspec() for axes in figure.axes}
    assert heights["gradient norm"].rowspan.start == 1  # below the scores, in a lower row


def test_a_run_of_another_objective_with_a_baseline_that_moves(drawn):
    figure = drawn("运行" + "b" * 99, {"loss": 1.0, "f1": 0.5, "f1_baseline": 0.1})
    assert figure.get_suptitle() == "…" + "b" * 60
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == ["loss", "f1", "learning rate", "gradient norm"]
    assert [len(panels[name].lines) for name in ("loss", "f1")] == [2, 3]


def test_a_single_log_is_seen(drawn):
    """A line of one point is none."""
    figure = drawn("one", {"mlm_loss": 5.0}, logs=1)
    for axes in figure.axes:
        for line in axes.lines:
            assert len(line.get_xdata()) > 1 or line.get_marker() == "o"

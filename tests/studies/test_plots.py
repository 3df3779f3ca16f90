"""The plots: they are drawn without a display, and show what they were given."""

import subprocess
import sys

import numpy as np
import pytest

from raoe_train.studies import plots

pytest.importorskip("matplotlib")

LOG = [
    {
        "loss": 2.0,
        "rank": 1.5,
        "angle": 0.5,
        "learning_rate": 1e-5,
        "grad_norm": 3.0,
        "epoch": 0.1,
        "step": 10,
    },
    {"eval_dev_spearman_cosine": 0.61, "eval_runtime": 1.0, "epoch": 0.1, "step": 10},
    {"loss": 1.0, "rank": 0.75, "angle": 0.25, "learning_rate": 1e-5, "epoch": 0.2, "step": 20},
    {"train_runtime": 5.0, "train_loss": 1.5, "step": 20},
]


@pytest.fixture
def drawn(monkeypatch):
    """The figures as they are saved."""
    figures = []
    real = plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: (figures.append(figure), real(figure, path)))
    return figures


def test_plot_run(drawn, tmp_path):
    plots.plot_run(LOG, tmp_path / "run.png")
    left, right = drawn[0].axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in left.lines}
    assert lines == {
        "loss": ([10, 20], [2.0, 1.0]),
        "angle": ([10, 20], [0.5, 0.25]),
        "rank": ([10, 20], [1.5, 0.75]),
    }
    assert [(line.get_label(), list(line.get_ydata())) for line in right.lines] == [("dev (right)", [61.0])]
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"
    plots.plot_run([], tmp_path / "empty.svg")
    assert b"<svg" in (tmp_path / "empty.svg").read_bytes()


def test_plot_scores_by_label(drawn, tmp_path):
    groups = {
        "entailment": np.full(10, 0.8),
        "neutral": np.array([0.1, 0.2, 0.6]),
        "contradiction": np.array([]),
    }
    plots.plot_scores_by_label(groups, tmp_path / "scores.png")
    names = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert names == ["entailment (10 pairs, mean 0.800)", "neutral (3 pairs, mean 0.300)"]
    with pytest.raises(ValueError, match="groups is empty"):
        plots.plot_scores_by_label({"neutral": np.array([])}, tmp_path / "none.png")


def test_matplotlib_is_not_needed_until_something_is_drawn():
    code = "import sys, raoe_train.studies.plots, raoe_train.jobs.score; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]

"""The plot of a run shows the values of its log."""

import pytest

from raoe_train.training.measures import plot_run

pytest.importorskip("matplotlib")

LOG = [
    {"loss": 2.0, "rank": 1.5, "angle": 0.5, "learning_rate": 1e-5, "grad_norm": 3.0, "epoch": 0.1, "step": 10},
    {"eval_dev_spearman_cosine": 0.61, "eval_runtime": 1.0, "epoch": 0.1, "step": 10},
    {"loss": 1.0, "rank": 0.75, "angle": 0.25, "learning_rate": 1e-5, "epoch": 0.2, "step": 20},
    {"train_runtime": 5.0, "train_loss": 1.5, "step": 20},
]


METRICS = {
    "before": {"spearman": 55.0, "tasks": {"sick": {"spearman": 70.0}}},
    "after": {"spearman": 61.0, "tasks": {"sick": {"spearman": 72.5}, "a$b_c$": {"spearman": None}}},
}


def test_plot_run(drawn, tmp_path):
    plot_run(LOG, METRICS, tmp_path / "run.png")
    top, left, right = drawn[0].axes
    assert [label.get_text() for label in top.get_yticklabels()] == ["dev", "sick", "a$b_c$"]
    assert [[bar.get_width() for bar in bars][:2] for bars in top.containers] == [[55.0, 70.0], [61.0, 72.5]]
    assert [text.get_text() for text in top.texts] == ["55.00", "70.00", "", "61.00", "72.50", ""]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in left.lines}
    values = {"loss": [2.0, 1.0], "angle": [0.5, 0.25], "rank": [1.5, 0.75]}
    assert lines == {name: ([10, 20], numbers) for name, numbers in values.items()}
    assert all(float(place).is_integer() for place in left.get_xticks())
    assert [(line.get_label(), list(line.get_ydata())) for line in right.lines] == [("dev (right)", [61.0])]
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"
    plot_run(LOG, {"before": {}, "after": {}}, tmp_path / "run.svg")
    assert len(drawn[1].axes) == 2 and b"<svg" in (tmp_path / "run.svg").read_bytes()
    assert plot_run(LOG[1:2], METRICS, tmp_path / "nothing.png") == [] and not (tmp_path / "nothing.png").exists()

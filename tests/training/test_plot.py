"""The plot of a run shows the values of its log."""

import pytest

from raoe_train.training.report import plot_run

pytest.importorskip("matplotlib")

LOG = [
    {"loss": 2.0, "rank": 1.5, "angle": 0.5, "learning_rate": 1e-5, "grad_norm": 3.0, "epoch": 0.1, "step": 10},
    {"eval_dev_spearman_cosine": 0.61, "eval_runtime": 1.0, "epoch": 0.1, "step": 10},
    {"loss": 1.0, "rank": 0.75, "angle": 0.25, "learning_rate": 1e-5, "epoch": 0.2, "step": 20},
    {"train_runtime": 5.0, "train_loss": 1.5, "step": 20},
]
DEV = {"before": {"spearman": 55.0}, "after": {"spearman": 61.0}}
TASKS = {
    "before": {"tasks": {"sick": {"spearman": 70.0}}},
    "after": {"tasks": {"sick": {"spearman": 72.5}, "a$b_c$": {"spearman": None}}},
}
BOTH = {when: DEV[when] | TASKS[when] for when in DEV}


@pytest.mark.parametrize(
    ("log", "metrics", "bars", "dev"),
    [
        (LOG, BOTH, {"dev": ("55.00", "61.00"), "sick": ("70.00", "72.50"), "a$b_c$": ("", "")}, [61.0]),
        (LOG, DEV, {"dev": ("55.00", "61.00")}, [61.0]),
        (LOG[::2], TASKS, {"sick": ("70.00", "72.50"), "a$b_c$": ("", "")}, None),
        (LOG, {"before": {}, "after": {}}, {}, [61.0]),
    ],
    ids=["both", "dev", "tasks", "none"],
)
def test_plot_run(drawn, tmp_path, log, metrics, bars, dev):
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert plot_run(log, metrics, tmp_path / f"run.{kind}")
        assert (tmp_path / f"run.{kind}").read_bytes().startswith(start)
    *top, left, right = [*drawn[0].axes, *([] if dev else [None])]
    assert len(top) == bool(bars)
    for axes in top:
        assert [label.get_text() for label in axes.get_yticklabels()] == [*bars]
        assert [text.get_text() for text in axes.texts] == [each[n] for n in (0, 1) for each in bars.values()]
        widths = [float(each[n]) for n in (0, 1) for each in bars.values() if each[n]]
        assert [bar.get_width() for bar in axes.patches if bar.get_width() > 0] == widths
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in left.lines}
    values = {"loss": [2.0, 1.0], "angle": [0.5, 0.25], "rank": [1.5, 0.75]}
    assert lines == {name: ([10, 20], numbers) for name, numbers in values.items()}
    assert all(float(place).is_integer() for place in left.get_xticks())
    assert dev is None or [(line.get_label(), [*line.get_ydata()]) for line in right.lines] == [("dev (right)", dev)]


def test_without_losses_nothing_is_plotted(tmp_path):
    assert not plot_run(LOG[1:2], BOTH, tmp_path / "nothing.png") and not (tmp_path / "nothing.png").exists()

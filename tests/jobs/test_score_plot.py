"""The plot of scores shows each label's."""

import numpy as np
import pytest

from raoe_train.jobs.score_plot import plot_scores_by_label

pytest.importorskip("matplotlib")


def test_plot_scores_by_label(drawn, tmp_path):
    groups = {
        "entailment": np.full(10, 0.8),
        "neutral": np.array([0.1, 0.2, 0.6]),
        "contradiction": np.array([]),
    }
    plot_scores_by_label(groups, tmp_path / "scores.png")
    names = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert names == ["entailment (10 pairs, mean 0.800)", "neutral (3 pairs, mean 0.300)"]
    with pytest.raises(ValueError, match="groups is empty"):
        plot_scores_by_label({"neutral": np.array([])}, tmp_path / "none.png")

"""Outcomes of examples are saved beside their result."""

import numpy as np
import pytest

from benchmarks.studies.jobs import read_outcomes
from raoe_train.evaluation.tasks import Outcomes, write_outcomes


def test_examples_belong_to_their_result(tmp_path):
    examples = {"a:b/c.tsv": Outcomes(np.array([1.0, 2.0]), np.array([3.0, 4.0])), "d": Outcomes(np.array([5.0]))}
    write_outcomes(tmp_path / "x.json", examples, {"model": "m"})
    result = read_outcomes(tmp_path / "x.json", {"model": "m"})
    assert result["a:b/c.tsv"].gold.tolist() == [3, 4] and result["a:b/c.tsv"].values.tolist() == [1, 2]
    assert result["d"].values.tolist() == [5] and result["d"].gold is None and len(result) == 2
    assert read_outcomes(tmp_path / "x.json", {"model": "another"}) == {}
    assert read_outcomes(tmp_path / "y.json", {"model": "m"}) == {}
    (tmp_path / "x.json.examples.npz").write_text("no")
    with pytest.raises(ValueError, match=r"x\.json\.examples\.npz cannot be read"):
        read_outcomes(tmp_path / "x.json", {"model": "m"})

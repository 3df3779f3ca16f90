"""The file of predictions that C-STS's organisers score. All rows are made up."""

import json

import pytest

from raoe_train.evaluation.submission import TEST_ROWS, write_submission


def as_the_organisers_read(path):
    """What make_test_submission.py does with the file before it sends the values."""
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return [float(value) for _, value in sorted(loaded.items(), key=lambda item: int(item[0]))]


def test_submission(tmp_path):
    import numpy as np
    import torch

    path = tmp_path / "predictions.json"
    predictions = [row / 7 for row in range(TEST_ROWS)]
    write_submission(path, predictions)
    assert as_the_organisers_read(path) == predictions
    assert len(predictions) == 4732
    loaded = json.loads(path.read_text())
    assert list(loaded)[:2] == ["0", "1"] and list(loaded)[-1] == "4731"
    for few in (np.array([0.5, -1], np.float32), torch.tensor([0.5, -1.0]), (0.5, -1)):
        write_submission(path, few, rows=2)
        assert json.loads(path.read_text()) == {"0": 0.5, "1": -1.0}
    write_submission(path, [], rows=None)
    assert json.loads(path.read_text()) == {}


@pytest.mark.parametrize(
    ("predictions", "rows", "message"),
    [
        ([0.5] * 4731, TEST_ROWS, "4731 predictions for 4732 rows"),
        ([0.5, 0.5], 1, "2 predictions for 1 rows"),
        ([0.5, float("nan")], 2, "prediction 1 is nan, not a finite number"),
        ([float("inf")], None, "prediction 0 is inf"),
        ([[0.5, 0.5]], 1, r"prediction 0 is \[0.5, 0.5\]"),
        ([None], 1, "prediction 0 is None"),
    ],
)
def test_a_submission_that_would_not_be_scored_is_not_written(tmp_path, predictions, rows, message):
    with pytest.raises(ValueError, match=message):
        write_submission(tmp_path / "predictions.json", predictions, rows=rows)
    assert list(tmp_path.iterdir()) == []

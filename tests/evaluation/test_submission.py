"""The file of predictions for C-STS's organisers. All rows are invented."""

import json

import numpy as np
import pytest
from datasets import Dataset

from raoe_train.evaluation.sts import submit
from tests.tiny import SENTENCES, tiny_encoder


def rows(count):
    texts = [SENTENCES[number % 11] for number in range(count + 5)]
    return Dataset.from_dict({"sentence1": texts[:count], "sentence2": texts[5:]})


def as_the_organisers_read(path):
    """The checks of make_test_submission.py before it sends the values."""
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return [float(value) for _, value in sorted(loaded.items(), key=lambda item: int(item[0]))]


def test_submission(tmp_path):
    model, path, asked = tiny_encoder(double=False), tmp_path / "predictions.json", rows(12)
    assert submit(model, asked, str(path), batch_size=5) == 12
    assert list(json.loads(path.read_text())) == [str(number) for number in range(12)]
    expected = []
    for row in asked:
        a, b = model.encode([row["sentence1"], row["sentence2"]])
        expected.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert as_the_organisers_read(path) == pytest.approx(expected, abs=1e-5)


def test_invalid_submission_is_not_written(tmp_path):
    broken = tiny_encoder(double=False)
    next(broken.parameters()).data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinity for"):
        submit(broken, rows(2), str(tmp_path / "predictions.json"), batch_size=5)
    assert list(tmp_path.iterdir()) == []

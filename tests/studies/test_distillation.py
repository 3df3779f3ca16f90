"""Distillation of a teacher that encodes each batch."""

import math

import numpy as np
import pytest
import torch

from benchmarks.studies.distillation import RankDistillationLoss, SimilarityDistillationLoss
from tests.losses.test_nli_baselines import at
from tests.tiny import SENTENCES, gradients, tiny_encoder


def plane(texts):
    """A teacher whose embedding of a text is the unit vector at that many degrees."""
    return at(*(float(text) for text in texts)).numpy().astype(np.float32) * 3  # its norm does not matter


def test_similarity_distillation_by_hand():
    """Student cosines cos 60 and cos 90, teacher's cos 0 and cos 60: mean of 0.5² and 0.5²; then of 0.5² and 1."""
    student = [at(0, 0), at(60, 90)]
    loss = SimilarityDistillationLoss(None, plane)
    for texts, expected in (((["5", "0"], ["5", "60"]), 0.25), ((["5", "0"], ["5", "0"]), (0.25 + 1) / 2)):
        result = loss.compute_loss_from_embeddings(student, {"texts": list(texts)})
        assert float(result) == pytest.approx(expected, abs=1e-6)


def test_rank_distillation_by_hand():
    """ListMLE: -log of the probability of the teacher's order, exp(s) over what is left, mean over the rows."""
    student, scale = [at(0, 30), at(10, 80)], 4.0
    loss = RankDistillationLoss(None, plane, scale=scale)
    cosine = (student[0] @ student[1].T).tolist()

    def expected(orders):
        rows = []
        for row, order in zip(cosine, orders, strict=True):
            ranked = [scale * row[place] for place in order]
            rows.append(sum(math.log(sum(map(math.exp, ranked[k:]))) - ranked[k] for k in range(len(ranked))))
        return sum(rows) / len(rows)

    # The teacher has both first sentences near the second pair's second, then each near its own.
    for texts, orders in (
        ([["0", "1"], ["90", "2"]], [[1, 0], [1, 0]]),
        ([["0", "90"], ["1", "80"]], [[0, 1], [1, 0]]),
        ([["0", "50"], ["10", "20"]], [[0, 1], [1, 0]]),  # whose columns rank otherwise than its rows
    ):
        result = loss.compute_loss_from_embeddings(student, {"texts": texts})
        assert float(result) == pytest.approx(expected(orders), abs=1e-6)


def by_length(texts):
    """A teacher that maps a text to a few numbers."""
    return np.array([[len(text), text.count("a"), text.count("e") - 2] for text in texts], dtype=np.float32)


@pytest.mark.parametrize("kind", [SimilarityDistillationLoss, RankDistillationLoss])
def test_distillation_trains_the_student_alone(kind):
    """Mini-batches give equal gradients; the teacher is not a submodule."""
    model = tiny_encoder()
    first, second = SENTENCES[:7], SENTENCES[4:11]
    made = []
    for size in (None, 3):
        loss = kind(model, by_length, scale=5.0, mini_batch_size=size)
        model.zero_grad()
        value = loss([model.preprocess(first), model.preprocess(second)], {"texts": [first, second]})
        value.backward()
        made.append((value.detach(), gradients(model).clone()))
    torch.testing.assert_close(made[1][0], made[0][0])
    torch.testing.assert_close(made[1][1], made[0][1], rtol=1e-3, atol=1e-6)
    assert made[0][1].abs().max() > 1e-6
    assert {id(p) for p in loss.parameters()} == {id(p) for p in model.parameters()}
    assert "rankcse" in loss.citation


def test_distillation_errors():
    loss, pair = SimilarityDistillationLoss(None, by_length), [at(0, 1), at(2, 3)]
    with pytest.raises(ValueError, match=r"needs the batch's texts: use raoe_train\.TextCollator"):
        loss.compute_loss_from_embeddings(pair, torch.zeros(2))
    with pytest.raises(ValueError, match="does not support gather_across_devices"):
        RankDistillationLoss(None, by_length, gather_across_devices=True)

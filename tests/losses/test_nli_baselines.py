"""Losses that RAOE is compared with on NLI: AnglE with neutrals, distillation on the fly."""

import math

import numpy as np
import pytest
import torch

from raoe_train.data.settings import Data
from raoe_train.encoders.embed import cosines, embedder
from raoe_train.encoders.settings import FrozenEncoder, identity
from raoe_train.losses import (
    AnglEContrastiveLoss,
    InfoNCELoss,
    RankDistillationLoss,
    SimilarityDistillationLoss,
    SoftmaxLoss,
)
from raoe_train.settings import Teacher
from tests.tiny import SENTENCES, gradients, tiny_encoder


def at(*degrees):
    radians = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def angle_similarity(first, second):
    """AnglE's |cos + sin| of the angle between two vectors of the plane."""
    between = (second - first) * math.pi / 180
    return abs(math.cos(between) - math.sin(between))


@pytest.mark.parametrize("neutral", [False, True])
def test_angles_own_three_parts_by_hand(neutral):
    """Its cosines are ordered by scale, its angles by another, and in-batch negatives are as before."""
    degrees = {"positive": 100, "negative": 20, "neutral": 50}
    roles = ("positive", "negative", *(["neutral"] if neutral else []))
    columns = [at(0), *(at(degrees[role]) for role in roles)]

    def value(**settings):
        return float(AnglEContrastiveLoss(None, scale=3.0, **settings).compute_loss_from_embeddings(columns))

    cosine = {role: math.cos(angle * math.pi / 180) for role, angle in degrees.items()}
    angle = {role: angle_similarity(0, degree) for role, degree in degrees.items()}
    order = [("negative", "positive"), *([("negative", "neutral"), ("neutral", "positive")] if neutral else [])]
    cosines = math.log(1 + sum(math.exp(3 * (cosine[less] - cosine[more])) for less, more in order))
    angles = math.log(1 + sum(math.exp(0.5 * (angle[less] - angle[more])) for less, more in order))
    contrast = float(InfoNCELoss(None, scale=3.0).compute_loss_from_embeddings(columns))
    assert value(angle_weight=0.0) == pytest.approx(contrast, abs=1e-9)
    result = value(angle_weight=2.0, angle_scale=0.5, cosine_weight=0.25)
    assert result == pytest.approx(contrast + 2 * angles + 0.25 * cosines, abs=1e-9)


def test_softmax_by_hand(tmp_path):
    """Of (u, v, |u - v|), with a classifier of our own, through a recipe's words; three classes from NLI's labels."""
    model = tiny_encoder(double=False)
    loss = SoftmaxLoss(model)
    with torch.no_grad():
        loss.classifier.weight.zero_()
        loss.classifier.bias.zero_()
        loss.classifier.weight[2, 32:] = 1.0  # class 2 where vectors are far apart
    first, second = SENTENCES[:3], SENTENCES[3:6]
    u, v = (torch.tensor(model.encode(texts)) for texts in (first, second))
    logits = torch.stack([torch.zeros(3), torch.zeros(3), (u - v).abs().sum(1)], 1)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2]))
    model.eval()
    result = loss([model.preprocess(first), model.preprocess(second)], torch.tensor([0, 1, 2]))
    assert float(result) == pytest.approx(float(expected), abs=1e-5)
    nli = tmp_path / "nli.tsv"
    words = ["entailment", "neutral", "contradiction", "-"]
    nli.write_text("label\tpremise\thypothesis\n" + "".join(f"{word}\tp {word}\th\n" for word in words))
    read = SoftmaxLoss.reads.read
    dataset, counts = read(str(nli), Data(), None, {})
    assert dataset["label"][:] == [0, 1, 2] and counts["dropped"] == {"no gold label": 1}
    nli.write_text("label\tpremise\thypothesis\n7\tp\th\n")
    with pytest.raises(ValueError, match="classes must be 0, 1 or 2, got 7"):
        read(str(nli), Data(labels={"7": 7}), None, {})


def test_two_teachers_are_their_mean(tmp_path):
    """The cosines of what both say; another identity than either alone, for what is kept on disk."""
    names = []
    for number in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            model = tiny_encoder(double=False)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight))
        names.append(str(tmp_path / str(number)))
        model.save_pretrained(names[-1])
    alone = [embedder(FrozenEncoder(name, device="cpu"), "teacher")(SENTENCES) for name in names]
    both = Teacher(names[0], device="cpu", second=FrozenEncoder(names[1], device="cpu"))
    made = embedder(both, "teacher")(SENTENCES)
    mean = sum(cosines(each[:-1], each[1:]) for each in alone) / 2
    np.testing.assert_allclose(cosines(made[:-1], made[1:]), mean, atol=1e-6)
    assert np.abs(cosines(*(each[:9] for each in alone))).max() < 0.999, "or both are one encoder"
    assert identity(both) != identity(Teacher(names[0], device="cpu"))
    assert identity(both) != identity(Teacher(names[0], second=FrozenEncoder(names[0])))


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

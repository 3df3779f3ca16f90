"""Losses that RAOE is compared with on NLI: AnglE with neutrals."""

import math
import pkgutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from raoe_train.encoders.embed import cosines, embedder
from raoe_train.inputs import recorded
from raoe_train.losses import (
    AnglEContrastiveLoss,
    InfoNCELoss,
    SoftmaxLoss,
)
from raoe_train.losses import collators as kinds
from raoe_train.settings import Data, FrozenEncoder, Teacher
from tests.tiny import SENTENCES, tiny_encoder


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
    assert recorded(both) != recorded(Teacher(names[0], device="cpu"))
    assert recorded(both) != recorded(Teacher(names[0], second=FrozenEncoder(names[0])))


def test_a_loss_does_not_import_the_readers_of_its_rows():
    code = "import sys; from raoe_train.losses import ByLength, CoSENTLoss; sys.exit(str([*sys.modules]))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert "'raoe_train.losses.collators'" in modules
    assert not [name for name in ("pairs", "rows") if f"'raoe_train.data.{name}'" in modules]
    for reads in (each for each in vars(kinds).values() if isinstance(each, kinds.Reads)):
        assert callable(pkgutil.resolve_name(reads.reader))


def test_contrastive_losses_read_no_nli_labels(tmp_path):
    """entailment is class 0 in NLI, but 0 means "not similar" in ContrastiveLoss."""
    path = tmp_path / "pairs.tsv"
    path.write_text("sentence1\tsentence2\tlabel\na\tb\t1\na\tc\t0\n")
    assert kinds.LABELLED_PAIRS.read(str(path), Data(), None, False)[0]["label"][:] == [1, 0]
    path.write_text("sentence1\tsentence2\tlabel\na\tb\tentailment\n")
    with pytest.raises(ValueError, match=r"label is 'entailment', which is not a known label .0, 1"):
        kinds.LABELLED_PAIRS.read(str(path), Data(), None, False)

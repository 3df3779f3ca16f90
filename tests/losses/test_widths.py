"""Losses that compute all Matryoshka widths in one sweep, against a MatryoshkaLoss around them."""

import math

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from raoe_train import losses
from raoe_train.losses.by_length import ByLength
from tests.losses.test_losses import CACHED, step
from tests.tiny import SENTENCES, batch, tiny_encoder

DIMS = [16, 4, 10]
PAIRS = [
    (losses.RAOELoss, {"rank_weight": 0.3}),
    (losses.RankMarginLoss, {"margin": 1}),
    (losses.GatedAngularLoss, {"gate": "label"}),
    (losses.CoSENTLoss, {}),
]
TRIPLETS = [
    (losses.InfoNCELoss, {"directions": ["query_to_doc", "query_to_query"]}),  # one sweep per width
    (losses.AnglEContrastiveLoss, {}),
]


def inputs(model, loss):
    if loss not in (losses.InfoNCELoss, losses.AnglEContrastiveLoss):
        return batch(model)
    columns = [[SENTENCES[(row * by + by) % 5 * 2 + by // 3] for row in range(7)] for by in (1, 2, 3)]
    return [model.preprocess(texts) for texts in columns], None


@pytest.mark.parametrize("mini_batch_size", [None, 4])
@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize(("loss", "settings"), PAIRS + TRIPLETS)
def test_equals_matryoshka_loss(loss, settings, mini_batch_size, by_length):
    model = tiny_encoder()
    features, labels = inputs(model, loss)
    expected = step(MatryoshkaLoss(model, loss(model, **settings), DIMS), model, features, labels)
    own = loss(model, mini_batch_size=mini_batch_size, matryoshka_dims=DIMS, **settings)
    value, gradient = step(ByLength(own) if by_length else own, model, features, labels)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(gradient, expected[1], **CACHED)
    alone = step(loss(model, **settings), model, features, labels)
    assert value > alone[0] and not torch.allclose(gradient, alone[1])


def test_one_width_less_than_all():
    model = tiny_encoder()
    features, labels = batch(model)
    with pytest.warns(UserWarning, match=r"matryoshka_dims \[5\] do not include the model's 16"):
        value, _ = step(losses.CoSENTLoss(model, matryoshka_dims=[5]), model, features, labels)
    cut = [model(dict(column))["sentence_embedding"][:, :5] for column in features]
    torch.testing.assert_close(value, losses.CoSENTLoss(model).compute_loss_from_embeddings(cut, labels).detach())


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        ("CoSENT", {"matryoshka_dims": [4, 4]}, r"must be distinct positive numbers .*16 dimensions, got \[4, 4\]"),
        ("CoSENT", {"matryoshka_dims": [16, 17]}, r"up to the model's 16 dimensions, got \[16, 17\]"),
        ("CoSENT", {"matryoshka_dims": [16], "similarity_fct": torch.dist}, "matryoshka_dims works only with cosines"),
        ("Pearson", {"matryoshka_dims": "wide"}, "dims must be a list of values, each an integer, got 'wide'"),
        ("InfoNCE", {"mini_batch_size": 0}, "mini_batch_size must be an integer above 0"),
        ("RAOE", {"rank_weight": -1}, "rank_weight must be a number of at least 0"),
        ("Contrastive", {"distance": "cos"}, "distance must be one of cosine, euclidean, got 'cos'"),
        ("Triplet", {"distance": "manhattan"}, "distance must be one of cosine, euclidean"),
        ("Triplet", {"margin": None}, "margin must be a number of at least 0, got None"),
    ],
)
def test_wrong_keywords(loss, settings, message):
    with pytest.raises(ValueError, match=message):
        getattr(losses, f"{loss}Loss")(tiny_encoder(), **settings)


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        *[("InfoNCE", {"scale": s}, "scale must be a") for s in (0, math.inf, math.nan, None, len)],
        ("InfoNCE", {"directions": "doc_to_doc"}, "directions"),
        ("InfoNCE", {"hardness_mode": "hard"}, "hardness_mode must be one of"),
        ("InfoNCE", {"hardness_mode": "all_negatives", "hardness_strength": -1}, "hardness_strength must be a"),
        ("AnglEContrastive", {"angle_scale": 0}, "scale must be a"),
        ("RAOE", {"margin": -1}, "margin must be a"),
        ("RAOE", {"gate": "labels"}, "gate must be one of"),
        ("RankMargin", {"ties": "random"}, "ties must be one of"),
        ("CoSENT", {"scale": 0}, "scale must be a"),
        ("ListMLE", {"ties": "mean"}, "ties must be one of"),
    ],
)
def test_numbers_are_checked_by_the_kernels(loss, settings, message):
    columns = [torch.eye(4)] * (1 if loss == "ListMLE" else 3 if loss == "AnglEContrastive" else 2)
    labels = {"score": torch.arange(4.0), "label": torch.arange(4), "lengths": torch.tensor([4])}
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(losses, f"{loss}Loss")(None, **settings).compute_loss_from_embeddings(columns, labels)

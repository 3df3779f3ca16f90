"""accelerate(a loss of sentence-transformers): that loss, equal in value and gradients, or an error, or nothing."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses as theirs

import raoe_train as rt
from raoe_train.losses import ByLength, accelerated
from tests.forked import together
from tests.losses.test_infonce_forms import CONFIGURATIONS, GTE
from tests.losses.test_losses import CACHED, step
from tests.tiny import SENTENCES, batch, tiny_encoder

CLOSE = {torch.float64: 1e-10, torch.float32: 5e-5}  # of the largest number of a gradient
PAIRS = [
    (theirs.CoSENTLoss, {}),
    (theirs.CoSENTLoss, {"scale": 3.5}),
    (theirs.CoSENTLoss, {"similarity_fct": util.pairwise_euclidean_sim}),
    (theirs.AnglELoss, {}),
    (theirs.AnglELoss, {"scale": 1.0}),
]


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def model(request):
    return tiny_encoder(double=request.param == torch.float64)


@pytest.fixture
def by_ours(monkeypatch):
    """How often our ops were called."""
    calls = []
    for name in ("cosent_loss", "_contrast"):
        real = getattr(accelerated, name)
        monkeypatch.setattr(accelerated, name, lambda *a, real=real, **k: calls.append(real) or real(*a, **k))
    return calls


def columns(model, number, rows=7):
    texts = [[SENTENCES[(3 * row + 2 * n) % len(SENTENCES)] for row in range(rows)] for n in range(number)]
    return [model.preprocess(column) for column in texts]


def assert_equal(loss, model, features, labels):
    expected, gradient = step(loss, model, features, labels)
    assert gradient.abs().max() > 1e-4
    faster = rt.accelerate(loss)
    assert isinstance(faster, type(loss)) and faster is not loss and faster.model is model
    assert faster.get_config_dict() == loss.get_config_dict()
    found, by_faster = step(faster, model, features, labels)
    for one, other in ((found, expected), (by_faster, gradient)):
        torch.testing.assert_close(one, other, rtol=0, atol=CLOSE[gradient.dtype] * float(other.abs().max()))


def said(value):
    """Without addresses of functions, by which two processes would call a test differently."""
    if isinstance(value, dict):
        return " ".join(f"{name}={getattr(each, '__name__', each)}" for name, each in value.items())
    return value.__name__


@pytest.mark.parametrize(("loss", "settings"), PAIRS, ids=said)
@pytest.mark.parametrize("scores", ["float", "integer", "bool", "column"])
def test_losses_of_pairs(model, by_ours, loss, settings, scores):
    features, labels = batch(model, 10)
    score = labels["score"].to(next(model.parameters()).dtype)
    score = {"float": score, "integer": labels["label"], "bool": score > 0.5, "column": score[:, None]}[scores]
    assert_equal(loss(model, **settings), model, features, score)
    assert len(by_ours) == 1


@pytest.mark.parametrize("labels", [None, torch.tensor([1.0, 0, 1, 1, 0.5, 1, 1])], ids=["none", "some"])
def test_angle_of_tuples(model, by_ours, labels):
    assert_equal(theirs.AnglELoss(model), model, columns(model, 4), labels)
    assert len(by_ours) == 1


@pytest.mark.parametrize("settings", CONFIGURATIONS, ids=said)
@pytest.mark.parametrize("number", [2, 4])
def test_multiple_negatives(model, by_ours, settings, number):
    features = columns(model, number)
    assert_equal(theirs.MultipleNegativesRankingLoss(model, **settings), model, features, None)
    cached = theirs.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3, **settings)
    assert_equal(cached, model, features, None)
    assert len(by_ours) == 2


def test_half_precision_is_no_worse():
    """Theirs rounds cosines to bfloat16."""
    seeded = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 64, 16, generator=seeded).bfloat16()
    scores = torch.rand(64, generator=seeded)
    for kind in (theirs.CoSENTLoss, theirs.AnglELoss):
        exact = kind(None).compute_loss_from_embeddings([a.double(), b.double()], scores)
        errors = [
            abs(loss.compute_loss_from_embeddings([a, b], scores) - exact)
            for loss in (rt.accelerate(kind(None)), kind(None))
        ]
        assert errors[0] <= errors[1] + 1e-5


def test_settings_changed_afterwards_count(by_ours):
    model = tiny_encoder()
    for kind in (theirs.MultipleNegativesRankingLoss, theirs.CachedMultipleNegativesRankingLoss):
        loss, faster = kind(model), rt.accelerate(kind(model))
        for name, value in (("scale", 5.0), ("similarity_fct", util.dot_score)):
            setattr(loss, name, value)
            setattr(faster, name, value)
            results = [step(each, model, columns(model, 3), None) for each in (faster, loss)]
            torch.testing.assert_close(*results, **CACHED)
    assert len(by_ours) == 2  # what our ops do not have is theirs


def test_around_and_inside():
    model = tiny_encoder()
    features = columns(model, 2)
    for wrap in (lambda loss: ByLength(loss), lambda loss: theirs.MatryoshkaLoss(model, loss, [16, 8])):
        both = [wrap(each(theirs.MultipleNegativesRankingLoss(model))) for each in (rt.accelerate, lambda loss: loss)]
        torch.testing.assert_close(*[step(loss, model, features, None) for loss in both], **CACHED)


def test_switched_off(monkeypatch):
    loss = theirs.CoSENTLoss(None)
    monkeypatch.setenv("RAOE_ACCELERATE", "0")
    assert rt.accelerate(loss) is loss
    monkeypatch.setenv("RAOE_ACCELERATE", "off")
    with pytest.raises(ValueError, match="RAOE_ACCELERATE must be 0 or 1, got 'off'"):
        rt.accelerate(loss)
    monkeypatch.setenv("RAOE_ACCELERATE", "1")
    faster = rt.accelerate(loss)
    assert faster is not loss and rt.accelerate(faster) is faster
    assert faster.training and not rt.accelerate(loss.eval()).training


def test_what_it_cannot_serve():
    class Own(theirs.CoSENTLoss):
        pass

    for loss, why in (
        (Own(None), "not Own"),
        (theirs.CosineSimilarityLoss(None), "accelerate takes CoSENTLoss, .* not CosineSimilarityLoss"),
        (theirs.MultipleNegativesRankingLoss(None, similarity_fct=util.dot_score), "util.cos_sim, got dot_score"),
        (theirs.CoSENTLoss(None, scale=-1.0), "scale must be above 0, got -1.0"),
    ):
        with pytest.raises(ValueError, match=why):
            rt.accelerate(loss)
    with pytest.raises(ValueError, match="expects 3 labels"):
        rt.accelerate(theirs.CoSENTLoss(None)).compute_loss_from_embeddings([torch.rand(3, 4)] * 2, torch.rand(6))


def gathered(rank, world, folder):
    """A process's gradients of its part, ours and theirs."""
    torch.set_num_threads(1)
    model = tiny_encoder()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        mine = slice(4 * rank, 4 * rank + 4)
        features = [
            {name: value[mine] if isinstance(value, torch.Tensor) else value for name, value in each.items()}
            for each in columns(model, 3, 8)
        ]
        for settings in ({}, {"directions": GTE, "hardness_mode": "all_negatives", "hardness_strength": 5.0}):
            loss = theirs.MultipleNegativesRankingLoss(parallel, gather_across_devices=True, **settings)
            alone = step(theirs.MultipleNegativesRankingLoss(parallel, **settings), model, features, None)
            expected = step(loss, model, copy.deepcopy(features), None)
            found = step(rt.accelerate(loss), model, copy.deepcopy(features), None)
            torch.testing.assert_close(found, expected, **CACHED)
            assert abs(alone[0] - found[0]) > 1e-3
    finally:
        del parallel, loss
        gc.collect()
        dist.destroy_process_group()


@pytest.mark.slow
def test_gathered(tmp_path):
    together(gathered, 2, str(tmp_path))

"""SigmoidLoss: the formula without false negatives, learned scale and bias, caching and a training run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from raoe_train.losses import ByLength, SigmoidLoss
from tests.losses.test_infonce_loss import ROWS, embeddings, false_negatives, tokenised
from tests.losses.test_losses import CACHED
from tests.tiny import gradients, tiny_encoder


def by_definition(columns, texts, scale, bias):
    """Mean over the anchors of the sum over what remains of -log sigmoid(z (scale cos + bias)), pair by pair."""
    anchors, *rest = [F.normalize(column) for column in columns]
    logits = scale * anchors @ torch.cat(rest).T + bias
    own = torch.eye(*logits.shape, dtype=torch.bool)
    keep = torch.ones_like(own)
    if texts is not None:
        keep = own | ~torch.tensor(false_negatives(texts))
    return -F.logsigmoid(torch.where(own, logits, -logits))[keep].sum() / len(anchors)


@pytest.mark.parametrize("columns", [2, 3, 4])
def test_equals_the_formula(columns):
    inputs, loss = embeddings(columns), SigmoidLoss(None, 5.0, bias=-2.0).double()
    result = loss.compute_loss_from_embeddings(inputs)
    learned = [x.detach().clone().requires_grad_() for x in (loss.log_scale, loss.logit_bias)]
    expected = by_definition(inputs, None, learned[0].exp(), learned[1])
    torch.testing.assert_close(result, expected)
    ours = torch.autograd.grad(result, [*inputs, loss.log_scale, loss.logit_bias])
    for x, y in zip(ours, torch.autograd.grad(expected, [*inputs, *learned]), strict=True):
        torch.testing.assert_close(x, y)


def test_initial_scale_and_bias_are_the_papers():
    loss = SigmoidLoss(None)
    assert loss.differentiable_scale().item() == pytest.approx(10) and loss.current_scale == 10
    assert loss.logit_bias.item() == -10
    assert {name for name, _ in loss.named_parameters()} == {"log_scale", "logit_bias"}
    fixed = SigmoidLoss(None, learn_scale=False)
    assert not [*fixed.parameters()]
    inputs = embeddings(3)
    torch.testing.assert_close(fixed.compute_loss_from_embeddings(inputs), by_definition(inputs, None, 10.0, -10.0))


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("kinds", [1, 3, 8, 30, 1 << 60])
def test_false_negatives_are_left_out(kinds, columns):
    inputs, loss = embeddings(columns, 12), SigmoidLoss(None, 5.0, bias=-1.0, learn_scale=False)
    for seed in range(4):
        texts = torch.randint(kinds, (12, columns), generator=torch.Generator().manual_seed(seed)) - kinds // 2
        result = loss.compute_loss_from_embeddings(inputs, texts=texts)
        expected = by_definition(inputs, texts.tolist(), 5.0, -1.0)
        torch.testing.assert_close(result, expected)
        for x, y in zip(torch.autograd.grad(result, inputs), torch.autograd.grad(expected, inputs), strict=True):
            torch.testing.assert_close(x, y)
        assert (loss.compute_loss_from_embeddings(inputs) - result > 1e-3) == (kinds < 1 << 60)


def learned(loss, model, own):
    """(the loss, gradients of the encoder and of what `own` learns) of the batch ROWS, a quarter of it taken."""
    for parameter in loss.parameters():
        parameter.grad = None
    value = loss(tokenised(model), None)
    (value / 4).backward()
    return value.detach(), gradients(model).clone(), torch.stack([own.log_scale.grad, own.logit_bias.grad])


@pytest.mark.parametrize("mini_batch_size", [1, 3, 100])
def test_cached_equals_uncached(mini_batch_size):
    model = tiny_encoder()
    plain = SigmoidLoss(model, bias=-2.0)
    expected = learned(plain, model, plain)
    columns = [model(dict(column))["sentence_embedding"] for column in tokenised(model)]
    torch.testing.assert_close(expected[0], by_definition(columns, ROWS, 10.0, -2.0).detach(), rtol=1e-6, atol=0)
    assert expected[1].abs().max() > 1e-3 and expected[2].abs().min() > 1e-3
    cached = SigmoidLoss(model, bias=-2.0, mini_batch_size=mini_batch_size)
    for loss in (cached, ByLength(cached)):
        for x, y in zip(learned(loss, model, cached), expected, strict=True):
            torch.testing.assert_close(x, y, **CACHED)
    with torch.no_grad():
        torch.testing.assert_close(cached(tokenised(model)), expected[0])


def test_bad_input():
    with pytest.raises(ValueError, match="with learn_scale the scale must be from 1 to 100"):
        SigmoidLoss(None, 0.5)
    with pytest.raises(ValueError, match=r"SigmoidLoss needs columns of equal length: .* got columns of \d+ rows"):
        SigmoidLoss(None).compute_loss_from_embeddings(embeddings(1))

"""The regularizer that keeps embeddings near their start: value, gradient and effect."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses as theirs

from raoe_train import Trainer
from raoe_train import losses as ours
from raoe_train.encoders import lengths
from raoe_train.losses import by_length
from raoe_train.losses.by_length import ByLength
from raoe_train.losses.keep import Keep, weight_for
from tests.losses.test_global_batch import REPLAYS_IN_DOUBLE
from tests.tiny import SENTENCES, batch, gradients, tiny_encoder, total


def moved(model: Any) -> Any:
    """An encoder whose weights differ from its start."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def by_hand(now: torch.Tensor, before: torch.Tensor) -> float:
    """Half the squared distance of unit vectors, text by text."""
    units = [each.detach() / each.detach().square().sum(dim=1, keepdim=True).sqrt() for each in (now, before)]
    return float((units[0] - units[1]).square().sum() / 2 / len(now))


def test_regularizer_is_the_mean_over_texts():
    model = tiny_encoder()
    start = copy.deepcopy(model).eval()
    loss = ByLength(ours.CoSENTLoss(model), keep=Keep(model, 3.0))
    features, labels = batch(moved(model), 5)  # no row has a text twice, which would be two views of it
    parts = loss(features, labels)
    texts = {text: None for row in range(5) for text in (SENTENCES[row % 11], SENTENCES[(3 * row + 1) % 11])}
    tokens = model.preprocess([*texts])
    now, before = (each(dict(tokens))["sentence_embedding"] for each in (model, start))
    assert parts["keep"].item() == pytest.approx(3.0 * by_hand(now, before), rel=1e-12)
    assert parts["target"].item() == pytest.approx(ours.CoSENTLoss(model)(features, labels).item(), rel=1e-12)


@pytest.mark.parametrize("cached", [{"mini_batch_size": 2}, {"mini_batch_num_tokens": 12}])
@pytest.mark.parametrize("kind", [ours.RAOELoss, ours.CoSENTLoss])
def test_cached_gradients_are_those_of_the_whole_batch(kind, cached, monkeypatch):
    monkeypatch.setattr(lengths, "CPU_FORWARD", 1)
    model = tiny_encoder()
    term = Keep(model, 30.0)
    features, labels = batch(moved(model))
    results = []
    for settings in ({}, cached):
        model.zero_grad()
        value = total(ByLength(kind(model, **settings), keep=term)([dict(each) for each in features], labels))
        value.backward()
        results.append((value.detach(), gradients(model)))
    (whole, its), (value, own) = results
    tolerance = 1e-12 if REPLAYS_IN_DOUBLE else 1e-5
    assert abs(value - whole) <= tolerance * abs(whole)
    assert (own - its).abs().max() <= tolerance * its.abs().max()
    plain = tiny_encoder()
    moved(plain)
    total(kind(plain)(features, labels)).backward()
    assert (gradients(plain) - its).abs().max() > 1e-3 * its.abs().max()  # the regularizer has a gradient


def test_a_weight_by_the_scores(tmp_path, capsys):
    def scored(*scores):
        return Dataset.from_dict({"sentence1": ["a"] * len(scores), "score": scores})

    classes, graded = scored(0.0, 1.0, 1.0), scored(0.0, 0.5, 1.0)
    for datasets, reason in (
        ({"a": classes}, "the scores have only two values"),
        ({"a": classes, "b": classes}, "the scores have only two values"),
        ({"a": classes, "b": graded}, ""),
        ({"a": Dataset.from_dict({"query": ["a"], "positive": ["b"]})}, "the data are queries and passages"),
        ({"a": Dataset.from_dict({"sentence1": ["a"], "sentence2": ["b"]})}, ""),
    ):
        assert weight_for(datasets, "auto") == (0.3 if reason else 0)
        assert capsys.readouterr().out == (f"keep is 0.3, because {reason}\n" if reason else "")
    assert weight_for({"a": classes}, 2.0) == 2 and capsys.readouterr().out == ""
    model, arguments = tiny_encoder(), SentenceTransformerTrainingArguments(str(tmp_path))
    pairs = Dataset.from_dict({"sentence1": SENTENCES[:4], "sentence2": SENTENCES[4:8], "score": [0.0, 1.0, 0.0, 1.0]})
    trainer = Trainer(model, arguments, pairs, loss=theirs.CoSENTLoss(model), keep="auto")
    assert trainer.keep == trainer.computed_loss().keep.weight == 0.3


def test_invalid_keep(tmp_path):
    model = tiny_encoder()
    with pytest.raises(ValueError, match="keep must be a number of at least 0, got -1"):
        Keep(model, -1)
    with pytest.raises(ValueError, match="keep must be a number of at least 0, got 'maybe'"):  # not auto
        Trainer(model, SentenceTransformerTrainingArguments(str(tmp_path)), loss=theirs.CoSENTLoss(model), keep="maybe")
    with pytest.raises(ValueError, match="keep requires by_length=True"):
        arguments = SentenceTransformerTrainingArguments(str(tmp_path))
        Trainer(model, arguments, loss=theirs.CoSENTLoss(model), keep=1, by_length=False)
    with pytest.raises(ValueError, match="keep cannot be used, because AdaptiveLayerLoss may need"):
        layers = theirs.AdaptiveLayerLoss(model, theirs.CoSENTLoss(model))
        Trainer(model, SentenceTransformerTrainingArguments(str(tmp_path)), loss=layers, keep=1)
    with pytest.raises(ValueError, match=r"remove keep from ByLength, and pass keep=0\.5 to rt\.Trainer instead"):
        own = ByLength(theirs.CoSENTLoss(model), keep=Keep(model, 0.5))
        Trainer(model, SentenceTransformerTrainingArguments(str(tmp_path)), loss=own)


@pytest.mark.parametrize("cached", [{}, {"mini_batch_size": 2}])
def test_repeated_forward_passes_do_not_count(monkeypatch, cached):
    """A process with fewer runs than another one repeats a run, because DistributedDataParallel needs equal numbers."""
    model = tiny_encoder()
    keep = Keep(model, 3.0)
    moved(model)
    values = []
    for more in (0, 2):
        monkeypatch.setattr(by_length, "_most_forwards", lambda runs, layers, more=more: runs + more)
        loss = ByLength(ours.CoSENTLoss(model, **cached), keep=keep)
        values.append(loss([model.preprocess(SENTENCES[:5]), model.preprocess(SENTENCES[5:10])], torch.arange(5.0)))
    assert values[0]["keep"] > 0.01 and float(values[1]["keep"]) == pytest.approx(float(values[0]["keep"]), abs=1e-12)

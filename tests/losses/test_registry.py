"""A loss of one's own: one class and one line make it a loss of recipes and of the Trainer."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import pytest
import torch

from raoe_train import run
from raoe_train.cli import load, main
from raoe_train.losses import RAOELoss, register
from raoe_train.losses.base import settings_of
from raoe_train.losses.collators import TextCollator
from raoe_train.losses.pair_losses import PairLoss
from raoe_train.losses.reads import PAIRS, Reads
from raoe_train.losses.registry import LOSSES
from raoe_train.training.trainer import Trainer
from tests.tiny import tiny_encoder
from tests.training.small_runs import SCRATCH, write_pairs

SEEN: list[Any] = []


class HuberLoss(PairLoss):
    """Huber's loss of cosines and scores.

    Args:
        model, scale, cached: see CachedLoss.
        delta: where the square ends; of a difference.
        kind: of mean, "mean" or "sum".
    """

    name = "huber"

    def __init__(self, model, scale: float = 1.0, *, delta: float = 0.5, kind: Literal["mean", "sum"] = "mean",
                 **cached: Any) -> None:  # fmt: skip
        super().__init__(model, scale, **cached)
        if delta <= 0:
            raise ValueError(f"delta must be above 0, got {delta!r}")
        self.delta, self.kind = delta, kind

    def of_pairs(self, similarity, score, label):
        SEEN.append((self.delta, self.kind, len(similarity)))
        return torch.nn.functional.huber_loss(similarity, score / 5, delta=self.delta, reduction=self.kind)


def long_pairs(source, data, prompt, loss):
    dataset, counts = PAIRS.read(source, data, prompt, loss)
    return dataset.filter(lambda row: len(row["sentence1"]) > loss.shortest, keep_in_memory=True), counts


class LongestTexts(torch.nn.Module):
    """No CachedLoss, with Reads of its own: the pairs of a source that are long enough, and their texts."""

    name = "longest"
    reads = Reads("pairs of long texts", long_pairs, TextCollator)

    def __init__(self, model, shortest: int = 20):
        super().__init__()
        self.model, self.shortest = model, shortest

    def forward(self, features, labels):
        SEEN.append(labels["texts"][0])
        first, second = (self.model(dict(column))["sentence_embedding"] for column in features)
        return (first - second).square().mean()


@pytest.fixture
def own():
    before = dict(LOSSES)
    SEEN.clear()
    register(HuberLoss)
    register(LongestTexts)
    yield
    LOSSES.clear()
    LOSSES.update(before)


def recipe(folder, **changes):
    made = {
        "model.name": "scratch",
        "model.device": "cpu",
        "model.scratch": SCRATCH,
        "data.train": [write_pairs(folder / "train.tsv")],
        "training": {"max_steps": 2, "batch_size": 8, "learning_rate": 1e-2},
        "output": str(folder / "out"),
    }
    return {**made, **changes}


def test_by_recipe(own, tmp_path, capsys):
    metrics = run("train", None, **recipe(tmp_path, **{"loss.name": "huber", "loss.delta": "0.25"}))
    assert metrics["steps"] == 2 and metrics["scale"] == {"train": 1.0}
    assert SEEN == [(0.25, "mean", 8)] * 2
    assert "train.tsv: 40 scored pairs" in capsys.readouterr().out
    saved = load("train", tmp_path / "out" / "recipe.yaml").loss
    assert saved == {"name": "huber", "scale": 1.0, "delta": 0.25, "kind": "mean", "memory_size": 0,
                     "memory_age": None, "mini_batch_size": None, "mini_batch_num_tokens": None,
                     "gather_across_devices": False, "matryoshka_dims": []}  # fmt: skip
    card = (tmp_path / "out" / "README.md").read_text()
    assert "HuberLoss" in card and '"delta": 0.25' in card


def test_mini_batches_and_matryoshka_come_with_it(own, tmp_path):
    changes = {"loss": {"name": "huber", "mini_batch_size": 3, "matryoshka_dims": [16, 4]}}
    assert run("train", None, **recipe(tmp_path, **changes))["steps"] == 2
    assert len(SEEN) == 4  # of each batch once a dimension, whole


def test_reads_of_its_own(own, tmp_path, capsys):
    run("train", None, **recipe(tmp_path, **{"loss.name": "longest", "loss.shortest": 25}))
    assert len(SEEN) == 2 and all(len(text) > 25 for texts in SEEN for text in texts)
    assert "pairs of long texts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "huber", "dleta": 1}, r"unknown key loss\.dleta \(did you mean loss\.delta\?\)"),
        ({"name": "huber", "delta": "wide"}, r"loss\.delta must be a number, got 'wide'"),
        ({"name": "huber", "delta": -1}, r"loss\.delta must be above 0, got -1"),
        ({"name": "huber", "kind": "median"}, r"loss\.kind must be one of mean, sum, got 'median'"),
        ({"name": "huber", "margin": 1}, r"loss huber has no loss\.margin: raoe, .* have it"),
        ({"name": "raoe", "delta": 1}, r"loss raoe has no loss\.delta: huber have it"),
        ({"name": "longest", "mini_batch_size": 1}, r"loss longest has no loss\.mini_batch_size: .*huber have it"),
    ],
)
def test_what_it_cannot_have(own, loss, message):
    with pytest.raises(ValueError, match=message):
        load("train", None, {"loss": loss})


def test_the_help_knows_it(own, capsys):
    assert main(["train", "--help"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "--loss.delta" in line)
    assert line.split(None, 1)[1] == "where the square ends (huber) [0.5]"


def test_from_python(own, tmp_path):
    """With the Trainer, which sees what the loss reads."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainingArguments

    model = tiny_encoder(double=False)
    pairs = Dataset.from_dict({"sentence1": ["a dog"] * 6, "sentence2": ["a cat"] * 6, "score": [1.0, 2, 3, 4, 5, 0]})
    args = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=6, report_to="none", use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, args, pairs, loss=HuberLoss(model, delta=2.0))
    trainer.train()
    assert SEEN == [(2.0, "mean", 6)] and trainer.scales == {"train": 1.0}


def test_a_signature_says_all():
    """What the base classes take, too, though no loss repeats it."""
    assert list(settings_of(HuberLoss)) == [
        *("scale", "delta", "kind", "memory_size", "memory_age"),
        *("mini_batch_size", "mini_batch_num_tokens", "gather_across_devices"),
    ]
    assert inspect.signature(RAOELoss).parameters["mini_batch_size"].default is None
    assert [*inspect.signature(RAOELoss).parameters][:4] == ["model", "scale", "margin", "rank_weight"]
    with pytest.raises(TypeError, match="mini_batchsize"):
        RAOELoss(None, mini_batchsize=3)

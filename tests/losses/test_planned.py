"""Batches planned in the collator: a step reads nothing back from its device; workers plan the same ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers.sentence_transformer import losses as theirs

import raoe_train as rt
from raoe_kernels.attention import OP, triton_kernels
from raoe_train import losses as ours
from raoe_train.encoders import lengths
from raoe_train.losses.by_length import ByLength
from raoe_train.losses.keep import Keep
from tests.tiny import SENTENCES, batch, tiny_encoder, total
from tests.training.small_runs import arguments


@pytest.fixture
def without_launches(monkeypatch):
    """On the device "meta", which has no data, the Triton backend of attention with its kernels left out."""
    monkeypatch.setattr(triton_kernels._Call, "launch", lambda *arguments, **keywords: None)
    monkeypatch.setattr(OP, "_chosen", {("auto", torch.device("meta")): triton_kernels})
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda kind, **on: nullcontext() if kind == "meta" else autocast(kind, **on))


def duplicates(model: Any, columns: int, rows: int = 9) -> list[dict[str, Any]]:
    return [model.preprocess([SENTENCES[(row + 2 * column) % 5] for row in range(rows)]) for column in range(columns)]


def step(made: Any, features: Any, labels: Any, packed: bool, keep: bool = False, include_prompt: bool = True) -> None:
    """Plan a batch on the CPU, and train a step on it on the device "meta"."""
    model = tiny_encoder(dropout=0.1, double=False).to("meta")
    model[1].include_prompt = include_prompt
    loss = ByLength(made(model), keep=Keep(model, 1.0) if keep else None, packed=packed).to("meta")
    optimizer = torch.optim.AdamW(loss.parameters())
    total(loss(loss.plan(features, labels))).backward()
    torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_reads_nothing_back(packed, monkeypatch, without_launches):
    monkeypatch.setattr(lengths, "CPU_FORWARD", 1)
    monkeypatch.setattr(lengths, "LAYER_SECONDS", 1e-9)  # several runs
    tokenizes = tiny_encoder(double=False)
    pairs, labels = batch(tokenizes)
    triplets, lists = duplicates(tokenizes, 3), tokenizes.preprocess(SENTENCES[:9])
    cases: list[tuple[Any, Any, Any]] = [
        (ours.RAOELoss, pairs, labels),
        (ours.CoSENTLoss, pairs, labels),
        (lambda model: ours.RAOELoss(model, matryoshka_dims=[4, 16]), pairs, labels),
        (lambda model: theirs.MatryoshkaLoss(model, theirs.CoSENTLoss(model), [16, 4]), pairs, labels["score"]),
        (ours.InfoNCELoss, triplets, None),
        (ours.InfoNCELoss, triplets, {"missing": torch.tensor([[0, 0, n % 2] for n in range(9)]).bool()}),
        (lambda model: ours.InfoNCELoss(model, symmetric=True), triplets, None),
        (ours.SigmoidLoss, triplets, None),
        (ours.ListMLELoss, [lists], {"lengths": torch.tensor([5, 4])}),
        (theirs.MultipleNegativesRankingLoss, triplets, None),
        (theirs.CosineSimilarityLoss, pairs, labels["score"]),
    ]  # fmt: skip
    for made, features, targets in cases:
        step(made, features, targets, packed)
    step(ours.RAOELoss, pairs, labels, packed, keep=True)
    if packed:
        prompted = [tokenizes.preprocess(texts, prompt="the dog ") for texts in (SENTENCES[:9], SENTENCES[2:])]
        step(ours.RAOELoss, prompted, labels, packed, include_prompt=False)

    class Reads(ours.CoSENTLoss):
        def compute_loss_from_embeddings(self, embeddings, labels=None):
            return super().compute_loss_from_embeddings(embeddings, labels) * float(embeddings[0].sum().item() > 0)

    with pytest.raises(RuntimeError, match=r"Tensor\.item\(\) cannot be called on meta tensors"):
        step(Reads, pairs, labels, packed)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"packed": True}, {"keep": 1.0}])
def test_workers_plan_the_same_batches(tmp_path, settings):
    """The trained weights are equal whether the batch is planned in the step, in the process, or in workers."""
    rows = {name: [SENTENCES[(step * n) % 11] for n in range(24)] for name, step in (("a", 1), ("b", 3))}
    data = Dataset.from_dict({**rows, "score": [n / 24 for n in range(24)]})
    weights = []
    for workers in (0, 2, None):
        model = tiny_encoder(dropout=0.1, double=False)
        args = arguments(tmp_path, max_steps=4, dataloader_num_workers=workers or 0, eval_strategy="epoch")
        trainer = rt.Trainer(model, args, data, data, loss=ours.CoSENTLoss(model), **settings)
        if workers is None:
            trainer.plans = False
        for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
            assert ("plan" in next(iter(loader))) == (workers is not None)
        trainer.train()
        assert trainer.state.log_history[-1]["train_loss"] > 0 and trainer.meter.unit == "pairs"
        weights.append(torch.cat([weight.flatten() for weight in model.parameters()]))
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])

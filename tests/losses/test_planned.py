"""Batches planned in the collator: a step reads nothing back from its device; workers plan the same ones."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers.sentence_transformer import losses as theirs

import raoe_train as rt
from raoe_kernels.attention import OP, triton_kernels
from raoe_kernels.pairwise import OP as PAIRWISE
from raoe_kernels.pairwise.problem import Problem, constants
from raoe_train import losses as ours
from raoe_train.encoders import lengths
from raoe_train.losses.by_length import ByLength
from raoe_train.losses.in_batch import text_ids
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


@pytest.mark.parametrize("made", [
    ours.RAOELoss, ours.RankMarginLoss, ours.GatedAngularLoss, ours.CoSENTLoss, ours.AnglELoss,
    lambda model: ours.RAOELoss(model, matryoshka_dims=[4, 16]), lambda model: ours.RAOELoss(model, gate="label"),
    lambda model: theirs.MatryoshkaLoss(model, ours.CoSENTLoss(model), [16, 4])])  # fmt: skip
@pytest.mark.parametrize("score_dtype", [torch.float64, torch.int64])
def test_a_plan_has_ranks_where_a_loss_reads_only_the_order(made, score_dtype):
    """With the loss and gradients of the scores, bit by bit."""
    model = tiny_encoder()
    features, labels = batch(model)
    scores = [-math.inf, -0.0, 0.0, 1.0, 1 + 1e-15, 0.5, math.inf, 0.5, -5e-324]
    labels["score"] = torch.tensor(scores, dtype=torch.float64).nan_to_num(posinf=9, neginf=-9).to(score_dtype)
    if score_dtype == torch.float64:
        labels["score"] = torch.tensor(scores, dtype=torch.float64)
    loss = ByLength(made(model))
    plan = loss.plan(features, labels)
    ranks = plan.labels["labels"]["score"]
    expected = [0, 2, 2, 4, 5, 3, 6, 3, 1] if score_dtype == torch.float64 else [0, 1, 1, 2, 2, 1, 3, 1, 1]
    assert ranks.dtype == torch.float32 and ranks.tolist() == expected
    results = []
    for each in (plan, replace(plan, labels={"labels": labels})):
        value = total(loss(copy.deepcopy(each)))
        results.append((value.detach(), *torch.autograd.grad(value, list(model.parameters()), allow_unused=True)))
    assert results[0][0] > 0
    for found, same in zip(*results, strict=True):
        assert found is same is None or torch.equal(found, same)


def test_a_plan_keeps_scores_whose_values_a_loss_may_read():
    model = tiny_encoder()
    features, labels = batch(model)

    class Margin(ours.CoSENTLoss):
        def of_pairs(self, similarity, score, label):
            return super().of_pairs(similarity, (score > 0.5).float(), label)

    class Wide(ours.RAOELoss):
        reads_order = True

    for loss in (ours.PearsonLoss(model), Margin(model), ours.CoSENTLoss(model, gather_across_devices=True)):
        assert ByLength(loss).plan(features, labels).labels["labels"] is labels
    assert ByLength(Wide(model)).plan(features, labels).labels["labels"]["score"].dtype == torch.float32
    scores = theirs.CoSENTLoss(model), ours.CosineSimilarityLoss(model)
    assert all(ByLength(loss).plan(features, labels["score"]).labels is labels["score"] for loss in scores)
    triplets = ByLength(ours.AnglELoss(model)).plan(duplicates(model, 3), labels["score"])  # 1 - score for negatives
    assert triplets.labels["labels"] is labels["score"]
    with pytest.raises(ValueError, match="NaN score"):
        ByLength(ours.CoSENTLoss(model)).plan(features, labels["score"].index_fill(0, torch.tensor([1]), math.nan))


@pytest.mark.parametrize("score_dtype", [torch.float32, torch.float64])
def test_triton_takes_planned_batches_of_2048_pairs(score_dtype):
    """Their scores need no 64 bits, so the kernel sorts them as they are."""
    score = torch.rand(2048, dtype=torch.float64).to(score_dtype)
    columns = [{"input_ids": torch.ones(2048, 2)}] * 2
    labels = ours.CoSENTLoss(None).prepare_labels(columns, {"score": score})["labels"]
    problem = Problem(torch.rand(2048), labels["score"], None, *constants(True, False, 20.0))
    assert problem.scores.dtype == torch.float32 and PAIRWISE.by_case(problem) == "triton"


def test_ids_of_texts_are_computed_on_the_device():
    """Without ByLength, a loss gets columns on the GPU."""
    columns = tiny_encoder(double=False).preprocess(SENTENCES)
    row = {"input_ids": torch.arange(6)[None], "cu_seq_lens_q": torch.tensor([0, 2, 6])}
    for features in (columns, row):
        on_meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in features.items()}
        assert text_ids(on_meta).is_meta and text_ids(on_meta).shape == text_ids(features).shape


@pytest.mark.parametrize("settings", [{}, {"keep": 1.0}])
@pytest.mark.parametrize("prompts", [None, "the dog "])
def test_a_step_of_the_trainer_reads_nothing_back(tmp_path, monkeypatch, without_launches, settings, prompts):
    """With plain arguments, and RAOE's parts. The loss itself is copied, and read later (training/test_finite.py)."""
    columns = {
        "sentence1": SENTENCES,
        "sentence2": SENTENCES[::-1],
        "score": [*range(11)],
        "label": [0, 1, 2, 1] * 2 + [0] * 3,
    }
    model = tiny_encoder(dropout=0.1, double=False)
    model[1].include_prompt = False
    args = arguments(tmp_path, prompts=prompts, optim="adamw_torch")  # fused AdamW has no kernel for "meta"
    trainer = rt.Trainer(model, args, Dataset.from_dict(columns), loss=ours.RAOELoss(model), packed=True, **settings)
    batches = [*trainer.get_train_dataloader()]
    monkeypatch.setattr(trainer.finite, "read", lambda loss: None)
    for module in (model, trainer.computed_loss(), *([trainer.computed_loss().keep.start] if settings else [])):
        module.to("meta")
    optimizer, trainer.current_gradient_accumulation_steps = trainer.create_optimizer(), 1
    for planned in batches:
        loss = trainer.training_step(model, planned)
        trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        trainer.finite.start(planned)
    assert loss.is_meta and loss.requires_grad is False
    with pytest.raises(RuntimeError, match=r"Tensor\.item\(\) cannot be called on meta tensors"):
        loss.item()


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

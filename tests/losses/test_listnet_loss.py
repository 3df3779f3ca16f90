"""ListNetLoss: the formula in loops, ragged lists, caching, recipes."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

from raoe_train import run
from raoe_train.losses import ListNetLoss
from tests.losses.test_listmle_loss import LENGTHS, LISTS, collated, embeddings, labels, teachers
from tests.tiny import SENTENCES, gradients, tiny_encoder
from tests.training.small_runs import SCRATCH


def softmax(values):
    return [math.exp(x) / sum(map(math.exp, values)) for x in values]


def by_definition(vectors, squares, scale, teacher_scale):
    costs = []
    for part, square in zip(vectors.split(LENGTHS), squares, strict=True):
        for own, targets in zip(part, square.tolist(), strict=True):
            cosines = [float(torch.dot(own, other) / own.norm() / other.norm()) for other in part]
            wanted, chosen = softmax([teacher_scale * t for t in targets]), softmax([scale * c for c in cosines])
            costs.append(-sum(p * math.log(q) for p, q in zip(wanted, chosen, strict=True)))
    return sum(costs) / len(costs)


@pytest.mark.parametrize(("scale", "teacher_scale"), [(20.0, 20.0), (3.0, 7.0)])
def test_is_the_formula(scale, teacher_scale):
    vectors, squares = embeddings().detach(), teachers()
    loss = ListNetLoss(None, scale, teacher_scale=teacher_scale)
    found = loss.compute_loss_from_embeddings([vectors], labels(squares, fill=float("nan")))
    assert found.item() == pytest.approx(by_definition(vectors, squares, scale, teacher_scale), rel=1e-9)


def test_cached_gradients_are_those_of_the_batch():
    model = tiny_encoder()
    features, targets = collated(model, LISTS, teachers())
    found = []
    for size in (None, 4):
        model.zero_grad()
        ListNetLoss(model, mini_batch_size=size)(copy.deepcopy(features), targets).backward()
        found.append(gradients(model))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-8)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="teacher_scale must be a number above 0, got 0"):
        ListNetLoss(None, teacher_scale=0)
    with pytest.raises(ValueError, match="ListNetLoss learns a teacher's similarities: the order of a list has none"):
        ListNetLoss(None).compute_loss_from_embeddings([embeddings()], labels())


def test_post_training_with_it(tmp_path):
    """The lists and the teacher of ListMLE's recipe."""
    lists = tmp_path / "lists.jsonl"
    lists.write_text("".join(json.dumps({"sentences": SENTENCES[k : k + 4 + k % 3]}) + "\n" for k in range(6)))
    tiny_encoder(double=False).save_pretrained(str(tmp_path / "teacher"))
    made = {
        "model.name": "scratch", "model.device": "cpu", "model.scratch": SCRATCH, "model.max_seq_length": 16,
        "teacher.name": str(tmp_path / "teacher"), "data.train": str(lists), "data.dev": "none",
        "loss": {"name": "listnet", "teacher_scale": 5}, "output": str(tmp_path / "out"),
        "training": {"epochs": 1, "batch_size": 2, "max_steps": 2, "eval_strategy": "no"},
    }  # fmt: skip
    assert run("train", "ranking-post", **made)["steps"] == 2
    with pytest.raises(ValueError, match=r"loss listnet learns similarities: --teacher\.information both or semantic"):
        run("train", "ranking-post", **{**made, "teacher.information": "ranking", "overwrite": True})

"""In-batch losses, of full rows and of rows that lack negatives: gradients equal those of a float64 reference that
knows only the texts that exist."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer import losses as stock
from torch.nn.functional import logsigmoid, normalize

from raoe_train.encoders import lengths
from raoe_train.losses import AnglEContrastiveLoss, ByLength, GISTLoss, InfoNCELoss, SigmoidLoss
from raoe_train.losses.collators import PlanningCollator, RowCollator, TextCollator, columns_of
from tests.losses.test_infonce_loss import GTE
from tests.losses.test_losses import CACHED
from tests.tiny import SENTENCES, gradients, tiny_encoder

BOTH = {"directions": GTE[::2], "partition_mode": "per_direction"}
WORDS = sorted({word for sentence in SENTENCES for word in sentence.split()})
Texts = list[list[str]]  # of each row: anchor, positive, and the negatives that exist


def letters(texts: Any) -> np.ndarray:
    """A guide whose embedding counts the letters of a text."""
    return np.array([[text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts], np.float64)


def hard(mode: str) -> dict[str, Any]:
    return {"hardness_mode": mode, "hardness_strength": 3.0}


FORMS: list[tuple[Any, dict[str, Any]]] = [
    (InfoNCELoss, {}),
    (InfoNCELoss, {"symmetric": True}),
    (InfoNCELoss, {"directions": GTE}),
    (InfoNCELoss, {"directions": GTE[::3]}),
    (InfoNCELoss, {"directions": (GTE[0], "positive_to_positive")}),
    (InfoNCELoss, {"mask_duplicates": False}),
    (InfoNCELoss, {"mask_duplicates": False, "directions": GTE, **hard("hard_negatives")}),
    *((InfoNCELoss, hard(mode)) for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")),
    (InfoNCELoss, {"directions": GTE, **hard("in_batch_negatives")}),
    (InfoNCELoss, {"directions": GTE, **hard("hard_negatives")}),
    (InfoNCELoss, {**BOTH, **hard("hard_negatives")}),
    (InfoNCELoss, {"matryoshka_dims": [16, 4]}),
    (InfoNCELoss, {"matryoshka_dims": [16, 4], "symmetric": True}),
    (InfoNCELoss, {"matryoshka_dims": [16, 4], "directions": GTE}),
    (SigmoidLoss, {"bias": -2.0}),
    (SigmoidLoss, {"bias": -2.0, "mask_duplicates": False}),
    (GISTLoss, {"embed": letters, "margin": 0.05}),
    (GISTLoss, {"embed": letters, "margin": 0.1, "margin_strategy": "relative", "contrast_anchors": False}),
    (GISTLoss, {"embed": letters, "margin": 0.05, "contrast_positives": False}),
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_encoder()


def drawn(seed: int, duplicates: bool, rows: int = 6, ragged: bool = True) -> list[dict[str, str | None]]:
    """Rows with 4 negatives, or, ragged, 0 to 4 at any place, and always a place without; with duplicates, of few
    texts."""
    rng = Random(seed)
    texts = [" ".join(pair) for pair in itertools.permutations(WORDS[:: 9 if duplicates else 3], 2)]
    rng.shuffle(texts)
    names = ["anchor", "positive", "negative", "negative_2", "negative_3", "negative_4"]
    result = []
    for row in range(rows):
        cells = [rng.choice(texts) if duplicates else texts.pop() for _ in names]
        result.append({name: text if n < 2 or rng.random() < (0.6 if ragged else 2) else None
                       for n, (name, text) in enumerate(zip(names, cells, strict=True))})  # fmt: skip
        if row == 0 and ragged:
            result[0]["negative_3"] = None
    return result


def left_out(rows: Texts, apart: bool) -> Callable[[Any, Any], bool]:
    """Whether two texts, given by (row, place), are no negatives of each other. An anchor leaves out its own text and
    its positives of all rows. Two documents are no negatives if an anchor leaves out both, and two anchors if they
    leave out the same documents. If `apart`, equal texts are different ones."""
    name = (lambda at: at) if apart else (lambda at: rows[at[0]][at[1]])
    documents = {name((i, k)) for i, row in enumerate(rows) for k in range(1, len(row))}
    of_anchor = {name((i, 0)): {name((i, 0))} & documents for i in range(len(rows))}
    for i in range(len(rows)):
        of_anchor[name((i, 0))].add(name((i, 1)))

    def excluded(one: Any, other: Any) -> bool:
        if one[1] > 0 < other[1]:
            return any({name(one), name(other)} <= each for each in of_anchor.values())
        if one[1] == 0 == other[1]:
            return of_anchor[name(one)] == of_anchor[name(other)]
        anchor, document = (one, other) if one[1] == 0 else (other, one)
        return name(document) in of_anchor[name(anchor)]

    return excluded


def reference(kind: Any, form: dict[str, Any], embedded: list[torch.Tensor], rows: Texts) -> torch.Tensor:
    """The loss, candidate by candidate."""
    if dims := form.get("matryoshka_dims"):
        rest = {name: value for name, value in form.items() if name != "matryoshka_dims"}
        return torch.stack([reference(kind, rest, [x[:, :d] for x in embedded], rows) for d in dims]).sum()
    unit = [normalize(x) for x in embedded]
    cos = lambda one, other: unit[one[0]][one[1]] @ unit[other[0]][other[1]]  # noqa: E731
    guide = [normalize(torch.from_numpy(letters(row))) for row in rows]
    similar = lambda one, other: guide[one[0]][one[1]] @ guide[other[0]][other[1]]  # noqa: E731
    no_negatives = left_out(rows, not form.get("mask_duplicates", True))
    documents = [(j, k) for j, row in enumerate(rows) for k in range(1, len(row))]
    losses = []
    for i in range(len(rows)):
        anchor, positive = (i, 0), (i, 1)
        own = 5 * cos(anchor, positive)
        if kind is SigmoidLoss:
            terms = [logsigmoid(own + form["bias"])]
            terms += [logsigmoid(-5 * cos(anchor, each) - form["bias"]) for each in documents
                      if each != positive and not no_negatives(anchor, each)]  # fmt: skip
            losses.append(-torch.stack(terms).sum())
            continue
        directions = form.get("directions", ("query_to_doc",))
        if kind is GISTLoss:
            directions = ["query_to_doc"] + ["query_to_query"] * form.get("contrast_anchors", 1)
            directions += ["positive_to_positive"] * form.get("contrast_positives", 1)
        pools: dict[str, list[torch.Tensor]] = {name: [] for name in directions}
        for other in documents:
            if other != positive and not no_negatives(anchor, other):
                mode, mine = form.get("hardness_mode"), other[0] == i
                raised = mode == "all_negatives" or mode == ("hard_negatives" if mine else "in_batch_negatives")
                cosine = cos(anchor, other)
                pools["query_to_doc"].append((anchor, other, 5 * cosine + raised * 3.0 * cosine.detach()))
            if other[0] != i and not no_negatives(positive, other):
                pools.get("doc_to_doc", []).append((positive, other, 5 * cos(positive, other)))
                if other[1] == 1:
                    pools.get("positive_to_positive", []).append((positive, other, 5 * cos(positive, other)))
        for j in range(len(rows)):
            if j != i and not no_negatives(anchor, (j, 0)):
                pools.get("query_to_query", []).append((anchor, (j, 0), 5 * cos(anchor, (j, 0))))
            if (j == i and form.get("partition_mode") is None) or (j != i and not no_negatives(positive, (j, 0))):
                pools.get("doc_to_query", []).append((positive, (j, 0), 5 * cos(positive, (j, 0))))
        if kind is GISTLoss:
            bound = similar(anchor, positive)
            bound = bound - form["margin"] * (abs(bound) if "margin_strategy" in form else 1)
            pools = {name: [x for x in pool if similar(*x[:2]) <= bound] for name, pool in pools.items()}
        sets = [*pools.values()] if "partition_mode" in form else [[*itertools.chain(*pools.values())]]
        each = [torch.stack([own, *(logit for *_, logit in pool)]).logsumexp(0) - own for pool in sets]
        losses.append(torch.stack(each).mean())
    return torch.stack(losses).mean()


def expected(model: Any, kind: Any, form: dict[str, Any], rows: list[dict[str, str | None]]) -> tuple[Any, Any]:
    """(loss, gradient) of the reference, which encodes the existing texts row by row."""
    if form.get("symmetric"):
        form = {name: value for name, value in form.items() if name != "symmetric"} | BOTH
    texts = [[text for text in row.values() if text is not None] for row in rows]
    model.zero_grad(set_to_none=True)
    value = reference(kind, form, [model(model.preprocess(row))["sentence_embedding"] for row in texts], texts)
    value.backward()
    return value.detach(), gradients(model).clone()


def loss_of(model: Any, kind: Any, form: dict[str, Any], **cached: Any) -> Any:
    loss = kind(model, scale=5.0, **form, **cached).double()
    if kind is SigmoidLoss:
        loss.log_scale.data.fill_(math.log(5.0))  # in float64
    return loss


def collated(model: Any, kind: Any, rows: list[dict[str, str | None]]) -> tuple[list[dict[str, Any]], Any]:
    return columns_of(kind.reads.collator(model.preprocess)(rows))


@pytest.mark.parametrize(
    ("ragged", "duplicates", "mini_batch_size", "around"),
    [(True, True, None, None), (True, False, 2, "packed"), (False, True, 2, None), (False, True, None, ByLength)],
    ids=["ragged", "ragged, packed, cached", "cached", "by length"],
)
@pytest.mark.parametrize("number", range(len(FORMS)))
def test_gradients_equal_the_reference(model, number, ragged, duplicates, mini_batch_size, around, monkeypatch):
    monkeypatch.setattr(lengths, "CPU_FORWARD", 1)  # several runs
    kind, form = FORMS[number]
    rows = drawn(number + 100 * duplicates + 7 * (mini_batch_size or 0), duplicates, ragged=ragged)
    value, gradient = expected(model, kind, form, rows)
    assert gradient.abs().max() > 1e-3
    loss = loss_of(model, kind, form, mini_batch_size=mini_batch_size)
    if around is not None:
        loss = ByLength(loss, packed=around == "packed")
    model.zero_grad(set_to_none=True)
    result = loss(*collated(model, kind, rows))
    result.backward()
    torch.testing.assert_close(result.detach(), value, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradients(model), gradient, **CACHED)
    model[0].model.config._attn_implementation = "sdpa"  # not as packing leaves it


@pytest.mark.parametrize("collator", [RowCollator, TextCollator])
def test_no_text_is_encoded_for_a_missing_negative(model, collator):
    rows = drawn(3, duplicates=False)
    features, labels = columns_of(collator(model.preprocess)(rows))
    assert labels["missing"].tolist() == [[text is None for text in row.values()] for row in rows]
    texts = [text for row in rows for text in row.values() if text is not None]
    plan = ByLength(InfoNCELoss(model)).plan(features, labels)
    encoded = model.tokenizer.batch_decode(torch.cat([x["input_ids"] for x in plan.runs]), skip_special_tokens=True)
    assert sorted(encoded) == sorted(texts)
    full = [{name: text or "x" for name, text in row.items()} for row in rows]
    assert "missing" not in (columns_of(collator(model.preprocess)(full))[1] or {})
    assert collator(model.preprocess)([]) == ({} if collator is RowCollator else {"label": {"texts": []}})


def test_what_cannot_be_is_refused(model):
    lacks = {"anchor": "a", "positive": "b", "negative": None}
    collate = RowCollator(model.preprocess)
    for name in ("anchor", "positive"):
        with pytest.raises(ValueError, match=f"a row has no {name}: only negatives may be missing"):
            collate([lacks | {name: None}])
    two = columns_of(collate([lacks, lacks | {"negative": "c"}]))
    with pytest.raises(ValueError, match="gather_across_devices needs mask_duplicates=True"):
        InfoNCELoss(model, gather_across_devices=True, mask_duplicates=False)(*two)
    for loss in (
        AnglEContrastiveLoss(model), stock.MultipleNegativesRankingLoss(model), stock.TripletLoss(model),
        stock.MatryoshkaLoss(model, stock.MultipleNegativesRankingLoss(model), [16]),
    ):  # fmt: skip
        for each in (loss, ByLength(loss)):
            with pytest.raises(ValueError, match="a row lacks a negative: use InfoNCELoss, GISTLoss or SigmoidLoss"):
                PlanningCollator(collate, each)([lacks])
    PlanningCollator(collate, ByLength(stock.MatryoshkaLoss(model, InfoNCELoss(model), [16])))([lacks])
    pair = columns_of(collate([{"anchor": "a", "positive": "b"}]))
    alone = columns_of(collate([lacks | {"negative_2": None}]))
    for loss in (InfoNCELoss(model), InfoNCELoss(model, mini_batch_size=1), ByLength(InfoNCELoss(model))):
        for each in (pair, alone):
            with pytest.warns(UserWarning, match="a batch of one row has no negatives"):
                assert loss(*each) == 0
            with torch.no_grad():
                assert loss(*each) == 0
        assert loss(*columns_of(collate([lacks | {"negative_2": "c"}]))) > 0
    assert SigmoidLoss(model)(pair[0]) > 0

"""Forms of InfoNCELoss: directions and hardness as in sentence-transformers, and a learned scale."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from sentence_transformers.sentence_transformer import losses as stock
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from raoe_train.losses import ByLength, InfoNCELoss
from raoe_train.losses.in_batch import related_as_ids
from tests.losses.test_infonce_loss import assert_same, embeddings, tokenised
from tests.losses.test_losses import CACHED, step
from tests.tiny import SENTENCES, tiny_encoder

GTE = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
# What sentence-transformers' own tests try (test_gradcache, test_cmnrl), and each mode with and without all directions.
CONFIGURATIONS = [
    {},
    {"scale": 50.0, **BOTH},
    {"directions": GTE},
    {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0},
    {"hardness_mode": "all_negatives", "hardness_strength": 5.0},
    {"scale": 42.0, **BOTH, "hardness_mode": "in_batch_negatives", "hardness_strength": 9.0},
    {"directions": GTE, "hardness_mode": "all_negatives", "hardness_strength": 5.0},
    {"hardness_mode": "hard_negatives", "hardness_strength": 5.0},
    {"directions": GTE, "hardness_mode": "hard_negatives", "hardness_strength": 5.0},
    {"hardness_mode": "hard_negatives", "hardness_strength": 0.0},
    {"directions": ("query_to_doc", "doc_to_query")},
    {"directions": ("query_to_doc",), "partition_mode": "per_direction"},
]


@pytest.fixture(scope="module")
def model():
    return tiny_encoder()


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_is_sentence_transformers_loss(model, configuration):
    """Cached gradients, against uncached ones of sentence-transformers."""
    columns = [[SENTENCES[(3 * row + 2 * column) % len(SENTENCES)] for row in range(7)] for column in range(3)]
    features = [model.preprocess(column) for column in columns]
    value, gradient = step(stock.MultipleNegativesRankingLoss(model, **configuration), model, features, None)
    assert gradient.abs().max() > 1e-3
    ours = InfoNCELoss(model, mask_duplicates=False, mini_batch_size=3, **configuration)
    result, by_ours = step(ours, model, features, None)
    torch.testing.assert_close(result, value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(by_ours, gradient, **CACHED)


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("partition", ["joint", "per_direction"])
def test_every_choice_of_directions_and_hardness(model, partition, negatives):
    inputs = embeddings(2 + negatives, 7, seed=3)
    rest = ("doc_to_query",) if partition == "per_direction" else GTE[1:]
    chosen = [c for n in range(len(rest) + 1) for c in itertools.combinations(rest, n)]
    for more, mode in itertools.product(chosen, (None, "in_batch_negatives", "hard_negatives", "all_negatives")):
        options = {"directions": ("query_to_doc", *more), "partition_mode": partition, "hardness_mode": mode}
        options["hardness_strength"] = 0.0 if mode is None else 3.0
        result = InfoNCELoss(None, 7.0, **options).compute_loss_from_embeddings(inputs)
        expected = stock.MultipleNegativesRankingLoss(None, 7.0, **options).compute_loss_from_embeddings(inputs, None)
        cached = stock.CachedMultipleNegativesRankingLoss(model, 7.0, mini_batch_size=3, **options)
        torch.testing.assert_close(result, cached.calculate_loss([[column] for column in inputs]))
        assert_same(result, expected, inputs)


def linked(texts):
    """A number for each text, equal where a chain of pairs links them, by merging sets one by one."""
    of = {text: {text} for row in texts for text in row}
    for a, b, *_ in texts:
        merged = of[a] | of[b]
        of.update(dict.fromkeys(merged, merged))
    return {text: min(chain) for text, chain in of.items()}


def by_definition(columns, scale, directions, texts):
    """Row by row: -log of the share of the positive's exp in that of all logits that are not left out."""
    anchors, positives, *negatives = [torch.nn.functional.normalize(column) for column in columns]
    rows, documents = len(anchors), torch.cat([positives, *negatives])
    number = linked(texts)

    def same(i, kind, j):
        """Whether row i is no negative of a column: of an anchor (kind 0) or a document."""
        text = texts[j][0] if kind == 0 else texts[j % rows][1 + j // rows]
        return number[texts[i][0]] == number[text]

    losses = []
    for i in range(rows):
        own = scale * anchors[i] @ documents[i]
        rest = [scale * anchors[i] @ documents[j] for j in range(len(documents)) if j != i and not same(i, 1, j)]
        if "query_to_query" in directions:
            rest += [scale * anchors[i] @ anchors[j] for j in range(rows) if j != i and not same(i, 0, j)]
        if "doc_to_query" in directions:
            rest += [scale * positives[i] @ anchors[j] for j in range(rows) if j == i or not same(i, 0, j)]
        if "doc_to_doc" in directions:
            rest += [
                scale * positives[i] @ documents[j]
                for j in range(len(documents))
                if j % rows != i and not same(i, 1, j)
            ]
        losses.append(torch.stack([own, *rest]).logsumexp(0) - own)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("kinds", [3, 8, 20, 1 << 60])
def test_false_negatives_of_all_directions_are_left_out(kinds, columns):
    inputs = embeddings(columns, 10)
    for seed in range(2):
        texts = torch.randint(kinds, (10, columns), generator=torch.Generator().manual_seed(seed)) - kinds // 2
        loss = InfoNCELoss(None, 5.0, directions=GTE)
        result = loss.compute_loss_from_embeddings(inputs, texts=texts)
        assert_same(result, by_definition(inputs, 5.0, GTE, texts.tolist()), inputs)
        assert (loss.compute_loss_from_embeddings(inputs) - result > 1e-3) == (kinds < 1 << 60)


def test_a_negative_that_is_another_rows_positive():
    """The batch has one duplicate; all anchors are distinct."""
    inputs, texts = embeddings(3, 2), torch.tensor([(1, 2, 3), (4, 5, 2)])
    result = InfoNCELoss(None, 5.0, directions=GTE).compute_loss_from_embeddings(inputs, texts=texts)
    assert_same(result, by_definition(inputs, 5.0, GTE, texts.tolist()), inputs)


def test_chained_duplicates_are_one_group():
    texts = torch.tensor([(6, 7), (5, 6), (1, 2), (7, 5), (3, 9), (9, 8), (8, 3), (20, 21)])
    anchors, columns = related_as_ids(texts)
    number = linked(texts.tolist())
    for (i, a), (j, b) in itertools.product(enumerate(texts[:, 0].tolist()), enumerate(texts[:, 1].tolist())):
        assert (anchors[i] == columns[j]) == (number[a] == number[b])
    long = torch.stack([torch.arange(1000).flip(0), torch.arange(1000).flip(0) + 1], dim=1)
    assert len(torch.cat(related_as_ids(long)).unique()) == 1


def test_symmetric_directions_equal_nt_xent():
    """Chen et al. 2020, Eq. 1: rows of both columns, each among all 2 N - 1 others, temperature 0.2."""
    inputs = embeddings(2, 7)
    rows = torch.nn.functional.normalize(torch.cat(inputs))
    logits = (rows @ rows.T / 0.2).fill_diagonal_(-torch.inf)
    pair = (torch.arange(14) + 7) % 14
    expected = (logits.logsumexp(1) - logits[torch.arange(14), pair]).mean()
    loss = InfoNCELoss(None, 1 / 0.2, directions=("query_to_doc", "query_to_query"))
    halves = [loss.compute_loss_from_embeddings(columns) for columns in (inputs, inputs[::-1])]
    assert_same(sum(halves) / 2, expected, inputs)


FORMS = [
    {"directions": GTE},
    {"symmetric": True, "hardness_mode": "all_negatives", "hardness_strength": 3.0},
    {"learn_scale": True, "directions": GTE},
    {"learn_scale": True},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_cached_equals_uncached(model, form):
    plain = InfoNCELoss(model, **form).double()
    value, gradient = step(plain, model, tokenised(model), None)
    for loss in (InfoNCELoss(model, **form, mini_batch_size=3), InfoNCELoss(model, **form)):
        for each in (loss, ByLength(loss)):
            each.double().zero_grad()
            result, cached = step(each, model, tokenised(model), None)
            torch.testing.assert_close(result, value, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(cached, gradient, **CACHED)
            if "learn_scale" in form:
                torch.testing.assert_close(loss.log_scale.grad, plain.log_scale.grad, **CACHED)
                assert loss.log_scale.grad.abs() > 1e-3


@pytest.mark.parametrize("form", [{}, {"symmetric": True}, {"directions": GTE}], ids=str)
def test_the_gradient_of_a_learned_scale(form):
    """Against central differences of losses whose scale is a number; the parameter is its logarithm."""
    given = embeddings(3, 8)
    learned = InfoNCELoss(None, 6.0, learn_scale=True, **form).double()
    loss = learned.compute_loss_from_embeddings(given)
    fixed = InfoNCELoss(None, 6.0, **form).compute_loss_from_embeddings(given)
    assert_same(loss, fixed, given)
    learned.compute_loss_from_embeddings(given).backward()
    step = 1e-5
    values = [
        InfoNCELoss(None, 6.0 * math.exp(h), **form).compute_loss_from_embeddings(given).detach() for h in (step, -step)
    ]
    torch.testing.assert_close(learned.log_scale.grad, (values[0] - values[1]) / (2 * step), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("wrapped", ["plain", "by length", "matryoshka"])
def test_scaled_loss_scales_the_gradient_of_a_learned_scale(model, wrapped):
    """A quarter of the loss, as gradient accumulation takes it, has a quarter of each gradient."""

    def gradient(factor, **cached):
        loss = InfoNCELoss(model, learn_scale=True, **cached).double()
        around = {"plain": lambda: loss, "by length": lambda: ByLength(loss),
                  "matryoshka": lambda: ByLength(MatryoshkaLoss(model, loss, [16, 4]))}[wrapped]()  # fmt: skip
        model.zero_grad()
        (factor * around(tokenised(model), None)).backward()
        (factor * around(tokenised(model), None)).backward()  # of a second batch on top
        return loss.log_scale.grad

    whole = gradient(1.0)
    assert whole.abs() > 1e-2
    for cached in ({}, {"mini_batch_size": 3}):
        torch.testing.assert_close(gradient(0.25, **cached), whole / 4, rtol=1e-7, atol=1e-9)


def test_learned_scale_stays_within_bounds():
    loss = InfoNCELoss(None, 99.0, learn_scale=True)
    for beyond, bound in ((5.0, 100.0), (-1.0, 1.0)):
        loss.log_scale.data.fill_(beyond)
        assert loss.current_scale == pytest.approx(bound)
        loss.compute_loss_from_embeddings([column.detach().float() for column in embeddings(2)])
        assert float(loss.log_scale.detach().exp()) == pytest.approx(bound)
    assert loss.get_config_dict()["scale"] == 99.0 and list(loss.state_dict()) == ["log_scale"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"directions": ["query_to_query"]}, "directions must include query_to_doc"),
        ({"directions": []}, "directions must include query_to_doc"),
        ({"partition_mode": "each"}, "partition_mode must be one of joint, per_direction, got 'each'"),
        ({"partition_mode": "per_direction", "directions": GTE}, "partition_mode per_direction needs query_to_doc"),
        ({"symmetric": True, "directions": GTE}, "symmetric sets directions and partition_mode"),
        ({"hardness_strength": -1.0}, "hardness_strength must be a number of at least 0, got -1"),
        ({"learn_scale": True, "scale": 200.0}, "with learn_scale the scale must be from 1 to 100, got 200"),
    ],
)
def test_invalid_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        InfoNCELoss(None, **settings).compute_loss_from_embeddings(embeddings(2))

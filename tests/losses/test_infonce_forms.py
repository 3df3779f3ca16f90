"""InfoNCELoss's forms: directions and hardness as in sentence-transformers, several positives, a tau that changes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from sentence_transformers.sentence_transformer import losses as stock
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from raoe_train.losses import ByLength, InfoNCELoss
from raoe_train.losses.duplicates import related_as_ids
from tests.losses.test_infonce_loss import ROWS, assert_same, embeddings, tokenised
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
    """With cached gradients, against theirs without."""
    columns = [[SENTENCES[(3 * row + 2 * column) % len(SENTENCES)] for row in range(7)] for column in range(3)]
    features = [model.preprocess(column) for column in columns]
    value, gradient = step(stock.MultipleNegativesRankingLoss(model, **configuration), model, features, None)
    assert gradient.abs().max() > 1e-3
    ours = InfoNCELoss(model, mask_duplicates=False, mini_batch_size=3, **configuration)
    found, by_ours = step(ours, model, features, None)
    torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(by_ours, gradient, **CACHED)


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("partition", ["joint", "per_direction"])
def test_every_choice_of_directions_and_hardness(model, partition, negatives):
    given = embeddings(2 + negatives, 7, seed=3)
    others = ("doc_to_query",) if partition == "per_direction" else GTE[1:]
    chosen = [c for n in range(len(others) + 1) for c in itertools.combinations(others, n)]
    for more, mode in itertools.product(chosen, (None, "in_batch_negatives", "hard_negatives", "all_negatives")):
        options = {"directions": ("query_to_doc", *more), "partition_mode": partition, "hardness_mode": mode}
        options["hardness_strength"] = 0.0 if mode is None else 3.0
        found = InfoNCELoss(None, 7.0, **options).compute_loss_from_embeddings(given)
        expected = stock.MultipleNegativesRankingLoss(None, 7.0, **options).compute_loss_from_embeddings(given, None)
        cached = stock.CachedMultipleNegativesRankingLoss(model, 7.0, mini_batch_size=3, **options)
        torch.testing.assert_close(found, cached.calculate_loss([[column] for column in given]))
        assert_same(found, expected, given)


def linked(texts, groups=None):
    """A number for each text, equal where a chain of pairs (or of groups) links them, by merging sets one by one."""
    of = {text: {text} for row in texts for text in row}
    pairs = [(row[0], row[1]) for row in texts]
    if groups is not None:
        pairs += [(a[0], b[0]) for i, a in enumerate(texts) for j, b in enumerate(texts) if groups[i] == groups[j]]
    for a, b in pairs:
        merged = of[a] | of[b]
        of.update(dict.fromkeys(merged, merged))
    return {text: min(chain) for text, chain in of.items()}


def by_definition(columns, scale, directions, texts=None, groups=None):
    """Row by row: -log of the share of the positives' exp in that of all logits that are not left out."""
    anchors, positives, *negatives = [torch.nn.functional.normalize(column) for column in columns]
    rows, documents = len(anchors), torch.cat([positives, *negatives])
    number = None if texts is None else linked(texts, groups)

    def same(i, kind, j):
        """Whether row i is no negative of a column: of an anchor (kind 0) or a document."""
        if number is None:
            in_group = kind == 0 or j < rows
            return groups is not None and in_group and groups[i] == groups[j % rows]
        text = texts[j][0] if kind == 0 else texts[j % rows][1 + j // rows]
        return number[texts[i][0]] == number[text]

    losses = []
    for i in range(rows):
        own, others = [], []
        for j in range(len(documents)):
            logit = scale * anchors[i] @ documents[j]
            positive = j == i or (groups is not None and j < rows and groups[i] == groups[j])
            if positive:
                own.append(logit)
            elif not same(i, 1, j):
                others.append(logit)
        if "query_to_query" in directions:
            others += [scale * anchors[i] @ anchors[j] for j in range(rows) if j != i and not same(i, 0, j)]
        if "doc_to_query" in directions:
            others += [scale * positives[i] @ anchors[j] for j in range(rows) if j == i or not same(i, 0, j)]
        if "doc_to_doc" in directions:
            others += [
                scale * positives[i] @ documents[j]
                for j in range(len(documents))
                if j % rows != i and not same(i, 1, j)
            ]
        own, everything = torch.stack(own), torch.stack(own + others)
        losses.append(everything.logsumexp(0) - own.logsumexp(0))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("kinds", [3, 8, 20, 1 << 60])
def test_false_negatives_of_all_directions_are_left_out(kinds, columns):
    given = embeddings(columns, 10)
    for seed in range(2):
        texts = torch.randint(kinds, (10, columns), generator=torch.Generator().manual_seed(seed)) - kinds // 2
        loss = InfoNCELoss(None, 5.0, directions=GTE)
        found = loss.compute_loss_from_embeddings(given, texts=texts)
        assert_same(found, by_definition(given, 5.0, GTE, texts.tolist()), given)
        assert (loss.compute_loss_from_embeddings(given) - found > 1e-3) == (kinds < 1 << 60)


def test_a_negative_that_is_another_rows_positive():
    """A batch's one duplicate, and all anchors differ."""
    given, texts = embeddings(3, 2), torch.tensor([(1, 2, 3), (4, 5, 2)])
    found = InfoNCELoss(None, 5.0, directions=GTE).compute_loss_from_embeddings(given, texts=texts)
    assert_same(found, by_definition(given, 5.0, GTE, texts.tolist()), given)


@pytest.mark.parametrize("directions", [GTE[:1], GTE])
@pytest.mark.parametrize("columns", [2, 4])
def test_several_positives(columns, directions):
    given = embeddings(columns, 8)
    labels, texts = [3, -7, 3, 0, 0, 3, 9, 8], torch.tensor(ROWS)[:, :columns]
    anchors = [row[0] for row in ROWS]
    assert len(set(anchors)) < len(anchors)
    for positives, groups in (("label", labels), ("anchor", anchors)):
        for masks in (True, False):
            loss = InfoNCELoss(None, 5.0, positives=positives, directions=directions, mask_duplicates=masks)
            found = loss.compute_loss_from_embeddings(given, torch.tensor(labels), texts=texts)
            expected = by_definition(given, 5.0, directions, texts.tolist() if masks else None, groups)
            assert_same(found, expected, given)
            alone = InfoNCELoss(None, 5.0, directions=directions, mask_duplicates=masks)
            assert abs(alone.compute_loss_from_embeddings(given, texts=texts) - found) > 1e-3


def test_two_positives_by_hand():
    """Two rows with one premise along x, hypotheses along x and y; a third row along -x with its own along -y."""
    columns = [torch.tensor(c, dtype=torch.float64) for c in (
        [[1, 0], [2, 0], [-1, 0]], [[3, 0], [0, 1], [0, -1]]
    )]  # fmt: skip
    texts = torch.tensor([[1, 2], [1, 3], [4, 5]])
    e = math.e
    # the first two: positives' cosines 1 and 0, the other column's 0; the third: its own 0, the others' -1 and 0
    expected = (2 * math.log((e + 1 + 1) / (e + 1)) + math.log((1 + 1 / e + 1) / 1)) / 3
    found = InfoNCELoss(None, 1.0, positives="anchor").compute_loss_from_embeddings(columns, texts=texts)
    assert float(found) == pytest.approx(expected, abs=1e-12)


def test_both_ways_with_several_positives():
    """In a softmax of its own, the other direction finds all anchors of the group, too."""
    given, labels = embeddings(2, 6), torch.tensor([1, 0, 1, 2, 2, 1])
    for said in ({"symmetric": True}, BOTH):
        found = InfoNCELoss(None, 5.0, positives="label", **said).compute_loss_from_embeddings(given, labels)
        anchors, positives = (torch.nn.functional.normalize(column) for column in given)
        logits = 5.0 * anchors @ positives.T
        shares = logits.masked_fill(labels[:, None] != labels, -torch.inf)
        there, back = ((logits.logsumexp(way) - shares.logsumexp(way)).mean() for way in (1, 0))
        assert_same(found, (there + back) / 2, given)


def test_chains_of_pairs_are_one():
    texts = torch.tensor([(6, 7), (5, 6), (1, 2), (7, 5), (3, 9), (9, 8), (8, 3), (20, 21)])
    anchors, columns = related_as_ids(texts, None)
    number = linked(texts.tolist())
    for (i, a), (j, b) in itertools.product(enumerate(texts[:, 0].tolist()), enumerate(texts[:, 1].tolist())):
        assert (anchors[i] == columns[j]) == (number[a] == number[b])
    long = torch.stack([torch.arange(1000).flip(0), torch.arange(1000).flip(0) + 1], dim=1)
    assert len(torch.cat(related_as_ids(long, None)).unique()) == 1


def test_debiased_is_the_papers_formula():
    """Chuang et al. 2020, Eq. 8, with one positive and all other columns for N."""
    given = embeddings(3, 8)
    for prior, scale in ((0.1, 5.0), (0.85, 2.0)):
        anchors, *others = [torch.nn.functional.normalize(column) for column in given]
        logits = (scale * anchors @ torch.cat(others).T).exp()
        own = logits.diagonal()
        count = logits.shape[1] - 1
        estimate = (logits.sum(1) - own - count * prior * own) / (1 - prior)
        assert (estimate < count * math.exp(-scale)).any() == (prior == 0.85)
        expected = -(own / (own + estimate.clamp(min=count * math.exp(-scale)))).log().mean()
        found = InfoNCELoss(None, scale, debias=prior).compute_loss_from_embeddings(given)
        assert_same(found, expected, given)


def test_both_halves_are_nt_xent():
    """Chen et al. 2020, Eq. 1: rows of both columns, each among all 2 N - 1 others, temperature 0.2."""
    given = embeddings(2, 7)
    rows = torch.nn.functional.normalize(torch.cat(given))
    logits = (rows @ rows.T / 0.2).fill_diagonal_(-torch.inf)
    pair = (torch.arange(14) + 7) % 14
    expected = (logits.logsumexp(1) - logits[torch.arange(14), pair]).mean()
    loss = InfoNCELoss(None, 1 / 0.2, directions=("query_to_doc", "query_to_query"))
    halves = [loss.compute_loss_from_embeddings(columns) for columns in (given, given[::-1])]
    assert_same(sum(halves) / 2, expected, given)


@pytest.mark.parametrize("columns", [3, 5])
def test_hard_negatives_only_are_rows_alone(columns):
    given = embeddings(columns, 6)
    loss = InfoNCELoss(None, 5.0, hard_negatives_only=True)
    alone = [InfoNCELoss(None, 5.0).compute_loss_from_embeddings([c[i : i + 1] for c in given]) for i in range(6)]
    assert_same(loss.compute_loss_from_embeddings(given), torch.stack(alone).mean(), given)
    # a negative that is the anchor, and one that is the positive of the same anchor elsewhere
    texts = torch.arange(6 * columns).reshape(6, columns)
    texts[0, 2], texts[1, 0], texts[1, 2] = texts[0, 0], texts[2, 0], texts[2, 1]
    anchors, *others = [torch.nn.functional.normalize(column) for column in given]
    logits = torch.stack([5.0 * (anchors * column).sum(1) for column in others], dim=1)
    drop = torch.zeros_like(logits, dtype=torch.bool)
    drop[0, 1] = drop[1, 1] = True
    expected = -logits.masked_fill(drop, -torch.inf).log_softmax(1)[:, 0].mean()
    assert_same(loss.compute_loss_from_embeddings(given, texts=texts), expected, given)


FORMS = [
    {"directions": GTE},
    {"positives": "anchor", "hardness_mode": "all_negatives", "hardness_strength": 3.0},
    {"hard_negatives_only": True},
    {"debias": 0.1, "symmetric": True},
    {"learn_scale": True, "directions": GTE},
    {"learn_scale": True},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_cached_is_uncached(model, form):
    plain = InfoNCELoss(model, **form).double()
    value, gradient = step(plain, model, tokenised(model), None)
    for loss in (InfoNCELoss(model, **form, mini_batch_size=3), InfoNCELoss(model, **form)):
        for each in (loss, ByLength(loss)):
            each.double().zero_grad()
            found, cached = step(each, model, tokenised(model), None)
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(cached, gradient, **CACHED)
            if "learn_scale" in form:
                torch.testing.assert_close(loss.log_scale.grad, plain.log_scale.grad, **CACHED)
                assert loss.log_scale.grad.abs() > 1e-3


@pytest.mark.parametrize("form", [{}, {"symmetric": True}, {"directions": GTE}, {"hard_negatives_only": True}], ids=str)
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
def test_what_is_put_before_a_cached_loss_is_before_a_learned_scale(model, wrapped):
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


def test_a_learned_scale_stays_within_clips_bounds():
    loss = InfoNCELoss(None, 99.0, learn_scale=True)
    for beyond, bound in ((5.0, 100.0), (-1.0, 1.0)):
        loss.log_scale.data.fill_(beyond)
        assert loss.current_scale == pytest.approx(bound) and loss.temperature == pytest.approx(1 / bound)
        loss.compute_loss_from_embeddings([column.detach().float() for column in embeddings(2)])
        assert float(loss.log_scale.detach().exp()) == pytest.approx(bound)
    assert loss.get_config_dict()["scale"] == 99.0 and list(loss.state_dict()) == ["log_scale"]


def test_a_scheduled_scale():
    given = embeddings(3)
    loss = InfoNCELoss(None, 10.0, end_scale=40.0)
    for progress, scale in ((0.0, 10.0), (0.5, 20.0), (1.0, 40.0)):
        loss.progress = progress
        assert loss.current_scale == pytest.approx(scale)
        expected = InfoNCELoss(None, scale).compute_loss_from_embeddings(given)
        torch.testing.assert_close(loss.compute_loss_from_embeddings(given), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"directions": ["query_to_query"]}, "directions must be query_to_doc and perhaps others of .*got"),
        ({"directions": []}, r"directions must be query_to_doc and perhaps others of .*got \[\]"),
        ({"directions": ["query_to_doc", "up"]}, r"directions must be .* got \['query_to_doc', 'up'\]"),
        ({"partition_mode": "each"}, "partition_mode must be one of joint, per_direction, got 'each'"),
        ({"partition_mode": "per_direction", "directions": GTE}, "partition_mode per_direction takes directions"),
        ({"symmetric": True, "directions": GTE}, "symmetric is short for directions and a partition_mode"),
        ({"hardness_mode": "hard"}, "hardness_mode must be one of None, in_batch_negatives, .* got 'hard'"),
        ({"hardness_strength": -1.0}, "hardness_strength must be a number from 0, got -1"),
        ({"positives": "all"}, "positives must be one of own, label, anchor, got 'all'"),
        ({"debias": 1.0}, "debias must be a number from 0 to below 1, got 1"),
        ({"debias": -0.1}, "debias must be a number from 0 to below 1, got -0.1"),
        ({"hard_negatives_only": True, "symmetric": True}, "hard_negatives_only compares a row with its own columns"),
        ({"learn_scale": True, "scale": 200.0}, "learn_scale begins at a scale from 1 to 100 .*got scale 200"),
        ({"learn_scale": True, "end_scale": 40.0}, "learn_scale .* has no end_scale, got .* end_scale 40"),
        ({"end_scale": -5.0}, "end_scale must be a number above 0 or None, got -5"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        InfoNCELoss(None, **settings)


def test_batches_that_cannot_be():
    given = embeddings(3)
    for labels in (None, torch.zeros(8), torch.zeros(7, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"positives 'label' needs labels, \(8,\) integers, a column 'label'; got"):
            InfoNCELoss(None, positives="label").compute_loss_from_embeddings(given, labels)
    with pytest.raises(ValueError, match="positives 'anchor' needs the ids of texts"):
        InfoNCELoss(None, positives="anchor").compute_loss_from_embeddings(given)
    with pytest.raises(ValueError, match="hard_negatives_only needs columns of negatives"):
        InfoNCELoss(None, hard_negatives_only=True).compute_loss_from_embeddings(given[:2])

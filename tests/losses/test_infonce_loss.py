"""InfoNCELoss: the formula without false negatives, caching and Matryoshka."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from raoe_train.losses import InfoNCELoss
from raoe_train.losses.in_batch import text_ids
from tests.losses.test_losses import CACHED, step
from tests.tiny import SENTENCES, gradients, tiny_encoder

# Rows of anchor, positive and two hard negatives, by numbers of SENTENCES. Rows 0 and 1 share the anchor, 1 and 2 the
# positive; a negative of 2 is 4's anchor, and one of 3 is 0's positive; 5 and 6 are a chain, 5 -> 6 -> 7.
ROWS = [(0, 1, 2, 7), (0, 3, 4, 5), (8, 3, 9, 1), (10, 2, 1, 3)]
ROWS += [(9, 4, 5, 8), (5, 6, 10, 9), (6, 7, 8, 4), (1, 8, 0, 6)]


def tokenised(model, columns=4, rows=ROWS):
    return [model.preprocess([SENTENCES[row[column]] for row in rows]) for column in range(columns)]


def embeddings(columns=3, rows=8, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(columns, rows, width, generator=generator, dtype=torch.float64)
    return [column.clone().requires_grad_() for column in made]


def false_negatives(texts):
    """[anchor i][column j]: a chain of pairs (anchor, positive) leads from one text to the other, or they are equal."""
    group = {text: {text} for row in texts for text in row}
    for anchor, positive, *_ in texts:
        whole = group[anchor] | group[positive]
        group |= dict.fromkeys(whole, whole)
    columns = [row[column] for column in range(1, len(texts[0])) for row in texts]
    return [[text in group[row[0]] for text in columns] for row in texts]


def by_definition(columns, texts, scale, symmetric):
    """Mean of -log softmax over what remains of the logits, row by row."""
    anchors, *rest = [torch.nn.functional.normalize(column) for column in columns]
    logits = scale * anchors @ torch.cat(rest).T
    rows = len(logits)
    drop = torch.zeros_like(logits, dtype=torch.bool)
    if texts is not None:
        drop = torch.tensor(false_negatives(texts)) & ~torch.eye(rows, logits.shape[1], dtype=torch.bool)
    logits = logits.masked_fill(drop, -torch.inf)
    loss = -logits.log_softmax(1).diagonal().mean()
    if symmetric:
        loss = (loss - logits[:, :rows].log_softmax(0).diagonal().mean()) / 2
    return loss


def assert_same(found, expected, columns):
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found, columns), torch.autograd.grad(expected, columns), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [2, 3, 4])
def test_equals_the_formula(columns, symmetric):
    inputs = embeddings(columns)
    result = InfoNCELoss(None, 5.0, symmetric=symmetric).compute_loss_from_embeddings(inputs)
    assert result.dtype == torch.float64
    assert_same(result, by_definition(inputs, None, 5.0, symmetric), inputs)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("kinds", [1, 3, 8, 14, 30, 1 << 60])
def test_false_negatives_are_left_out(kinds, columns, symmetric):
    inputs = embeddings(columns, 12)
    for seed in range(4):
        texts = torch.randint(kinds, (12, columns), generator=torch.Generator().manual_seed(seed)) - kinds // 2
        loss = InfoNCELoss(None, 5.0, symmetric=symmetric)
        result = loss.compute_loss_from_embeddings(inputs, texts=texts)
        assert_same(result, by_definition(inputs, texts.tolist(), 5.0, symmetric), inputs)
        with_all = loss.compute_loss_from_embeddings(inputs)
        assert (with_all - result > 1e-3) == (kinds < 1 << 60)


def test_a_chain_of_pairs():
    """1 and 4 share the positive 2, so 1, 2 and 4 are not negatives of each other; 7 is one of all."""
    assert false_negatives([(1, 2), (4, 2), (7, 4)]) == [[True] * 3] * 3
    texts = [(1, 2, 9), (4, 2, 7), (7, 8, 4)]
    assert false_negatives(texts)[0] == [True, True, False, False, False, True]
    inputs = embeddings(3, 3)
    result = InfoNCELoss(None, symmetric=True).compute_loss_from_embeddings(inputs, texts=torch.tensor(texts))
    assert_same(result, by_definition(inputs, texts, 20.0, True), inputs)


TEXTS = [[2, 27, 38, 3], [2, 38, 27, 3], [2, 27, 27, 3], [2, 27, 3], [2, 3], [3, 2], [], [2, 27, 38, 3, 3]]


def padded(width, left=False):
    ids, real = torch.zeros(2, len(TEXTS), width, dtype=torch.long)
    ids += 7  # what stands in the padding does not matter
    for row, text in enumerate(TEXTS):
        place = slice(width - len(text), None) if left else slice(len(text))
        ids[row, place], real[row, place] = torch.tensor(text, dtype=torch.long), 1
    return {"input_ids": ids, "attention_mask": real, "modality": "text"}


def test_the_same_tokens_are_the_same_text():
    ids = text_ids(padded(5))
    assert ids.dtype == torch.int64 and len(ids.unique()) == len(TEXTS)
    in_a_row = torch.tensor([token for text in TEXTS for token in text])
    ends = torch.tensor([len(text) for text in TEXTS]).cumsum(0)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]])
    for features in (
        padded(9),
        padded(9, left=True),
        {**padded(9), "input_ids": padded(9)["input_ids"].int()},
        {"input_ids": in_a_row[None], "cu_seq_lens_q": torch.cat([starts, ends[-1:]]).int()},
        {"input_ids": in_a_row, "offsets": starts},  # as StaticEmbedding has them
    ):
        assert torch.equal(text_ids(features), ids)
    many = torch.randint(120_000, (20_000, 2), generator=torch.Generator().manual_seed(0)).unique(dim=0)
    assert len(text_ids({"input_ids": many}).unique()) == len(many)


def test_no_texts_to_compare():
    for column in ({"pixel_values": torch.zeros(2, 3)}, {**padded(5), "modality": ("text", "image")}):
        with pytest.raises(ValueError, match=r"a column is not text-only.*mask_duplicates=False"):
            InfoNCELoss(None)([column, column])


@pytest.mark.parametrize("symmetric", [False, True])
def test_finds_the_duplicates_of_a_batch(symmetric):
    model = tiny_encoder()
    columns = [model(dict(column))["sentence_embedding"] for column in tokenised(model)]
    assert sum(map(sum, false_negatives(ROWS))) > len(ROWS), "or there are no duplicates to find"
    for settings, texts in (({}, ROWS), ({"mask_duplicates": False}, None)):
        value, gradient = step(InfoNCELoss(model, symmetric=symmetric, **settings), model, tokenised(model), None)
        expected = by_definition(columns, texts, 20.0, symmetric)
        torch.testing.assert_close(value, expected.detach())
        model.zero_grad(set_to_none=True)
        expected.backward(retain_graph=True)
        torch.testing.assert_close(gradient, gradients(model))
    assert InfoNCELoss(model)(tokenised(model), torch.full((8,), 7)) == InfoNCELoss(model)(tokenised(model))


@pytest.mark.parametrize("mini_batch_size", [1, 3, 100])
def test_cached_equals_uncached(mini_batch_size):
    model = tiny_encoder()
    value, gradient = step(InfoNCELoss(model, symmetric=True), model, tokenised(model), None)
    assert gradient.abs().max() > 1e-3
    loss = InfoNCELoss(model, symmetric=True, mini_batch_size=mini_batch_size)
    cached_value, cached = step(loss, model, tokenised(model), None)
    torch.testing.assert_close(cached_value, value, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cached, gradient, **CACHED)
    with torch.no_grad():
        torch.testing.assert_close(loss(tokenised(model)), value)


def test_inside_matryoshka():
    model = tiny_encoder()
    dims, weights = [16, 4], [1.0, 0.5]
    columns = [model(dict(column))["sentence_embedding"] for column in tokenised(model)]
    expected = sum(
        weight * by_definition([column[:, :dim] for column in columns], ROWS, 20.0, True)
        for dim, weight in zip(dims, weights, strict=True)
    )
    model.zero_grad()
    expected.backward()
    by_hand = gradients(model).clone()
    for mini_batch_size in (None, 3):
        inner = InfoNCELoss(model, symmetric=True, mini_batch_size=mini_batch_size)
        value, gradient = step(MatryoshkaLoss(model, inner, dims, weights), model, tokenised(model), None)
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(gradient, by_hand, **CACHED)


def test_bad_input():
    for scale in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"scale must be a number above 0, got "):
            InfoNCELoss(None, scale)
    with pytest.raises(ValueError, match="mini_batch_size must be a number above 0, got 0"):
        InfoNCELoss(None, mini_batch_size=0)
    loss, columns = InfoNCELoss(None), embeddings(3)
    with pytest.raises(ValueError, match=r"needs columns of equal length: .* got columns of \d+ rows"):
        loss.compute_loss_from_embeddings(columns[:1])
    with pytest.raises(ValueError, match=r"columns of equal length.* got columns of 8, 8, 7 rows"):
        loss.compute_loss_from_embeddings([*columns[:2], columns[2][1:]])

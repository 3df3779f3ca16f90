"""InfoNCELoss and SigmoidLoss: ids of texts, learned scales, wrong input. Their formula, cached, by length and of
several widths: test_ragged_rows.py."""

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from raoe_kernels.infonce.problem import equal_ids
from raoe_train.losses import ByLength, InfoNCELoss, SigmoidLoss
from raoe_train.losses.in_batch import duplicate_ids, text_ids
from tests.tiny import SENTENCES, tiny_encoder

GTE = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")

# Rows of anchor, positive and two hard negatives, by numbers of SENTENCES. Rows 0 and 1 share the anchor, 1 and 2 the
# positive; a negative of 2 is 4's anchor, and one of 3 is 0's positive; 5 and 6 are a chain, 5 -> 6 -> 7.
ROWS = [(0, 1, 2, 7), (0, 3, 4, 5), (8, 3, 9, 1), (10, 2, 1, 3)]
ROWS += [(9, 4, 5, 8), (5, 6, 10, 9), (6, 7, 8, 4), (1, 8, 0, 6)]


@pytest.fixture(scope="module")
def model():
    return tiny_encoder()


def tokenized(model, columns=4, rows=ROWS):
    return [model.preprocess([SENTENCES[row[column]] for row in rows]) for column in range(columns)]


def embeddings(columns=3, rows=8, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(columns, rows, width, generator=generator, dtype=torch.float64)
    return [column.clone().requires_grad_() for column in made]


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
        with pytest.raises(ValueError, match=r"a column contains other inputs.*mask_duplicates=False"):
            InfoNCELoss(None)([column, column])


def left_out(texts):
    """{(row, column) that duplicate_ids leaves out}, and the same by the rule alone, for all pairs but the own ones."""
    rows, columns = len(texts), texts[:, 1:].T.flatten().tolist()
    ids = duplicate_ids(texts)
    equal = torch.zeros(rows, len(columns), dtype=bool) if ids is None else equal_ids(*ids)
    positives = {anchor: {anchor} for anchor in texts[:, 0].tolist()}
    for anchor, positive in texts[:, :2].tolist():
        positives[anchor].add(positive)
    rule = [[text in positives[anchor] for text in columns] for anchor in texts[:, 0].tolist()]
    other = ~torch.eye(rows, len(columns), dtype=bool)
    return equal & other, torch.tensor(rule) & other


@pytest.mark.parametrize("texts", [30, 8, 3])
@pytest.mark.parametrize("columns", [2, 4])
def test_a_query_leaves_out_its_own_positives_and_no_other_text(texts, columns):
    generator = torch.Generator().manual_seed(texts)
    for _ in range(30):
        by_ids, by_rule = left_out(torch.randint(texts, (12, columns), generator=generator))
        assert torch.equal(by_ids, by_rule)


def test_a_chain_of_shared_texts_keeps_its_negatives():
    """q1 has the positives A and B, q2 has B and C. So q1's only negative is C, and q2's is A; the loss is not 0."""
    chain = torch.tensor([[0, 10], [0, 11], [1, 11], [1, 12]])
    by_ids, by_rule = left_out(chain)
    assert torch.equal(by_ids, by_rule) and by_rule.sum() == 2 + 2 + 2 + 2
    columns = [column.detach() for column in embeddings(2, rows=4)]
    cosines = torch.nn.functional.normalize(columns[0], dim=1) @ torch.nn.functional.normalize(columns[1], dim=1).T
    logits = (5 * cosines).masked_fill(by_rule, -torch.inf)
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(4))
    assert expected > 0.1
    for dims in ((), [6, 3]):
        loss = InfoNCELoss(None, 5.0, matryoshka_dims=dims).compute_loss_from_embeddings(columns, texts=chain)
        halves = [column[:, :3] for column in columns]
        shorter = InfoNCELoss(None, 5.0).compute_loss_from_embeddings(halves, texts=chain) if dims else 0
        assert float(loss) == pytest.approx(float(expected + shorter), abs=1e-12)


def test_a_long_chain_needs_two_ids():
    chain = torch.stack([torch.arange(1000).flip(0), torch.arange(1000).flip(0) + 1], dim=1)
    ids = duplicate_ids(chain)
    assert ids[0].shape == ids[1].shape == (1000, 2)


@pytest.mark.parametrize("wrapped", ["plain", "by length", "matryoshka"])
def test_scaled_loss_scales_the_gradient_of_what_it_learns(model, wrapped):
    """A quarter of the loss, as gradient accumulation takes it, has a quarter of each gradient, cached too."""

    def gradient(factor, **cached):
        loss = SigmoidLoss(model, **cached).double()
        around = {"plain": lambda: loss, "by length": lambda: ByLength(loss),
                  "matryoshka": lambda: ByLength(MatryoshkaLoss(model, loss, [16, 4]))}[wrapped]()  # fmt: skip
        model.zero_grad()
        (factor * around(tokenized(model), None)).backward()
        (factor * around(tokenized(model), None)).backward()  # of a second batch on top
        return torch.stack([x.grad for name, x in loss.named_parameters() if not name.startswith("model.")])

    whole = gradient(1.0)
    assert whole.abs().min() > 1e-3
    for cached in ({}, {"mini_batch_size": 3}):
        torch.testing.assert_close(gradient(0.25, **cached), whole / 4, rtol=1e-6, atol=1e-9)


def test_learned_scale_stays_within_bounds():
    loss = SigmoidLoss(None, 99.0)
    for beyond, bound in ((5.0, 100.0), (-1.0, 1.0)):
        loss.log_scale.data.fill_(beyond)
        assert loss.current_scale == pytest.approx(bound)
        loss.compute_loss_from_embeddings([column.detach().float() for column in embeddings(2)])
        assert float(loss.log_scale.detach().exp()) == pytest.approx(bound)
    assert loss.get_config_dict()["scale"] == 99.0 and {*loss.state_dict()} == {"log_scale", "logit_bias"}


def test_initial_scale_and_bias_are_the_papers():
    loss = SigmoidLoss(None)
    assert loss.current_scale == 10
    assert loss.logit_bias.item() == -10
    assert {name for name, _ in loss.named_parameters()} == {"log_scale", "logit_bias"}
    assert not [*SigmoidLoss(None, learn_scale=False).parameters()]


def test_bad_input():
    for scale in (200.0, 0.5):
        with pytest.raises(ValueError, match="with learn_scale, the scale must be from 1 to 100"):
            SigmoidLoss(None, scale)
    columns = embeddings(3)
    for given in (columns[:1], [*columns[:2], columns[2][1:]]):
        with pytest.raises(ValueError, match="needs two or more columns of equal length"):
            InfoNCELoss(None).compute_loss_from_embeddings(given)

"""ListMLELoss: the paper's formula for ragged lists, and the trainer's batches."""

import pytest
import torch

from raoe_train import ListCollator
from raoe_train.losses import ListMLELoss
from tests.losses.test_infonce_loss import embeddings
from tests.tiny import SENTENCES, tiny_encoder

LENGTHS = [4, 3, 7, 5]
LISTS = [SENTENCES[:4], SENTENCES[4:7], SENTENCES[3:10], SENTENCES[6:11]]


def teachers():
    """Squares of different sizes, not symmetric, so that rows and columns cannot be mixed up."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(n, n, generator=generator, dtype=torch.float64) * 2 - 1 for n in LENGTHS]


def padded(squares):
    longest = max(map(len, squares))
    made = torch.zeros(len(squares), longest, longest, dtype=torch.float64)
    for place, square in zip(made, squares, strict=True):
        place[: len(square), : len(square)] = square
    return made


def labels(squares=None):
    options = {"lengths": torch.tensor(LENGTHS)}
    return options if squares is None else {**options, "teacher": padded(squares)}


def by_definition(vectors, squares, scale):
    """Eq. 8 and 9 in loops: over lists, their sentences, and what is left to draw. Ties in order of appearance."""
    costs = []
    for number, part in enumerate(vectors.split(LENGTHS)):
        for j, own in enumerate(part):
            cosine = [torch.dot(own, other) / own.norm() / other.norm() for other in part]
            teacher = [-abs(k - j) for k in range(len(part))] if squares is None else squares[number][j].tolist()
            left = sorted(range(len(part)), key=lambda k: -teacher[k])
            cost = vectors.new_zeros(())
            while left:
                cost = cost - (scale * cosine[left[0]]) + torch.stack([scale * cosine[k] for k in left]).logsumexp(0)
                left.pop(0)
            costs.append(cost)
    return sum(costs) / len(costs)


def assert_same(found, expected, vectors):
    torch.testing.assert_close(found, expected)
    (a,), (b,) = (torch.autograd.grad(value, vectors) for value in (found, expected))
    assert b.abs().max() > 1e-3
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_equals_the_papers_formula(scale):
    vectors, squares = embeddings(1, 19)[0], teachers()
    result = ListMLELoss(None, scale).compute_loss_from_embeddings([vectors], labels(squares))
    assert result.dtype == torch.float64 and result.shape == ()
    assert_same(result, by_definition(vectors, squares, scale), vectors)


def test_ranking_only_is_the_order_of_the_list():
    vectors = embeddings(1, 19)[0]
    loss = ListMLELoss(None, 5.0)
    result = loss.compute_loss_from_embeddings([vectors], labels())
    assert_same(result, by_definition(vectors, None, 5.0), vectors)
    places = [torch.arange(n, dtype=torch.float64) for n in LENGTHS]
    same = [-(place - place[:, None]).abs() for place in places]
    torch.testing.assert_close(loss.compute_loss_from_embeddings([vectors], labels(same)), result)


def collated(model, lists=LISTS, squares=None, **settings):
    """(features, labels) as the trainer collates them."""
    rows = [{"sentences": list(texts)} for texts in lists]
    if squares is not None:
        rows = [{**row, "label": square.flatten().tolist()} for row, square in zip(rows, squares, strict=True)]
    made = ListCollator(preprocess_fn=model.preprocess, **settings)(rows)
    prefix = "sentences_"
    return [{key[len(prefix) :]: value for key, value in made.items() if key.startswith(prefix)}], made["label"]


def test_the_collator():
    model, squares = tiny_encoder(), teachers()
    (features,), made = collated(model, squares=squares)
    flat = model.preprocess([text for texts in LISTS for text in texts])
    assert torch.equal(features["input_ids"], flat["input_ids"])
    assert torch.equal(made["lengths"], torch.tensor(LENGTHS))
    assert made["teacher"].dtype == torch.float32
    torch.testing.assert_close(made["teacher"].double(), padded(squares), atol=1e-6, rtol=0)
    assert set(collated(model)[1]) == {"lengths"}
    with_prompt = collated(model, prompts="the train ")[0][0]["input_ids"]
    assert torch.equal(with_prompt[0, :3], model.preprocess(["the train"])["input_ids"][0, :3])
    collator = ListCollator(preprocess_fn=model.preprocess)
    named = collator([{"sentences": ["a", "b", "c"], "dataset_name": "lists"}] * 2)
    assert named["dataset_name"] == "lists" and named["sentences_input_ids"].shape[0] == 6
    assert collator([]) == {}
    for row in ({"sentences": []}, {"sentences": "a b c"}, {"text": "a"}):
        with pytest.raises(ValueError, match="each row needs a list of texts in column 'sentences'"):
            collator([row])
    with pytest.raises(ValueError, match=r"3 sentences need 3 x 3 label values, got 4"):
        collator([{"sentences": ["a", "b", "c"], "label": [1.0, 2.0, 3.0, 4.0]}])


def test_bad_input():
    loss, column = ListMLELoss(None), embeddings(1, 19)[0]
    with pytest.raises(ValueError, match=r"one column and the labels from raoe_train.ListCollator; got 2 columns"):
        loss.compute_loss_from_embeddings([column, column], labels())
    for inputs in (None, torch.ones(4), {"score": torch.ones(4)}):
        with pytest.raises(ValueError, match=r"ListCollator; got 1 columns and "):
            loss.compute_loss_from_embeddings([column], inputs)

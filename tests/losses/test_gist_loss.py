"""GISTLoss: guides that read texts, caching. Its formula: test_ragged_rows.py."""

import itertools
import json

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from raoe_train.jobs.settings import loss_keywords
from raoe_train.losses import ByLength, GISTLoss
from tests.losses.test_losses import CACHED, step
from tests.losses.test_ragged_rows import WORDS, letters
from tests.tiny import tiny_encoder

ROWS = 8


def texts(columns, rows=ROWS):
    """All texts are distinct."""

    def text(number):
        return " ".join(WORDS[(7 * number + 3 * k) % len(WORDS)] for k in range(2 + number % 3))

    made = [[text(row + rows * column) for row in range(rows)] for column in range(columns)]
    assert len({text for column in made for text in column}) == rows * columns
    return made


@pytest.fixture(scope="module")
def model():
    return tiny_encoder()


def ours(model, embed, columns, **settings):
    return GISTLoss(model, embed, **settings), [model.preprocess(c) for c in columns], {"texts": columns}


def test_guide_encodes_once_per_batch(model):
    """Also by length, cached and inside a MatryoshkaLoss. The guide is not a submodule."""
    columns, asked = texts(3), []

    def embed(sentences):
        asked.append(len(sentences))
        return letters(sentences)

    made = []
    for settings, by_length in itertools.product(({}, {"mini_batch_size": 3}), (False, True)):
        loss, features, labels = ours(model, embed, columns, scale=20.0, margin=0.1, **settings)
        around = MatryoshkaLoss(model, loss, [16, 8, 4])
        made.append(step(ByLength(around) if by_length else around, model, features, labels))
        assert asked == [3 * ROWS]
        asked.clear()
        assert {id(p) for p in loss.parameters()} == {id(p) for p in model.parameters()}
    for value, gradient in made[1:]:
        torch.testing.assert_close(value, made[0][0])
        torch.testing.assert_close(gradient, made[0][1], **CACHED)
    guide = tiny_encoder()
    for teacher in (guide, guide.encode, lambda texts: guide.encode(texts, convert_to_tensor=True)):
        given, features, labels = ours(model, teacher, columns)
        made.append(step(given, model, features, labels))
        assert not any(each is guide for each in given.modules())
    for each in made[-2:]:
        torch.testing.assert_close(each, made[-3])
    other = {"texts": [list(reversed(column)) for column in columns]}
    assert step(loss, model, features, other)[0] != step(loss, model, features, labels)[0]
    assert len(asked) == 2


def test_card_and_bad_input():
    loss = GISTLoss(None, letters, margin=0.1)
    card = json.loads(json.dumps(loss.get_config_dict()))
    assert card.keys() == loss_keywords(GISTLoss).keys() and (card["scale"], card["margin"]) == (100, 0.1)
    assert "solatorio2024" in loss.citation
    with pytest.raises(ValueError, match=r"needs the batch's texts: use raoe_train\.TextCollator"):
        loss.compute_loss_from_embeddings([torch.eye(2), torch.eye(2)], None)

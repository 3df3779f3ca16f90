"""GISTLoss against sentence-transformers' GISTEmbedLoss; guides that read texts, caching and recipes."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer import losses as stock
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import Dense

from raoe_train import run
from raoe_train.cli import load
from raoe_train.encoders import embed as frozen
from raoe_train.encoders.settings import FrozenEncoder
from raoe_train.losses import ByLength, GISTLoss, InfoNCELoss
from tests.losses.test_infonce_loss import assert_same, embeddings
from tests.losses.test_losses import CACHED, step
from tests.tiny import SENTENCES, tiny_encoder
from tests.training.small_runs import SCRATCH

WORDS = sorted({word for sentence in SENTENCES for word in sentence.split()})
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


class Bag(torch.nn.Module):
    """A guide that averages one vector per token."""

    def __init__(self, model):
        super().__init__()
        self.words = torch.randn(
            len(model.tokenizer), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
        )
        self.words[model.tokenizer.all_special_ids] = 0
        self.preprocess = model.preprocess

    def forward(self, features):
        real = features["attention_mask"][:, :, None]
        return {"sentence_embedding": (self.words[features["input_ids"]] * real).sum(1) / real.sum(1)}

    def embed(self, sentences):
        return self(self.preprocess(list(sentences)))["sentence_embedding"].numpy()


class Given(torch.nn.Module):
    """An encoder that returns embeddings from the features."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, features):
        return {"sentence_embedding": features[self.name]}


@pytest.fixture(scope="module")
def guide(model):
    return Bag(model)


def ours(model, embed, columns, **settings):
    return GISTLoss(model, embed, **settings), [model.preprocess(c) for c in columns], {"texts": columns}


MARGINS = [("absolute", 0.0), ("absolute", 0.3), ("absolute", -0.2), ("relative", 0.1), ("relative", 0.9)]


@pytest.mark.parametrize(("strategy", "margin"), MARGINS)
@pytest.mark.parametrize("negatives", [0, 1, 3])
def test_is_sentence_transformers_loss(model, negatives, strategy, margin):
    inputs, guides = (
        embeddings(2 + negatives),
        [column.detach() for column in embeddings(2 + negatives, width=4, seed=9)],
    )
    texts = [[f"{row} {column}" for row in range(ROWS)] for column in range(2 + negatives)]
    features = [{"own": own, "guide": of_guide} for own, of_guide in zip(inputs, guides, strict=True)]
    values = set()
    for anchors, positives in itertools.product((True, False), repeat=2):
        options = {"margin_strategy": strategy, "margin": margin}
        options |= {"contrast_anchors": anchors, "contrast_positives": positives}
        loss = GISTLoss(None, lambda texts: torch.cat(guides).numpy(), 20.0, **options)
        result = loss.compute_loss_from_embeddings(inputs, {"texts": texts})
        cached = stock.CachedGISTEmbedLoss(model, model, 0.05, mini_batch_size=3, **options)
        expected = cached.calculate_loss([[own] for own in inputs], [[of_guide] for of_guide in guides])
        if negatives < 2:
            plain = stock.GISTEmbedLoss(model, model, 0.05, **options)
            plain.model, plain.guide = Given("own"), Given("guide")
            torch.testing.assert_close(result, plain(features, None))
        assert_same(result, expected, inputs)
        values.add(round(result.item(), 9))
    # some columns are masked, not all
    unguided = InfoNCELoss(None, 20.0, directions=("query_to_doc", "query_to_query", "positive_to_positive"))
    values.add(round(unguided.compute_loss_from_embeddings(inputs).item(), 9))
    assert len(values) == 5 and min(values) > 0.01


@pytest.mark.parametrize("settings", [{}, {"margin": 0.05, "mini_batch_size": 3}], ids=str)
def test_trains_like_sentence_transformers(model, guide, settings):
    """With a guide that reads; by default all is theirs."""
    columns = texts(3)
    features = [model.preprocess(column) for column in columns]
    value, gradient = step(GISTLoss(model, guide.embed, **settings), model, features, {"texts": columns})
    theirs = stock.GISTEmbedLoss(model, model, margin=settings.get("margin", 0.0))
    theirs.guide = guide
    expected, by_theirs = step(theirs, model, features, None)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, by_theirs, **CACHED)
    assert value > 0.01 and gradient.abs().max() > 1e-3


def at(*degrees):
    radians = np.radians(np.array(degrees, dtype=np.float64))
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


@pytest.mark.parametrize(("strategy", "margin", "left"), [
    ("absolute", 0.0, [True, True, False]), ("absolute", 0.3, [True, False, False]),
    ("relative", 0.5, [True, False, False]), ("relative", 0.1, [True, True, False]),
])  # fmt: skip
def test_by_hand(strategy, margin, left):
    """One anchor at 0 degrees; the guide has its positive at 60 (cosine 0.5), negatives at 75 (0.26) and 30 (0.87).
    At 0.3 and at half, 0.2 and 0.25 are the bounds."""
    where = {"a": 0, "p": 60, "n": 75, "m": 30}
    student = [torch.tensor(c, dtype=torch.float64) for c in ([[1, 0]], [[0, 1]], [[1, 1]], [[2, 0]])]
    logits = torch.tensor([0.0, 0.5**0.5, 1.0], dtype=torch.float64) * 3
    loss = GISTLoss(None, lambda of: at(*(where[t] for t in of)), 3.0, margin_strategy=strategy, margin=margin)
    result = loss.compute_loss_from_embeddings(student, {"texts": [["a"], ["p"], ["n"], ["m"]]})
    expected = -logits.masked_fill(~torch.tensor(left), -torch.inf).log_softmax(0)[0]
    torch.testing.assert_close(result, expected)


def test_guide_encodes_once_per_batch(model, guide):
    """Also by length, cached and inside a MatryoshkaLoss. The guide is not a submodule."""
    columns, asked = texts(3), []

    def embed(sentences):
        asked.append(len(sentences))
        return guide.embed(sentences)

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
    other = {"texts": [list(reversed(column)) for column in columns]}
    assert step(loss, model, features, other)[0] != step(loss, model, features, labels)[0]
    assert len(asked) == 2


def test_card_and_bad_input():
    embed = at
    loss = GISTLoss(None, embed, margin=0.1)
    assert json.loads(json.dumps(loss.get_config_dict())) == {
        "scale": 100.0, "margin_strategy": "absolute", "margin": 0.1, "contrast_anchors": True,
        "contrast_positives": True, "learn_scale": False, "mask_duplicates": True,
        "mini_batch_size": None, "mini_batch_num_tokens": None, "gather_across_devices": False,
    }  # fmt: skip
    assert "solatorio2024" in loss.citation
    with pytest.raises(ValueError, match="scale must be a number above 0"):
        GISTLoss(None, embed, scale=0)
    with pytest.raises(ValueError, match=r"needs the batch's texts: use raoe_train\.TextCollator"):
        loss.compute_loss_from_embeddings([torch.eye(2), torch.eye(2)], None)


def write_nli(path):
    lines = ["anchor\tpositive\tnegative", *("\t".join(row) for row in zip(*texts(3, 16), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder with an encoder whose cosines are spread: without the mean of some sentences'."""
    folder, made = tmp_path_factory.mktemp("guide"), tiny_encoder(double=False).eval()
    with torch.no_grad():
        mean = torch.from_numpy(made.encode(SENTENCES)).mean(0)
    dense = Dense(16, 16, activation_function=torch.nn.Identity())
    dense.linear.weight.data, dense.linear.bias.data = torch.eye(16), -mean
    made.append(dense)
    made.save_pretrained(str(folder))
    return str(folder)


def test_recipe_and_teacher_cache(tmp_path, monkeypatch, teacher):
    common = {
        "model.name": "scratch", "model.device": "cpu", "model.scratch": SCRATCH, "teacher.device": "cpu",
        "data.train": [write_nli(tmp_path / "nli.tsv")], "loss": "GISTLoss", "loss.scale": 20, "loss.margin": 0.05,
        "training": {"max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "logging_steps": 1},
        "teacher.name": teacher,
    }  # fmt: skip
    asked = run("train", None, **common, output=str(tmp_path / "asked"))
    for turn in ("first", "again"):
        if turn == "again":
            monkeypatch.setattr(frozen, "encode_sentences", None)  # nothing may be computed again
        out = {"output": str(tmp_path / turn), "teacher.cache": str(tmp_path / "kept")}
        result = run("train", None, **common, **out)
        assert result["steps"] == 3 and result["scale"] == asked["scale"] == {"nli": 20.0}
        lines = [(tmp_path / name / "log.jsonl").read_text().splitlines()[:3] for name in ("asked", turn)]
        losses = [[json.loads(line)["loss"] for line in each] for each in lines]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4) and min(losses[0]) > 0.01


def test_cache_of_a_teacher(tmp_path, teacher):
    teacher = FrozenEncoder(name=teacher, device="cpu")
    texts = ["a dog", "a cat", "a dog"]
    ask = frozen.remembered(teacher, texts, "teacher", tmp_path / "kept")
    for sentences in (["a cat", "a dog", "a cat"], ["a bird", "a dog"]):
        np.testing.assert_allclose(ask(sentences), frozen.embedder(teacher, "teacher")(sentences), rtol=1e-4, atol=1e-5)


def test_recipe_keys(tmp_path):
    made = load("train", None, {"loss": "GISTLoss", "loss.margin": "0.05", "loss.learn_scale": "true"}).loss.init_args
    assert (made["scale"], made["margin"], made["learn_scale"]) == (100.0, 0.05, True)
    settings = {"loss": "InfoNCELoss", "loss.directions": ["query_to_doc", "doc_to_doc"], "loss.hardness_strength": "9"}
    made = load("train", None, settings).loss.init_args
    assert made["directions"] == ["query_to_doc", "doc_to_doc"] and made["hardness_strength"] == 9.0
    for output, message in (
        ({"loss": "GISTLoss", "loss.margin_strategy": "both"}, "both"),
        ({"loss": "GISTLoss", "loss.directions": ["query_to_doc"]}, "unknown key loss.directions"),
        ({"loss": "InfoNCELoss", "loss.directions": ["up"]}, "up"),
    ):
        with pytest.raises(ValueError, match=message):
            load("train", None, output)
    with pytest.raises(ValueError, match=r"--teacher\.name is missing: set it to the encoder that GISTLoss learns"):
        run("train", None, **{"loss": "GISTLoss", "data.train": ["builtin-nli#train"]}, output=str(tmp_path / "out"))

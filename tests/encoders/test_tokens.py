"""Tokens in one row give the plan of padded tokens, for every family of tokenizers."""

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers import losses as stock

import raoe_train as rt
from raoe_train.encoders.embed import encode_sentences
from raoe_train.encoders.lengths import by_length, grouping_for
from raoe_train.encoders.tokens import RowTokenizer, is_plain
from raoe_train.losses import ByLength, CoSENTLoss, InfoNCELoss
from raoe_train.losses.collators import PlanningCollator, ScoreLabelCollator
from tests.encoders.test_prompts import KINDS, encoder
from tests.tiny import SENTENCES, tiny_encoder
from tests.training.small_runs import arguments

TEXTS = [
    *filter(None, SENTENCES),
    "a",
    "the same text",
    "the same text",
    "Zürich 東京 " * 30,
    "two  spaces\nand a line",
]


@pytest.fixture(params=KINDS)
def model(request, tmp_path):
    made = encoder(KINDS[request.param](), tmp_path)
    made[0].modality_config.pop("message", None)  # as load_encoder does: no chat template
    return made


def compare(model, texts, **options):
    """The plans of tokens in a row, which must be one, and of padded tokens are equal."""
    grouping = grouping_for(model)
    row, padded = RowTokenizer(model)(texts, **options), model.preprocess(texts, **options)
    assert "cu_seq_lens_q" in row and "cu_seq_lens_q" not in padded
    ours, theirs = by_length([row], grouping), by_length([padded], grouping)
    assert ours.rows[0].equal(theirs.rows[0]) and len(ours.features) == len(theirs.features)
    for each, other in zip(ours.features, theirs.features, strict=True):
        assert each.keys() == other.keys()
        for name, value in each.items():
            same = value.equal(other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            assert same and getattr(value, "dtype", None) == getattr(other[name], "dtype", None), name


@pytest.mark.parametrize("prompt", [None, "query: "])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [None, 7])
def test_plans_are_equal(model, prompt, side, length):
    model.tokenizer.truncation_side = side
    if length:
        model.max_seq_length = length
    compare(model, TEXTS, prompt=prompt)
    compare(model, TEXTS[:3], prompt=prompt)  # the tokenizer keeps no setting of the other call
    assert model.preprocess(TEXTS)["input_ids"].shape[0] == len(TEXTS)


def test_texts_without_tokens_are_padded_and_other_inputs_refused(tmp_path):
    model = encoder(KINDS["qwen2"](), tmp_path)
    message = model[0].modality_config.pop("message")
    rows = RowTokenizer(model)
    assert rows([]) == {} and is_plain(model)
    row, padded = rows(["a", ""], prompt=None), model.preprocess(["a", ""])
    assert row.keys() == padded.keys() and all(
        row[name].equal(padded[name]) for name in ("input_ids", "attention_mask")
    )
    with pytest.raises(ValueError, match=r"the encoder's inputs must be strings, got \('a', 'b'\)"):
        rows([("a", "b")])
    model[0].modality_config["message"] = message
    assert not is_plain(model)


class Shouting(SentenceTransformer):
    def preprocess(self, inputs, *arguments, **keywords):
        return super().preprocess([text.upper() + "!" for text in inputs], *arguments, **keywords)


@pytest.mark.parametrize("where", ["subclass", "instance"])
def test_another_preprocess_is_used_and_stays(where):
    model = tiny_encoder(double=False)
    expected = model.encode(["A MAN!", "THE DOG!"])
    if where == "subclass":
        model.__class__ = Shouting
    else:
        real = model.preprocess
        model.preprocess = lambda inputs, **keywords: real([text.upper() + "!" for text in inputs], **keywords)
    own = model.preprocess
    assert not is_plain(model)
    assert torch.allclose(
        torch.tensor(encode_sentences(model, ["a man", "the dog"])), torch.tensor(expected), atol=1e-6
    )
    assert model.preprocess == own
    collate = PlanningCollator(ScoreLabelCollator(preprocess_fn=model.preprocess), ByLength(CoSENTLoss(model)))
    assert collate.tokenizer is None


@pytest.mark.parametrize("prompt", [None, "query: "])
def test_remembered_texts_have_the_same_tokens(model, prompt):
    plain, rows = RowTokenizer(model), RowTokenizer(model)
    rows.remember([(prompt or "") + text for text in dict.fromkeys(TEXTS)])
    rows.tokenizer = None if prompt is None else rows.tokenizer  # the length of a prompt is always looked up
    expected, found = plain(TEXTS, prompt=prompt), rows(TEXTS, prompt=prompt)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].equal(value) if isinstance(value, torch.Tensor) else found[name] == value


def test_unseen_texts_are_tokenized(model):
    rows = RowTokenizer(model)
    rows.remember(TEXTS[:2])
    assert rows(TEXTS)["input_ids"].equal(RowTokenizer(model)(TEXTS)["input_ids"])


@pytest.mark.parametrize("loss", [CoSENTLoss, InfoNCELoss, stock.CoSENTLoss])
def test_training_is_equal(tmp_path, monkeypatch, loss):
    columns = {"sentence1": SENTENCES, "sentence2": SENTENCES[::-1]}
    scores = {} if loss is InfoNCELoss else {"score": [n / len(SENTENCES) for n in range(len(SENTENCES))]}
    weights, rows, call = [], [], RowTokenizer.__call__
    monkeypatch.setattr(RowTokenizer, "__call__", lambda *x, **y: rows.append(call(*x, **y)) or rows[-1])
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr("raoe_train.losses.collators.is_plain", lambda model: False)
        model = tiny_encoder()
        made = arguments(tmp_path / str(fast), max_steps=3)
        rt.Trainer(model, made, Dataset.from_dict(columns | scores), loss=loss(model)).train()
        weights.append(model.state_dict())
    assert rows and all("cu_seq_lens_q" in row for row in rows)
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_a_guide_gets_padded_tokens(tmp_path):
    model, guide = tiny_encoder(double=False), tiny_encoder(double=False)
    data = Dataset.from_dict({"anchor": SENTENCES, "positive": SENTENCES[::-1]})
    trainer = rt.Trainer(model, arguments(tmp_path, max_steps=1), data, loss=stock.GISTEmbedLoss(model, guide))
    trainer.train()
    assert trainer.state.global_step == 1

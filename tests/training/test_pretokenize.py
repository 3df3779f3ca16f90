"""rt.Trainer tokenizes all texts before training, and gives workers a collator without the encoder's weights."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers.sentence_transformer import losses as stock

import raoe_train as rt
from raoe_train import losses as ours
from raoe_train.encoders.tokens import RowTokenizer
from tests.tiny import SENTENCES, tiny_encoder
from tests.training.small_runs import arguments, settings

COUNT = len(SENTENCES)
PAIRS = Dataset.from_dict(
    {"sentence1": SENTENCES, "sentence2": SENTENCES[::-1], "score": [n / COUNT for n in range(COUNT)]}
)
ROWS = Dataset.from_dict(
    {"anchor": SENTENCES, "positive": SENTENCES[::-1], "negative": [*SENTENCES[:-2], None, "an unseen text"]}
)
LISTS = Dataset.from_dict({"sentences": [SENTENCES[:4], SENTENCES[4:9]]})
CASES: list[tuple[Any, Any]] = [
    (ours.RAOELoss, PAIRS.add_column("label", [n % 3 for n in range(COUNT)])),
    (ours.CoSENTLoss, PAIRS),
    (lambda model: stock.MatryoshkaLoss(model, stock.CoSENTLoss(model), [16, 8]), PAIRS),
    (stock.CosineSimilarityLoss, PAIRS),
    (ours.InfoNCELoss, ROWS),
    (lambda model: ours.InfoNCELoss(model, mini_batch_size=2), ROWS),
    (ours.SigmoidLoss, ROWS),
    (lambda model: ours.GISTLoss(model, tiny_encoder(double=False)), ROWS),
    (lambda model: stock.GISTEmbedLoss(model, tiny_encoder(double=False)), ROWS.select(range(5))),
    (ours.ListMLELoss, LISTS),
]


def trainer_of(folder: Any, loss: Any, data: Any, settings: dict[str, Any] | None = None, **training: Any) -> Any:
    model = tiny_encoder(double=False)
    made = {name: each(model) for name, each in loss.items()} if isinstance(loss, dict) else loss(model)
    return rt.Trainer(model, arguments(folder, **training), data, loss=made, **(settings or {}))


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.equal(second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second if not hasattr(first, "__dict__") else same(vars(first), vars(second))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_workers_get_no_encoder(tmp_path, case):
    loss, data = CASES[case]
    with torch.random.fork_rng():
        trainer = trainer_of(tmp_path, loss, data)
    loader = trainer.get_train_dataloader()
    saved: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, each: Any) -> None:
            saved.extend([each] if isinstance(each, torch.Tensor | torch.nn.Module) else [])

    with (tmp_path / "collator").open("wb") as file:
        Pickler(file).dump(loader.collate_fn)
    encoders = [each for each in saved if isinstance(each, rt.losses.base.SentenceTransformer)]
    if loader.collate_fn.tokenizer is not None:  # the guide of sentence-transformers reads padded tokens
        assert not encoders and not [each for each in saved if isinstance(each, torch.Tensor)]
    rows = [{name: value for name, value in row.items() if value is not None or name == "negative"} for row in data]
    copied = pickle.loads((tmp_path / "collator").read_bytes())
    assert "plan" in copied(rows) and same(copied(rows)["plan"], loader.collate_fn(rows)["plan"])
    assert same(trainer.computed_loss().plan(*_columns(trainer, rows)).rows, copied(rows)["plan"].rows)


def _columns(trainer: Any, rows: Any) -> Any:
    return rt.losses.collators.columns_of(trainer.data_collator(rows))


@pytest.mark.parametrize(
    ("loss", "data", "training"),
    [
        (ours.CoSENTLoss, PAIRS, {"prompts": "say: "}),
        (ours.CoSENTLoss, PAIRS, {"prompts": {"sentence1": "first: "}}),
        (ours.InfoNCELoss, ROWS, {}),
        ({"a": ours.CoSENTLoss, "b": ours.CoSENTLoss}, {"a": PAIRS, "b": PAIRS.select(range(6))}, {}),
        (ours.ListMLELoss, LISTS, {"per_device_train_batch_size": 1}),
    ],
)
def test_training_is_equal_and_tokenizes_each_text_once(tmp_path, monkeypatch, loss, data, training):
    weights, tokenized = [], list[str]()
    tokens = RowTokenizer._tokens
    monkeypatch.setattr(RowTokenizer, "_tokens", lambda self, texts: tokenized.extend(texts) or tokens(self, texts))
    for pretokenize in (True, False):
        trainer = trainer_of(tmp_path, loss, data, {"pretokenize": pretokenize}, max_steps=3, **training)
        tokenized.clear()
        trainer.train()
        assert len(set(tokenized)) == len(tokenized) if pretokenize else len(set(tokenized)) < len(tokenized)
        weights.append(trainer.model.state_dict())
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("expected", "training", "data"),
    [
        (True, {"num_train_epochs": 1}, PAIRS),
        (False, {"num_train_epochs": 0.5}, PAIRS),
        (True, {"max_steps": 3}, PAIRS),
        (False, {"max_steps": 2}, PAIRS),
        (True, {"max_steps": 2, "gradient_accumulation_steps": 2}, PAIRS),
        (False, {"max_steps": 3}, PAIRS.to_iterable_dataset()),
    ],
)
def test_auto_tokenizes_data_that_the_run_reads_whole(tmp_path, monkeypatch, expected, training, data):
    trainer = trainer_of(tmp_path, ours.CoSENTLoss, data, per_device_train_batch_size=4, **training)
    assert bool(trainer.get_train_dataloader().collate_fn.tokenizer.places) == expected
    monkeypatch.setattr("raoe_train.training.training_data.ROOM", 100)
    assert not trainer.get_train_dataloader().collate_fn.tokenizer.places


def test_a_recipe_tokenizes_its_texts_once(tmp_path, monkeypatch):
    """Also if the number of batches is counted before training."""
    made, remember = [], RowTokenizer.remember
    monkeypatch.setattr(RowTokenizer, "remember", lambda self, texts: made.append(1) or remember(self, texts))
    options = settings(tmp_path)
    options["training"] |= {"min_steps": 3, "pretokenize": True}
    assert rt.train(None, **options)["steps"] >= 3 and len(made) == 1

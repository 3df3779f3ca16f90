"""Conditional STS on invented rows: training with a rank loss and evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from raoe_train import run
from raoe_train.data.pairs import split_conditional
from raoe_train.encoders.load import load_encoder
from raoe_train.settings import Model
from tests.decoders import saved_decoder

PROMPT = 'Given the context {condition}, summarize the sentence {text} in one word:"'
SCENES = ("a dog runs", "two men play chess", "a child reads", "the train is late")
CONDITIONS = ("The number of people", "The animal", "The place")


def write_rows(path: Path, rows: int = 24, *, hidden: bool = False) -> str:
    lines = ["sentence1,sentence2,condition,label"]
    for row in range(rows):
        first, second = SCENES[row % 4], SCENES[row * 3 % 4]
        label = -1 if hidden else 1 + row % 5
        lines.append(f"{first},{second} {row},{CONDITIONS[row % 3]},{label}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("csts")
    metrics = run(
        "train",
        None,
        **{
            "model.name": saved_decoder(folder),
            "model.device": "cpu",
            "model.bidirectional_layers": 1,
            "model.max_seq_length": 100,
            "model.prompt": PROMPT,
            "data.train": [write_rows(folder / "train.csv")],
            "data.dev": write_rows(folder / "dev.csv", rows=12),
            "loss": "RankMarginLoss",
            "training": {"num_train_epochs": 2, "per_device_train_batch_size": 12, "learning_rate": 1e-3},
            "evaluation.tasks": [str(folder / "dev.csv")],
            "output": str(folder / "out"),
        },
    )
    return folder, metrics


def test_trains_and_evaluates(trained):
    folder, metrics = trained
    assert metrics["pairs"] == {"train": 24} and metrics["steps"] == 4
    assert metrics["after"]["tasks"][str(folder / "dev.csv")]["pairs"] == 12
    assert -100 <= metrics["after"]["spearman"] <= 100


def test_the_prompt_is_saved_and_fills_in_conditions_again(trained):
    folder, metrics = trained
    # given again, or as saved with the model
    tasks = [str(folder / "dev.csv")]
    result = run("evaluate", **{"model.name": str(folder / "out"), "model.device": "cpu", "tasks": tasks})
    assert result["tasks"] == {tasks[0]: pytest.approx(metrics["after"]["tasks"][tasks[0]], abs=1e-4)}
    model = load_encoder(Model(name=str(folder / "out"), device="cpu"))
    assert model.prompts["conditional"] == split_conditional(PROMPT)[0]
    whole = model.tokenizer.decode(model.preprocess(["Given the context A, summarize the sentence b"])["input_ids"][0])
    assert whole.endswith('Given the context A, summarize the sentence b in one word:"')

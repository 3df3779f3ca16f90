"""A loss that is NaN: where the run ends, which rows it names, what is left."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from raoe_train import run
from raoe_train.cli import main
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.named import Model
from raoe_train.jobs.check import check_encoder
from raoe_train.losses import RAOELoss
from raoe_train.training.stop_at_nan import rows_of
from tests.tiny import SENTENCES, tiny_encoder
from tests.training.test_training import settings

PAIR = 27  # whose batch goes wrong


def small(folder, **changes):
    made = settings(folder, **{"data.dev": None, **changes})
    made["training"] = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}
    return made


def by_row(monkeypatch, change, from_step):
    """From a step on, the loss of the batch that holds the pair goes through `change`; the batches' scores by step."""
    batches, real = [], RAOELoss.forward

    def forward(self, features, labels):
        loss = real(self, features, labels)
        batches.append(labels["score"].tolist())
        if len(batches) >= from_step and ROWS[PAIR] in batches[-1]:
            loss["rank"] = change(loss["rank"])
        return loss

    monkeypatch.setattr(RAOELoss, "forward", forward)
    return batches


ROWS = {PAIR: None}


@pytest.fixture
def pairs(tmp_path):
    """Their scores are all different, so that a batch shows which rows it has."""
    path = tmp_path / "pairs.tsv"
    rows = [f"{SENTENCES[i % 11]} {i}\t{SENTENCES[(3 * i + 1) % 11]}\tneutral\t{i / 8}" for i in range(40)]
    path.write_text("sentence1\tsentence2\tlabel\tscore\n" + "\n".join(rows) + "\n")
    ROWS[PAIR] = PAIR / 8
    return str(path)


def of_gradient(loss):
    """The loss as it is, with a gradient that is NaN."""
    return loss + torch.sqrt(loss * 0)


@pytest.mark.parametrize(
    ("change", "said", "every"),
    [
        (lambda loss: loss * float("nan"), "the loss is nan", 2),
        (lambda loss: loss / 0, "the loss is inf", 2),
        (of_gradient, "its gradient left weights that are not finite", 1),  # seen before the checkpoint of that step
        (of_gradient, "its gradient left weights that are not finite", 3),  # seen at the next step's loss
    ],
)
def test_the_run_stops_at_the_step_and_names_the_rows(pairs, tmp_path, monkeypatch, change, said, every):
    made = {**small(tmp_path), "data.train": [pairs]}
    made["training"]["save_steps"] = every
    whole = run("train", "raoe-s1", **{**made, "output": str(tmp_path / "whole")})
    with monkeypatch.context() as patch:
        batches = by_row(patch, change, from_step=4)
        with pytest.raises(FloatingPointError) as caught:
            run("train", "raoe-s1", **made)
    step = next(n for n, scores in enumerate(batches, 1) if n >= 4 and ROWS[PAIR] in scores)
    text = str(caught.value)
    assert text.startswith(f"step {step}: {said}")
    listed = ", ".join(str(int(score * 8)) for score in batches[step - 1])
    assert f"rows of the batch, of pairs as it was read, from 0: {listed}\n" in text
    first = int(batches[step - 1][0] * 8)
    assert f"  {first}: '{SENTENCES[first % 11]} {first}' | '{SENTENCES[(3 * first + 1) % 11]}' | score" in text
    assert "learning_rate (now 0.001)" in text and "loss.scale (now 20)" in text
    # What was saved before is whole, and the same command goes on from there.
    last = tmp_path / "out" / "checkpoints" / f"checkpoint-{(step - 1) // every * every}"
    assert (len(batches) > step) == (every == 3)
    assert f"--model.name {last}" in text
    assert check_encoder(load_encoder(Model(name=str(last), device="cpu")))["failed"] == []
    for path in last.parent.glob("checkpoint-*"):
        assert all(value.isfinite().all() for value in load_file(path / "model.safetensors").values())
    again = run("train", "raoe-s1", **made)
    assert again["steps"] == whole["steps"] == 10
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_learning_rate_that_is_too_large(tmp_path, capsys, monkeypatch):
    """Nothing is put in its way here: real weights that overflow; told by the command line, without a traceback."""
    monkeypatch.chdir(tmp_path)
    words = ["train", "raoe-s1", "--model.name", "scratch", "--model.device", "cpu", "--output", "out"]
    made = small(tmp_path)
    words += ["--data.train", made["data.train"][0], "--training.learning_rate", "1e30", "--training.batch_size", "8"]
    assert main([*words, "--training.epochs", "1", "--model.scratch.hidden_size", "16"]) == 2
    error = capsys.readouterr().err
    assert "raoe-train: step 2: the loss is " in error and "learning_rate (now 1e+30)" in error
    assert "There is no checkpoint yet" in error and "Traceback" not in error
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert log == []


@pytest.mark.parametrize("kind", ["pairs", "triplets", "lists", "tokens"])
def test_rows_are_found_by_their_tokens(kind):
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
    from transformers import DataCollatorForLanguageModeling

    from raoe_train.losses.collators import ListCollator, ScoreLabelCollator

    model = tiny_encoder(double=False)
    texts = [f"{SENTENCES[n % 11]} {SENTENCES[n % 7]} {SENTENCES[n % 3]}"[: 12 + n % 30] for n in range(60)]
    columns = {
        "pairs": {"sentence1": texts, "sentence2": texts[::-1], "score": [0.5] * 60, "label": [1] * 60},
        "triplets": {"anchor": texts, "positive": texts[::-1], "negative": texts[1:] + texts[:1]},
        "lists": {"sentences": [[*texts[n % 7 : n % 7 + 3 + n % 4], texts[n]] for n in range(60)]},
        "tokens": {"input_ids": [ids for ids in model.tokenizer(texts)["input_ids"]]},
    }
    made = {"pairs": ScoreLabelCollator, "triplets": SentenceTransformerDataCollator, "lists": ListCollator}
    collate = (
        DataCollatorForLanguageModeling(model.tokenizer, mlm=False)
        if kind == "tokens"
        else made[kind](preprocess_fn=model.preprocess)
    )
    dataset = Dataset.from_dict(columns[kind])
    chosen = [41, 3, 17, 59]
    found = rows_of(collate([dataset[n] for n in chosen]), dataset, collate)
    assert [dataset[n] == dataset[m] for n, m in zip(found, chosen, strict=True)] == [True] * 4
    assert found == [min(n for n in range(60) if dataset[n] == dataset[m]) for m in chosen]
    other = dataset.select(range(10))
    assert rows_of(collate([dataset[41], dataset[2]]), other, collate)[1] is not None
    assert rows_of({"label": torch.zeros(2)}, dataset, collate) == []

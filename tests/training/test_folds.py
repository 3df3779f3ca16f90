"""Few rows without a dev set: an encoder for each fold, the mean of their weights, and evidence from the rows that each
of them has not seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from scipy import stats
from sentence_transformers import SentenceTransformer, util

import raoe_train as rt
from raoe_train.training import training_data
from raoe_train.training.training_data import FOLDS, hold_out
from tests.forked import python
from tests.tiny import SENTENCES
from tests.training.small_runs import KILLED

STEPS = 4  # of a fold, two fifths of 10
SMALL = {"model.device": "cpu", "training.max_steps": 10, "training.per_device_train_batch_size": 16,
         "training.logging_steps": 1, "training.bf16": False}  # fmt: skip


@pytest.fixture
def source(tmp_path):
    """Pairs of distinct first texts."""
    lines = [f"{row} {SENTENCES[row % 11]}\t{SENTENCES[row * 7 % 11]}\t{row % 11 + row / 1000}" for row in range(110)]
    (tmp_path / "mine.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *lines]) + "\n")
    return str(tmp_path / "mine.tsv")


def splits(source: str, seed: int = 42) -> list[tuple[Dataset, Dataset]]:
    first, second, scores = zip(*(line.split("\t") for line in Path(source).read_text().splitlines()[1:]), strict=True)
    columns = {"sentence1": [*first], "sentence2": [*second], "score": [*map(float, scores)]}
    return [(rest["mine"], held) for rest, held in hold_out({"mine": Dataset.from_dict(columns)}, "auto", seed, FOLDS)]


def test_each_row_is_held_out_once():
    columns = {"sentence1": [f"text {row % 40}" for row in range(100)], "sentence2": ["b"] * 100,
               "score": [float(row % 2) for row in range(100)], "row": [*range(100)]}  # fmt: skip
    pieces = hold_out({"a": Dataset.from_dict(columns), "b": "other"}, "auto", 7, FOLDS)
    assert sorted(row for _, held in pieces for row in held["row"]) == [*range(100)] and len(pieces) == FOLDS
    for rest, held in pieces:
        assert sorted([*rest["a"]["row"], *held["row"]]) == [*range(100)] and rest["b"] == "other"
        assert 16 <= len(held) <= 24 and {*held["score"]} == {0, 1}
        assert not {*rest["a"]["sentence1"]} & {*held["sentence1"]}
    assert pieces[0][1]["row"] != hold_out({"a": Dataset.from_dict(columns)}, "auto", 8, FOLDS)[0][1]["row"]


def test_without_enough_scores_a_share_is_held_out(capsys):
    """A fold without a positive pair would have no correlation."""
    columns = {"sentence1": [*map(str, range(40))], "sentence2": ["b"] * 40, "score": [float(r < 4) for r in range(40)]}
    [(rest, held)] = hold_out({"mine": Dataset.from_dict(columns)}, "auto", 0, FOLDS)
    assert len(rest["mine"]) + len(held) == 40 and {*held["score"]} == {*rest["mine"]["score"]} == {0, 1}
    assert capsys.readouterr().out == f"mine: {len(held)} of 40 rows are held out as a dev set\n"


@pytest.mark.parametrize("rank", [None, 4])
def test_the_saved_weights_are_the_mean_of_separate_trainings(tmp_path, encoder, source, rank):
    lora = {"model.lora.r": rank, "training.learning_rate": 1e-2} if rank else {}
    settings = {**SMALL, **lora, "model.name": encoder}
    certified = {"evaluation.guard_budget": 200, "evaluation.mixtures": [0.5], "output": str(tmp_path / "out")}
    metrics = rt.train("adapt", **{**settings, **certified, "data.train": [source]})
    assert metrics["steps"] == metrics["train_steps"] == FOLDS * STEPS
    made = metrics["certificate"]
    assert (made["folds"], made["examples"], len(made["candidates"])) == (FOLDS, 110, 3)
    weights, correlations = [], []
    for number, (rest, held) in enumerate(splits(source)):
        lines = ["sentence1\tsentence2\tscore", *("\t".join(map(str, row.values())) for row in rest)]
        file, output = tmp_path / f"fold{number}.tsv", tmp_path / f"fold{number}"
        file.write_text("\n".join(lines) + "\n")
        alone = {"data.dev_share": 0, "training.max_steps": STEPS, "data.train": [str(file)], "output": str(output)}
        rt.train("adapt", **{**settings, **alone})
        trained = SentenceTransformer(str(output), device="cpu")
        first, second = (trained.encode(held[name]) for name in ("sentence1", "sentence2"))
        correlations.append(100 * stats.spearmanr(util.pairwise_cos_sim(first, second), held["score"]).statistic)
        weights.append(load_file(output / ("adapter_model.safetensors" if rank else "model.safetensors")))
    assert made["candidates"]["5 folds"]["dev"] == pytest.approx(np.mean(correlations), abs=1e-3)
    name = made["saved"] if made["accepted"] else made["rejected"]
    share, folder = made["candidates"][name]["share"], tmp_path / ("out" if made["accepted"] else "out/rejected")
    saved = load_file(folder / ("adapter_model.safetensors" if rank else "model.safetensors"))
    start = {} if rank else load_file(f"{encoder}/model.safetensors")
    for key, value in saved.items():
        mean = sum(each[key].double() for each in weights) / FOLDS
        expected = mean if "lora_A" in key else share * mean + (1 - share) * start[key] if start else share * mean
        assert abs(value - expected).max() < 1e-6, key
    after = made["candidates"][made["saved"]]["dev"]
    assert metrics["after"]["spearman"] == after
    assert metrics["before"]["spearman"] == pytest.approx(made["candidates"]["start"]["dev"])


@pytest.mark.slow
def test_a_killed_run_resumes_in_its_fold(tmp_path, encoder, source):
    results = []
    for name, kills in (("whole", ()), ("killed", ((3, 3), (1, 4)))):  # (step, fold)
        output, recipe = tmp_path / name, tmp_path / f"{name}.yaml"
        settings = {**SMALL, "model.name": encoder, "data.train": [source], "output": str(output)}
        settings |= {"data.dev_share": "auto", "evaluation.certificate": True, "loss": "PearsonLoss"}
        recipe.write_text(yaml.safe_dump({**settings, "training.eval_steps": 2}))
        for kill in kills:
            assert python("-c", KILLED, recipe, *kill).returncode == 9
        ended = python("-c", KILLED, recipe, 0)
        assert ended.returncode == 0 and ended.stdout.count("resuming from") == (3 if kills else 0)
        log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
        losses = [(entry["fold"], entry["step"], entry["loss"]) for entry in log if "loss" in entry]
        certificate = json.loads((output / "certificate.json").read_text())
        results.append((losses, certificate["candidates"]))
        assert not (output / "checkpoints").exists()
    assert results[0] == results[1]
    assert [entry[:2] for entry in results[0][0]] == [(fold, step) for fold in range(1, 6) for step in range(1, 5)]


def test_rows_are_ranked_among_held_out_and_training_passages(tmp_path, encoder):
    rows = [{"query": f"{SENTENCES[i % 11]} {i}", "positive": f"{SENTENCES[i % 7]} of {i}"} for i in range(110)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {**SMALL, "model.name": encoder, "data.train": [str(tmp_path / "rows.jsonl")]}
    metrics = rt.train("adapt", **settings, output=str(tmp_path / "out"))
    assert (metrics["certificate"]["metric"], metrics["certificate"]["folds"]) == ("ndcg@10", FOLDS)
    assert metrics["certificate"]["examples"] == 110  # queries


@pytest.mark.parametrize(
    "settings",
    [{"data.dev_share": 0.3}, {"evaluation.certificate": False}, {"training.patience": 9}, {"data.max_rows": 99}, {}],
)
def test_other_runs_hold_out_a_share(tmp_path, encoder, source, capsys, monkeypatch, settings):
    """A share as a number, a run without a certificate or with early stopping, too few rows, or many."""
    if not settings:
        monkeypatch.setattr(training_data, "FEW", 110)
    output = str(tmp_path / "out")
    metrics = rt.train(
        "adapt", **{**SMALL, "model.name": encoder, "data.train": [source], "output": output, **settings}
    )
    assert "rows are held out as a dev set" in capsys.readouterr().out and metrics["steps"] == 10
    assert metrics.get("certificate", {}).get("folds", 1) == 1


def test_a_dry_run_counts_the_steps_of_all_folds(encoder, source):
    settings = {**SMALL, "model.name": encoder, "data.train": [source], "dry_run": True}
    assert rt.train("adapt", **settings)["steps"] == FOLDS * STEPS

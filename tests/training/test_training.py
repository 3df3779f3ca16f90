"""``raoe-train train`` end to end on small real encoders: what it writes, sources, losses."""

import json
import re
from pathlib import Path

import pytest
import yaml
from sentence_transformers import SentenceTransformer

from raoe_train import run
from raoe_train.jobs.check import check_encoder
from raoe_train.training.training_data import hold_out
from tests.forked import python
from tests.tiny import SENTENCES, load, training_data
from tests.training.small_runs import settings, write_pairs


def test_writes_model_and_metadata(finished):
    folder, _, metrics = finished
    out = folder / "out"
    assert {"recipe.yaml", "metrics.json", "log.jsonl", "run.png", "modules.json"} <= {p.name for p in out.iterdir()}
    assert not (out / "checkpoints").exists()
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert metrics["steps"] == 10
    assert metrics["pairs"] == {"train": 40}
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    assert recipe["loss"]["class_path"].endswith("RAOELoss") and recipe["training"]["per_device_train_batch_size"] == 8
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in log if "loss" in entry]
    assert len(steps) == 5
    for entry in steps:  # both parts are logged, and are what is trained
        assert entry["rank"] + entry["angle"] == pytest.approx(entry["loss"], abs=2e-3)
    evaluated = [entry for entry in log if "eval_dev_spearman_cosine" in entry]
    assert [entry["epoch"] for entry in evaluated] == [1.0, 2.0]
    best = max(evaluated, key=lambda entry: entry["eval_dev_spearman_cosine"])
    assert metrics["best_step"] == best["step"]
    assert metrics["after"]["spearman"] == pytest.approx(100 * best["eval_dev_spearman_cosine"], abs=0.2)


def test_the_model_loads_anywhere_with_its_prompt(finished):
    folder, _, metrics = finished
    model = SentenceTransformer(str(folder / "out"), device="cpu")
    assert model.default_prompt_name == "default" and model.prompts["default"] == "query: "
    assert model.max_seq_length == 16
    assert check_encoder(model)["failed"] == []
    task = metrics["after"]["tasks"][str(folder / "dev.tsv")]
    # dev and the task are the same pairs: the evaluator's and ours agree, and so does the loaded model, but
    # for the order of pairs of equal sentences, whose cosines are 1 up to rounding.
    assert task["spearman"] == pytest.approx(metrics["after"]["spearman"], abs=0.2)
    again = run("evaluate", **{"model.name": str(folder / "out"), "tasks": [str(folder / "dev.tsv")]})
    assert again["tasks"][str(folder / "dev.tsv")]["spearman"] == pytest.approx(task["spearman"], abs=0.2)


@pytest.mark.parametrize(
    ("loss", "error"), [("RankMarginLoss", True), ("RAOELoss", False), ("CosineSimilarityLoss", False)]
)
def test_equal_scores_are_an_error(tmp_path, caplog, loss, error):
    data = tmp_path / "equal.tsv"
    data.write_text(re.sub(r"\t[\d.]+\t", "\t1.0\t", Path(write_pairs(data)).read_text()))
    arguments = load("train", None, {"loss": loss, "data.train": [str(data)]})
    if error:
        with pytest.raises(ValueError, match="all 40 scores are 1, so no pair ranks above another: the loss"):
            training_data(arguments)
    else:
        training_data(arguments)
        assert ("only the labels have an effect" in caplog.text) == (loss == "RAOELoss")


def test_mse_needs_scores_on_the_scale_of_cosines(tmp_path):
    with pytest.raises(ValueError, match=r"got 0\.455 to 5\.0: declare their range with data\.score_scale"):
        run("train", "raoe-s1", **settings(tmp_path, **{"loss": "CosineSimilarityLoss"}))


@pytest.mark.parametrize(("scale", "wanted"), [([1, 5], [0, 0.25, 1]), ([-2, 2], [0, 0.25, 1]), ([], [-1, -0.5, 1])])
def test_mse_targets(tmp_path, scale, wanted):
    """Each source's scores, from its own scale: that of cosines stays as it is."""
    low, high = scale or (-1, 1)
    rows = [
        f"{SENTENCES[row]}\t{SENTENCES[row + 1]}\t{low + part * (high - low)}" for row, part in enumerate((0, 0.25, 1))
    ]
    (tmp_path / "own.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows]) + "\n")
    changes = {"data.train": [str(tmp_path / "own.tsv"), write_pairs(tmp_path / "train.tsv")]}
    if scale:
        changes["data.score_scale"] = [*scale, 0, 5]
    else:
        changes["data.train"] = changes["data.train"][:1]
    arguments = load("train", None, settings(tmp_path, **{"loss": "CosineSimilarityLoss", **changes}))
    datasets, _ = training_data(arguments)
    assert datasets["own"]["score"][:] == pytest.approx(wanted)
    if scale:
        assert max(datasets["train"]["score"]) == 1 and 0 < min(datasets["train"]["score"]) < 0.2


def test_max_rows_draws_with_the_seed(tmp_path):
    options = settings(tmp_path, **{"data.max_rows": 7})
    sample = []
    for seed in (1, 1, 2):
        datasets, texts = training_data(load("train", None, {**options, "training.seed": seed}))
        texts = list(texts)
        assert len(datasets["train"]) == 7 and len(texts) == 14
        sample.append(texts)
    assert sample[0] == sample[1] != sample[2]


def test_best_model_is_chosen_on_held_out_pairs(tmp_path, capsys):
    options = settings(tmp_path, **{"data.dev": None, "data.dev_share": 0.2})
    metrics = run("train", "raoe-s1", **options)
    held = int(re.search(r"train: (\d+) of 40 rows are held out", capsys.readouterr().out)[1])
    assert 8 <= held <= 12 and metrics["pairs"] == {"train": 40 - held}
    assert metrics["before"]["spearman"] is not None and metrics["best_step"] is not None
    datasets, _ = training_data(load("train", "raoe-s1", options))
    [(rest, dev)] = hold_out(datasets, 0.2, 42)
    assert not {*dev["sentence1"]} & {*rest["train"]["sentence1"]}  # of a premise all pairs, or none
    assert len(dev) + len(rest["train"]) == 40
    assert hold_out(datasets, 0.2, 43)[0][1]["sentence2"] != dev["sentence2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.dev": None, "training.patience": 2}, "training.patience needs a dev set"),
        ({"data.score_scale": [1, 2, 3]}, "data.score_scale must contain 2 numbers"),
        ({"data.train": "nowhere.tsv"}, "no such file"),
        (
            {"training.dataloader_drop_last": True, "training.per_device_train_batch_size": 50},
            "train has 40 rows, fewer than a batch of 50",
        ),
    ],
)
def test_invalid_settings(tmp_path, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("train", "raoe-s1", **{**settings(tmp_path), **changes})


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_learns(tmp_path):
    """What ``make demo`` does."""
    process = python("-m", "raoe_train", "train", "demo", "--output", tmp_path / "demo")
    assert process.returncode == 0, process.stderr
    metrics = json.loads((tmp_path / "demo" / "metrics.json").read_text())
    assert metrics["after"]["average"] > metrics["before"]["average"] + 20
    assert "builtin#test" in process.stdout and "raoe_kernels backends for cpu: " in process.stdout

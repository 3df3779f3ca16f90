"""The grid: what runs, what is skipped, what fails, what is reported."""

from __future__ import annotations

import json

import pytest

from raoe_train import run
from raoe_train.cli import main
from raoe_train.studies.runs import chosen
from raoe_train.studies.sweep_metrics import curves, mean, metric
from raoe_train.studies.sweep_report import what_numbers_are
from raoe_train.training.run_directory import finished_metrics
from tests.studies.tables import runs_of
from tests.training.test_training import SCRATCH, settings


def table(folder, **changes):
    base = {key: value for key, value in settings(folder).items() if key not in ("output", "model.name")}
    base["training"] = {**base["training"], "epochs": 1}
    made = {
        "base": "raoe-s1",
        "model": "scratch",
        "settings": {**base, "model.scratch": SCRATCH},
        "seeds": [1, 2],
        "tasks": [str(folder / "dev.tsv")],
        "variants": {"raoe": {}, "second": {"after": "raoe", "loss.name": "rank_margin"}},
        "output": str(folder / "sweep"),
    }
    return {**made, **changes}


def test_expand(tmp_path):
    asked = table(tmp_path, variants={
        "later": {"after": "raoe", "training.epochs": 3},
        "raoe": {},
        "cosent": {"loss.name": "cosent", "seeds": [7]},
        "rate": {"grid": {"training.learning_rate": [1e-5, "2e-5"], "loss.margin": [0, 2]}, "seeds": [1]},
    })  # fmt: skip
    runs = {made.name: made for made in runs_of(None, asked)}
    assert list(runs)[:4] == ["raoe-seed1", "raoe-seed2", "later-seed1", "later-seed2"]
    assert runs["cosent-seed7"].arguments.loss.name == "cosent"
    assert runs["cosent-seed7"].arguments.training["seed"] == 7
    assert runs["later-seed2"].arguments.model.name == runs["raoe-seed2"].arguments.output
    assert runs["later-seed2"].arguments.training["epochs"] == 3
    point = runs["rate-learning_rate-2e-05-margin-0-seed1"]
    assert point.arguments.training["learning_rate"] == 2e-5 and point.arguments.loss.margin == 0
    assert point.point == {"training.learning_rate": 2e-5, "loss.margin": 0}
    assert len(runs) == 4 + 1 + 4
    names = [made.name for made in chosen(list(runs.values()), ["later-seed2", "cos*"])]
    assert names == ["raoe-seed2", "later-seed2", "cosent-seed7"]


def test_cells_with_the_same_settings_are_one_run(tmp_path):
    variants = {
        "small": {"loss.margin": 2},
        "curve": {"grid": {"loss.margin": [1, 2]}, "seeds": [2]},
    }
    made = {run.name: run.directory.name for run in runs_of(None, table(tmp_path, variants=variants))}
    assert made == {
        "small-seed1": "small-seed1",
        "small-seed2": "small-seed2",
        "curve-margin-1-seed2": "curve-margin-1-seed2",
        "curve-margin-2-seed2": "small-seed2",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": {}}, "variants is empty"),
        ({"variants": {"a": {"after": "b"}}}, "'a' comes after 'b', which is none of a"),
        ({"variants": {"a": {"after": "b"}, "b": {"after": "a"}}}, "in a circle: a after b after a"),
        ({"variants": {"a": {"los.name": "mse"}}}, "unknown key los"),
        ({"variants": {"a": {"grid": {"loss.margin": 2}}}}, r"grid\.loss\.margin must be a list"),
        ({"variants": {"a": {"data.train": "{data_dir}/x.tsv"}}}, "--data_dir is missing"),
        ({"only": ["nothing"]}, "--only nothing: no such run; variants: raoe, second"),
        ({"output": None}, "--output is missing"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run("sweep", **table(tmp_path, **changes))
    assert not (tmp_path / "sweep").exists()


def test_placeholders(tmp_path):
    changes = {
        "data_dir": "/data",
        "variants": {"a": {"data.train": ["{data_dir}/x.tsv#train", "{output}/y.tsv"]}},
    }
    (first, _) = runs_of(None, table(tmp_path, **changes))
    assert first.arguments.data.train == ["/data/x.tsv#train", f"{tmp_path}/sweep/y.tsv"]
    assert first.arguments.data.dir == "/data"


def test_mean_and_deviation():
    assert mean([1.0, 2.0, 4.0]) == "2.33 ± 1.53"
    assert mean([1.234]) == "1.23"
    assert mean([1.0, None]) == mean([]) == "-"


def test_main_metrics_of_each_kind():
    after = {"tasks": {"mr": {"kind": "transfer", "main": "accuracy", "accuracy": 75.5}}, "average": 75.5}
    assert metric(after, "mr") == metric(after, "average") == 75.5
    assert metric({"tasks": {"stsb": {"spearman": 82.0}}}, "stsb") == 82.0  # of an old version
    assert what_numbers_are(["mr"], [{"after": after}]) == "Spearman x 100 of cosine; accuracy x 100 of mr"


def test_curves_are_of_numbers():
    points = [(20, 1.0), (5, 2.0), ("auto", 3.0), (5, 4.0), (True, 5.0)]
    rows = [{"family": "tau", "point": {"loss.tau": x}, "after": {"spearman": y}} for x, y in points]
    assert curves(rows, "loss.tau", ["average", "dev"]) == {"tau": {20: 1.0, 5: 3.0}}


@pytest.mark.slow
def test_runs_are_made_once_reported_and_failures_do_not_stop_others(tmp_path, capsys):
    variants = {
        "broken": {"data.train": str(tmp_path / "nowhere.tsv"), "seeds": [1]},
        "raoe": {},
        "second": {"after": "raoe", "loss.name": "rank_margin"},
        "rate": {"grid": {"training.learning_rate": [1e-4, 1e-3]}, "seeds": [1]},
    }
    made = table(tmp_path, variants=variants)
    result = run("sweep", **made)
    assert result["failed"] == ["broken-seed1"]
    folder = tmp_path / "sweep"
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [line["run"] for line in lines] == [
        "raoe-seed1", "raoe-seed2", "second-seed1", "second-seed2",
        "rate-learning_rate-0.0001-seed1", "rate-learning_rate-0.001-seed1",
    ]  # fmt: skip
    task = str(tmp_path / "dev.tsv")
    report = (folder / "report.md").read_text()
    scores = [line["after"]["tasks"][task]["spearman"] for line in lines[:2]]
    assert "| raoe | 2 | " in report and f"{sum(scores) / 2:.2f} ± " in report
    assert "Failed: broken-seed1" in report and "learning_rate.png" in report
    assert (folder / "learning_rate.png").stat().st_size > 1000
    assert not list(folder.rglob("*.safetensors")), "weights of finished runs are dropped"

    # Again: nothing is redone but what failed, and the exit status says so.
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.json")}
    assert run("sweep", **made)["failed"] == ["broken-seed1"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.json")} == times

    # One more stage after a run whose weights are gone: that run is made again, the new one starts from it.
    made["variants"] = {"raoe": {}, "third": {"after": "raoe", "loss.name": "cosent"}}
    capsys.readouterr()
    result = run("sweep", **made, only=["third-seed2"])
    assert result["failed"] == []
    by_name = {line["run"]: line for line in result["results"]}
    assert by_name["third-seed2"]["before"]["spearman"] == pytest.approx(
        by_name["raoe-seed2"]["after"]["spearman"]
    )
    assert "third-seed1" not in by_name


@pytest.mark.slow
def test_the_exit_status_tells(tmp_path):
    import yaml

    recipe = tmp_path / "table.yaml"
    variants = {"raoe": {}, "bad": {"model.name": "./no"}}
    made = table(tmp_path, seeds=[1], tasks=[], variants=variants)
    recipe.write_text(yaml.safe_dump(made, sort_keys=False))
    assert main(["sweep", str(recipe), "--only", "raoe"]) == 0
    assert main(["sweep", str(recipe)]) == 1
    assert finished_metrics(runs_of(recipe)[0].arguments) is not None

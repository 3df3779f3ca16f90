"""The grid: what runs, what is skipped, what fails, what is reported."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import yaml

from raoe_train import run
from raoe_train.artifacts import figures
from raoe_train.cli import load, main
from raoe_train.recipe import to_dict
from raoe_train.studies import sweep
from raoe_train.studies.runs import chosen
from raoe_train.studies.sweep_report import curves, frame, mean, metric
from raoe_train.training.run_directory import finished_metrics, made_from
from tests.studies.tables import runs_of
from tests.training.small_runs import SCRATCH, settings


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
        "raoe": {},
        "later": {"after": "raoe", "training.epochs": 3},
        "cosent": {"loss.name": "cosent", "seeds": [7]},
        "rate": {"grid": {"training.learning_rate": [1e-5, "2e-5"], "loss.margin": [0, 2]}, "seeds": [1]},
    })  # fmt: skip
    runs = {made.name: made for made in runs_of(None, asked)}
    assert list(runs)[:4] == ["raoe-seed1", "raoe-seed2", "later-seed1", "later-seed2"]
    assert runs["cosent-seed7"].arguments.loss["name"] == "cosent"
    assert runs["cosent-seed7"].arguments.training["seed"] == 7
    assert runs["later-seed2"].arguments.model.name == runs["raoe-seed2"].arguments.output
    assert runs["later-seed2"].arguments.training["epochs"] == 3
    point = runs["rate-learning_rate-2e-05-margin-0-seed1"]
    assert point.arguments.training["learning_rate"] == 2e-5 and point.arguments.loss["margin"] == 0
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


def test_a_scale_is_on_top_of_every_variant(tmp_path):
    asked = table(tmp_path, seeds=[1], variants={
        "short": {"data.max_rows": 7, "loss.margin": 3},
        "curve": {"grid": {"training.epochs": [4]}},
    }, scales={"paper": {"settings": {"data.max_rows": None, "training": {"epochs": 2}, "loss.scale": 9}, "tasks": []}},
    scale="paper")  # fmt: skip
    short, curve = runs_of(None, asked)
    assert short.arguments.data.max_rows is None
    assert (short.arguments.loss["margin"], short.arguments.loss["scale"]) == (3, 9)
    assert (short.arguments.training["epochs"], curve.arguments.training["epochs"]) == (2, 4)  # a grid stays a grid
    assert short.arguments.evaluation.tasks == []
    patterns = {"variants": {"s*": {"loss.margin": 5, "seeds": [7]}, "curve": {"grid": {"loss.scale": [4, 5]}}}}
    short, *curves = runs_of(None, {**asked, "scale": "by pattern", "scales": {"by pattern": patterns}})
    assert (short.arguments.loss["margin"], short.seed) == (5, 7)
    assert [(made.arguments.training["epochs"], made.arguments.loss["scale"]) for made in curves] == [(4, 4), (4, 5)]
    with pytest.raises(ValueError, match=r"scales\.x\.variants\.q\* is none of short, curve"):
        runs_of(None, {**asked, "scale": "x", "scales": {"x": {"variants": {"q*": {}}}}})
    (short, _) = runs_of(None, {**asked, "scale": None})
    assert short.arguments.data.max_rows == 7 and short.arguments.evaluation.tasks == asked["tasks"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": {}}, "variants is empty"),
        ({"scale": "paper"}, "scale must be of none, as this sweep has no scales, got 'paper'"),
        ({"scale": "x", "scales": {"x": {"seeds": [1]}}}, "settings, variants, prepare, tasks and only, got seeds"),
        ({"variants": {"a": {"after": "b"}}}, "'a' comes after 'b', which is none of those above it: nothing"),
        ({"variants": {"a": {}, "b": {"after": "c"}, "c": {}}}, "'b' comes after 'c', which is none of .*: a"),
        ({"variants": {"a": {}, "b": {"after": "a", "seeds": [7]}}}, "'a', which has no run of seed 7 alone"),
        ({"variants": {"a": {"los.name": "mse"}}}, "unknown key los"),
        ({"variants": {"a": {"grid": {"loss.margin": 2}}}}, r"grid\.loss\.margin must be a list"),
        ({"variants": {"a": {"data.train": "{data_dir}/x.tsv"}}}, "--data_dir is missing"),
        ({"variants": {"../../evil": {}}}, "'../../evil' cannot name a folder"),
        ({"variants": {"a\nb": {}}}, "cannot name a folder"),
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
    assert mean(pd.Series([1.0, 2.0, 4.0])) == "2.33 ± 1.53"
    assert mean(pd.Series([1.234])) == "1.23"
    assert mean(pd.Series([1.0, None])) == mean(pd.Series([], dtype=float)) == "-"


def test_main_metrics_of_each_kind():
    after = {"tasks": {"mr": {"kind": "transfer", "main": "accuracy", "accuracy": 75.5}}, "average": 75.5}
    assert metric(after, "mr") == metric(after, "average") == 75.5
    assert metric({"tasks": {"stsb": {"spearman": 82.0}}}, "stsb") == 82.0  # of an old version


def test_curves_are_of_numbers():
    points = [(20, 1.0), (5, 2.0), ("auto", 3.0), (5, 4.0), (True, 5.0)]
    same = {"variant": "", "family": "tau", "seed": 1, "steps": 1, "seconds": 1}
    rows = [{**same, "point": {"loss.tau": x}, "after": {"spearman": y}} for x, y in points]
    runs = frame(rows, ["dev"])
    assert curves(runs, "loss.tau", runs[["dev"]]) == {"tau": [(5.0, 3.0), (20.0, 1.0)]}


@pytest.fixture
def trained(monkeypatch):
    """In place of training, what it leaves; and a count of what a sweep does beside it."""
    counts = Counter()

    def pretend(job, recipe, **values):
        arguments = load(job, recipe, values)
        if counts["train"] == counts["stop"] > 0:
            raise KeyboardInterrupt
        counts["train"] += 1
        folder = Path(arguments.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(to_dict(arguments), sort_keys=False))
        (folder / "made_from.json").write_text(json.dumps(made_from(arguments)))
        rate = arguments.training["learning_rate"]
        metrics = {"after": {"spearman": 1e6 * rate}, "steps": 1, "seconds": 60, "commit": "c", "versions": {}}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        for name in ("modules.json", "model.safetensors"):
            (folder / name).write_text(getattr(counts, "weights", "{}"))

    def counted(name, real):
        return lambda *given: (counts.update([name]), real(*given))[1]

    monkeypatch.setattr(sweep, "run_job", pretend)
    monkeypatch.setattr(sweep, "finished_metrics", counted("metrics", sweep.finished_metrics))
    monkeypatch.setattr(figures, "save", counted("plots", figures.save))
    monkeypatch.setattr(Path, "rglob", counted("folders", Path.rglob))
    return counts


def rates(folder, count):
    grid = {"training.learning_rate": [n * 1e-5 for n in range(1, count + 1)]}
    return table(folder, seeds=[1], tasks=[], variants={"rate": {"grid": grid}})


def test_tasks_are_told_apart_by_how_they_are_scored(tmp_path, trained, monkeypatch):
    """The state before training is scored as the runs are, and no run by what another one's tasks are."""
    asked, pretend = [], sweep.run_job

    def run_job(job, recipe=None, **values):
        if job == "evaluate":
            asked.append(load(job, recipe, values))
            return {"tasks": {}, "average": None}
        return pretend(job, recipe, **values)

    monkeypatch.setattr(sweep, "run_job", run_job)
    lines = [f"{label} {n}\t{label}\n" for label in "ab" for n in range(12)]
    (tmp_path / "set.tsv").write_text("text\tlabel\n" + "".join(lines))
    made = table(tmp_path, seeds=[1], model="a/model", tasks=[f"transfer:{tmp_path}/set.tsv"], variants={
        "plain": {"evaluation.classifier": "senteval", "evaluation.batcher": "bellm"},
        "other": {"evaluation.classifier": "senteval", "evaluation.classifier.kfold": 5},
    })  # fmt: skip
    made["settings"]["training"]["learning_rate"] = 1e-5
    run("sweep", **made)
    assert [(its.classifier.name, its.batcher) for its in asked] == [("senteval", "bellm")]
    trained.clear()
    run("sweep", **made)
    assert not trained["train"]  # both are as they were recorded


def test_what_is_done_beside_training_grows_as_the_runs_do(tmp_path, trained):
    """Metrics are read when the sweep starts and when their run was made, weights looked for when they may go."""
    run("sweep", **rates(tmp_path, 12))
    assert {name: trained[name] for name in ("train", "metrics", "folders", "plots")} == {
        "train": 12, "metrics": 24, "folders": 36, "plots": 1
    }  # fmt: skip
    trained.clear()
    run("sweep", **rates(tmp_path, 12))  # nothing to do
    assert (trained["train"], trained["metrics"], trained["plots"]) == (0, 12, 1)


def test_a_kill_leaves_what_the_next_start_completes(tmp_path, trained):
    (tmp_path / "whole").mkdir()
    run("sweep", **rates(tmp_path / "whole", 4))
    (tmp_path / "cut").mkdir()
    trained["stop"] = 6  # of training, after two more
    with pytest.raises(KeyboardInterrupt):
        run("sweep", **rates(tmp_path / "cut", 4))
    folder = tmp_path / "cut" / "sweep"
    assert len((folder / "results.jsonl").read_text().splitlines()) == 2
    report = (folder / "report.md").read_text()
    assert "| rate-learning_rate-2e-05 | 1 | 20.00 |" in report and "learning_rate-3e-05 |" not in report
    trained["stop"] = 0
    run("sweep", **rates(tmp_path / "cut", 4))
    assert trained["train"] == 8 and (folder / "learning_rate.png").is_file()
    whole = tmp_path / "whole" / "sweep"
    assert (folder / "results.jsonl").read_text() == (whole / "results.jsonl").read_text()
    assert (folder / "report.md").read_text() == (whole / "report.md").read_text().replace("whole", "cut")
    assert not list(folder.rglob("*.safetensors"))


def test_weights_stay_while_a_run_has_to_go_on_from_them(tmp_path, trained):
    made = table(tmp_path, seeds=[1], tasks=[], variants={"first": {}, "second": {"after": "first"}})
    made["settings"]["training"]["learning_rate"] = 1e-5
    first, second = (tmp_path / "sweep" / "runs" / f"{name}-seed1" for name in ("first", "second"))
    run("sweep", **made, only=["first"])
    assert (first / "modules.json").is_file() and (first / "model.safetensors").is_file()
    run("sweep", **made)
    assert trained["train"] == 2 and not (first / "modules.json").exists() and not (second / "modules.json").exists()
    trained.clear()
    run("sweep", **made)
    assert trained["train"] == 0  # the second is still of the first, whose weights are gone
    made["variants"]["third"] = {"after": "first", "loss.margin": 3}
    run("sweep", **made)
    assert trained["train"] == 2  # the first, for the third; it came out as it was
    trained.weights, made["variants"]["fourth"] = "other", {"after": "first", "loss.margin": 4}
    trained.clear()
    run("sweep", **made)
    assert trained["train"] == 4  # it came out otherwise: the second and the third are made again
    trained.clear()
    run("sweep", **made)
    assert trained["train"] == 0
    data = Path(made["settings"]["data.train"][0])
    data.write_text(data.read_text().replace("5.000", "0.000"))
    run("sweep", **made)
    assert trained["train"] == 4  # none is finished any more


def test_each_encoder_that_runs_start_from_has_its_row(tmp_path, trained, monkeypatch):
    """By what is said of it, not by its name alone."""
    asked, pretend = [], sweep.run_job

    def run_job(job, recipe=None, **values):
        if job == "train":
            return pretend(job, recipe, **values)
        asked.append(load(job, recipe, values).model)
        score = float(len(asked))
        return {"tasks": {str(tmp_path / "dev.tsv"): {"spearman": score}}, "average": score}

    monkeypatch.setattr(sweep, "run_job", run_job)
    variants = {
        "plain": {}, "same": {"loss.margin": 3, "model.dropout": 0.2}, "cls": {"model.pooling": "cls"},
        "other": {"model.name": "b/model"}, "third": {"model.name": "c/model"},
    }  # fmt: skip
    made = table(tmp_path, seeds=[1], model="a/model", variants=variants)
    made["settings"]["training"]["learning_rate"] = 1e-5
    run("sweep", **made)
    assert [(model.name, model.pooling) for model in asked] == [
        ("a/model", None), ("a/model", "cls"), ("b/model", None), ("c/model", None)
    ]  # fmt: skip
    report = (tmp_path / "sweep" / "report.md").read_text()
    rows = ("model ({})", "model (pooling cls, {})", "b/model ({})", "c/model ({})")
    for number, row in enumerate(rows, 1):
        assert f"| before: {row.format('max seq length 16')} |  | - | {number}.00 |" in report


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
    assert by_name["third-seed2"]["before"]["spearman"] == pytest.approx(by_name["raoe-seed2"]["after"]["spearman"])
    assert "third-seed1" not in by_name


def test_a_dry_run_says_of_each_cell_what_is_not_there(tmp_path, capsys):
    found = run("sweep", **table(tmp_path, variants={"raoe": {"model.name": "./no"}}), dry_run=True)
    assert found == {"results": {}, "failed": ["raoe-seed1", "raoe-seed2"]}
    said = capsys.readouterr().out
    assert "raoe-seed1:\n" in said and said.endswith("  no such model directory: ./no\nraoe-seed2, as raoe-seed1\n")


@pytest.mark.slow
def test_the_exit_status_tells(tmp_path):
    recipe = tmp_path / "table.yaml"
    variants = {"raoe": {}, "bad": {"model.name": "./no"}}
    made = table(tmp_path, seeds=[1], tasks=[], variants=variants)
    recipe.write_text(yaml.safe_dump(made, sort_keys=False))
    assert main(["sweep", str(recipe), "--only", "raoe"]) == 0
    assert main(["sweep", str(recipe)]) == 1
    assert finished_metrics(runs_of(recipe)[0].arguments) is not None

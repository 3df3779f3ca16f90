"""Sweeps: finished, failed and interrupted cells, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.studies import jobs, pictures, plots
from benchmarks.studies.__main__ import main
from benchmarks.studies.sweep import sweep
from benchmarks.studies.sweep_report import SweepReport
from tests.tiny import saved_encoder
from tests.training.small_runs import SCRATCH, settings

EPOCH = {"num_train_epochs": 1, "per_device_train_batch_size": 8}


def table(folder, **changes):
    """The keys of a small study."""
    folder.mkdir(exist_ok=True)
    base = {key: value for key, value in settings(folder).items() if key not in ("output", "model.name")}
    base["training"] = {**EPOCH, "learning_rate": 1e-3}
    options = {
        "base": "raoe-s1",
        "settings": {**base, "model.name": "scratch", "model.scratch": SCRATCH},
        "seeds": [1, 2],
        "tasks": [str(folder / "dev.tsv")],
        "variants": {"raoe": {}, "second": {"after": "raoe", "loss.class_path": "RankMarginLoss"}},
    }
    return {**options, **changes}


def run(folder, study, **options):
    study = {**study, "settings": {"data.train": ["pairs.tsv"], **study.get("settings", {})}}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return sweep(path, folder / "out", **options)


@pytest.fixture
def trained(monkeypatch):
    """A list of trained cells. Training is replaced by writing its output files."""
    names: list[str] = []

    def pretend(job, recipe, overrides):
        assert job == "train"
        if len(names) == getattr(pretend, "stop", None):
            raise KeyboardInterrupt
        folder = Path(overrides["output"])
        names.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("modules.json", "model.safetensors"):
            (folder / name).write_text("{}")
        rate = overrides["training"]["learning_rate"]
        before = {"tasks": {"sick": {"spearman": 5.0}}} if overrides["evaluation"]["before"] else {}
        return {"before": before, "after": {"spearman": 1e6 * rate}, "steps": 1, "seconds": 60,
                "versions": {"torch": "2"}}  # fmt: skip

    monkeypatch.setattr(jobs, "run", pretend)
    names_and_stop = names, pretend
    return names_and_stop


def rates(count):
    grid = {"training.learning_rate": [n * 1e-5 for n in range(1, count + 1)]}
    return {"seeds": [1], "variants": {"rate": {"grid": grid}}}


def test_an_interrupted_sweep_resumes(tmp_path, trained):
    names, pretend = trained
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    run(tmp_path / "whole", rates(4))
    pretend.stop = 6  # after two more
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", rates(4))
    folder = tmp_path / "cut" / "out"
    assert len((folder / "results.jsonl").read_text().splitlines()) == 2
    report = (folder / "report.md").read_text()
    assert "| rate-learning_rate-2e-05 | 1 | 20.00 |" in report and "learning_rate-3e-05 |" not in report
    pretend.stop = None
    run(tmp_path / "cut", rates(4))
    assert len(names) == 8 and (folder / "learning_rate.png").stat().st_size > 1000
    whole = tmp_path / "whole" / "out"
    assert (folder / "results.jsonl").read_text() == (whole / "results.jsonl").read_text()
    assert (folder / "report.md").read_text() == (whole / "report.md").read_text().replace("whole", "cut")
    assert not list(folder.rglob("*.safetensors"))
    run(tmp_path / "cut", rates(4))
    assert len(names) == 8, "finished cells are skipped"


def test_levels_before_training_are_of_the_tasks_of_the_curve(tmp_path, monkeypatch):
    levels = []
    monkeypatch.setattr(plots, "plot_lines", lambda *arguments: levels.append(arguments[-1]))

    def row(rate, task):
        scores = {"tasks": {task: {"spearman": 50.0}}, "average": 50.0}
        point = {"rate": rate} if rate else {}
        return {"variant": f"v{rate}", "family": "v", "seed": 1, "point": point, "start": {"recipe": "r", "name": "e"},
                "before": scores, "after": scores, "steps": 1, "seconds": 1, "commit": "c", "versions": {}}  # fmt: skip

    for other in ("sick", "stsb"):
        rows = [row(0, other), row(1, "sick"), row(2, "sick")]
        SweepReport(tmp_path, ["sick"], [], False, {}).write(rows, [], draw=True)
    assert levels == [{"before: e": 50.0}, {}]


def test_pictures_of_pages_are_drawn_from_committed_rows(monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: drawn.append(path))
    pictures.main()
    assert len(drawn) == 10 and all(path.is_file() for path in drawn)


def test_weights_stay_while_a_cell_starts_from_them(tmp_path, trained):
    names, _ = trained
    rate = {"training.learning_rate": 1e-5}
    study = {"seeds": [1], "variants": {"first": rate, "second": {"after": "first", **rate}}}
    first, second = (tmp_path / "out" / "runs" / f"{name}-seed1" for name in ("first", "second"))
    run(tmp_path, study, only=["first"])
    assert (first / "modules.json").is_file() and (first / "model.safetensors").is_file()
    run(tmp_path, study)
    assert names == ["first-seed1", "second-seed1"]
    assert not (first / "modules.json").exists() and not (second / "model.safetensors").exists()
    study["variants"]["third"] = {"after": "first", "loss.init_args.margin": 3, **rate}
    run(tmp_path, study)
    assert names[2:] == ["first-seed1", "third-seed1"], "the first is trained again for the third"
    assert not (first / "modules.json").exists()
    study["variants"]["last"] = {"loss.init_args.margin": 4, **rate}
    run(tmp_path, {**study, "keep_models": True})
    assert (tmp_path / "out" / "runs" / "last-seed1" / "modules.json").is_file()


def test_a_cell_of_other_settings_or_data_is_not_overwritten(tmp_path, trained, capsys):
    names, _ = trained
    data = tmp_path / "data.tsv"
    data.write_text("one")
    study = {"seeds": [1], "variants": {"a": {"training.learning_rate": 1e-5, "data.train": [f"{data}#train"]}}}
    run(tmp_path, study)
    data.write_text("two")
    assert run(tmp_path, study)["failed"] == ["a-seed1"]
    assert "--overwrite trains the cell again" in capsys.readouterr().out and len(names) == 1
    assert run(tmp_path, study, overwrite=True)["failed"] == [] and len(names) == 2
    assert run(tmp_path, study)["failed"] == [] and len(names) == 2


def test_cells_are_trained_once_and_failures_do_not_stop_others(tmp_path, capsys):
    variants = {
        "broken": {"data.train": str(tmp_path / "nowhere.tsv"), "seeds": [1]},
        "raoe": {},
        "second": {"after": "raoe", "loss.class_path": "RankMarginLoss"},
        "lost": {"after": "broken", "seeds": [1]},
    }
    study = table(tmp_path, variants=variants, compare=[["raoe", "second"]])
    assert run(tmp_path, study)["failed"] == ["broken-seed1", "lost-seed1"]
    folder = tmp_path / "out"
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [line["run"] for line in lines] == ["raoe-seed1", "raoe-seed2", "second-seed1", "second-seed2"]
    scores = [line["after"]["tasks"][study["tasks"][0]]["spearman"] for line in lines]
    report = (folder / "report.md").read_text()
    assert f"| raoe | 2 | {lines[0]['after']['spearman'] / 2 + lines[1]['after']['spearman'] / 2:.2f} ± " in report
    assert f"{sum(scores[:2]) / 2:.2f} ± " in report and "| raoe - second | 2 | " in report
    assert "Failed: broken-seed1 (runs/broken-seed1.error.txt), lost-seed1" in report
    assert "nowhere.tsv" in (folder / "runs" / "broken-seed1.error.txt").read_text()
    assert lines[2]["before"]["spearman"] == pytest.approx(lines[0]["after"]["spearman"])
    assert not list(folder.rglob("*.safetensors")), "weights of finished cells are removed"

    # Again: only what failed runs, and the exit status says so.
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.json")}
    words = ["sweep", str(tmp_path / "study.yaml"), "--output", str(folder)]
    assert main(words) == 1
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.json")} == times
    assert main([*words, "--only", "raoe"]) == 0

    # One more stage after a cell whose weights are gone: that cell is trained again.
    study["variants"] = {"raoe": {}, "third": {"after": "raoe", "loss.class_path": "CoSENTLoss"}}
    study["compare"] = []
    (third,) = (row for row in run(tmp_path, study, only=["third-seed2"])["results"] if row["variant"] == "third")
    assert third["before"]["spearman"] == pytest.approx(lines[1]["after"]["spearman"])


def test_random_weights_depend_on_the_seed_only(tmp_path):
    start = saved_encoder(tmp_path / "start")
    drawn = [jobs.draw_weights(start, seed, tmp_path / name) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    old, first, second, other = (
        jobs.load_encoder(str(name), device="cpu")[0].model.state_dict() for name in (start, *drawn)
    )
    name = "embeddings.word_embeddings.weight"
    assert all(first[key].equal(second[key]) for key in first)
    assert not first[name].equal(old[name]) and not first[name].equal(other[name])


def test_cells_start_from_random_weights(tmp_path):
    start = saved_encoder(tmp_path / "start")
    variants = {"own": {}, "drawn": {"random_weights": True}}
    study = table(tmp_path, variants=variants, seeds=[1], keep_models=True)
    study["settings"] |= {
        "model.name": start,
        "model.scratch": {},
        "training.max_steps": 1,
        "training.learning_rate": 1e-9,
    }
    assert run(tmp_path, study)["failed"] == []
    name = "embeddings.word_embeddings.weight"
    first, own, drawn = (
        jobs.load_encoder(str(path), device="cpu")[0].model.state_dict()[name]
        for path in (start, *(tmp_path / "out" / "runs" / f"{variant}-seed1" for variant in variants))
    )
    assert own.allclose(first, atol=1e-6) and not drawn.allclose(first, atol=1e-2)
    assert not (tmp_path / "out" / "runs" / "drawn-seed1.start").exists()

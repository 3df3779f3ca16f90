"""What is in a run's folder: runs that are finished, written over, killed."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from raoe_train import run
from raoe_train.config import to_dict
from raoe_train.inputs import recorded
from tests.forked import python
from tests.tiny import load, saved_encoder
from tests.training.small_runs import KILLED, SCRATCH, saving, settings


def test_finished_run_is_returned_and_other_settings_refused(finished):
    folder, made, metrics = finished
    weights = folder / "out" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert run("train", "raoe-s1", **made) == metrics
    keys = r"loss\.init_args\.margin, training\.seed"
    with pytest.raises(ValueError, match=rf"other settings or inputs \(different: {keys}\)"):
        run("train", "raoe-s1", **{**made, "loss.margin": 3, "training": {**made["training"], "seed": 1}})
    with pytest.raises(ValueError, match=r"contains the input data\.train"):
        run("train", "raoe-s1", **{**made, "output": str(folder), "overwrite": True})
    assert weights.stat().st_mtime_ns == before


@pytest.mark.parametrize(("name", "key"), [("train", "data.train"), ("dev", "data.dev")])
def test_run_counts_as_finished_only_with_equal_inputs(finished, name, key):
    folder, made, metrics = finished
    data = folder / f"{name}.tsv"
    text = data.read_text()
    data.write_text(text.replace("5.000", "0.000"))
    with pytest.raises(ValueError, match=rf"other settings or inputs \(different: {key}.*--overwrite"):
        run("train", "raoe-s1", **made)
    data.write_text(text)  # another time, the same contents
    assert run("train", "raoe-s1", **made) == metrics


def test_device_is_not_part_of_the_settings():
    """Mappings may have keys of any name."""

    def made_from(**settings):
        return recorded(load("train", None, settings))

    named = {"teacher.second.name": "x", "polarity.reference.name": "y"}
    for key in ("output", "model.device", "teacher.second.cache", "polarity.reference.device"):
        assert made_from(**named, **{key: "z"}) == made_from(**named)
    plain = made_from()
    free = {"data.labels": {"device": 0, "output": 1}, "training.learning_rate_mapping": {"output": 1e-3}}
    for key, value in {**free, "model.lora": {"cache": 1}, "training.seed": 1}.items():
        assert made_from(**{key: value}) != plain
    assert made_from(**{"data.labels": {"cache": 0}}) != made_from(**{"data.labels": {"device": 0}})
    assert made_from(**{"data.columns": {"label": None}}) != plain  # null is not absent


@pytest.mark.parametrize("key", ["model.name", "teacher.name"])
def test_second_stage_is_stale_after_its_first_stage_is_retrained(tmp_path, key):
    """Nor what a teacher taught."""
    first = saved_encoder(tmp_path / "first")
    options = settings(tmp_path, **{"data.dev": None, "training.max_steps": 1, key: first})
    options |= {"loss": "benchmarks.studies.distillation.RankDistillationLoss"} if key == "teacher.name" else {}
    metrics = run("train", None, **options)
    assert run("train", None, **options) == metrics
    weights = load_file(Path(first) / "model.safetensors")
    save_file({name: 1.5 * value for name, value in weights.items()}, Path(first) / "model.safetensors")
    with pytest.raises(ValueError, match=f"different: {key}"):
        run("train", None, **options)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"data.train": ["bad.tsv"]}, "bad.tsv, line 2"),
        ({"data.dev": "bad.tsv"}, "bad.tsv, line 2"),
        ({"evaluation.tasks": ["nowhere.tsv"]}, "no such file"),
        ({"model.name": "./nowhere"}, "no such model directory"),
        ({"training.optim": "adam-w"}, "adam-w"),
    ],
)
def test_invalid_settings_do_not_damage_an_existing_run(finished, tmp_path, monkeypatch, changes, error):
    folder, made, _ = finished
    (tmp_path / "bad.tsv").write_text("sentence1\tsentence2\tscore\na\tb\tmuch\n")
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
    with pytest.raises((ValueError, OSError), match=error):
        run("train", "raoe-s1", **{**made, **changes, "overwrite": True})
    assert {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()} == before


def test_weights_that_cannot_be_trained_do_not_damage_an_existing_run(finished, encoder):
    folder, made, _ = finished
    before = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
    kept = {key: value for key, value in made.items() if not key.startswith("model.")}
    changes = {"model": {"name": encoder, "dtype": "float16", "device": "cpu"}, "training.bf16": True}
    with pytest.raises(ValueError, match=r"float16 weights cannot be trained on a CPU with training.bf16 true"):
        run("train", "raoe-s1", **{**kept, **changes, "overwrite": True})
    assert {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"loss.mini_batch_size": 3}, {"training.patience": 5, "training.packed": True}])
def test_killed_run_resumes_exactly(tmp_path, changes, capsys):
    """Killed in the third of four epochs, with dropout on and a half-written checkpoint in the way."""
    results = {}
    for name, kill_at in (("whole", 0), ("killed", 13)):
        options = settings(
            tmp_path, output=str(tmp_path / name), **{"model.scratch": {**SCRATCH, "hidden_dropout_prob": 0.2}}
        )
        options["training"] = {**options["training"], "num_train_epochs": 4}
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(to_dict(load("train", "raoe-s1", {**options, **changes}))))
        if kill_at:
            process = python("-c", KILLED, recipe, kill_at)
            assert process.returncode == 9, process.stderr
            checkpoints = tmp_path / name / "checkpoints"
            assert (checkpoints / "checkpoint-10").is_dir()
            (checkpoints / "checkpoint-15").mkdir()
            (checkpoints / "checkpoint-15" / "trainer_state.json").write_text('{"epoch":')
            assert not (tmp_path / name / "metrics.json").exists()
        results[name] = run("train", recipe)
        resumed = "checkpoint-10" in capsys.readouterr().out  # not begun again from the start
        assert resumed == bool(kill_at)
    assert results["killed"]["steps"] == results["whole"]["steps"] == 20
    assert results["killed"]["after"] == results["whole"]["after"]
    whole, killed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[key], killed[key]) for key in whole)
    logs = []
    for name in ("whole", "killed"):
        entries = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        logs.append([entry["loss"] for entry in entries if "loss" in entry])
    assert logs[0] == logs[1] and len(logs[0]) == 10


def test_old_adapter_is_removed_when_a_model_replaces_it(tmp_path):
    """It would be loaded into that."""
    options = {**settings(tmp_path), "model.name": saved_encoder(tmp_path / "start")}
    out = tmp_path / "out"
    run("train", "raoe-s1", **options, **{"model.lora": {"r": 2, "target_modules": ["query"]}})
    (out / "notes.txt").write_text("mine")
    assert (out / "adapter_config.json").is_file()
    run("train", "raoe-s1", **options, overwrite=True)
    assert not list(out.glob("adapter*")) and (out / "notes.txt").read_text() == "mine"
    saved = load_file(out / "model.safetensors")
    loaded = SentenceTransformer(str(out), device="cpu")[0].model.state_dict()
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[key], saved[key]) for key in saved)


@pytest.mark.parametrize("mask", [0o022, 0o027], ids=oct)
def test_every_file_has_the_mode_of_the_umask(tmp_path, monkeypatch, mask):
    """Weights too, which safetensors writes for their owner only: of a run, its checkpoints, an adapter, an export."""
    monkeypatch.setattr("raoe_train.outputs.Output.clear", lambda output: None)
    before = os.umask(mask)
    try:
        options = saving(tmp_path, 2)
        run("train", "raoe-s1", **options)
        adapter = {"model.name": str(tmp_path / "out"), "model.scratch": {}, "model.lora": {"r": 2}}
        run("train", "raoe-s1", **{**options, **adapter, "output": str(tmp_path / "adapter")})
        run("export", **{"model.name": str(tmp_path / "adapter"), "merge": True, "output": str(tmp_path / "merged")})
    finally:
        os.umask(before)
    weights = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in weights) > 4
    assert {oct(path.stat().st_mode & 0o777) for path in weights} == {oct(0o666 & ~mask)}

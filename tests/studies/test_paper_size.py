"""The papers' settings with tiny models: a dry run of each cell, and three steps of some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.studies import jobs
from benchmarks.studies.sweep import sweep
from raoe_train import run
from raoe_train.encoders.load import load_encoder
from tests.studies.papers import BERTS, DECODERS, mined, prepared, stand_ins

LLAMA = next(iter(DECODERS))


@pytest.fixture(scope="module")
def without_weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papers")
    stand_ins(folder, weights=False)
    prepared(folder)
    mined(folder)
    return folder


NLI = "data/nli/snli.jsonl.gz#train+data/nli/mnli.jsonl.gz#train"
RECIPES = {
    **dict.fromkeys(("raoe-s1", "raoe-qwen2.5-7b"), "out/nli.jsonl.gz"),
    **dict.fromkeys(("raoe-s2", "raoe-s2-qwen2.5-7b"), "data/sts/stsb.jsonl.gz#train"),
    **dict.fromkeys(("simcse", "simcse-qwen2.5-7b", "sbert-softmax", "cosent", "angle", "bellm"), NLI),
    "ranking-post": "data/lists/ranking-sentences.jsonl.gz",
    "bellm-csts": "data/csts_train.csv",
    "margins": "out/mined/sst2-triplet.jsonl",
}

TASKS = {"bellm-csts": ["data/csts_train.csv"]}  # its prompt has conditions


@pytest.mark.parametrize("recipe", RECIPES)
def test_dry_run_of_each_recipe(without_weights, monkeypatch, recipe):
    monkeypatch.chdir(without_weights)
    # these evaluate every so many steps
    dev = "data/sts/stsb.jsonl.gz#dev" if recipe == "ranking-post" else None
    tasks = {"tasks": TASKS.get(recipe, ["stsb"])}
    options = {"data": {"train": [RECIPES[recipe]], "dir": "data", "dev": dev}, "evaluation": tasks}
    options |= {"model": {"name": BERTS[2]}} if recipe == "ranking-post" else {}
    result = run("train", recipe, dry_run=True, **options)
    assert result["steps"] > 0 and result["memory_gb"]["sum"] > 0
    assert (result["trained"] < result["parameters"]) is ("7b" in recipe or "bellm" in recipe)


SWEEPS = {"raoe-ablation": 51, "bellm-study": 5, "ranking-study": 19, "efficiency": 5, "margins": 144}


@pytest.mark.slow
@pytest.mark.parametrize("study", SWEEPS)
def test_dry_run_of_each_cell(without_weights, monkeypatch, study):
    monkeypatch.chdir(without_weights)
    model = {"raoe-ablation": "bert-base-uncased", "ranking-study": BERTS[2], "bellm-study": LLAMA}.get(study)
    before = sorted(without_weights.rglob("*"))
    result = sweep(study, "out", data_dir="data", scale="paper", model=model, dry_run=True)
    assert result["failed"] == [] and len(result["results"]) == SWEEPS[study]
    assert sorted(without_weights.rglob("*")) == before  # nothing is written


def test_a_dry_run_names_what_is_missing(without_weights, monkeypatch, capsys):
    monkeypatch.chdir(without_weights)
    result = sweep("efficiency", "elsewhere", data_dir="data", scale="paper", only=["raoe"], dry_run=True)
    assert result == {"results": {}, "failed": ["raoe-seed42"]}
    printed = capsys.readouterr().out
    assert "[prepare] snli: elsewhere/nli.jsonl.gz does not exist yet; the job score makes it" in printed
    assert "no such file: 'elsewhere/nli.jsonl.gz'" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("data/nli/mnli.jsonl.gz", r"no such file: data/nli/mnli\.jsonl\.gz"),  # which is scored
        ("data/sts/sts15.jsonl.gz", "no task 'sts15' in data"),
    ],
)
def test_missing_data_is_reported_before_anything_is_prepared(tmp_path, monkeypatch, missing, message):
    monkeypatch.chdir(tmp_path)
    stand_ins(tmp_path, weights=False)
    prepared(tmp_path)
    (tmp_path / missing).unlink()
    monkeypatch.setattr(jobs, "run", lambda *job: pytest.fail(f"{job} was started"))
    with pytest.raises((OSError, ValueError), match=message):
        sweep("raoe-ablation", "ablation", data_dir="data", scale="paper", model="bert-base-uncased")
    assert not (tmp_path / "ablation").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "only", "model"),
    [
        ("bellm-study", ["last-seed42", "causal-seed42"], LLAMA),
        ("ranking-study", ["minilm-seed42", "weak-name-qiyuw_pcl-bert-base-uncased-seed42"], BERTS[2]),
        ("margins", ["sst2-minilm-triplet-margin-0.1-name-intfloat_e5-small-v2-seed42"], None),
    ],
)
def test_three_steps_at_the_papers_settings(tmp_path, monkeypatch, study, only, model):
    """From prepared files to the report, mining too, with tiny models: 4 bits, LoRA, a teacher and all."""
    monkeypatch.chdir(tmp_path)
    stand_ins(tmp_path, weights=True)
    prepared(tmp_path)
    training = {"max_steps": 3, "save_strategy": "no", "eval_strategy": "no", "eval_steps": None}
    few = {"training": training, "model": {"device": "cpu"}}
    task = "polarity:sst2-phrases" if study == "margins" else "stsb"
    changes = {"scales": {"paper": {"settings": few, "tasks": [task]}}}
    result = sweep(study, "out", data_dir="data", scale="paper", model=model, only=only, changes=changes)
    # other cells may have the same settings, and then the same run
    assert result["failed"] == [] and {row["variant"] for row in result["results"]} >= {name[:-7] for name in only}
    for row in result["results"]:
        assert row["steps"] == 3 and list(row["after"]["tasks"]) == [task]


@pytest.mark.slow
def test_stage_two_of_a_decoder_continues_its_adapter(tmp_path, monkeypatch):
    """4 bits, LoRA, the prompt and the last token as stage 1 left them; what is trained is the same adapter."""
    monkeypatch.chdir(tmp_path)
    stand_ins(tmp_path, weights=True)
    prepared(tmp_path)
    few = {"max_steps": 1, "per_device_train_batch_size": 24, "save_strategy": "no"}  # a margin of 16 ranks
    cpu = {"device": "cpu", "lora": {"r": 4}}
    run("train", "raoe-qwen2.5-7b", model=cpu, data={"train": ["out/nli.jsonl.gz"]}, training=few, output="s1")
    stsb = {"train": ["data/sts/stsb.jsonl.gz#train"]}
    options = {"model": {**cpu, "name": "s1"}, "data": stsb}
    would = run("train", "raoe-s2-qwen2.5-7b", **options, training=few, dry_run=True)
    run("train", "raoe-s2-qwen2.5-7b", **options, training=few, output="s2")
    first, second = (load_file(*Path(stage).rglob("adapter_model.safetensors")) for stage in ("s1", "s2"))
    assert first.keys() == second.keys() and any(not torch.equal(first[key], second[key]) for key in first)
    assert would["trained"] == sum(weight.numel() for weight in first.values())
    output = [load_encoder(stage, device="cpu").encode("a man plays").shape for stage in ("s1", "s2")]
    assert output == [(64,), (64,)]

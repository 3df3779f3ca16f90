"""The papers' tables at their own settings, with tiny models: a dry run of each recipe, three steps of some cells."""

from __future__ import annotations

import pytest

from benchmarks.studies.sweep import sweep
from raoe_train import run
from tests.studies.papers import BERTS, DECODERS, mined, prepared, stand_ins

LLAMA = next(iter(DECODERS))


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papers")
    stand_ins(folder)
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


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_of_each_recipe(papers, monkeypatch, recipe):
    monkeypatch.chdir(papers)
    before = sorted(papers.rglob("*"))
    # these evaluate every so many steps
    dev = "data/sts/stsb.jsonl.gz#dev" if recipe == "ranking-post" else None
    tasks = {"tasks": TASKS.get(recipe, ["stsb"])}
    asked = {"data": {"train": [RECIPES[recipe]], "dir": "data", "dev": dev}, "evaluation": tasks}
    model = {"device": "cpu"} | ({"name": BERTS[2]} if recipe == "ranking-post" else {})
    found = run("train", recipe, dry_run=True, model=model, **asked)
    assert found["steps"] > 0 and found["seconds"] > 0 and found["peak_memory_mb"] > 0
    assert sorted(papers.rglob("*")) == before


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
    stand_ins(tmp_path)
    prepared(tmp_path)
    training = {"max_steps": 3, "save_strategy": "no", "eval_strategy": "no", "eval_steps": None}
    few = {"training": training, "model": {"device": "cpu"}}
    task = "polarity:sst2-phrases" if study == "margins" else "stsb"
    changes = {"scales": {"paper": {"settings": few, "tasks": [task]}}}
    found = sweep(study, "out", data_dir="data", scale="paper", model=model, only=only, changes=changes)
    # other cells may have the same settings, and then the same run
    assert found["failed"] == [] and {row["variant"] for row in found["results"]} >= {name[:-7] for name in only}
    for row in found["results"]:
        assert row["steps"] == 3 and list(row["after"]["tasks"]) == [task]

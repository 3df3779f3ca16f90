"""The papers' tables at their own size: which cells, what each would take without weights, and three steps of some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raoe_train import run
from raoe_train.encoders.load import load_encoder
from tests.studies.papers import BERTS, FOUR, STS, TABLE_4, mined, prepared, stand_ins
from tests.studies.tables import chosen_of, prepared_for

WORDS = {"data_dir": "D", "output": "O", "scale": "paper"}


def test_table_4_of_bellm():
    """Its recipe's settings, one thing changed in each cell; three seeds of the default."""
    runs = chosen_of("bellm-study", WORDS)
    assert prepared_for("bellm-study", WORDS) == {}  # no decoder is pretrained
    models = {made.name: made.arguments.model for made in runs}
    assert {name: (each.bidirectional_layers, each.bidirectional_mode) for name, each in models.items()} == {
        **{f"last-seed{seed}": (1, "modify") for seed in (42, 43, 44)},
        "causal-seed42": (0, "modify"),
        "all-seed42": ("all", "modify"),
        "sum-seed42": (1, "sum"),
        "add-seed42": (1, "add"),
    }
    for made in runs:
        its = made.arguments
        assert made.after is None and its.model.name == "meta-llama/Llama-2-7b-hf"
        assert its.model.load_in_4bit is (made.family != "add") and its.model.lora["r"] == 32
        assert (its.training["epochs"], its.training["batch_size"], its.training["learning_rate"]) == (3, 128, 2e-4)
        assert its.data.train == ["D/nli/snli.jsonl.gz#train+D/nli/mnli.jsonl.gz#train"]
        assert tuple(its.evaluation.tasks) == STS


def test_tables_3_and_4_of_ranking_sentences():
    runs = chosen_of("ranking-study", {**WORDS, "model": "M"})
    information = {made.family: made.arguments.teacher.information for made in runs}
    assert information["minilm-ranking"] == "ranking" and information["minilm-semantic"] == "semantic"
    assert [made.family for made in runs if made.arguments.data.shuffle_lists] == ["minilm-shuffled"]
    assert tuple(made.arguments.model.name for made in runs if made.family == "weak") == TABLE_4
    shares = [made.arguments.data.max_rows for made in runs if made.family == "minilm-lists"]
    assert shares == [800, 1600, 4000, 8000]
    for made in runs:
        its = made.arguments
        assert made.family == "weak" or its.model.name == "M"
        training = [its.training[key] for key in ("batch_size", "learning_rate", "eval_steps", "epochs")]
        assert training == [1, 3e-6, 25, 1] and its.model.max_seq_length == 32 and its.model.training_head
        assert its.data.dev == ["D/sts/stsb.jsonl.gz#dev", "D/sts/sick.jsonl.gz#dev"]
        assert its.teacher.name == "voidism/diffcse-bert-base-uncased-sts"
        assert its.data.train == ["D/lists/ranking-sentences.jsonl.gz"] and tuple(its.evaluation.tasks) == STS


def test_table_4_of_raoe():
    """BERT-base learns the same pairs from static scores, and from both teachers in every batch; one seed."""
    runs = {made.name: made.arguments for made in chosen_of("efficiency", WORDS)}
    prepared = prepared_for("efficiency", WORDS)
    assert set(prepared) == {"snli"} and prepared["snli"][2]["teachers"] == []
    families = ("infonce", "mse-static", "rank-on-the-fly", "mse-on-the-fly", "raoe")
    assert list(runs) == [f"{family}-seed42" for family in families]
    for name, its in runs.items():
        assert (its.model.name, its.model.random_weights) == ("bert-base-uncased", False)
        assert its.data.columns == {"score": "score"} and its.data.train == ["O/nli.jsonl.gz"]
        training = [its.training[key] for key in ("epochs", "batch_size", "learning_rate", "max_steps")]
        assert training == [5, 512, 5e-5, None]
        both = (its.teacher.name, its.teacher.second.name, its.teacher.second.task)
        fly = ("Lajavaness/bilingual-embedding-large", "jinaai/jina-embeddings-v3", "text-matching")
        assert both == (fly if "fly" in name else (None, None, None))


def test_tables_4_to_6_of_margins():
    """17 losses x margins and SetFit, four encoders, both sets; Table 4's 544 models, which the paper counts."""
    runs = chosen_of("margins", WORDS)
    assert len({made.name for made in runs}) == 18 * 4 * 2
    assert {made.arguments.model.name for made in runs} == set(FOUR)
    for name, (_, _, mining) in prepared_for("margins", WORDS).items():
        assert mining["model"] == {"name": "intfloat/e5-small"} and mining["mining"]["count"] == 250000
        source = {"sst2": "sst2-phrases", "headlines": "headlines-split"}[name.partition("-")[0]]
        assert mining["data"]["input"] == f"D/polarity/{source}.jsonl.gz#train"
    for made in runs:
        its = made.arguments
        task = "sst2-phrases" if made.family.startswith("sst2") else "headlines-split"
        assert its.evaluation.tasks == [f"polarity:{task}"] and its.polarity.max_sentences is None
        training = [its.training[key] for key in ("epochs", "batch_size", "learning_rate")]
        assert training == [5, 64, 3e-5] and (its.data.max_rows, its.data.redraw) == (50000, True)
    sizes = chosen_of("margins", {**WORDS, "scale": "paper-sizes"})
    assert len({made.name for made in sizes}) == 544 == 17 * 4 * 8
    assert {made.arguments.data.max_rows for made in sizes} == {50, 500, 2000, 5000, 10000, 20000, 50000, 100000}
    assert {made.arguments.evaluation.tasks[0] for made in sizes} == {"polarity:sst2-phrases"}


@pytest.fixture(scope="module")
def without_weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papers")
    stand_ins(folder, weights=False)
    prepared(folder)
    mined(folder)
    return folder


SCORED = ("raoe-s1", "raoe-s1-bert-large", "raoe-s1-modernbert-base", "raoe-s1-modernbert-large", "raoe-qwen2.5-7b")
NLI = "data/nli/snli.jsonl.gz#train+data/nli/mnli.jsonl.gz#train"
RECIPES = {
    **dict.fromkeys(SCORED, "out/nli.jsonl.gz"),
    **dict.fromkeys(("raoe-s2", "raoe-s2-qwen2.5-7b"), "data/sts/stsb.jsonl.gz#train"),
    **dict.fromkeys(("simcse", "simcse-qwen2.5-7b", "sbert-softmax", "cosent", "angle", "bellm"), NLI),
    "ranking-post": "data/lists/ranking-sentences.jsonl.gz",
    "rankcse": "data/wiki1m.tsv",
    "bellm-csts": "data/csts_train.csv",
    "margins": "out/mined/sst2-triplet.jsonl",
}

TASKS = {"bellm-csts": ["data/csts_train.csv"]}  # its prompt has conditions


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_each_recipe_would_take(without_weights, monkeypatch, recipe):
    monkeypatch.chdir(without_weights)
    # these evaluate every so many steps
    dev = "data/sts/stsb.jsonl.gz#dev" if recipe in ("ranking-post", "rankcse") else None
    tasks = {"tasks": TASKS.get(recipe, ["stsb"])}
    asked = {"data": {"train": [RECIPES[recipe]], "dir": "data", "dev": dev}, "evaluation": tasks}
    found = run("train", recipe, dry_run=True, **asked)
    assert found["steps"] > 0 and min(found["hours"].values()) > 0
    assert (found["trained"] < found["parameters"]) is ("7b" in recipe or "bellm" in recipe)


SWEEPS = {"raoe-ablation": 51, "bellm-study": 7, "ranking-study": 19, "efficiency": 5, "margins": 144}


@pytest.mark.parametrize("sweep", SWEEPS)
def test_what_each_cell_would_take(without_weights, monkeypatch, capsys, sweep):
    monkeypatch.chdir(without_weights)
    model = {"raoe-ablation": "bert-base-uncased", "ranking-study": BERTS[2]}.get(sweep)
    asked = {"data_dir": "data", "output": "out", "scale": "paper", "model": model}
    before = sorted(without_weights.rglob("*"))
    found = run("sweep", sweep, dry_run=True, **asked)
    assert found["failed"] == [] and len(found["results"]) == SWEEPS[sweep]
    assert sorted(without_weights.rglob("*")) == before  # nothing is made
    said = capsys.readouterr().out
    assert f"for {SWEEPS[sweep]} of {SWEEPS[sweep]} runs, by arithmetic" in said


def test_what_is_not_there_is_said(without_weights, monkeypatch, capsys):
    monkeypatch.chdir(without_weights)
    asked = {"data_dir": "data", "output": "elsewhere", "scale": "paper", "only": ["raoe"]}
    found = run("sweep", "efficiency", dry_run=True, **asked)
    assert found == {"results": {}, "failed": ["raoe-seed42"]}
    said = capsys.readouterr().out
    assert "[prepare] snli: elsewhere/nli.jsonl.gz is not there yet, score makes it" in said
    assert "no such file: 'elsewhere/nli.jsonl.gz'" in said


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("data/nli/mnli.jsonl.gz", r"no such file: 'data/nli/mnli\.jsonl\.gz'"),  # which is scored
        ("data/sts/sts15.jsonl.gz", "no task 'sts15' in data"),
        ("data/sts/stsb.jsonl.gz", "no task 'stsb' in data"),
        (None, "bert-base-uncased does not fit: its weights, gradients"),
    ],
)
def test_what_is_not_there_is_said_before_anything_is_prepared(tmp_path, monkeypatch, missing, message):
    monkeypatch.chdir(tmp_path)
    stand_ins(tmp_path, weights=False)
    prepared(tmp_path)
    if missing:
        (tmp_path / missing).unlink()
    else:
        monkeypatch.setattr("raoe_train.encoders.sizes.device_memory", lambda device: 0)
    monkeypatch.setattr("raoe_train.studies.sweep.run_job", lambda *job, **keys: pytest.fail(f"{job} was begun"))
    asked = {"data_dir": "data", "output": "ablation", "scale": "paper", "model": "bert-base-uncased"}
    with pytest.raises((OSError, ValueError), match=message):
        run("sweep", "raoe-ablation", **asked)
    assert not (tmp_path / "ablation").exists() or not list((tmp_path / "ablation").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sweep", "only", "model"),
    [
        ("bellm-study", ["last-seed42", "add-seed42"], None),
        ("ranking-study", ["minilm-seed42", "weak-name-qiyuw_pcl-bert-base-uncased"], BERTS[2]),
        ("margins", ["sst2-minilm-triplet-margin-0.1-name-intfloat_e5-small-v2"], None),
    ],
)
def test_three_steps_at_the_papers_settings(tmp_path, monkeypatch, sweep, only, model):
    """From prepared files to the report, mining too, with tiny models: 4 bits, LoRA, a teacher and all."""
    monkeypatch.chdir(tmp_path)
    stand_ins(tmp_path, weights=True)
    prepared(tmp_path)
    asked = {"data_dir": "data", "output": "sweep", "scale": "paper", "model": model, "only": only}
    few = {"training": {"max_steps": 3, "save_strategy": "no", "eval_strategy": "no"}, "model": {"device": "cpu"}}
    task = "polarity:sst2-phrases" if sweep == "margins" else "stsb"
    made = run("sweep", sweep, **asked, scales={"paper": {"settings": few, "tasks": [task]}})
    found = {name: row for row in made["results"] for name in only if row["run"].startswith(name)}
    assert made["failed"] == [] and set(found) == set(only)
    for row in found.values():
        assert row["steps"] == 3 and list(row["after"]["tasks"]) == [task]


@pytest.mark.slow
def test_stage_two_of_a_decoder_goes_on_from_its_adapter(tmp_path, monkeypatch):
    """4 bits, LoRA, the prompt and the last token as stage 1 left them; what is trained is the same adapter."""
    monkeypatch.chdir(tmp_path)
    stand_ins(tmp_path, weights=True)
    prepared(tmp_path)
    few = {"max_steps": 1, "batch_size": 24, "save_strategy": "no"}  # a margin of 16 ranks
    cpu = {"device": "cpu", "lora": {"r": 4}}
    run("train", "raoe-qwen2.5-7b", model=cpu, data={"train": ["out/nli.jsonl.gz"]}, training=few, output="s1")
    stsb = {"train": ["data/sts/stsb.jsonl.gz#train"]}
    asked = {"model": {**cpu, "name": "s1"}, "data": stsb}
    would = run("train", "raoe-s2-qwen2.5-7b", **asked, training=few, dry_run=True)
    run("train", "raoe-s2-qwen2.5-7b", **asked, training=few, output="s2")
    first, second = (load_file(*Path(stage).rglob("adapter_model.safetensors")) for stage in ("s1", "s2"))
    assert first.keys() == second.keys() and any(not torch.equal(first[key], second[key]) for key in first)
    assert would["trained"] == sum(weight.numel() for weight in first.values())
    said = [load_encoder(stage, device="cpu").encode("a man plays").shape for stage in ("s1", "s2")]
    assert said == [(64,), (64,)]

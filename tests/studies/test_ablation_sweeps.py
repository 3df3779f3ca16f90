"""The sweeps raoe-ablation, efficiency and from-scratch: their cells, and each in miniature from raw files."""

from __future__ import annotations

import itertools
import json

import pytest

from raoe_train import run
from raoe_train.artifacts.memory import CLEAR, peak_mb, reset_peak
from raoe_train.cli import load
from raoe_train.data.files import write_rows
from raoe_train.data.sources import open_source, pool
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.settings import Model, Scratch
from raoe_train.studies.sweep import own_process
from raoe_train.studies.sweep_report import COSTS
from raoe_train.training.arguments import trainer_settings
from raoe_train.training.cost_meter import CostMeter
from tests.studies.tables import prepared_for, runs_of
from tests.tiny import SENTENCES

# What each row of the ablation is, from either start, and the rows that are curves.
HEADLINE = {
    "raoe": {},
    "rank-only": {"name": "rank_margin"},
    "angle-only": {"name": "gated_angular"},
    "no-margin": {"margin": 0},
    "gate-score": {"gate": "score"},
    "gate-label": {"gate": "label"},
    "raoe-ec": {},
    "simcse-ec": {"name": "infonce", "scale": 20},
    "simcse-enc": {"name": "infonce", "scale": 20},
    "angle-ec": {"name": "angle_contrastive", "scale": 20},
    "angle-enc": {"name": "angle_contrastive", "scale": 20},
}


WORDS = {"model": "M", "data_dir": "D", "output": "O"}


def test_the_cells_of_the_ablation_at_the_papers_size(tmp_path):
    """Appendix B: all of NLI by the paper's teachers, 5 epochs, batches of 512, 5e-5, tau 20; the same cells."""
    asked = {**WORDS, "scale": "paper"}
    prepared = prepared_for("raoe-ablation", asked)
    assert set(prepared) == {"snli"}  # neither a second start nor its teacher
    job, _, scoring = prepared["snli"]
    assert (job, scoring["teachers"], scoring["output"]) == ("score", [], "O/nli.jsonl.gz")
    assert pool(scoring["data"]["input"]) == ["D/nli/snli.jsonl.gz#train", "D/nli/mnli.jsonl.gz#train"]
    runs = [made for made in runs_of("raoe-ablation", asked) if made.family.startswith("minilm")]
    small = [made for made in runs_of("raoe-ablation", WORDS) if made.family.startswith("minilm")]
    assert [made.name for made in runs] == [made.name for made in small]
    for made, little in zip(runs, small, strict=True):
        its = made.arguments
        training = {key: its.training.get(key) for key in ("epochs", "batch_size", "max_steps", "learning_rate")}
        assert training == {"epochs": 5, "batch_size": 512, "max_steps": None, "learning_rate": 5e-5}
        assert "max_steps" not in trainer_settings(its.training, tmp_path, device="cpu", has_dev=True)
        assert its.data.train == ["O/nli.jsonl.gz"] and its.data.max_rows is None and its.model.name == "M"
        assert its.loss == {**little.arguments.loss, "scale": 20, "mini_batch_size": 64}
        assert (its.data.neutral, its.data.labels) == (little.arguments.data.neutral, little.arguments.data.labels)


def test_the_cells_of_the_ablation():
    runs = runs_of("raoe-ablation", WORDS)
    assert set(prepared_for("raoe-ablation", WORDS)) == {"second", "snli", "mnli"}
    families = {made.family for made in runs}
    rows = [*HEADLINE, "cls", "max", "margin", "weights"]
    assert families == {f"{start}-{row}" for start in ("minilm", "scratch") for row in rows}
    for start, tau in (("minilm", 5), ("scratch", 20)):
        for row, loss in HEADLINE.items():
            cells = [made for made in runs if made.family == f"{start}-{row}"]
            assert [made.seed for made in cells] == [42, 43, 44]
            for made in cells:
                expected = {"name": "raoe", "scale": tau, "margin": 2, "gate": "label+score", **loss}
                had = made.arguments.loss.keys() & expected.keys()  # infonce, say, has no gate
                assert {key: made.arguments.loss[key] for key in had} == {key: expected[key] for key in had}, made.name
                assert {"name", "scale", *loss} <= had
        curves = (f"{start}-margin", f"{start}-weights")
        grids = {made.variant: made.arguments for made in runs if made.family in curves}
        margins = [made.loss["margin"] for name, made in grids.items() if name.startswith(f"{start}-margin")]
        assert margins == [0, 1, 2, 4, 8, 16, 32]
        weights = [(c.loss["rank_weight"], c.loss["angle_weight"]) for name, c in grids.items() if "-weights-" in name]
        assert weights == list(itertools.product([0.5, 1, 2], [0.5, 1, 2]))
        assert all(made.evaluation.tasks == ["stsb#dev", "sick#dev"] for made in grids.values())
    by_name = {made.name: made.arguments for made in runs}
    for start in ("minilm", "scratch"):
        assert by_name[f"{start}-cls-seed42"].model.pooling == "cls"
        assert by_name[f"{start}-max-seed42"].model.pooling == "max"
        assert by_name[f"{start}-raoe-ec-seed42"].data.labels == {"entailment": 0, "neutral": None, "contradiction": 2}
        for row, neutral in (("simcse-ec", False), ("simcse-enc", True), ("angle-ec", False), ("angle-enc", True)):
            assert by_name[f"{start}-{row}-seed42"].data.neutral is neutral
    for made in runs:  # one start a family, the same steps everywhere, STS-B dev to select by
        scratch = made.family.startswith("scratch")
        model = made.arguments.model
        assert (model.name, model.random_weights) == (("O/second", True) if scratch else ("M", False))
        assert made.arguments.training["max_steps"] == (141 if scratch else 48)
        if made.arguments.loss["name"] not in ("infonce", "angle_contrastive"):  # pairs of three sources
            assert made.arguments.data.max_rows == (3000 if scratch else 1000)
        curve = made.family.endswith(("-margin", "-weights")) and not made.family.endswith("-no-margin")
        assert made.arguments.data.dev == (None if curve else ["D/sts/stsb.tsv.gz#dev"])
        assert made.arguments.training["learning_rate"] == (5e-4 if scratch else 5e-5)


def test_the_cells_of_efficiency():
    runs = runs_of("efficiency", WORDS)
    assert load("sweep", "efficiency").measure and set(prepared_for("efficiency", WORDS)) == {"second", "snli"}
    assert {made.family: made.arguments.loss["name"] for made in runs} == {
        "infonce": "infonce",
        "mse-static": "mse",
        "rank-on-the-fly": "rank_distillation",
        "mse-on-the-fly": "similarity_distillation",
        "raoe": "raoe",
    }
    assert len({json.dumps([made.arguments.training[k] for k in ("max_steps", "batch_size")]) for made in runs}) == 1
    for made in runs:
        assert made.arguments.data.columns == {"score": "score_1"}, "static scores are those of the teacher on the fly"
        assert made.arguments.data.dev is None, "nothing but training in the loop that is timed"
        assert made.arguments.teacher.name == ("M" if made.family.endswith("fly") else None)


LOSSES = {"infonce": "infonce", "raoe": "raoe", "rank": "rank_margin", "angular": "gated_angular", "cosent": "cosent"}
STAGES = {"infonce-half": "infonce", "infonce-raoe": "raoe", "infonce-rank": "rank_margin"}


def test_the_cells_of_from_scratch():
    """Two starts, tau 20, as many sentences in every cell, and rates of a grid; a second stage has its loss's."""
    runs = runs_of("from-scratch", WORDS)
    rows = {f"{start}-{row}": loss for start in ("plain", "new") for row, loss in {**LOSSES, **STAGES}.items()}
    grids = {f"rate-{row}": loss for row, loss in LOSSES.items()}
    assert {made.family: made.arguments.loss["name"] for made in runs} == {**rows, **grids}
    tried, taken = {}, {}
    for made in runs:
        its, loss = made.arguments, made.arguments.loss["name"]
        assert its.loss["scale"] == 20 and its.data.train == ["O/snli.tsv.gz"]
        assert its.data.dev is None and its.data.columns == {"score": "score_1"}, (
            "what MiniLM says, and not the language model"
        )
        texts = its.training["max_steps"] * its.training["batch_size"] * (3 if loss == "infonce" else 2)
        share = 0.5 if made.family in {f"{start}-{row}" for start in ("plain", "new") for row in STAGES} else 1
        assert texts == pytest.approx(12800 * share, rel=0.02), made.name
        start, _, row = made.family.partition("-")
        if row in ("infonce-raoe", "infonce-rank"):
            assert (made.after.family, made.after.seed) == (f"{start}-infonce-half", made.seed)
            assert not its.model.random_weights, "it goes on from what the first stage has learned"
        else:
            assert (its.model.name, its.model.random_weights, made.after) == ("M", start == "new", None)
        (tried if start == "rate" else taken).setdefault(loss, set()).add(its.training["learning_rate"])
        assert start != "rate" or its.evaluation.tasks == ["stsb#dev"], "a rate is chosen without a test set"
    assert tried == {loss: {1e-4, 3e-4, 1e-3, 3e-3} for loss in tried}
    assert all(len(rates) == 1 and rates <= tried[loss] for loss, rates in taken.items())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(an encoder, a folder with files of the names and columns of the real ones, a handful of rows each)."""
    encoder, data = tmp_path_factory.mktemp("encoder"), tmp_path_factory.mktemp("data")
    scratch = Scratch(vocab_size=120, hidden_size=16, layers=1, heads=2, intermediate_size=16)
    config = Model(name="scratch", device="cpu", max_seq_length=32, scratch=scratch)
    load_encoder(config, sentences=SENTENCES).save(str(encoder))
    words = ("entailment", "neutral", "contradiction")  # as the real files have them
    pairs, nli = (
        [{**row, "label": words[row["label"]]} for _, row in itertools.islice(open_source(source).rows, count)]
        for source, count in (("builtin#train", 40), ("builtin-nli#train", 96))
    )
    sts = [{**row, "split": split} for split in ("train", "dev", "test") for row in pairs]
    for name in ("sick", "stsb", "sts12", "sts14", "sts15"):
        columns = ["split", "score", "sentence1", "sentence2", *(["label"] if name == "sick" else [])]
        write_rows(data / "sts" / f"{name}.tsv.gz", columns, sts)
    for name in ("snli", "mnli"):
        rows = [{**row, "split": split} for split in ("dev", "test", "train_sample") for row in nli]
        write_rows(data / "nli" / f"{name}.tsv.gz", ["split", "label", "premise", "hypothesis"], rows)
    return str(encoder), str(data)


def miniature(name, made, folder, **changes):
    """The shipped sweep with a tiny encoder, two steps a cell and as many for the second teacher."""
    scratch = {"vocab_size": 300, "hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 16}
    small = {"batch_size": 8, "max_steps": 2, "bf16": False, "warmup_steps": 0, "logging_steps": 1}
    overrides = {
        "model": made[0],
        "data_dir": made[1],
        "output": str(folder),
        "settings": {"training": small, "model": {"device": "cpu"}},
        "variants": {family: {"training": {"max_steps": 2}} for family in load("sweep", name).variants},
        "prepare": {"second": {"model": {"scratch": scratch, "device": "cpu"}, "training": small}},
        **changes,
    }
    result = run("sweep", name, **overrides)
    assert result["failed"] == []
    return result["results"], (folder / "report.md").read_text()


# Cells that differ in their data, their loss or their encoder, and those that differ in a number of the loss alone.
KINDS = [f"minilm-{row}-seed42" for row in ("raoe", "rank-only", "angle-only", "raoe-ec", "simcse-ec", "angle-enc")]
KINDS += ["minilm-cls-seed42", "scratch-raoe-seed42"]
OTHERS = [f"minilm-{row}-seed42" for row in HEADLINE if f"minilm-{row}-seed42" not in KINDS]
OTHERS += ["minilm-max-seed42", "minilm-margin-margin-4-seed42"]
OTHERS += ["minilm-weights-rank_weight-2-angle_weight-0.5-seed42"]
OTHERS += ["scratch-raoe-seed43", "scratch-rank-only-seed42", "scratch-rank-only-seed43", "scratch-simcse-enc-seed42"]


@pytest.mark.parametrize("more", [[], pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["kinds", "all"])
def test_a_small_ablation(made, tmp_path, more):
    """Each kind of cell once, of both starts; a report with their rows."""
    results, report = miniature("raoe-ablation", made, tmp_path / "out", only=KINDS + more, tasks=["stsb", "sick"])
    found = {row["run"]: row for row in results}
    assert set(found) == {*KINDS, *more}
    for name, row in found.items():
        curve = "-margin-m" in name or "-weights-" in name
        assert row["steps"] == 2 and ("spearman" in row["after"]) is not curve, name
        assert list(row["after"]["tasks"]) == (["stsb#dev", "sick#dev"] if curve else ["stsb", "sick"])
        assert f"| {row['variant']} | " in report
    assert found["minilm-raoe-seed42"]["pairs"] == {"sick#train": 40, "snli": 96, "mnli": 96}
    without = found["minilm-raoe-ec-seed42"]["pairs"]
    assert without["snli"] == without["mnli"] == 64 and without["sick#train"] < 40
    assert found["minilm-simcse-ec-seed42"]["pairs"] == {"snli": 32}
    # cells differ in what they say
    scores = {
        name: row["after"]["tasks"][next(iter(row["after"]["tasks"]))]["pearson"]
        for name, row in found.items()
        if name.startswith("minilm")
    }
    assert len(set(scores.values())) == len(scores), scores
    if more:
        assert found["scratch-raoe-seed42"]["before"]["pearson"] != found["scratch-raoe-seed43"]["before"]["pearson"]
        assert "| scratch-raoe - scratch-rank-only | 2 | " in report
    assert "peak MB" not in report


def test_a_small_efficiency_table(made, tmp_path):
    """Each loss once, in this process; which costs more is nothing to assert."""
    cells = [f"{name}-seed42" for name in ("infonce", "mse-static", "rank-on-the-fly", "mse-on-the-fly", "raoe")]
    results, report = miniature("efficiency", made, tmp_path / "out", only=cells, tasks=["stsb"], measure=False)
    assert [row["run"] for row in results] == cells and "peak MB" not in report
    for row in results:
        assert row["train_steps"] == 2 and 0 < row["train_seconds"] < row["seconds"]
        assert 50 < row["peak_memory_mb"] < 20000
    # the same targets, made before or in the loop: the same model, up to the digits of a file
    static, on_the_fly = (row["after"] for row in results if "mse" in row["run"])
    assert static["average"] == pytest.approx(on_the_fly["average"], abs=0.5)


def test_a_small_from_scratch(made, tmp_path):
    """Triplets of scored rows, new weights, and RAOE after InfoNCE."""
    other = load_encoder(Model(name=made[0], device="cpu", random_weights=True), sentences=SENTENCES)
    other.save(str(tmp_path / "other"))
    cells = ["plain-infonce-half-seed42", "plain-infonce-raoe-seed42", "new-infonce-seed42", "new-angular-seed42"]
    prepare = {"snli": {"teachers": [made[0], str(tmp_path / "other")], "device": "cpu"}}
    results, _ = miniature("from-scratch", made, tmp_path / "out", only=cells, tasks=["stsb"], prepare=prepare)
    found = {row["run"]: row for row in results}
    assert set(cells) <= set(found)  # two steps are half of two, too
    assert found["new-angular-seed42"]["pairs"] == {"snli": 96}
    first, second = (found[name]["after"]["tasks"]["stsb"]["spearman"] for name in cells[:2])
    assert first != second


@pytest.mark.slow
def test_a_process_a_run(made, tmp_path):
    """What a measured run cost stands beside its scores; another process's errors are this one's."""
    import torch

    ballast = torch.ones(250_000_000)  # 1 GB here, which is nothing of the run's
    (row,), report = miniature("efficiency", made, tmp_path / "out", only=["raoe-seed42"], tasks=["stsb"])
    assert "| minutes | peak MB | s / 1,000 steps |" in report
    paid = [f"{cost(row):.2f}" for cost in COSTS.values()]
    assert f" | {paid[0]} | {paid[1]} |" in report
    assert 50 < row["peak_memory_mb"] < ballast.nbytes / 1e6 + 300
    with pytest.raises(ValueError, match="--output is missing"):
        own_process(load("train"))


class State:
    global_step = 0


def test_time_without_evaluation(monkeypatch):
    """Two steps of 3 s, an evaluation of 10 s and a checkpoint of 5 s after the first: 6 s. A step was done before."""
    import torch

    clock = iter([100.0, 103.0, 113.0, 118.0, 121.0, 121.0])
    monkeypatch.setattr("raoe_train.training.cost_meter.time.perf_counter", lambda: next(clock))
    meter, state = CostMeter(torch.device("cpu")), State()
    state.global_step = 1
    meter.on_train_begin(None, state, None)
    meter.on_step_end(None, state, None)
    meter.on_evaluate(None, state, None)
    meter.on_save(None, state, None)
    meter.on_step_end(None, state, None)
    meter.on_epoch_end(None, state, None)
    state.global_step = 3
    meter.on_train_end(None, state, None)
    costs = meter.costs()
    assert (costs["train_seconds"], costs["train_steps"]) == (6.0, 2)
    assert COSTS["s / 1,000 steps"](costs) == 3000.0


def test_peak_memory_begins_anew():
    """On Linux, what was freed before is no part of it, and what is freed before it is read is."""
    import torch

    try:
        CLEAR.write_text("5")
    except OSError as error:
        pytest.skip(f"the peak cannot be reset here, it is that of the whole process: {error}")
    block = torch.ones(60_000_000)  # 240 MB
    before = peak_mb(cuda=False)
    del block
    reset_peak(cuda=False)
    after = peak_mb(cuda=False)
    assert before - after > 200
    block = torch.ones(30_000_000)
    del block
    assert peak_mb(cuda=False) - after == pytest.approx(120, abs=20)

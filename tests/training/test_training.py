"""``raoe-train train`` end to end on small real encoders: what it writes, resuming, sources, losses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from raoe_train import run
from raoe_train.artifacts.processes import owned
from raoe_train.cli import load
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.named import Model
from raoe_train.jobs.check import check_encoder
from raoe_train.training.run_directory import claim, finished_metrics, made_from
from raoe_train.training.training_data import held_out
from tests.forked import python
from tests.tiny import SENTENCES, saved_encoder, tiny_encoder, training_data

SCRATCH = {"hidden_size": 16, "intermediate_size": 16, "layers": 1, "heads": 2, "vocab_size": 200}


def write_pairs(path: Path, rows: int = 40, *, labels: bool = True, scale: float = 5.0) -> str:
    """Pairs whose score falls with the distance of their sentences in the list."""
    count = len(SENTENCES)
    lines = ["sentence1\tsentence2\tscore" + ("\tlabel" if labels else "")]
    for row in range(rows):
        first, step = row % count, (row * 7 // count) % count
        score = scale * (1 - step / count)
        label = ("entailment", "neutral", "contradiction")[3 * step // count]
        cells = [
            SENTENCES[first],
            SENTENCES[(first + step) % count],
            f"{score:.3f}",
            *([label] if labels else []),
        ]
        lines.append("\t".join(cells))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def settings(folder: Path, **changes):
    made = {
        "model.name": "scratch",
        "model.device": "cpu",
        "model.scratch": SCRATCH,
        "model.max_seq_length": 16,
        "data.train": [write_pairs(folder / "train.tsv")],
        "data.dev": write_pairs(folder / "dev.tsv", rows=24),
        "training": {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "logging_steps": 2},
        "output": str(folder / "out"),
    }
    return {**made, **changes}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    made = settings(folder, **{"evaluation.tasks": [str(folder / "dev.tsv")], "model.prompt": "query: {text}"})
    return folder, made, run("train", "raoe-s1", **made)


def test_writes_a_model_and_what_goes_with_it(finished):
    folder, _, metrics = finished
    out = folder / "out"
    assert {"recipe.yaml", "metrics.json", "log.jsonl", "run.png", "modules.json"} <= {p.name for p in out.iterdir()}
    assert not (out / "checkpoints").exists()
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert metrics["steps"] == 10
    assert metrics["pairs"] == {"train": 40}
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    assert (recipe["loss"]["name"], recipe["training"]["batch_size"]) == ("raoe", 8)
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


def test_a_finished_run_is_returned_and_another_refused(finished):
    folder, made, metrics = finished
    weights = folder / "out" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert run("train", "raoe-s1", **made) == metrics
    with pytest.raises(ValueError, match=r"run of another recipe \(different: loss\.margin, training\.seed\)"):
        run("train", "raoe-s1", **{**made, "loss.margin": 3, "training": {**made["training"], "seed": 1}})
    with pytest.raises(ValueError, match="not empty and holds no run"):
        run("train", "raoe-s1", **{**made, "output": str(folder), "overwrite": True})
    assert weights.stat().st_mtime_ns == before


@pytest.mark.parametrize(("name", "key"), [("train", "data.train 1"), ("dev", "data.dev, contents of evaluation")])
def test_a_run_is_finished_only_from_the_same_contents(finished, name, key):
    folder, made, metrics = finished
    data = folder / f"{name}.tsv"
    text = data.read_text()
    data.write_text(text.replace("5.000", "0.000"))
    with pytest.raises(ValueError, match=rf"holds a run of other files \(different: contents of {key}.*--overwrite"):
        run("train", "raoe-s1", **made)
    data.write_text(text)  # another time, the same contents
    assert run("train", "raoe-s1", **made) == metrics


@pytest.mark.parametrize("key", ["model.name", "teacher.name", "teacher.second.name"])
def test_a_second_stage_is_not_finished_once_its_first_was_trained_anew(finished, tmp_path, key):
    """Nor what a teacher taught, or a second one."""
    first = shutil.copytree(finished[0] / "out", tmp_path / "s1")
    asked = load("train", "raoe-s2", settings(tmp_path, **{key: str(first)}))
    assert claim(asked, made_from(asked)) is None
    (tmp_path / "out" / "metrics.json").write_text('{"after": {}}')
    assert claim(asked, made_from(asked)) == {"after": {}} == finished_metrics(asked)
    save_file({"other": torch.ones(1)}, first / "model.safetensors")
    assert finished_metrics(asked) is None
    with pytest.raises(ValueError, match=f"other files .different: contents of {key}"):
        claim(asked, made_from(asked))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"data.train": ["nowhere.tsv"]}, "no such file"),
        ({"data.train": ["bad.tsv"]}, "bad.tsv, line 2"),
        ({"data.dev": "bad.tsv"}, "bad.tsv, line 2"),
        ({"evaluation.tasks": ["nowhere.tsv"]}, "no such file"),
        ({"model.name": "./nowhere"}, "no such model directory"),
        ({"training.optim": "adam-w"}, "adam-w"),
        ({"training.learning_rate": -1}, "training.learning_rate"),
    ],
)
def test_what_cannot_be_costs_the_run_that_was_there_nothing(finished, tmp_path, monkeypatch, changes, error):
    folder, made, _ = finished
    (tmp_path / "bad.tsv").write_text("sentence1\tsentence2\tscore\na\tb\tmuch\n")
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
    with pytest.raises((ValueError, OSError), match=error):
        run("train", "raoe-s1", **{**made, **changes, "overwrite": True})
    assert {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("key", ["model.name", "teacher.name", "teacher.second.name"])
def test_a_run_never_goes_over_an_encoder_that_it_needs(finished, key):
    folder, made, _ = finished
    for inside in (".", "checkpoints/checkpoint-5"):
        model = folder / "out" / inside
        more = {"teacher.name": "on-a-hub"} if key == "teacher.second.name" else {}
        asked = load("train", "raoe-s1", {**made, **more, key: str(model), "overwrite": True})
        model.mkdir(parents=True, exist_ok=True)
        with pytest.raises(ValueError, match=f"holds {re.escape(key)}"):
            claim(asked, {})
    shutil.rmtree(folder / "out" / "checkpoints")


def test_two_processes_do_not_train_into_one_output(finished):
    folder, made, _ = finished
    with owned(folder / "out"), pytest.raises(ValueError, match="another process is writing to it"):
        run("train", "raoe-s1", **made)
    assert not list(folder.glob("*.lock"))


KILLED = """
import os, sys
import raoe_train.jobs.train as training
from raoe_train.cli import load

log_writer = training.log_writer

def killer(path):
    callback = log_writer(path)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(sys.argv[2]):
            os._exit(9)

    type(callback).on_step_end = on_step_end
    return callback

training.log_writer = killer
training.train(**vars(load("train", sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"loss.mini_batch_size": 3}, {"training.patience": 5}, {"loss.memory_size": 13}]
)
def test_a_killed_run_goes_on_exactly(tmp_path, changes, capsys):
    """Killed in the third of four epochs, with dropout on and a half-written checkpoint in the way."""
    results = {}
    for name, kill_at in (("whole", 0), ("killed", 13)):
        made = settings(tmp_path, output=str(tmp_path / name), **{"model.scratch": {**SCRATCH, "dropout": 0.2}})
        made["training"] = {**made["training"], "epochs": 4}
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump({"extends": "raoe-s1", **made, **changes}))
        if kill_at:
            done = python("-c", KILLED, recipe, kill_at)
            assert done.returncode == 9, done.stderr
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


def test_a_kill_leaves_nothing_of_a_file_that_was_being_written(tmp_path, monkeypatch):
    """safetensors writes to a name of its own beside the file, another one each time."""
    made, write = settings(tmp_path), safetensors.torch.serialize_file

    def killed(tensors, filename, **more):
        if Path(filename).parent.name not in ("out", ".partial.model"):
            return write(tensors, filename, **more)
        Path(filename).with_name(".tmpcLpmEc").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(safetensors.torch, "serialize_file", killed)
        run("train", "raoe-s1", **made)
    assert len(list((tmp_path / "out").rglob(".tmp*"))) == 1
    run("train", "raoe-s1", **made)
    assert list((tmp_path / "out").rglob(".*")) == []


def test_an_adapter_does_not_stay_for_the_model_that_replaces_it(tmp_path):
    """It would be loaded into that."""
    made = {**settings(tmp_path), "model.name": saved_encoder(tmp_path / "start")}
    out = tmp_path / "out"
    run("train", "raoe-s1", **made, **{"model.lora": {"r": 2, "target_modules": ["query"]}})
    (out / "notes.txt").write_text("mine")
    assert (out / "adapter_config.json").is_file()
    run("train", "raoe-s1", **made, overwrite=True)
    assert not list(out.glob("adapter*")) and (out / "notes.txt").read_text() == "mine"
    saved = load_file(out / "model.safetensors")
    loaded = SentenceTransformer(str(out), device="cpu")[0].model.state_dict()
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[key], saved[key]) for key in saved)


@pytest.mark.parametrize("name", ["rank_margin", "gated_angular", "cosent", "angle", "mse"])
def test_every_loss_trains(tmp_path, name):
    made = settings(tmp_path, **{"loss.name": name, "data.dev": None, "data.score_scale": [0, 5]})
    made["training"] = {**made["training"], "max_steps": 2}
    metrics = run("train", "raoe-s1", **made)
    assert metrics["steps"] == 2 and metrics["before"] == {}
    assert (tmp_path / "out" / "modules.json").is_file()


@pytest.mark.parametrize(("loss", "error"), [("rank_margin", True), ("raoe", False), ("mse", False)])
def test_scores_that_are_all_equal_rank_nothing(tmp_path, caplog, loss, error):
    data = tmp_path / "equal.tsv"
    data.write_text(re.sub(r"\t[\d.]+\t", "\t1.0\t", Path(write_pairs(data)).read_text()))
    arguments = load("train", None, {"loss.name": loss, "data.train": [str(data)]})
    if error:
        with pytest.raises(ValueError, match="all 40 scores are 1, so that no pair ranks above another: the loss"):
            training_data(arguments, 1)
    else:
        training_data(arguments, 1)
        assert ("only its labels are learned from" in caplog.text) == (loss == "raoe")


def test_mse_needs_scores_on_the_scale_of_cosines(tmp_path):
    with pytest.raises(ValueError, match=r"run from 0\.455 to 5\.0; declare data\.score_scale"):
        run("train", "raoe-s1", **settings(tmp_path, **{"loss.name": "mse"}))


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        ([1, 5], [0, 0.25, 1]),
        ([-1, 1], [-1, -0.5, 1]),
        ([0, 1], [0, 0.25, 1]),
        ([0, 0.5], [0, 0.25, 1]),
        ([-2, 2], [0, 0.25, 1]),
        ([], [-1, -0.5, 1]),
    ],
)
def test_what_mse_compares_with_cosines(tmp_path, scale, wanted):
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
    arguments = load("train", None, settings(tmp_path, **{"loss.name": "mse", **changes}))
    datasets, _ = training_data(arguments, 42)
    assert datasets["own"]["score"][:] == pytest.approx(wanted)
    if scale:
        assert max(datasets["train"]["score"]) == 1 and 0 < min(datasets["train"]["score"]) < 0.2


def test_a_batch_never_mixes_sources(tmp_path):
    """Scores of different sources are not comparable: here one's are a hundred times as large."""
    other = write_pairs(tmp_path / "other.tsv", rows=20, scale=500.0)
    made = settings(tmp_path, **{"data.dev": None})
    made["data.train"] = [*made["data.train"], other]
    made["training"] = {**made["training"], "epochs": 1}
    from raoe_train.losses.collators import ScoreLabelCollator

    seen = []
    collate = ScoreLabelCollator.__call__

    def watched(self, features):
        seen.append([row["score"] for row in features])
        return collate(self, features)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScoreLabelCollator, "__call__", watched)
        metrics = run("train", "raoe-s1", **made)
    assert metrics["pairs"] == {"train": 40, "other": 20}
    assert metrics["steps"] == 8 and sum(map(len, seen)) == 60
    assert all(max(scores) <= 5 or min(scores) > 5 for scores in seen)


def test_max_rows_draws_with_the_seed(tmp_path):
    made = settings(tmp_path, **{"data.max_rows": 7})
    drawn = []
    for seed in (1, 1, 2):
        datasets, texts = training_data(load("train", None, made), seed)
        texts = list(texts)
        assert len(datasets["train"]) == 7 and len(texts) == 14
        drawn.append(texts)
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_best_weights_of_the_way_are_saved(tmp_path):
    encoder = tmp_path / "encoder"
    tiny_encoder(double=False).save_pretrained(str(encoder))
    made = settings(tmp_path, **{"model.name": str(encoder), "model.scratch": None})
    run("train", "raoe-s1", **made)
    asked = {**made, "training": {**made["training"], "interpolate": [0, 0.3, 1]}, "output": str(tmp_path / "between")}
    metrics = run("train", "raoe-s1", **asked)
    found = metrics["interpolation"]
    by_dev = {row["weight"]: row["dev"] for row in found["curve"]}
    assert by_dev[0] == pytest.approx(metrics["before"]["spearman"])
    assert metrics["after"]["spearman"] == pytest.approx(max(by_dev.values())) == by_dev[found["weight"]]
    start, end, saved = (
        load_file(folder / "model.safetensors") for folder in (encoder, tmp_path / "out", tmp_path / "between")
    )
    for name, value in saved.items():
        torch.testing.assert_close(value, start[name].lerp(end[name], found["weight"]), rtol=1e-6, atol=1e-7)


def test_pairs_held_out_are_what_the_best_is_chosen_by(tmp_path, capsys):
    made = settings(tmp_path, **{"data.dev": None, "data.dev_share": 0.2})
    metrics = run("train", "raoe-s1", **made)
    held = int(re.search(r"train: (\d+) of 40 pairs are held out", capsys.readouterr().out)[1])
    assert 8 <= held <= 12 and metrics["pairs"] == {"train": 40 - held}
    assert metrics["before"]["spearman"] is not None and metrics["best_step"]
    datasets, _ = training_data(load("train", "raoe-s1", made), 42)
    rest, dev = held_out(datasets, 0.2, 42)
    assert not {*dev["sentence1"]} & {*rest["train"]["sentence1"]}  # of a premise all pairs, or none
    assert len(dev) + len(rest["train"]) == 40
    assert held_out(datasets, 0.2, 43)[1]["sentence2"] != dev["sentence2"]


def test_where_nothing_can_be_held_out(tmp_path):
    made = settings(tmp_path, **{"data.dev": None, "data.dev_share": 0.2})
    few = {"data.train": write_pairs(tmp_path / "few.tsv", rows=15)}
    with pytest.raises(ValueError, match=r"few has 15 pairs: 16 at least"):
        run("train", "raoe-s1", **{**made, **few})
    with pytest.raises(ValueError, match=r"data\.dev_share must be .*below 1"):
        run("train", "raoe-s1", **{**made, "data.dev_share": 1})


def test_development_pairs_that_are_trained_on_are_said(tmp_path, capsys):
    run("train", "raoe-s1", **settings(tmp_path))
    assert re.search(r"dev\.tsv: 24 of 24 pairs are trained on, too", capsys.readouterr().out)


def test_patience_stops_a_run_that_gets_no_better(tmp_path):
    made = settings(tmp_path)
    made["training"] = {"epochs": 30, "batch_size": 8, "learning_rate": 1e-30, "patience": 2}
    metrics = run("train", "raoe-s1", **made)
    assert metrics["epochs"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.dev": None, "training.patience": 2}, "training.patience needs data.dev"),
        ({"data.dev": None, "training.interpolate": 0.5}, "training.interpolate needs data.dev"),
        ({"training.interpolate": [0.5, 2]}, r"training\.interpolate must be at most 1, got 2"),
        ({"training.interpolate": "half"}, "training.interpolate"),
        ({"training.interpolate": 0.5, "model.lora": {"r": 4}}, "leave model.lora out"),
        ({"data.score_scale": [1, 2, 3]}, "data.score_scale takes 2 numbers"),
        ({"training.output_dir": "x"}, "set output"),
        ({"model.pooling": "median"}, "model.pooling must be one of mean, weighted_mean, cls, max, last, got 'median'"),
        ({"model.name": "./nowhere"}, "no such model directory"),
        ({"data.train": "nowhere.tsv"}, "no such file"),
        (
            {"training.dataloader_drop_last": True, "training.batch_size": 50},
            "train has 40 rows, less than a batch of 50",
        ),
    ],
)
def test_settings_that_cannot_be(tmp_path, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("train", "raoe-s1", **{**settings(tmp_path), **changes})


def test_labels_are_only_needed_where_the_gate_looks_at_them(tmp_path):
    unlabelled = write_pairs(tmp_path / "unlabelled.tsv", labels=False)
    made = {**settings(tmp_path), "data.train": unlabelled, "training.max_steps": 1}
    with pytest.raises(ValueError, match="label"):
        run("train", "raoe-s1", **made)
    assert run("train", "raoe-s1", **{**made, "loss.gate": "score", "overwrite": True})["steps"] == 1


@pytest.mark.parametrize(
    ("pooling", "saved"),
    [(None, "mean"), ("cls", "cls"), ("max", "max"), ("last", "lasttoken"), ("weighted_mean", "weightedmean")],
)
def test_pooling_is_saved(tmp_path, pooling, saved):
    model = load_encoder(Model(name="scratch", pooling=pooling, device="cpu", max_seq_length=16), sentences=SENTENCES)
    model.save_pretrained(str(tmp_path / "m"))
    again = SentenceTransformer(str(tmp_path / "m"), device="cpu")
    assert again[1].pooling_mode == saved
    assert torch.equal(torch.tensor(again.encode(SENTENCES)), torch.tensor(model.encode(SENTENCES)))
    # A saved encoder keeps its pooling unless another is asked for, and then keeps that.
    assert load_encoder(Model(name=str(tmp_path / "m"), device="cpu"))[1].pooling_mode == saved
    changed = load_encoder(Model(name=str(tmp_path / "m"), pooling="max", device="cpu"))
    assert changed[1].pooling_mode == "max"


def test_a_bare_encoder_gets_the_papers_pooling(tmp_path):
    from transformers import BertTokenizer, ModernBertConfig, ModernBertModel

    load_encoder(Model(name="scratch", device="cpu"), sentences=SENTENCES).save_pretrained(str(tmp_path / "st"))
    tokenizer = BertTokenizer.from_pretrained(str(tmp_path / "st"))
    bare = SentenceTransformer(str(tmp_path / "st"), device="cpu")[0].model
    bare.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    assert load_encoder(Model(name=str(tmp_path / "bert"), device="cpu"))[1].pooling_mode == "mean"
    config = ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    ModernBertModel(config).save_pretrained(tmp_path / "modern")
    tokenizer.save_pretrained(tmp_path / "modern")
    assert load_encoder(Model(name=str(tmp_path / "modern"), device="cpu"))[1].pooling_mode == "cls"


def test_random_weights_and_dropout(tmp_path):
    load_encoder(Model(name="scratch", device="cpu"), sentences=SENTENCES).save_pretrained(str(tmp_path / "m"))
    saved = Model(name=str(tmp_path / "m"), device="cpu")
    new = Model(name=str(tmp_path / "m"), device="cpu", random_weights=True, dropout=0.25)
    old, first, second, other = (
        load_encoder(config, seed=seed) for config, seed in ((saved, 1), (new, 1), (new, 1), (new, 2))
    )
    weights = [model[0].model.embeddings.word_embeddings.weight for model in (old, first, second, other)]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[3])
    assert first[0].model.config.hidden_dropout_prob == 0.25
    assert first[0].model.embeddings.dropout.p == 0.25


def test_the_tokenizer_is_the_same_in_every_process():
    """Hash tables are in a random order; a vocabulary must not depend on it."""
    code = f"from raoe_train.encoders.scratch import train_word_pieces as t\nprint(t({SENTENCES * 3}, 90))"
    root = Path(__file__).parents[2]
    made = set()
    for seed in "01":
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        made.add(done.stdout)
    assert len(made) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_learns(tmp_path):
    """What ``make demo`` does."""
    done = python("-m", "raoe_train", "train", "demo", "--output", tmp_path / "demo")
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "demo" / "metrics.json").read_text())
    assert metrics["after"]["average"] > metrics["before"]["average"] + 20
    assert "builtin#test" in done.stdout and "raoe_kernels backends for cpu: " in done.stdout

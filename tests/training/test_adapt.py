"""The recipe `adapt` end to end on a tiny encoder: classes, an adapter, held-out pairs; invalid input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from raoe_train import run
from raoe_train.jobs import train_settings as job
from raoe_train.training.training_data import hold_out
from tests.tiny import SENTENCES, load


def pairs(path: Path, rows: int = 60, **columns: Any) -> str:
    """Rows of two sentences, with `columns` as functions of the row number."""
    lines = ["\t".join(["sentence1", "sentence2", *columns])]
    for row in range(rows):
        cells = [SENTENCES[row % 11], SENTENCES[(row * 7 // 11 + row) % 11], *(of(row) for of in columns.values())]
        lines.append("\t".join(map(str, cells)))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def adapt(folder: Path, encoder: str, source: str, **changed: Any) -> dict[str, Any]:
    options = {"model.name": encoder, "model.device": "cpu", "data.train": [source], "output": str(folder / "out")}
    small = {"training.min_steps": 8, "training.per_device_train_batch_size": 16, "training.logging_steps": 2}
    return run("train", "adapt", **{**options, **small, **changed})


def test_classes_as_scores_train(tmp_path, encoder):
    metrics = adapt(tmp_path, encoder, pairs(tmp_path / "mine.tsv", score=lambda row: row % 2))
    assert metrics["steps"] == 8 and metrics["after"]["spearman"] is not None and metrics["keep"] == 0.3
    logged = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert any("keep" in entry and "target" in entry for entry in logged)


def test_disabled_adapter_leaves_embeddings_unchanged(tmp_path, encoder):
    source = pairs(tmp_path / "mine.tsv", score=lambda row: row % 7)
    adapter = {"model.lora.r": 4, "training.learning_rate": 1e-2, "evaluation.certificate": False}
    adapt(tmp_path, encoder, source, **adapter)
    start, adapted = (SentenceTransformer(str(place), device="cpu") for place in (encoder, tmp_path / "out"))
    before, trained = start.encode(SENTENCES), adapted.encode(SENTENCES)
    assert abs(trained - before).max() > 1e-3
    adapted.disable_adapters()
    assert (adapted.encode(SENTENCES) == before).all()
    adapted.enable_adapters()
    assert (adapted.encode(SENTENCES) == trained).all()


@pytest.mark.parametrize(
    ("rows", "column", "message"),
    [
        (15, {"score": lambda row: row}, "mine has only 15 rows: data.dev_share needs at least 16"),
        (60, {"label": lambda row: row % 2}, "label is 0, and there is no score column. If"),
        (60, {"other": lambda row: row}, r"nor labelled sentence pairs; its columns are .*'other': map"),
        (60, {"a\tb": lambda row: row}, r"mine\.tsv, line 2: 3 fields, but the header has 4"),
    ],
)
def test_invalid_use_is_one_sentence(tmp_path, encoder, rows, column, message):
    with pytest.raises(ValueError, match=message):
        adapt(tmp_path, encoder, pairs(tmp_path / "mine.tsv", rows, **column))


def test_held_out_and_training_pairs_differ_in_score():
    rows = range(100)
    columns = {"sentence1": [*map(str, rows)], "sentence2": ["b"] * 100, "score": [float(row < 5) for row in rows]}
    for seed in range(5):
        [(rest, dev)] = hold_out({"train": Dataset.from_dict(columns)}, 0.1, seed)
        assert {*dev["score"]} == {*rest["train"]["score"]} == {0, 1} and len(dev) + len(rest["train"]) == 100
    columns["score"] = [float(row == 0) for row in rows]
    with pytest.raises(ValueError, match="each need at least 2 distinct values of score, and"):
        hold_out({"train": Dataset.from_dict(columns)}, 0.1, 0)


@pytest.mark.parametrize(("rows", "dev_rows"), [(100, 30), (666, 200), (1000, 200), (2000, 200), (3000, 300)])
def test_small_sources_hold_out_a_larger_share(rows, dev_rows):
    columns = {"sentence1": [*map(str, range(rows))], "sentence2": ["b"] * rows, "score": [*map(float, range(rows))]}
    [(rest, dev)] = hold_out({"train": Dataset.from_dict(columns)}, "auto", 0)
    assert (len(dev), len(rest["train"])) == (dev_rows, rows - dev_rows)


def test_swapped_dev_pairs_are_reported(tmp_path, encoder, capsys):
    source = pairs(tmp_path / "mine.tsv", 10, score=lambda row: row)
    header, *lines = Path(source).read_text().splitlines()
    swapped = ["\t".join([second, first, score]) for first, second, score in (line.split("\t") for line in lines)]
    (tmp_path / "dev.tsv").write_text("\n".join([header, *swapped[:6], "new\ttexts\t3"]) + "\n")
    adapt(tmp_path, encoder, source, **{"data.dev": [str(tmp_path / "dev.tsv")]})
    output = capsys.readouterr().out
    assert "warning: 6 of the 7 dev pairs of dev.tsv are also training pairs" in output


def test_distances_as_scores_and_other_columns_are_reported(tmp_path, encoder, capsys):
    units = SentenceTransformer(encoder, device="cpu").encode(SENTENCES, normalize_embeddings=True)
    distances = 1 - units @ units.T
    score = {"score": lambda row: distances[row % 11, (row * 7 // 11 + row) % 11], "note": str, "id": str}
    adapt(tmp_path, encoder, pairs(tmp_path / "mine.tsv", **score))
    output = capsys.readouterr().out
    assert "mine.tsv: 60 scored pairs; columns not read: note, id\n" in output
    assert "warning: dev pairs with high scores have low cosines (spearman -" in output


def test_premises_are_not_split_between_train_and_dev(tmp_path, encoder):
    with pytest.raises(ValueError, match="values of score, and rows with the same sentence1 stay together"):
        lines = [f"the same\t{SENTENCES[row % 11]}\t{row}" for row in range(20)]
        (tmp_path / "one.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *lines]) + "\n")
        adapt(tmp_path, encoder, str(tmp_path / "one.tsv"))
    columns = {"sentence1": ["a"] * 10 + ["b"] * 10, "sentence2": [*map(str, range(20))], "score": [*range(20)]}
    [(rest, dev)] = hold_out({"train": Dataset.from_dict(columns)}, 0.9, 42)
    assert len(rest["train"]) == len(dev) == 10  # at least one is left for training


@pytest.mark.parametrize("rows", [{"sentence1": "a", "sentence2": "b", "score": 1}, {"query": "a", "passage": "b"}])
def test_several_processes_compare_all_of_their_rows(tmp_path, monkeypatch, rows):
    (tmp_path / "a.jsonl").write_text(json.dumps(rows) + "\n")
    config = load("train", "adapt", {"data.train": [str(tmp_path / "a.jsonl")]})
    for world in (1, 2):
        monkeypatch.setattr(job, "rank_and_world", lambda world=world: (0, world))
        assert job.by_data(config).loss.init_args["gather_across_devices"] == (world > 1)

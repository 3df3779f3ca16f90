"""Training data that need not fit in memory: Arrow tables, kept or not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from datasets import Dataset

from raoe_train.artifacts.once import SUMS, made_once
from raoe_train.cli import load
from raoe_train.data import files, tables
from raoe_train.data.pairs import pair_table, read_pairs
from raoe_train.data.tables import Texts, to_table
from tests.tiny import training_data
from tests.training.small_runs import settings, write_pairs

ROOT = Path(__file__).parents[2]


def read(made, **changes):
    """(datasets as lists, texts) that settings train on."""
    datasets, texts = training_data(load("train", None, {**made, **changes}), 1)
    return {name: dataset.to_dict() for name, dataset in datasets.items()}, list(texts)


def parsed(monkeypatch):
    """A list that grows by one for each data file that is parsed."""
    seen, real = [], files.read_rows

    def counted(path, **options):
        seen.append(path)
        return real(path, **options)

    monkeypatch.setattr("raoe_train.data.sources.read_rows", counted)
    return seen


def test_a_table_has_what_the_lists_have(tmp_path):
    path = Path(write_pairs(tmp_path / "a.tsv", rows=30))
    path.write_text(path.read_text() + "only one\nx\ty\t1\t-\n")
    names = ["sentence1", "sentence2", "score", "label"]
    expected, expected_counts = pair_table(path, on_error="skip")
    for target in (None, tmp_path / "rows.arrow"):
        table, counts = pair_table(path, names, on_error="skip", path=target)
        assert counts == expected_counts and counts["dropped"] == {"malformed row": 1, "no gold label": 1}
        assert table.to_dict() == expected.to_dict()
        assert table.features == Dataset.from_dict(expected.to_dict()).features
    with pytest.raises(ValueError, match=r"a\.tsv, line 32: 1 fields where the header names 4"):
        pair_table(path, names)
    (tmp_path / "none.tsv").write_text("sentence1\tsentence2\n")
    for target in (None, tmp_path / "rows.arrow"):
        with pytest.raises(ValueError, match="no pair left of 0 rows"):
            pair_table(tmp_path / "none.tsv", names[:2], path=target)


def test_rows_over_several_record_batches(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "BATCH", 4)
    rows = [{"text": f"text {n}", "number": n, "more": ""} for n in range(11)]
    for path in (None, tmp_path / "rows.arrow"):
        table = to_table(iter(rows), path, ["text", "number"])
        assert table.data.column("text").num_chunks == 3
        assert table.to_list() == [{"text": row["text"], "number": row["number"]} for row in rows]
        assert list(Texts({"a": table.select_columns(["text"])})) == [row["text"] for row in rows]


NLI = "sentence1\tsentence2\tlabel\n" + "".join(
    f"premise {n}\thypothesis {n} {label}\t{label}\n" for n in range(5) for label in (0, 2, 2)
)


@pytest.mark.parametrize("loss", ["raoe", "cosent", "mse", "infonce", "contrastive", "multiple_negatives", "causal_lm"])
def test_kept_rows_are_the_rows(tmp_path, monkeypatch, capsys, loss):
    """Every kind of data: the same columns, order and printed lines in memory, kept, and found again."""
    source = tmp_path / "pairs.tsv"
    write_pairs(source)
    if loss == "infonce":
        source.write_text(NLI)
    changes = {"data.train": [str(source)], "loss": {"name": loss}}
    if loss == "mse":
        changes["data.score_scale"] = [0, 5]
    if loss == "contrastive":
        changes["data.labels"] = {"entailment": 1, "neutral": None, "contradiction": 0}
    made = settings(tmp_path, **changes)
    seen = parsed(monkeypatch)
    found = []
    for cache in (None, str(tmp_path / "cache"), str(tmp_path / "cache")):
        found.append((read(made, **{"data.cache_dir": cache}), capsys.readouterr().out))
        drawn, texts = read(made, **{"data.cache_dir": cache, "data.max_rows": 3})
        found[-1] += (drawn, texts)
        capsys.readouterr()
    assert found[0] == found[1] == found[2]
    assert len(seen) == 3  # two of memory, one that was kept
    columns = found[0][0][0]["pairs"]
    if loss == "causal_lm":
        expected = read_pairs(source)
        assert columns == {"text": list(dict.fromkeys([*expected["sentence1"], *expected["sentence2"]]))}
    texts = [text for name, values in columns.items() if name not in ("score", "label") for text in values]
    assert found[0][0][1] == texts and len(texts) > 8
    (entry,) = (tmp_path / "cache").iterdir()  # nothing else is left there, not even of max_rows
    assert {path.name for path in entry.iterdir()} == {tables.ROWS, tables.COUNTS, SUMS}


def test_what_was_read_otherwise_is_read_anew(tmp_path, monkeypatch):
    source = tmp_path / "a.tsv"
    text = "sentence1\tsentence2\tscore\tother\tlabel\tsplit\n" + "a\tb\t1\t2\tneutral\tx\nc\td\t3\t4\tentailment\ty\n"
    source.write_text(text)
    base = {"data.train": [str(source)], "data.cache_dir": str(tmp_path / "cache"), "loss": {"name": "raoe"}}
    seen = parsed(monkeypatch)
    changes = [
        {},
        {"data.columns": {"sentence2": "sentence1", "sentence1": "sentence2"}},
        {"data.columns": {"score": "other"}},
        {"data.labels": {"neutral": 2, "entailment": 0}},
        {"data.labels": {"neutral": None, "entailment": 0}},
        {"data.train": [f"{source}#x"]},
        {"data.train": [f"{source}#y"]},
        {"data.score_scale": [0, 5]},
        {"data.on_error": "skip"},
        {"loss": {"name": "cosent"}},
    ]
    for number, change in enumerate(changes, 1):
        expected, _ = read(base, **{"data.cache_dir": None, **change})
        assert read(base, **change)[0] == expected == read(base, **change)[0]
        assert len(seen) == 2 * number
    source.write_text(text.replace("a\tb", "a\tchanged"))
    assert read(base)[0]["a"]["sentence2"][0] == "changed"
    (tmp_path / "moved.tsv").write_text(text)  # the same bytes elsewhere are the same rows
    assert read(base, **{"data.train": [str(tmp_path / "moved.tsv")]})[0]["moved"]["sentence2"] == ["b", "d"]
    assert len(seen) == 2 * len(changes) + 1
    with pytest.raises(ValueError, match="score 3 is outside the declared score_scale 0 to 2"):
        read(base, **{"data.score_scale": [0, 2]})  # errors are as ever, and not kept
    assert len(list((tmp_path / "cache").iterdir())) == len(changes) + 1


def test_a_cache_that_cannot_be_written(tmp_path):
    made = settings(tmp_path, **{"data.cache_dir": str(tmp_path / "occupied")})
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(OSError, match=r"cannot write .*occupied.*: choose another data.cache_dir"):
        read(made)


def make(entry, name):
    def write(folder):
        (folder / "part").write_text(name)
        entry.with_name(f"{name} writes").touch()
        if name == "first":
            time.sleep(60)
        with entry.with_name("made").open("a") as file:
            file.write(name)
        time.sleep(0.3)

    made_once(entry, write)
    if (entry / "part").read_text() != "second":
        raise SystemExit(1)


def test_a_kill_leaves_nothing_that_is_taken_for_whole(tmp_path):
    entry = tmp_path / "entry"
    fork = multiprocessing.get_context("fork")
    first, *others = [fork.Process(target=make, args=(entry, name)) for name in ("first", "second", "second")]
    first.start()
    while not (tmp_path / "first writes").exists():
        time.sleep(0.01)
    for other in others:  # they wait for the first one
        other.start()
    time.sleep(0.3)
    assert not entry.exists() and not (tmp_path / "second writes").exists()
    os.kill(first.pid, signal.SIGKILL)
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    assert (tmp_path / "made").read_text() == "second"  # one of the two
    assert {path.name for path in tmp_path.iterdir()} == {"entry", "made", "first writes", "second writes"}


MEMORY = """
import gc, sys
import datasets, pyarrow
from raoe_train.artifacts.memory import peak_mb, reset_peak
from raoe_train.cli import load
from tests.tiny import training_data
from raoe_train.data.pairs import read_pairs

def read(source, cache):
    return training_data(load("train", None, {"data.train": [source], "data.cache_dir": cache}), 1)

source, cache = sys.argv[1:]
read("builtin#dev", None)  # what is loaded at first use
for how in ("kept", "found", "memory", "lists"):
    gc.collect()
    reset_peak(False)
    before = peak_mb(False)
    if how == "lists":
        made = read_pairs(source).to_list()
    else:
        made = read(source, None if how == "memory" else cache)
        assert sum(1 for _ in made[1]) == 400_000
    print(how, peak_mb(False) - before)
    del made
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak of memory to be had")
def test_memory(tmp_path):
    """200,000 rows, 17 MB: the memory they take is that of their bytes, not of Python's objects."""
    source = tmp_path / "large.tsv"
    with source.open("w") as file:
        file.write("sentence1\tsentence2\tscore\tlabel\n")
        for n in range(200_000):
            file.write(f"the first sentence {n} of two\tthe second sentence {n} of two\t0.5\t1\n")
    command = [sys.executable, "-c", MEMORY, str(source), str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {words[0]: float(words[1]) for words in lines if len(words) == 2}
    assert found.pop("lists") > 1.5 * 47, done.stdout  # else the others' bound says nothing
    assert len(found) == 3 and max(found.values()) < 47, done.stdout

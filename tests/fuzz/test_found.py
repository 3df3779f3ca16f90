"""Faults found by fuzzing, each with the smallest file that shows it."""

from __future__ import annotations

import os

import pyarrow
import pyarrow.parquet
import pytest

from raoe_train.artifacts.provenance import file_digest
from raoe_train.data.pairs import pair_table
from tests.data.made import write


def test_duplicate_json_key_is_a_row_error(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"sentence1": "a", "sentence2": "b", "score": 1, "score": 2}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: .*duplicate key among sentence1, sentence2, score, score"):
        pair_table(path)


def test_duplicate_parquet_column_is_an_error(tmp_path):
    table = pyarrow.table([["a"], ["b"], [1.0], [2.0]], names=["sentence1", "sentence2", "score", "score"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet.* duplicate column name: .*'score', 'score'"):
        pair_table(tmp_path / "a.parquet")


@pytest.mark.parametrize("score", ["1_0", "0_1.5"])
def test_underscore_in_a_number_is_an_error(tmp_path, score):
    path = write(tmp_path / "a.tsv", f"sentence1\tsentence2\tscore\na\tb\t{score}\n")
    with pytest.raises(ValueError, match=f"line 2: score is '{score}', not a number"):
        pair_table(path)


def test_digest_ignores_the_time_of_a_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one")
    old, digest = path.stat(), file_digest(path)
    path.write_bytes(b"two")
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert file_digest(path) != digest

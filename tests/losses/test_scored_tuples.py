"""Queries with texts that a teacher scored, from a file."""

from __future__ import annotations

import json

import pytest

from raoe_train.data.retrieval import scored_tuple_table

ROWS = [
    {"query": "one", "positive": "a", "negative": ["b", "c"], "score": [9.5, 2, -1]},
    {"query": "two", "positive": "d", "negative": ["e", "a"], "score": [0.5, 0.75, 0.25], "extra": 1},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows(tmp_path):
    table, counts = scored_tuple_table(write(tmp_path / "a.jsonl", ROWS))
    assert table[0] == {
        "query": "one", "positive": "a", "negative_1": "b", "negative_2": "c", "label": [9.5, 2.0, -1.0]
    }  # fmt: skip
    assert table[1]["label"] == [0.5, 0.75, 0.25] and counts == {"read": 2, "kept": 2, "dropped": {}}
    one = [{**row, "negative": row["negative"][0], "marks": row["score"][:2]} for row in ROWS]
    for row in one:
        del row["score"]
    table, _ = scored_tuple_table(write(tmp_path / "b.jsonl", one), columns={"score": "marks"})
    assert table.column_names == ["query", "positive", "negative_1", "label"]


@pytest.mark.parametrize(
    ("change", "message", "reason"),
    [
        ({"score": [1, 2]}, "2 scores, of a positive and 2 negatives", "bad score"),
        ({"score": 3.0}, "score is 3.0, not a list of numbers, the positive's first", "bad score"),
        ({"score": [1, None, 2]}, "score 1 is None, not a number", "bad score"),
        ({"negative": ["b"], "score": [1, 2]}, "1 negatives where earlier rows have 2", "other number of negatives"),
        ({"negative": []}, "negative is empty: there is nothing to rank", "no negative"),
        ({"positive": " "}, "positive is empty", "empty sentence"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, change, message, reason):
    file = write(tmp_path / "a.jsonl", [ROWS[0], {**ROWS[1], **change}])
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        scored_tuple_table(file)
    table, counts = scored_tuple_table(file, on_error="skip")
    assert len(table) == 1 and counts["dropped"] == {reason: 1}

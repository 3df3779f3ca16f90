"""Reranking: MAP and MRR, on rankings made by hand."""

import json

import numpy as np
import pytest

from raoe_train.evaluation.tasks import read_tasks


def write(folder, rows, name="set.jsonl"):
    path = folder / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def read(folder, rows, **options):
    return read_tasks([f"rerank:{write(folder, rows)}"], **options).popitem()[1]


def at(degrees):
    """An embedding at this angle to the queries, which are all (1, 0); of any length."""
    return [np.cos(np.radians(degrees)) * 3, np.sin(np.radians(degrees)) * 3]


def score(task, angles):
    embeddings = [[1, 0] if t.startswith("q") else at(angles[t]) for t in task.sentences]
    result, examples = task.score(np.array(embeddings, np.float32))
    assert examples.values.mean() == pytest.approx(result["map"]) and len(examples.values) == result["queries"]
    return result


def test_by_hand(tmp_path):
    rows = [
        {"query": "q1", "positive": ["a", "b"], "negative": ["c", "d"]},  # ranked a c b d: (1/1 + 2/3) / 2, 1/1
        {"query": "q2", "positive": ["d"], "negative": ["a", "b", "c"]},  # ranked a c b d: 1/4, 1/4
        {"query": "q3", "positive": "a", "negative": "b"},  # ranked a b: 1, 1
    ]
    assert score(read(tmp_path, rows), {"a": 10, "c": 20, "b": -30, "d": 120}) == {
        "map": pytest.approx(100 * (5 / 6 + 1 / 4 + 1) / 3),
        "mrr": pytest.approx(100 * (1 + 1 / 4 + 1) / 3),
        "queries": 3,
    }


def test_ties_are_broken_against_the_encoder(tmp_path):
    rows = [{"query": "q", "positive": ["a"], "negative": ["b", "c"]}]
    # all the same: the positive is third, whatever the file's order
    assert score(read(tmp_path, rows), {"a": 20, "b": 20, "c": 20})["map"] == pytest.approx(100 / 3)
    assert score(read(tmp_path, rows), {"a": 20, "b": 20, "c": 50})["mrr"] == pytest.approx(50)


def test_all_candidates_count(tmp_path):
    """Unlike MTEB's mrr_at_10, which reads only the first ten."""
    angles = {f"n{k}": k for k in range(11)} | {"last": 90}
    rows = [{"query": "q", "positive": ["last"], "negative": [name for name in angles if name != "last"]}]
    result = score(read(tmp_path, rows), angles)
    assert result["mrr"] == result["map"] == pytest.approx(100 / 12)


def test_splits_and_names(tmp_path):
    rows = [{"query": "q1", "positive": ["a"], "negative": ["b"], "split": split} for split in ("dev", "test", "test")]
    (tmp_path / "rerank").mkdir()
    write(tmp_path / "rerank", rows, "SciDocsRR.jsonl")
    tasks = read_tasks(["SciDocsRR", "rerank:SciDocsRR#dev", "rerank:SciDocsRR-all"], tmp_path)
    assert [len(task.content) for task in tasks.values()] == [2, 1, 3]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "q", "positive": [], "negative": ["a"]}, "line 2: positive is empty: there is nothing to rank"),
        ({"query": "q", "positive": ["a"], "negative": []}, "line 2: negative is empty: there is nothing to rank"),
        ({"query": "q", "positive": ["a"]}, "line 2: no column for negative .*columns: 'query', 'positive'"),
        ({"query": "q", "positive": ["a", None], "negative": ["b"]}, "line 2: positive 1 is None, not a text"),
        ({"query": "q", "positive": 3, "negative": ["b"]}, "line 2: positive must be a text or a list of texts, got 3"),
        ({"query": "", "positive": ["a"], "negative": ["b"]}, "line 2: query is empty"),
        ("{\n", r"set\.jsonl, line 2: not JSON"),
    ],
)
def test_malformed_rows(tmp_path, row, message):
    rows = [{"query": "q", "positive": ["a"], "negative": ["b"]}, row]
    with pytest.raises(ValueError, match=message):
        read(tmp_path, rows)
    assert len(read(tmp_path, rows, on_error="skip").content) == 1


def test_columns_are_mapped(tmp_path):
    rows = [{"q": "q1", "yes": ["a"], "negatives": ["b"]}]
    task = read(tmp_path, rows, columns={"query": "q", "positive": "yes"})
    assert task.sentences == ["q1", "a", "b"]

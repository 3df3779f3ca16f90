"""Rows of any shape read from sources, or built from NLI pairs, and the count of every dropped row."""

import json

import pytest
from datasets import Dataset
from pandas import DataFrame

from raoe_train.data import sources
from raoe_train.data.files import write_rows
from raoe_train.data.pairs import read_pairs
from raoe_train.data.rows import row_table
from tests.data.made import write

HEADER = "premise\thypothesis\tlabel\n"
# Premise p has two entailed, three contradicting and two neutral hypotheses, one of them repeated; q has one of
# each; r has no contradiction, s has no entailment, t has neither; the rest cannot be used at all.
PAIRS = HEADER + (
    "p\tp contra 1\tcontradiction\nq\tq neutral\tneutral\np\tp entail 1\tentailment\nr\tr entail\tentailment\n"
    "p\tp entail 2\tentailment\np\tp contra 2\tcontradiction\np\tp contra 2\tcontradiction\n"
    "p\tp neutral 1\tneutral\nq\tq contra\tcontradiction\ns\ts contra\tcontradiction\nt\tt neutral\tneutral\n"
    "q\tq entail\tentailment\np\tp contra 3\tcontradiction\nq\tq unsure\t-\np\tp neutral 2\tneutral\n\n"
)
ALWAYS = {"no gold label": 1, "blank line": 1, "duplicate hypothesis": 1}


def read_triplets(*source, **asked):
    return row_table(*source, **asked)[0]


def rows_of(data):
    return list(zip(*data.to_dict().values(), strict=True))


def accounted(counts):
    return counts["kept"] + sum(counts["dropped"].values())


@pytest.mark.parametrize("names", ["query positive", "anchor positive negative", "question answer", "sent0 sent1"])
def test_read_pairs_names_the_function_that_reads_rows(names):
    table = Dataset.from_dict({name: ["a", "b"] for name in names.split()})
    with pytest.raises(ValueError, match=r"row 1: no column for sentence1 .*use the Python function row_table, a loss"):
        read_pairs(table)


def test_one_triplet_per_premise(tmp_path):
    data, counts = row_table(write(tmp_path / "a.tsv", PAIRS))
    assert rows_of(data) == [("p", "p entail 1", "p contra 1"), ("q", "q entail", "q contra")]
    assert data.column_names == ["anchor", "positive", "negative"]
    assert counts == {
        "read": 16,
        "kept": 4,
        "dropped": {
            **ALWAYS,
            "neutral": 4,
            "surplus": 3,  # p entail 2, p contra 2 and 3
            "premise without contradiction": 1,
            "premise without entailment": 1,
        },
    }
    assert accounted(counts) == 16


def test_other_pairings(tmp_path):
    path = write(tmp_path / "a.tsv", PAIRS)
    zipped, zipped_counts = row_table(path, pairing="zip")
    assert rows_of(zipped) == [
        ("p", "p entail 1", "p contra 1"),
        ("p", "p entail 2", "p contra 2"),
        ("q", "q entail", "q contra"),
    ]
    assert (zipped_counts["kept"], zipped_counts["dropped"]["surplus"]) == (6, 1)
    every, counts = row_table(path, pairing="all")
    assert rows_of(every) == [
        *[("p", f"p entail {i}", f"p contra {j}") for i in (1, 2) for j in (1, 2, 3)],
        ("q", "q entail", "q contra"),
    ]
    assert counts["kept"] == 7  # p's five and q's two, however often each stands in a triplet
    assert "surplus" not in counts["dropped"]
    assert accounted(zipped_counts) == accounted(counts) == 16


def test_a_text_is_never_both_positive_and_negative(tmp_path):
    text = HEADER + "p\tx\tentailment\np\tx\tcontradiction\np\ty\tentailment\np\tz\tcontradiction\np\ty\tneutral\n"
    data, counts = row_table(write(tmp_path / "a.tsv", text), pairing="all")
    assert rows_of(data) == [("p", "y", "z")]
    assert counts["dropped"] == {"text in two roles": 2, "neutral": 1}
    inputs = write(tmp_path / "b.tsv", "anchor\tpositive\tnegative\np\tx\tx\np\ty\tz\n")
    assert rows_of(read_triplets(inputs)) == [("p", "x", None), ("p", "y", "z")]
    assert row_table(inputs)[1]["texts"] == {"in two roles": 1}


RAGGED = [("q", "p", None, None), ("r", "s", "t", "u"), ("v", "w", "x", None)]


@pytest.mark.parametrize(
    "names",
    [
        ("anchor", "positive", "negative", "negative_2"),
        ("query", "answer", "negative_1", "negative_2"),  # as sentence-transformers' miner writes them
        ("query", "document", "negative_2", "negative_10"),
        ("sentence1", "sentence2", "negative", "negative_2"),
        ("sent0", "sent1", "hard_neg", "negative_2"),
    ],
)
@pytest.mark.parametrize("kind", ["a.tsv", "a.csv", "a.jsonl.gz", "a.parquet", "Dataset", "DataFrame", "no nulls"])
def test_every_source_and_name(tmp_path, names, kind):
    rows = [dict(zip(reversed(names), reversed(row), strict=True)) for row in RAGGED]  # in any order
    if kind == "no nulls":
        kind, rows = "a.jsonl", [{name: text for name, text in row.items() if text is not None} for row in rows]
        (tmp_path / kind).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif "." in kind:
        write_rows(tmp_path / kind, [*names[::-1]], rows)
    source = {"Dataset": Dataset.from_list, "DataFrame": DataFrame}.get(kind, lambda _: tmp_path / kind)(rows)
    data, counts = row_table(source)
    assert data.column_names == ["anchor", "positive", "negative", "negative_2"]
    assert rows_of(data) == RAGGED
    assert counts == {"read": 3, "kept": 3, "dropped": {}}


def jsonl(path, *rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_lists_of_positives_and_negatives(tmp_path):
    """FlagEmbedding's and tevatron's layouts, and lists in parquet and a Dataset."""
    rows = [{"query": "q", "pos": ["a", "b"], "neg": ["c", "d", "e"]}, {"query": "r", "pos": ["f"], "neg": []}]
    expected = [("q", "a", "c", "d", "e"), ("q", "b", "c", "d", "e"), ("r", "f", None, None, None)]
    write_rows(tmp_path / "a.parquet", [*rows[0]], rows)
    for source in (jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "a.parquet", Dataset.from_list(rows)):
        data, counts = row_table(source)
        assert rows_of(data) == expected
        assert data.column_names == ["anchor", "positive", "negative", "negative_2", "negative_3"]
        assert counts == {"read": 2, "kept": 2, "dropped": {}}
    passages = [{"docid": "1", "title": "T", "text": "x"}, {"title": "", "text": "y"}, {"title": None, "text": "z"}]
    rows = [{"query_id": "1", "query": "q", "positive_passages": passages[:1], "negative_passages": passages[1:]},
            {"query_id": "2", "query": "r", "positive_passages": passages[1:], "negative_passages": []}]  # fmt: skip
    expected = [("q", "T x", "y", "z"), ("r", "y", None, None), ("r", "z", None, None)]
    assert rows_of(read_triplets(jsonl(tmp_path / "b.jsonl", *rows))) == expected


@pytest.mark.parametrize("most, expected", [(None, (9, 1, 0)), (12, (9, 1, 0)), (4, (4, 1, 0)), (1, (1, 1, 0)),
                                            (0, (0, 0, 0))])  # fmt: skip
def test_a_number_of_negatives_is_drawn(tmp_path, most, expected):
    negatives = [f"n{n}" for n in range(9)]
    rows = [{"query": query, "pos": [f"{query} yes"], "neg": texts}
            for query, texts in (("a", negatives), ("b", ["only"]), ("c", []))]  # fmt: skip
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    data, counts = row_table(path, num_negatives=most)
    drawn = [[text for text in row[2:] if text is not None] for row in rows_of(data)]
    assert tuple(map(len, drawn)) == expected
    assert {*drawn[0]} <= {*negatives} and len({*drawn[0]}) == len(drawn[0])
    assert counts.get("texts", {}) == ({"more than num_negatives": 10 - sum(expected)} if sum(expected) < 10 else {})
    assert rows_of(row_table(path, num_negatives=most)[0]) == rows_of(data)
    if most == 4:
        assert drawn[0] != negatives[:4]  # not the first ones


def test_scores_and_labels_are_no_rows(tmp_path):
    """Pairs with a score stay scored pairs, which InfoNCE cannot read; a query's score is ignored."""
    for text in ("sentence1\tsentence2\tscore\na\tb\t1\n", "sentence1\tsentence2\tsimilarity\na\tb\t1\n"):
        with pytest.raises(ValueError, match="line 2: no column for label"):
            read_triplets(write(tmp_path / "a.tsv", text))
    labelled = write(tmp_path / "b.tsv", "sentence1\tsentence2\tlabel\na\tb\t0\na\tc\t2\n")
    assert rows_of(read_triplets(labelled)) == [("a", "b", "c")]
    assert rows_of(read_triplets(write(tmp_path / "c.tsv", "query\tanswer\tscore\na\tb\t1\n"))) == [("a", "b")]


@pytest.mark.parametrize(
    "name, value, columns",
    [("label", int, {}), ("relevance", str, {}), ("relevant", bool, {}), ("clicked", float, {"relevance": "clicked"})],
)
def test_texts_with_a_relevance_of_0_are_negatives(tmp_path, name, value, columns):
    judged = [("q", "a", 1), ("q", "b", 0), ("q", "c", 1), ("r", "d", 0), ("s", "e", 1), ("q", "f", 0), ("s", "e", 0)]
    rows = [{"query": query, "passage": text, name: value(relevance)} for query, text, relevance in judged]
    data, counts = row_table(path := jsonl(tmp_path / "a.jsonl", *rows), columns=columns)
    assert rows_of(data) == [("q", "a", "b", "f"), ("q", "c", "b", "f"), ("s", "e", None, None)]
    assert counts == {"read": 7, "kept": 6, "dropped": {"no positive": 1}, "texts": {"in two roles": 1}}
    ignored, counts = row_table(path, columns={"relevance": None})
    assert len(ignored) == 7 and counts["unread"] == [name]
    with pytest.raises(ValueError, match=r"line 2: (the row has columns anchor, positive|no column for relevance)"):
        row_table(jsonl(tmp_path / "c.jsonl", rows[0], {"query": "q", "passage": "b"}), columns=columns)
    for wrong in (2, "entailment", 0.5, None):
        with pytest.raises(ValueError, match=r"line 1: .* needs 1 \(positive\) or 0 \(negative\); .*relevance=none"):
            row_table(jsonl(tmp_path / "b.jsonl", {**rows[0], name: wrong}), columns=columns)


GOOD = {"query": "good", "pos": ["p"], "neg": ["n"]}


@pytest.mark.parametrize(
    ("reason", "rows"),
    [
        ("no positive", [{"query": "q", "pos": []}, {"query": "q", "pos": None}, {"query": "q", "positive": ""},
                         {"query": "q", "pos": [], "neg": ["n"]}, {"query": "q", "positive": None}]),
        ("positive equal to the query", [{"query": "q", "pos": ["q"]}, {"query": "q", "pos": ["q", "q"]},
                                         {"query": "q", "positive": "q"}, {"query": "q", "answer": "q", "neg": ["n"]}]),
    ],
)  # fmt: skip
def test_rows_that_are_dropped(tmp_path, reason, rows):
    for row in rows:
        good = {"pos": GOOD, "positive": {"query": "good", "positive": "p"}, "answer": {"query": "good", "answer": "p"}}
        data, counts = row_table(jsonl(tmp_path / "a.jsonl", row, good[[*row][1]]))
        assert [each["anchor"] for each in data] == ["good"]
        assert counts == {"read": 2, "kept": 1, "dropped": {reason: 1}}
        with pytest.raises(ValueError, match=rf"a\.jsonl: no usable row in 1 rows: {reason} \(1\)$"):
            read_triplets(jsonl(tmp_path / "a.jsonl", row))


def test_no_row_is_left_if_negatives_lose_their_query(tmp_path):
    rows = [{"query": "q", "passage": "p", "neutral": "p", "relevance": 1},
            {"query": "q", "passage": "n", "neutral": "m", "relevance": 0}]  # fmt: skip
    with pytest.raises(ValueError, match=r"no usable row in 2 rows: text in two roles \(1\), no positive \(1\)$"):
        row_table(jsonl(tmp_path / "a.jsonl", *rows), neutral=True)
    data, counts = row_table(
        jsonl(tmp_path / "b.jsonl", *rows, {**rows[0], "query": "r", "neutral": "m"}), neutral=True
    )
    assert len(data) == 1
    assert counts == {"read": 3, "kept": 1, "dropped": {"text in two roles": 1, "no positive": 1}}


def test_rows_that_are_kept_in_files_are_the_same(tmp_path, monkeypatch):
    rows = [{"query": f"q{n % 60}", "pos": [f"p{n}", f"p{n + 1}"][: n % 3], "neg": [f"p{n + 2}", f"n{n % 7}", "m"]}
            for n in range(100)]  # fmt: skip
    path = jsonl(tmp_path / "a.jsonl", *rows)
    pairs = [{"premise": f"p{n % 30}", "hypothesis": f"h{n}", "label": n // 30 % 3} for n in range(100)]
    nli = jsonl(tmp_path / "b.jsonl", *pairs)
    in_memory = [row_table(path, num_negatives=2), row_table(path, keep_all=True), row_table(nli, pairing="all")]
    monkeypatch.setattr(sources, "BATCH", 8)
    monkeypatch.setattr(sources, "LARGE", 100)
    in_files = [row_table(path, num_negatives=2), row_table(path, keep_all=True), row_table(nli, pairing="all")]
    assert all(data.cache_files for data, _ in in_files) and not any(data.cache_files for data, _ in in_memory)
    assert [(data[:], counts) for data, counts in in_files] == [(data[:], counts) for data, counts in in_memory]


@pytest.mark.parametrize(
    ("rows", "expected", "texts"),
    [
        ([("q", ["p"], ["p", "n"])], [("q", "p", "n")], {"in two roles": 1}),
        ([("q", ["p"], ["n", "r"]), ("q", ["r"], ["p", "m"])], [("q", "p", "n"), ("q", "r", "m")],
         {"in two roles": 2}),
        ([("q", ["p", "r"], ["r", "q"])], [("q", "p"), ("q", "r")], {"in two roles": 2}),
        ([("q", ["p"], ["m"]), ("r", ["m"], ["p"])], [("q", "p", "m"), ("r", "m", "p")], None),  # another query's
        ([("q", ["q", "p"], ["n"])], [("q", "p", "n")], {"in two roles": 1}),
        ([("q", ["p", "p"], ["n", "n", "m"])], [("q", "p", "n", "m")], {"repeated": 2}),
    ],
)  # fmt: skip
def test_texts_that_are_left_out(tmp_path, rows, expected, texts):
    rows = [dict(zip(("query", "pos", "neg"), row, strict=True)) for row in rows]
    data, counts = row_table(jsonl(tmp_path / "a.jsonl", *rows))
    assert rows_of(data) == expected
    assert counts == {"read": len(rows), "kept": len(rows), "dropped": {}} | ({"texts": texts} if texts else {})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "q", "pos": "[p, r]"}, r"pos is .\[p, r\]., not a list of texts"),
        ({"query": ["q"], "pos": ["p"]}, r"query is \['q'\], not a string"),
        ({"query": "q", "pos": ["p", ""]}, "text 2 of pos is empty"),
        ({"query": "q", "positive_passages": [{"title": "t"}]}, "text 1 of positive_passages is None, not a string"),
        ({"query": "", "pos": ["p"]}, "query is empty"),
        ({"query": "q", "neg": ["n"]}, "no column for positive"),
        ({"query": "q", "pos": ["p"], "answer": "a"}, r"several columns match positive \(answer and pos\)"),
    ],
)
def test_malformed_rows(tmp_path, row, message):
    good = {**GOOD, "positive_passages": GOOD["pos"]} if "positive_passages" in row else GOOD
    good = {name: good[name] for name in ("query", "positive_passages" if "positive_passages" in row else "pos", "neg")}
    path = jsonl(tmp_path / "a.jsonl", good, row)
    with pytest.raises(ValueError, match=rf"^\S*a\.jsonl, line 2: {message}"):
        read_triplets(path)
    data, counts = row_table(path, on_error="skip")
    assert rows_of(data) == [("good", "p", "n")]
    assert sum(counts["dropped"].values()) == 1 and counts["read"] == 2


def test_pairs_mapped_and_with_other_labels(tmp_path):
    path = write(tmp_path / "a.tsv", "q\tanswer\tkind\np\te\tyes\np\tc\tno\np\tn\tmaybe\n")
    columns = {"sentence1": "q", "sentence2": "answer", "label": "kind"}
    with pytest.raises(ValueError, match=r"line 2: kind is 'yes', which is not a known label .entailment"):
        read_triplets(path, columns=columns)
    data = read_triplets(path, columns=columns, labels={"yes": 0, "maybe": 1, "no": 2}, neutral=True)
    assert rows_of(data) == [("p", "e", "c", "n")]
    with pytest.raises(ValueError, match=r"map each label to 0 \(entailment\), 1 \(neutral\), 2 \(contradiction\)"):
        read_triplets(path, columns=columns, labels={"yes": 0, "maybe": 1, "no": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "p\te\tentailment\np\tn\tneutral\n", "2 rows: .*\n.*exactly the same premise\\. .*\n.*labels"),
        (HEADER + "p\te\t-\n", r"no usable triplet in 1 rows: no gold label \(1\)\n  .*line 2: label is '-'"),
        ("premise\thypothesis\np\te\n", "line 2: no column for label"),
        ("anchor\tother\tlabel\na\tb\t1\n", "line 2: no column for positive .*'anchor', 'other', 'label'"),
    ],
)
def test_errors(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_triplets(write(tmp_path / "a.tsv", text))

"""Triplets built from NLI pairs or read from files, and the count of every dropped row."""

import json
from pathlib import Path

import pytest

from raoe_train.data.files import write_rows
from raoe_train.data.triplets import triplet_table

REAL = Path(__file__).parents[3] / "shared" / "data"
HEADER = "premise\thypothesis\tlabel\n"

# Premise p has two entailed, three contradicting and two neutral hypotheses, one of them repeated; q has one of
# each; r has no contradiction, s has no entailment, t has neither; the rest cannot be used at all.
PAIRS = (
    HEADER
    + "p\tp contra 1\tcontradiction\n"
    + "q\tq neutral\tneutral\n"
    + "p\tp entail 1\tentailment\n"
    + "r\tr entail\tentailment\n"
    + "p\tp entail 2\tentailment\n"
    + "p\tp contra 2\tcontradiction\n"
    + "p\tp contra 2\tcontradiction\n"
    + "p\tp neutral 1\tneutral\n"
    + "q\tq contra\tcontradiction\n"
    + "s\ts contra\tcontradiction\n"
    + "t\tt neutral\tneutral\n"
    + "q\tq entail\tentailment\n"
    + "p\tp contra 3\tcontradiction\n"
    + "q\tq unsure\t-\n"
    + "p\tp neutral 2\tneutral\n"
    + "\n"
)
ALWAYS = {"no gold label": 1, "blank line": 1, "duplicate hypothesis": 1}


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def read_triplets(*source, **asked):
    return triplet_table(*source, **asked)[0]


def rows_of(data):
    return list(zip(*data.to_dict().values(), strict=True))


def accounted(counts):
    return counts["kept"] + sum(counts["dropped"].values())


def test_one_triplet_per_premise(tmp_path):
    data, counts = triplet_table(write(tmp_path / "a.tsv", PAIRS))
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
    zipped, zipped_counts = triplet_table(path, pairing="zip")
    assert rows_of(zipped) == [
        ("p", "p entail 1", "p contra 1"),
        ("p", "p entail 2", "p contra 2"),
        ("q", "q entail", "q contra"),
    ]
    assert (zipped_counts["kept"], zipped_counts["dropped"]["surplus"]) == (6, 1)
    every, counts = triplet_table(path, pairing="all")
    assert rows_of(every) == [
        *[("p", f"p entail {i}", f"p contra {j}") for i in (1, 2) for j in (1, 2, 3)],
        ("q", "q entail", "q contra"),
    ]
    assert counts["kept"] == 7  # p's five and q's two, however often each stands in a triplet
    assert "surplus" not in counts["dropped"]
    assert accounted(zipped_counts) == accounted(counts) == 16


def test_neutral_as_second_negative(tmp_path):
    text = PAIRS + "u\tu entail\tentailment\nu\tu contra\tcontradiction\n"
    data, counts = triplet_table(write(tmp_path / "a.tsv", text), neutral=True)
    assert rows_of(data) == [
        ("p", "p entail 1", "p contra 1", "p neutral 1"),
        ("q", "q entail", "q contra", "q neutral"),
    ]
    assert counts["kept"] == 6
    assert counts["dropped"] == {
        **ALWAYS,
        "surplus": 4,  # p entail 2, p contra 2 and 3, p neutral 2
        "premise without contradiction": 1,
        "premise without entailment": 2,  # s's row, and t's, which has no contradiction either
        "premise without neutral": 2,  # u's
    }
    assert accounted(counts) == counts["read"] == 18


def test_a_text_is_never_both_positive_and_negative(tmp_path):
    text = HEADER + "p\tx\tentailment\np\tx\tcontradiction\np\ty\tentailment\np\tz\tcontradiction\np\ty\tneutral\n"
    data, counts = triplet_table(write(tmp_path / "a.tsv", text), pairing="all")
    assert rows_of(data) == [("p", "y", "z")]
    assert counts["dropped"] == {"text in two roles": 2, "neutral": 1}
    inputs = write(tmp_path / "b.tsv", "anchor\tpositive\tnegative\np\tx\tx\np\ty\tz\n")
    assert rows_of(read_triplets(inputs)) == [("p", "y", "z")]
    assert triplet_table(inputs)[1]["dropped"] == {"text in two roles": 1}


def test_the_order_of_the_columns(tmp_path):
    path = write(tmp_path / "a.tsv", PAIRS)
    assert read_triplets(path).column_names == ["anchor", "positive", "negative"]
    dataset = read_triplets(path, neutral=True)
    assert dataset.column_names == ["anchor", "positive", "negative", "neutral"]
    assert dataset[1] == {"anchor": "q", "positive": "q entail", "negative": "q contra", "neutral": "q neutral"}


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        (("anchor", "positive", "negative"), None),
        (("sentence0", "sentence1", "sentence2"), None),
        (("sent0", "sent1", "hard_neg"), None),
        (("query", "positive", "negative"), {"anchor": "query"}),
        (("sentence1", "positive", "negative"), {"anchor": "sentence1"}),
        (("sentence1", "sentence2", "worse"), {"anchor": "sentence1", "positive": "sentence2", "negative": "worse"}),
    ],
)
def test_files_of_triplets(tmp_path, header, columns):
    texts = [("a", 'b, "b"', "c"), ("a", 'b, "b"', "c"), ("d", "e", "f")]
    write_rows(tmp_path / "a.csv", list(header), [dict(zip(header, row, strict=True)) for row in texts])
    data, counts = triplet_table(tmp_path / "a.csv", columns=columns)
    assert rows_of(data) == texts
    assert counts == {"read": 3, "kept": 3, "dropped": {}}


def test_files_of_triplets_with_more_columns(tmp_path):
    four = write(tmp_path / "a.tsv", "fold\tanchor\tpositive\tnegative\tneutral\nx\ta\tb\tc\td\ny\te\tf\tg\th\n")
    assert rows_of(read_triplets(four + "#y", columns={"split": "fold"})) == [("e", "f", "g")]
    assert rows_of(read_triplets(four, neutral=True)) == [("a", "b", "c", "d"), ("e", "f", "g", "h")]
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: no column for negative \(looked for worse\)"):
        read_triplets(four, columns={"anchor": "anchor", "negative": "worse"})


def test_pairs_mapped_and_with_other_labels(tmp_path):
    path = write(tmp_path / "a.tsv", "q\tanswer\tkind\np\te\tyes\np\tc\tno\np\tn\tmaybe\n")
    columns = {"sentence1": "q", "sentence2": "answer", "label": "kind"}
    with pytest.raises(ValueError, match=r"line 2: kind is 'yes', which is not a known label .entailment"):
        read_triplets(path, columns=columns)
    data = read_triplets(path, columns=columns, labels={"yes": 0, "maybe": 1, "no": 2}, neutral=True)
    assert rows_of(data) == [("p", "e", "c", "n")]
    with pytest.raises(ValueError, match="labels must map to 0 entailment, 1 neutral, 2 contradiction"):
        read_triplets(path, columns=columns, labels={"yes": 0, "maybe": 1, "no": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "p\te\tentailment\np\tn\tneutral\n", "2 rows: .*\n.*No row has the label contradiction: .*labels"),
        (HEADER + "p\tn\tneutral\n", "No row has the label entailment or contradiction"),
        (HEADER + "p\te\tentailment\nq\tc\tcontradiction\n", "with exactly the same premise. Without hard neg"),
        (HEADER + "p\te\t-\n", "no usable triplet in 1 rows: 1 x no gold label\n  .*line 2: label is '-'"),
        (HEADER, "no usable triplet in 0 rows: there are no rows"),
        ("premise\thypothesis\np\te\n", "line 2: no column for label"),
        ("hypothesis\tlabel\ne\tentailment\n", "line 2: no column for sentence1"),
        (HEADER + "p\te\tentailment\np\tc\n", "a.tsv, line 3: 2 fields, but the header has 3"),
        (HEADER + "p\t \tentailment\n", "a.tsv, line 2: hypothesis is empty"),
        ("anchor\tother\tlabel\na\tb\t1\n", "line 2: no column for positive .*'anchor', 'other', 'label'"),
        ("anchor\tpositive\tnegative\na\tb\t\n", "line 2: negative is empty"),
        ("anchor\tsent0\tpositive\tnegative\na\tb\tc\td\n", "columns anchor and sent0 could both be anchor: choose"),
    ],
)
def test_errors(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_triplets(write(tmp_path / "a.tsv", text))


def test_malformed_rows_are_skipped_and_counted(tmp_path):
    text = HEADER + "p\te\tentailment\np\tc\n\t\tneutral\np\tx\tperhaps\np\tc\tcontradiction\n"
    path = write(tmp_path / "a.tsv", text)
    with pytest.raises(ValueError, match=r"^\S*a\.tsv, line 3: 2 fields, but the header has 3$"):
        read_triplets(path)
    data, counts = triplet_table(path, on_error="skip")
    assert rows_of(data) == [("p", "e", "c")]
    assert counts["dropped"] == {"malformed row": 1, "empty sentence": 1, "unknown label": 1}
    assert accounted(counts) == counts["read"] == 5
    with pytest.raises(ValueError, match=r"1 x malformed row\n.*line 2: no column for label"):
        read_triplets(write(tmp_path / "b.tsv", "premise\thypothesis\np\te\n"), on_error="skip")


def test_arguments_are_checked(tmp_path):
    pairs = write(tmp_path / "a.tsv", PAIRS)
    triplets = write(tmp_path / "b.tsv", "anchor\tpositive\tnegative\na\tb\tc\n")
    for wrong in ({"pairing": "some"}, {"on_error": "ignore"}, {"labels": {}}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            read_triplets(pairs, **wrong)
    with pytest.raises(ValueError, match="no column for positive"):
        read_triplets(triplets, columns={"anchor": "anchor", "sentence2": "positive"})
    with pytest.raises(ValueError, match="no column for neutral"):
        read_triplets(triplets, neutral=True)
    with pytest.raises(FileNotFoundError):
        read_triplets(tmp_path / "nope.tsv")


def test_json_lines_with_mixed_types(tmp_path):
    lines = [{"premise": "p", "hypothesis": "h", "label": 0}, {"anchor": "a", "positive": "b", "negative": "c"}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"line 2: no column for sentence1 .*'anchor', 'positive', 'negative'"):
        read_triplets(path)


@pytest.mark.skipif(not REAL.is_dir(), reason="the benchmark data beside the project is not here")
@pytest.mark.parametrize(
    ("source", "one", "zipped", "every"),
    [
        # The data's notes count 2,954 for SNLI dev: "zip" with a hypothesis that a premise has twice counted twice.
        ("snli.tsv.gz#dev", 2943, 2953, 3253),
        ("snli.tsv.gz#test", 2921, 2929, 3247),
        ("snli.tsv.gz#train_sample", 122, 122, 124),
        ("mnli.tsv.gz#train_sample", 76, 76, 76),
    ],
)
def test_real_files(source, one, zipped, every):
    for pairing, triplets in (("one", one), ("zip", zipped), ("all", every)):
        data, counts = triplet_table(f"{REAL}/nli/{source}", pairing=pairing)
        assert len(data) == triplets
        assert accounted(counts) == counts["read"]
        if pairing != "all":
            assert counts["kept"] == 2 * triplets

"""Reading sentence pairs: formats, columns, labels, scores, splits, and unusable rows."""

import csv
import logging
from pathlib import Path

import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from raoe_train.data.files import write_rows
from raoe_train.data.pairs import pair_table, read_pairs, read_scored
from raoe_train.data.rows import list_table
from tests.data.made import HEADER, rows_in, write

ROWS = [
    {"sentence1": 'He said "no', "sentence2": "a, b", "score": 0.5, "label": "entailment"},
    {"sentence1": "one\u2028line", "sentence2": "ünï 🎸", "score": -1.25, "label": "contradiction"},
]


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl", ".parquet", ".tsv.gz", ".csv.gz", ".jsonl.gz"])
def test_every_format_gives_the_same_pairs(tmp_path, suffix):
    path = tmp_path / f"pairs{suffix}"
    write_rows(path, list(ROWS[0]), ROWS)
    data = read_pairs(path)
    assert data["sentence1"] == ['He said "no', "one\u2028line"]
    assert data["sentence2"] == ["a, b", "ünï 🎸"]
    assert data["score"] == [0.5, -1.25]
    assert data["label"] == [0, 2]
    assert pair_table(path)[1] == {"read": 2, "kept": 2, "dropped": {}}


def test_files_written_by_hand(tmp_path, caplog):
    """Independent of our own writer: a byte-order mark, carriage returns, CSV quoting, no last line feed."""
    tsv = write(tmp_path / "a.tsv", b'\xef\xbb\xbfpremise\thypothesis\r\n"quoted"\tx\r\n\'\ty')
    assert read_pairs(tsv)["sentence1"] == ['"quoted"', "'"]
    assert not caplog.records
    quoted = 'premise\thypothesis\n"say ""hi"""\tx\n'
    assert read_pairs(write(tmp_path / "b.tsv", quoted))["sentence1"] == ['"say ""hi"""']
    assert "line 2: in TSV files, quotes are part of the text" in caplog.text
    csv = write(tmp_path / "a.csv", 'text1,text2,similarity\n"one, ""two""",y,1e-1\n"over\ntwo lines",z,1\n')
    assert read_pairs(csv)["sentence1"] == ['one, "two"', "over\ntwo lines"]
    assert read_pairs(csv)["score"] == [0.1, 1.0]


def test_split(tmp_path):
    path = write(tmp_path / "a.tsv", HEADER + "a\tb\t1\t0\ttrain\nc\td\t2\t1\tdev\ne\tf\t3\t2\ttrain\n")
    assert read_pairs(path + "#train")["sentence1"] == ["a", "e"]
    assert pair_table(path + "#dev")[1] == {"read": 1, "kept": 1, "dropped": {}}
    with pytest.raises(ValueError, match=r"no split 'test'; splits: train \(2\), dev \(1\)"):
        read_pairs(path + "#test")
    ragged = write(tmp_path / "d.tsv", HEADER + "a\tb\t1\t0\ttrain\nragged\nc\td\t2\t1\tdev\n")
    with pytest.raises(ValueError, match=r"d\.tsv, line 3: 1 fields"):  # its split is unknown
        read_pairs(ragged + "#train")
    assert pair_table(ragged + "#dev", on_error="skip")[1] == {"read": 2, "kept": 1, "dropped": {"malformed row": 1}}
    nosplit = write(tmp_path / "b.tsv", "sentence1\tsentence2\na\tb\n")
    with pytest.raises(ValueError, match="#train selects rows by the column 'split', which is missing"):
        read_pairs(nosplit + "#train")
    mapped = write(tmp_path / "c.tsv", "sentence1\tsentence2\tfold\na\tb\tx\nc\td\ty\n")
    assert read_pairs(mapped + "#y", columns={"split": "fold"})["sentence1"] == ["c"]


def test_columns(tmp_path):
    path = write(tmp_path / "a.tsv", "id\tq\tanswer\tlabel\n1\ta\tb\t3.8\n")
    with pytest.raises(ValueError, match=r"line 2: no column for sentence1 .*'id', 'q', 'answer', 'label'"):
        read_pairs(path)
    mapping = {"sentence1": "q", "sentence2": "answer"}
    with pytest.raises(ValueError, match=r"label is '3.8', which is not a known label .entailment.*score=label"):
        read_pairs(path, columns=mapping)
    data = read_pairs(path, columns={**mapping, "score": "label"})
    assert data["score"] == [3.8] and "label" not in data.column_names
    for unread in (None, "none"):
        assert read_pairs(path, columns={**mapping, "label": unread}).column_names == ["sentence1", "sentence2"]
    # columns of other kinds of rows may be absent: one map serves several tasks
    assert read_pairs(path, columns={**mapping, "label": None, "query": "nope"})["sentence1"] == ["a"]
    assert read_pairs(path, columns={"premise": "q", "text2": "answer", "label": None})["sentence1"] == ["a"]  # aliases
    with pytest.raises(ValueError, match="columns must be a mapping"):
        read_pairs(path, columns=3)
    with pytest.raises(ValueError, match="two names for sentence1 in columns"):
        read_pairs(path, columns={"premise": "q", "sentence1": "q"})
    with pytest.raises(ValueError, match="did you mean 'sentence1'"):
        read_pairs(path, columns={"sentense1": "q"})
    with pytest.raises(ValueError, match=r"no column for score \(looked for nope"):
        read_pairs(path, columns={**mapping, "score": "nope"})
    with pytest.raises(ValueError, match="no column for score"):
        read_pairs(path, columns={**mapping, "label": None}, require=("score",))
    both = write(tmp_path / "b.tsv", "sentence1\tsentence2\tscore\tsimilarity\na\tb\t1\t2\n")
    with pytest.raises(ValueError, match=r"several columns match score \(score and similarity\)"):
        read_pairs(both)
    assert read_pairs(both, columns={"score": "similarity"})["score"] == [2.0]


@pytest.mark.parametrize(
    ("labels", "words", "expected"),
    [
        (None, ["entailment", "NEUTRAL", "contradiction"], [0, 1, 2]),
        (None, [2, 1.0, "0"], [2, 1, 0]),
        ({"Dup": 0, "NO": 7}, ["dUP", "no", "Dup"], [0, 7, 0]),
        ({0: 2, 1: 1, 2: 0}, ["0", "1", "2"], [2, 1, 0]),
        ({"-": 1, "yes": 0}, ["-", "yes", "yes"], [1, 0, 0]),
    ],
)
def test_labels(tmp_path, labels, words, expected):
    rows = [{"sentence1": "a", "sentence2": "b", "label": word} for word in words]
    write_rows(tmp_path / "a.jsonl", list(rows[0]), rows)
    assert read_pairs(tmp_path / "a.jsonl", labels=labels)["label"] == expected


def test_labels_are_never_guessed(tmp_path):
    path = write(tmp_path / "a.tsv", HEADER + "a\tb\t1\tneutral\tx\na\tb\t1\tentailed\tx\n")
    with pytest.raises(ValueError, match=r"a\.tsv, line 3: label .* is not .*labels 'entailed'=CLASS"):
        read_pairs(path)
    with pytest.raises(ValueError, match="label is 'neutral'"):
        read_pairs(path, labels={"yes": 0, "no": 2})
    for wrong in ({}, {"neutral": -1}, {"neutral": "1"}, {"neutral": True}):
        with pytest.raises(ValueError, match="labels"):
            read_pairs(path, labels=wrong)
    for nothing in (-1, "-1", None, "", "-", float("nan")):
        rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in (nothing, 1)]
        write_rows(tmp_path / "b.jsonl", list(rows[0]), rows)
        data, counts = pair_table(tmp_path / "b.jsonl")
        assert (data["label"], counts["dropped"]) == ([1], {"no gold label": 1})


def test_labels_replace_missing_scores(tmp_path):
    def labelled(*words):
        rows = [{"sentence1": "a", "sentence2": f"b {word}", "label": word} for word in words]
        write_rows(tmp_path / "a.jsonl", list(rows[0]), rows)
        return tmp_path / "a.jsonl"

    path = labelled("entailment", "contradiction", "-", "neutral")
    assert read_pairs(path, require=("score",))["score"] == [1, 0, 0.5]
    assert read_scored(path, None)["score"] == [1, 0, 0.5]
    assert read_pairs(path).column_names == ["sentence1", "sentence2", "label"]
    options = {"require": ("score",), "labels": {"same": 0, "near": 1, "far": 3}}
    assert read_pairs(labelled("far", "near", "same"), **options)["score"] == pytest.approx([0, 2 / 3, 1])
    assert read_pairs(labelled("1", "0"), labels={"1": 0, "0": 1}, require=("score",))["score"] == [1, 0]
    for number in ("1", 1, 1.0, "1.0"):  # of a paraphrase, or of a neutral pair
        with pytest.raises(ValueError, match=r"line 1: label is 1.*, and there is no score column. If"):
            read_pairs(labelled(number), require=("score",))
    assert read_pairs(labelled("1", "0"), columns={"score": "label"}, require=("score",))["score"] == [1, 0]
    with pytest.raises(ValueError, match="no column for score"):
        read_pairs(path, columns={"label": None}, require=("score",))


def test_scores(tmp_path):
    def scored(text):
        return write(tmp_path / "a.tsv", f"sentence1\tsentence2\tscore\na\tb\t0\nc\td\t{text}\n")

    for text in ("", "high", "nan", "inf", "1,5", "1_0", "0_1.5"):
        with pytest.raises(ValueError, match=rf"line 3: score is '{text}', not a"):
            read_pairs(scored(text))
    for text, score in (("5.1", 5.1), ("True", 1), ("false", 0)):
        assert read_pairs(scored(text))["score"] == [0, score]
    with pytest.raises(ValueError, match=r"line 3: score 5\.1 is outside the range of score_scale, 0 to 5"):
        read_pairs(scored("5.1"), score_scale=(0, 5))
    assert read_pairs(scored("5"), score_scale=[0, 5])["score"] == [0, 5]
    for wrong in ((5, 0), (5, 5), (0, 5, 5)):
        with pytest.raises(ValueError, match="score_scale must be"):
            read_pairs(scored("5"), score_scale=wrong)


BAD = HEADER + "a\tb\t1\t0\tx\nonly two\tfields\n\nc\td\tnone\t0\tx\ne\t \t1\t0\tx\nf\tg\t1\t-\tx\n"
BAD += "h\ti\t2\t2\tx\nj\tk\t1\t?\tx\n"


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz"])
def test_malformed_rows(tmp_path, suffix, caplog):
    path = write(tmp_path / f"a{suffix}", BAD)
    with pytest.raises(ValueError, match=rf"a{suffix}, line 3: 2 fields, but the header has 5"):
        read_pairs(path)
    with caplog.at_level(logging.WARNING):
        data, counts = pair_table(path, on_error="skip")
    reasons = ("malformed row", "blank line", "bad score", "empty sentence", "no gold label", "unknown label")
    assert data["sentence1"] == ["a", "h"]
    assert counts == {"read": 8, "kept": 2, "dropped": dict.fromkeys(reasons, 1)}
    assert "6 of 8 rows were left out" in caplog.text
    bad = write(tmp_path / f"bad{suffix}", HEADER + "a\tb\t1\t-\tx\n" * 5)
    with pytest.raises(ValueError, match=r"5 rows: no gold label \(5\)\n  .*line 2: .*\n.*line 3: .*\n.*line 4: .*$"):
        read_pairs(bad)
    with pytest.raises(ValueError, match="on_error must be"):
        read_pairs(path, on_error="ignore")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"sentence1": "a", "sentence2": "b"}\n[1]\n', "line 2: a JSON list"),
        ("a.jsonl", '{"sentence1": "a", "sentence2": "b"}\n\n{"sentence1": \n', "line 3: not JSON"),
        ("a.jsonl", '{"sentence1": "a", "sentence2": 3}\n', "line 1: sentence2 is 3, not a string"),
        ("a.jsonl", '{"sentence1": "a", "score": 1, "score": 2}\n', "line 1: .*only once .*, score, score"),
        ("a.jsonl", '{"sentence1": "a", "sentence2": "\\ud83d"}\n', "line 1: invalid Unicode .lone surrogate"),
        ("a.tsv", b"sentence1\tsentence2\na\tb\n\xff\tb\n", "line 3: not UTF-8"),
        ("a.tsv", "sentence1\tsentence1\na\tb\n", "line 1: the header has a duplicate column name"),
        ("a.csv", "sentence1;sentence2\na, b;c\n", "line 2: 2 fields, but the header has 1: separate them with commas"),
        ("a.csv", "a, b\tc\td\t5\n", r"line 1: this \.csv file has tabs instead of commas: rename the file to \.tsv"),
        ("a.tsv", "", "no usable pair in 0 rows"),
        ("a.tsv", "sentence1\tsentence2\tlabel\na\tb\t-\n", r"no usable pair in 1 rows: no gold label \(1\)"),
    ],
)
def test_errors_name_the_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_pairs(write(tmp_path / name, text))


def test_cells_of_any_length(tmp_path):
    text = "a" * 300_000
    for suffix in ("tsv", "csv", "jsonl"):
        write_rows(tmp_path / f"a.{suffix}", ["text"], [{"text": text}])
        assert rows_in(tmp_path / f"a.{suffix}") == [{"text": text}]
    assert csv.field_size_limit() == 131_072  # the default of Python, for the rest of the process


def test_damaged_gzip(tmp_path):
    path = Path(write(tmp_path / "a.tsv.gz", HEADER + "a\tb\t1\t0\tx\n" * 5000))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"a\.tsv\.gz: the file is damaged after line \d+"):
        read_pairs(path, on_error="skip")


def test_writing_what_a_format_cannot_hold(tmp_path):
    for value in ("a\tb", "a\nb", ["a"]):
        with pytest.raises(ValueError, match=r"cannot store .*write a \.jsonl"):
            write_rows(tmp_path / "a.tsv", ["text"], [{"text": value}])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="all but parquet may be followed by"):
        write_rows(tmp_path / "a.parquet.gz", ["text"], [{"text": "a"}])


def test_parquet_classes_are_read_by_name(tmp_path):
    """Datasets on a hub number their classes in different orders."""
    names = ["contradiction", "entailment", "neutral"]
    features = Features({"sentence1": Value("string"), "sentence2": Value("string"), "label": ClassLabel(names=names)})
    rows = {"sentence1": ["a", "b", "c", "d"], "sentence2": ["e", "f", "g", "h"], "label": [0, 1, 2, -1]}
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "x.parquet"))
    result = read_pairs(tmp_path / "x.parquet")
    assert result["label"][:] == [2, 0, 1]
    bad = Dataset.from_dict({**rows, "sentence1": ["a", "b", "", "d"]}, features=features)
    bad.to_parquet(str(tmp_path / "bad.parquet"))
    for source, name in ((tmp_path / "bad.parquet", r"bad\.parquet"), (bad, "Dataset")):
        with pytest.raises(ValueError, match=rf"{name}, row 3: sentence1 is empty"):
            read_pairs(source)


def test_duplicate_parquet_column_is_an_error(tmp_path):
    table = pyarrow.table([["a"], ["b"], [1.0], [2.0]], names=["sentence1", "sentence2", "score", "score"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet.* duplicate column name: .*'score', 'score'"):
        read_pairs(tmp_path / "a.parquet")


def test_lists_with_a_repeated_id(tmp_path):
    rows = [{"id": name, "sentences": ["a", "b", f"c {place}"]} for place, name in enumerate(("1", 1, None, None))]
    write_rows(tmp_path / "a.jsonl", ["id", "sentences"], rows)
    with pytest.raises(ValueError, match=r"line 2: id 1 is already used in an earlier row"):
        list_table(tmp_path / "a.jsonl")
    data, counts = list_table(tmp_path / "a.jsonl", on_error="skip")
    assert [each[2] for each in data["sentences"]] == ["c 0", "c 2", "c 3"] and counts["dropped"] == {"duplicate id": 1}

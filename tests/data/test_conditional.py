"""C-STS: reading its columns, filling prompts. All rows are made up."""

import logging

import pytest
from datasets import Dataset

from raoe_train.data.conditional import (
    TEMPLATE,
    conditional_table,
    with_condition,
    with_conditions,
)

HEADER = "sentence1,sentence2,condition,label\n"
ROWS = (
    HEADER
    + '"A man, in red, rows.",Two women paddle a canoe.,The color of the clothes.,2\n'
    + '"A man, in red, rows.",Two women paddle a canoe.,The kind of sport.,5\n'
    + '"He said ""stop"".",She sang.,What is said.,1\n'
)


def read_conditional(*source, **asked):
    return conditional_table(*source, **asked)[0]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_columns_as_published(tmp_path):
    data, counts = conditional_table(write(tmp_path / "csts_train.csv", ROWS))
    assert data["sentence1"] == ["A man, in red, rows.", "A man, in red, rows.", 'He said "stop".']
    assert data["sentence2"][2] == "She sang."
    assert data["condition"] == ["The color of the clothes.", "The kind of sport.", "What is said."]
    assert data["score"] == [2.0, 5.0, 1.0]
    assert len(data) == 3
    assert counts == {"read": 3, "kept": 3, "other_split": 0, "dropped": {}}


def test_hidden_labels(tmp_path):
    for hidden in ("-1", "-1.0"):
        data = read_conditional(write(tmp_path / "test.csv", HEADER + f"a,b,c,{hidden}\nd,e,f,{hidden}\n"))
        assert len(data) == 2 and "score" not in data.column_names
    mixed = write(tmp_path / "mixed.csv", HEADER + "a,b,c,-1\nd,e,f,3\ng,h,i,4\n")
    for on_error in ("raise", "skip"):
        with pytest.raises(ValueError, match=r"mixed\.csv: 1 labels are hidden \(-1\) and 2 are not"):
            read_conditional(mixed, on_error=on_error)


def test_mapped_columns_positions_and_splits(tmp_path):
    path = write(tmp_path / "a.tsv", "text1\ttext2\taspect\tgold\tfold\na\tb\tc\t1.5\tx\nd\te\tf\t2\ty\n")
    mapping = {"condition": "aspect", "label": "gold", "split": "fold"}
    data, counts = conditional_table(path + "#x", columns=mapping)
    assert (data["sentence1"], data["condition"], data["score"]) == (["a"], ["c"], [1.5])
    assert counts == {"read": 2, "kept": 1, "other_split": 1, "dropped": {}}
    unread = read_conditional(path, columns={"condition": "aspect", "label": None})
    assert unread.column_names == ["sentence1", "sentence2", "condition"]
    bare = write(tmp_path / "b.csv", "a,b,c,4\n")
    data = read_conditional(bare, columns={"sentence1": 0, "sentence2": 1, "condition": 2, "label": 3})
    assert (data["condition"], data["score"]) == (["c"], [4.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sentence1,sentence2,label\na,b,1\n", "a.csv, line 2: no column 'condition' for condition; there are: 'sent"),
        ("sentence1,sentence2,condition\na,b,c\n", "a.csv, line 2: no column for label"),
        ("sentence1,condition,label\na,c,1\n", "a.csv, line 2: no column for sentence2"),
        (HEADER + "a,b,c,1\na,b,c,0\n", r"a.csv, line 3: label 0 is neither 1 to 5 nor -1 \(hidden\)"),
        (HEADER + "a,b,c,5.5\n", "line 2: label 5.5 is neither"),
        (HEADER + "a,b,c,high\n", "line 2: label is 'high', not a number"),
        (HEADER + "a,b,c,\n", "line 2: label is '', not a number"),
        (HEADER + "a,b,c,nan\n", "line 2: label is 'nan', not a finite number"),
        (HEADER + '"over\ntwo",b, ,1\n', "line 2: condition is empty"),
        (HEADER + '"over\ntwo",b,c,1\n,b,c,1\n', "line 4: sentence1 is empty"),
        (HEADER + "a,b,c\n", "line 2: 3 fields where the header names 4"),
        (HEADER, "no pair left of 0 rows: there are no rows"),
    ],
)
def test_errors_name_the_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_conditional(write(tmp_path / "a.csv", text))


def test_malformed_rows_are_skipped_and_counted(tmp_path, caplog):
    text = HEADER + "a,b,c,1\n\na,b,c,6\na,b, ,2\na,b\nd,e,f,5\n"
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(ValueError, match=r"^\S*a\.csv, line 4: label 6 is neither"):  # and not for the blank line 3
        read_conditional(path)
    with caplog.at_level(logging.WARNING):
        data, counts = conditional_table(path, on_error="skip")
    assert (data["sentence1"], data["score"]) == (["a", "d"], [1.0, 5.0])
    dropped = {"blank line": 1, "bad label": 1, "empty sentence": 1, "malformed row": 1}
    assert counts == {"read": 6, "kept": 2, "other_split": 0, "dropped": dropped}
    assert "4 of 6 rows left out" in caplog.text
    with pytest.raises(ValueError, match=r"no pair left of 1 rows: 1 x bad label\n  .*line 2: label 9"):
        read_conditional(write(tmp_path / "b.csv", HEADER + "a,b,c,9\n"), on_error="skip")
    with pytest.raises(ValueError, match="on_error must be"):
        read_conditional(tmp_path / "a.csv", on_error="ignore")


def test_the_prompt():
    assert (
        with_condition("A man rows.", "the sport")
        == 'Given the context the sport, summarize the sentence A man rows. in one word:"'
    )
    assert with_condition("{condition} {0}", "{text}", "{text}|{condition}|{{}}") == "{condition} {0}|{text}|{}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{text}", "it has {text}"),
        ("about {condition}", "it has {condition}"),
        ("nothing", "it has none"),
        ("{text} {condition} {label}", "no other; it has {condition}, {label}, {text}"),
        ("{text.__class__} {condition}", "no other"),
        ("{} {condition} {text}", "no other"),
        ("{text} {condition", "expected '}'"),
        ("{text} {condition} }", "Single '}'"),
    ],
)
def test_templates_are_checked(template, message):
    with pytest.raises(ValueError, match="template ") as error:
        with_condition("a", "b", template)
    assert message in str(error.value)


def test_texts_to_encode():
    pairs = Dataset.from_dict({"sentence1": ["a", "b"], "sentence2": ["c", "d"], "condition": ["x", "y"]})
    assert with_conditions(pairs, "{condition}: {text}") == (["x: a", "y: b"], ["x: c", "y: d"])
    assert with_conditions(pairs)[1][1] == TEMPLATE.format(condition="y", text="d")

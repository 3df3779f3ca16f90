"""C-STS: reading its columns, filling prompts. All rows are made up."""

import pytest

from raoe_train.data.pairs import conditional_table, split_conditional
from tests.data.made import write

PROMPT = 'Given the context {condition}, summarize the sentence {text} in one word:"'
HEADER = "sentence1,sentence2,condition,label\n"
ROWS = (
    HEADER
    + '"A man, in red, rows.",Two women paddle a canoe.,The color of the clothes.,2\n'
    + '"A man, in red, rows.",Two women paddle a canoe.,The kind of sport.,5\n'
    + '"He said ""stop"".",She sang.,What is said.,1\n'
)


def read_conditional(source, prompt="{condition}|{text}", **asked):
    return conditional_table(source, prompt, **asked)[0]


def test_columns_as_published(tmp_path):
    data, counts = conditional_table(write(tmp_path / "csts_train.csv", ROWS), PROMPT)
    assert data["sentence1"][:2] == [
        "Given the context The color of the clothes., summarize the sentence A man, in red, rows.",
        "Given the context The kind of sport., summarize the sentence A man, in red, rows.",
    ]
    assert data["sentence1"][2].endswith('What is said., summarize the sentence He said "stop".')
    assert data["sentence2"][2] == "Given the context What is said., summarize the sentence She sang."
    assert data.column_names == ["sentence1", "sentence2", "score"] and data["score"] == [2.0, 5.0, 1.0]
    assert counts == {"read": 3, "kept": 3, "dropped": {}}


def test_texts_are_inserted_unchanged(tmp_path):
    data = read_conditional(write(tmp_path / "a.csv", HEADER + "{condition} {0},{text},{text},1\n"))
    assert data.to_list() == [{"sentence1": "{text}|{condition} {0}", "sentence2": "{text}|{text}", "score": 1.0}]


def test_hidden_labels(tmp_path):
    unlabelled = write(tmp_path / "new.csv", "sentence1,sentence2,condition\na,b,c\n")
    assert read_conditional(unlabelled, scored=False).column_names == ["sentence1", "sentence2"]
    for hidden in ("-1", "-1.0"):
        path = write(tmp_path / "test.csv", HEADER + f"a,b,c,{hidden}\nd,e,f,{hidden}\n")
        assert read_conditional(path, scored=False).column_names == ["sentence1", "sentence2"]
        with pytest.raises(ValueError, match=r"test\.csv, line 2: label is -1, which marks a hidden label"):
            read_conditional(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sentence1,sentence2,label\na,b,1\n", "a.csv, line 2: no column for condition .*condition=COLUMN: 'sent"),
        (HEADER + "a,b,c,1\na,b,c,0\n", r"a.csv, line 3: label must be from 1 to 5, got 0"),
        (HEADER + "a,b,c,high\n", "line 2: label is 'high', not a number"),
        (HEADER + '"over\ntwo",b, ,1\n', "line 2: condition is empty"),
    ],
)
def test_errors_name_the_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_conditional(write(tmp_path / "a.csv", text))
    if "from 1 to 5" in message:
        skipped = conditional_table(tmp_path / "a.csv", PROMPT, on_error="skip")[1]
        assert skipped == {"read": 2, "kept": 1, "dropped": {"bad label": 1}}


@pytest.mark.parametrize(
    ("prompt", "there"),
    [
        ("{text}", "it contains {text}"),
        ("{text} {condition}", "it contains {text}, {condition}"),
        ("{condition} {text} {label}", "it contains {condition}, {text}, {label}"),
        ("{condition} {text.__class__}", "it contains {condition}, {text.__class__}"),
        ("{text} {condition", "it contains {text}"),
    ],
)
def test_prompts_are_checked(prompt, there):
    with pytest.raises(ValueError, match="prompt ") as error:
        split_conditional(prompt)
    assert there in str(error.value)

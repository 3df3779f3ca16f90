"""The ledger: lines by id that a kill cannot halve, of any kind."""

from __future__ import annotations

import json

import pytest

from raoe_train.artifacts.ledger import Ledger
from raoe_train.artifacts.writing import write_json

SETTINGS = {"of": "what decides"}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "words.jsonl"


def write(ledger, *lines):
    with ledger.writing():
        for line in lines:
            ledger.write(line)


def test_one_process_at_a_time(output):
    ledger = Ledger(output, "word", "word")
    with ledger.writing():
        with pytest.raises(ValueError, match="another process is writing to it"):
            with Ledger(output, "word", "word").writing():
                pass
        with Ledger(output, "word", "word", 1, 2).writing():
            pass
    with ledger.writing():
        pass


def test_lines_of_any_kind_go_from_settings_to_summary(output):
    first, second = (Ledger(output, "word", "word", rank, 2) for rank in (0, 1))
    with first.locked():
        assert first.claim(SETTINGS, overwrite=False) is None
        write_json(first.summary, {"settings": SETTINGS})
    write(first, {"id": 3, "word": "three"}, {"id": 1, "word": "one", "reason": "too short"})
    assert [path.read_bytes().count(b"\n") for path in first.own.values()] == [1, 1]
    assert b"too short" in first.own[False].read_bytes()
    with first.locked():
        assert first.finish([1, 2, 3], dict) is None  # the other's is missing
    with open(second.own[True], "wb") as file:
        file.write(b'{"id": 2, "wo')  # what a kill leaves
    write(second, {"id": 2, "word": "two"})
    assert first.done() == {1, 2, 3}
    with second.locked():
        assert second.claim(SETTINGS, overwrite=False) == {"settings": SETTINGS}
        good, bad = second.finish([1, 2, 3], lambda line: line["word"])
        assert (good, bad) == (["two", "three"], ["one"])
        write_json(second.summary, {"output": str(output), "settings": SETTINGS})
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == [2, 3]
    assert sorted(path.name for path in output.parent.iterdir()) == [
        "words.jsonl", "words.jsonl.failed.jsonl", "words.jsonl.json"
    ]  # fmt: skip
    with first.locked():
        assert first.claim(SETTINGS, overwrite=False)["output"] == str(output)
        with pytest.raises(ValueError, match=r"words\.jsonl is there already, not from these settings and inputs"):
            first.claim({}, overwrite=False)
        assert first.claim({}, overwrite=True) is None
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("line", ['{"id": 2}', '{"word": "two"}', '{"id": "2", "word": "two"}', "[]", "{"])
def test_a_line_that_is_none_of_ours(output, line):
    ledger = Ledger(output, "word", "word")
    output.write_text(line + "\n" + '{"id": 1, "word": "one"}\n')
    with pytest.raises(ValueError, match=r"words\.jsonl, line 1: not a word; was the file changed\? overwrite begins"):
        ledger.done()
    output.write_text('{"id": 1, "word": "one"}\n' + line + "\n")  # at the end it may be a kill's
    assert ledger.done() == {1}


def test_a_last_line_that_lacks_only_its_end(output):
    """What is written after it would stand in the same line."""
    ledger = Ledger(output, "word", "word")
    write(ledger, {"id": 1, "word": "one"})
    with open(ledger.own[True], "ab") as file:
        file.write(b'{"id": 2, "word": "two"}')
    assert ledger.done() == {1}
    write(ledger, {"id": 3, "word": "three"})
    assert ledger.done() == {1, 3}

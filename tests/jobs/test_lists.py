"""Lists of sentences: reading chains, whatever state their file is in, and making lists of pairs."""

from __future__ import annotations

import gzip
import itertools
import json
import math

import numpy as np
import pytest
import torch

from raoe_train import run
from raoe_train.artifacts import once
from raoe_train.cli import main
from raoe_train.data.ranking_lists import list_table
from raoe_train.encoders import frozen
from raoe_train.jobs.lists import geometric_ranks, lists_from_pairs
from tests.tiny import SENTENCES, saved_encoder, tiny_encoder


def read_lists(*source, **asked):
    return list_table(*source, **asked)[0]


def chain(name, *sentences):
    return json.dumps({"id": name, "sentences": sentences or SENTENCES[:4], "method": "directional", "versions": {}})


def write(folder, *lines, end="\n"):
    path = folder / "chains.jsonl"
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return str(path)


def test_reads_what_generate_writes(tmp_path):
    source = write(tmp_path, chain("a"), chain(7, "x", "y\u2028z", "x"), '{"sentences": ["1", "2", "3", "4"]}')
    found, counts = list_table(source)
    assert found["id"] == ["a", "7", "line 3"]
    assert found["sentences"] == [SENTENCES[:4], ["x", "y\u2028z", "x"], ["1", "2", "3", "4"]]
    assert counts == {"read": 3, "kept": 3, "dropped": {}}
    assert found["sentences"][1] == ["x", "y\u2028z", "x"]
    zipped = tmp_path / "chains.jsonl.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "chains.jsonl").read_bytes()))
    assert read_lists(zipped)["sentences"] == found["sentences"]
    found.to_parquet(str(tmp_path / "chains.parquet"))
    assert read_lists(tmp_path / "chains.parquet")["sentences"] == found["sentences"]


def test_one_split(tmp_path):
    rows = [{"split": split, "sentences": [split, "b", "c"]} for split in ("train", "dev", "train")]
    source = write(tmp_path, *map(json.dumps, rows))
    found, counts = list_table(f"{source}#dev")
    assert found["sentences"] == [["dev", "b", "c"]] and counts["read"] == 1


@pytest.mark.parametrize(
    ("bad", "reason", "message"),
    [
        ('{"id": "b", "sentences": ["x", null, "z"]}', "hole", "line 2: sentence 1 is None, not a text; .* no holes"),
        ('{"id": "b", "sentences": ["x", "y", " "]}', "hole", "line 2: sentence 2 is empty; a list has no holes"),
        ('{"id": "b", "sentences": ["x", "y", 3, "z"]}', "hole", "line 2: sentence 2 is 3, not a text"),
        ('{"id": "b", "sentences": ["x", "\\ud83d", "z"]}', "malformed row", "line 2: half of a surrogate pair"),
        ('{"id": "b", "sentences": ["x", "y"]}', "shorter than 3", "line 2: 2 sentences, where a ranking takes .* 3"),
        ('{"id": "b", "sentences": []}', "shorter than 3", "line 2: 0 sentences"),
        ('{"id": "b", "sentences": "x y z"}', "no list", "line 2: no list of sentences in a column 'sentences'"),
        ('{"id": "b", "text": "x"}', "no list", "there are: 'id', 'text'"),
        ('["x", "y", "z"]', "malformed row", "line 2: a JSON list, not an object"),
        ('{"id": "b", "sentences": ["x", "y"', "malformed row", "line 2: not JSON"),
        (chain("a", "p", "q", "r"), "duplicate id", "line 2: id 'a' is that of line 1, too"),
    ],
)
def test_a_malformed_list_is_an_error_or_a_counted_skip(tmp_path, bad, reason, message):
    source = write(tmp_path, chain("a"), bad, chain("c"))
    with pytest.raises(ValueError, match=message):
        read_lists(source)
    found, counts = list_table(source, on_error="skip")
    assert found["id"] == ["a", "c"] and found["sentences"] == [SENTENCES[:4]] * 2
    assert counts == {"read": 3, "kept": 2, "dropped": {reason: 1}}


def test_a_last_line_that_was_cut_off(tmp_path):
    source = write(tmp_path, chain("a"), chain("b")[:-20], end="")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        read_lists(source)
    assert list_table(source, on_error="skip")[1]["dropped"] == {"malformed row": 1}


def test_not_utf8_and_blank_lines(tmp_path):
    path = tmp_path / "chains.jsonl"
    path.write_bytes(f"{chain('a')}\n\n".encode() + b'{"id": "b", "sentences": ["\xff", "y", "z"]}\n')
    with pytest.raises(ValueError, match="line 3: not UTF-8"):
        read_lists(path)
    assert list_table(path, on_error="skip")[1]["dropped"] == {"blank line": 1, "malformed row": 1}


def test_nothing_left(tmp_path):
    source = write(tmp_path, chain("a", "x", "y"), chain("b", "x"))
    with pytest.raises(ValueError, match=r"no list left of 2 rows: 2 x shorter than 3\n.*line 1: 2 sentences"):
        read_lists(source, on_error="skip")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="no list left of 0 rows: there are no rows"):
        read_lists(tmp_path / "empty.jsonl")
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_lists(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="on_error must be"):
        read_lists(source, on_error="ignore")


@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 7, 40, 1000])
def test_geometric_ranks(ranks):
    for count in (0, 1, 2, 3, 12, 39, 40, 41):
        found = geometric_ranks(ranks, count)
        assert len(found) == min(count, ranks)
        assert all(a < b for a, b in itertools.pairwise(found))
        if len(found) > 1:
            assert found[0] == 0 and found[-1] == ranks - 1
    assert geometric_ranks(1000, 4) == [0, 9, 99, 999]


def test_lists_from_pairs_by_hand():
    """Sentences on a circle: the premise at 0 degrees, 40 others at 4, 8, … 160, one hypothesis at 61."""
    angles = [0, *range(4, 164, 4), 61]
    pool = ["p", *(str(angle) for angle in range(4, 164, 4)), "h"]
    embeddings = np.array([[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in angles]) * 3
    ((sentences, similarity),) = lists_from_pairs({"p": ["h", "p"]}, pool, embeddings.astype(np.float32), 6)
    # Of the 40 others those at ranks 1, 3, 12 and 40: 40 ^ (0, 1/3, 2/3, 1).
    assert sentences == ["p", "4", "12", "48", "h", "160"]
    expected = [math.cos(math.radians(angle)) for angle in (0, 4, 12, 48, 61, 160)]
    np.testing.assert_allclose(similarity, expected, atol=1e-4)
    # Of too many hypotheses the first; of too few sentences all.
    ((sentences, _),) = lists_from_pairs({"p": ["8", "160", "12"]}, pool, embeddings, 3)
    assert sentences == ["p", "8", "160"]
    ((sentences, _),) = lists_from_pairs({"p": ["h"]}, pool, embeddings, 100)
    assert sorted(sentences) == sorted(pool) and sentences[0] == "p"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return saved_encoder(tmp_path_factory.mktemp("teacher"))


def pairs_file(folder):
    lines = ["premise\thypothesis\tlabel"]
    for n, premise in enumerate(SENTENCES[:4]):
        lines += [f"{premise}\t{SENTENCES[4 + n]}\tentailment", f"{premise}\t{SENTENCES[5 + n]}\t-"]
    (folder / "nli.tsv").write_text("\n".join(lines) + "\n")
    return str(folder / "nli.tsv")


def test_the_job_lists(tmp_path, teacher, monkeypatch):
    asked = {
        "data.input": pairs_file(tmp_path),
        "teacher.name": teacher,
        "teacher.device": "cpu",
        "length": 6,
        "output": str(tmp_path / "lists.jsonl"),
    }
    made = run("lists", **asked)
    assert made["lists"] == 4 and made["sentences"] == 24 and len(made["similarity"]) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lists.jsonl", "lists.jsonl.json", "nli.tsv"]
    rows = [json.loads(line) for line in (tmp_path / "lists.jsonl").read_text().splitlines()]
    assert [row["sentences"][0] for row in rows] == SENTENCES[:4]
    found = read_lists(tmp_path / "lists.jsonl")
    assert found["id"] == [row["id"] for row in rows] and len(set(found["id"])) == 4
    assert set(rows[0]) == {"id", "sentences", "similarity", "method", "settings", "model", "versions"}
    encoder = tiny_encoder(double=False)
    for number, row in enumerate(rows):
        # The rows without a gold label count, too, and the order is the teacher's.
        assert {SENTENCES[4 + number], SENTENCES[5 + number]} <= set(row["sentences"])
        assert len(set(row["sentences"])) == 6
        vectors = torch.tensor(encoder.encode(row["sentences"]))
        cosine = torch.nn.functional.cosine_similarity(vectors, vectors[:1])
        torch.testing.assert_close(torch.tensor(row["similarity"]), cosine, atol=1e-4, rtol=0)
        assert row["similarity"] == sorted(row["similarity"], reverse=True)
    before = (tmp_path / "lists.jsonl").read_bytes()
    with monkeypatch.context() as patch:  # again: nothing is encoded
        patch.setattr("raoe_train.encoders.frozen.embedder", None)
        assert run("lists", **asked) == made
    with pytest.raises(ValueError, match="not from these settings"):
        run("lists", **asked, max_lists=2)
    two = run("lists", **asked, max_lists=2, overwrite=True)
    drawn = [json.loads(line) for line in (tmp_path / "lists.jsonl").read_text().splitlines()]
    assert two["lists"] == 2 and all(row in rows for row in drawn)
    (tmp_path / "lists.jsonl").unlink()
    run("lists", **asked)
    assert (tmp_path / "lists.jsonl").read_bytes() == before


def test_a_killed_job_goes_on(tmp_path, teacher, monkeypatch):
    monkeypatch.setattr(once, "SHARD", 3)
    asked = {"data.input": pairs_file(tmp_path), "teacher.name": teacher, "length": 5}
    whole = run("lists", **asked, output=str(tmp_path / "whole.jsonl"))
    encode, encoded, limit = frozen.encode_sentences, [], 2

    def counting(model, sentences, *rest):
        if len(encoded) == limit:
            raise KeyboardInterrupt
        encoded.append(len(sentences))
        return encode(model, sentences, *rest)

    output = tmp_path / "killed.jsonl"
    monkeypatch.setattr(frozen, "encode_sentences", counting)
    with pytest.raises(KeyboardInterrupt):
        run("lists", **asked, output=str(output))
    assert encoded == [3, 3] and not output.exists()
    limit = 99
    assert run("lists", **asked, output=str(output))["similarity"] == whole["similarity"]
    assert encoded == [3, 3, 3] and output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.input": None}, "--data.input is missing"),
        ({"output": None}, "--output is missing"),
        ({"teacher.name": None}, "--teacher.name is missing"),
        ({"length": 2}, "length must be at least 3, got 2"),
        ({"max_lists": 0}, "max_lists must be at least 1, got 0"),
        ({"output": "x.tsv"}, "lists are written as .jsonl"),
        ({"data.input": "none.tsv"}, "no such file"),
        ({"teacher.name": "./nowhere"}, "no such model directory"),
    ],
)
def test_settings_that_cannot_be(tmp_path, changes, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = {"data.input": pairs_file(tmp_path), "teacher.name": "x", "output": "x.jsonl", **changes}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("lists", **made)


def test_too_few_sentences(tmp_path, capsys):
    (tmp_path / "two.tsv").write_text("premise\thypothesis\na b\tc d\n")
    words = ["--data.input", str(tmp_path / "two.tsv"), "--teacher.name", "x", "--output", str(tmp_path / "x.jsonl")]
    assert main(["lists", *words]) == 2
    assert "2 different sentences are too few: a list takes at least 3" in capsys.readouterr().err

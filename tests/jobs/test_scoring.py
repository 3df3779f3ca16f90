"""Scoring pairs with two teachers: the numbers, resuming after a kill, and whose place the output is."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from raoe_train.artifacts import once
from raoe_train.data import read_pairs
from raoe_train.data.files import read_rows
from raoe_train.jobs import score as scoring
from raoe_train.old_recipe import load
from tests.tiny import SENTENCES, tiny_encoder

LABELS = ("entailment", "neutral", "contradiction", "-")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    for name, pooling in (("A", "mean"), ("B", "cls")):
        tiny_encoder(double=False, pooling=pooling).save(str(folder / name))
    return [str(folder / "A"), str(folder / "B")]


@pytest.fixture
def pairs(tmp_path):
    rows = [
        (SENTENCES[i % 11], SENTENCES[(i * i + 3) % 11], LABELS[i % 4], "train" if i % 5 else "dev")
        for i in range(50)
    ]
    path = tmp_path / "pairs.tsv"
    path.write_text("premise\thypothesis\tlabel\tsplit\n" + "".join("\t".join(row) + "\n" for row in rows))
    return path


def config(pairs, teachers, output, **more):
    return load(
        "score",
        None,
        {"data.input": str(pairs), "teachers": teachers, "output": str(output), "device": "cpu", **more},
    )


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(once, "SHARD", 8)


@pytest.fixture
def encoded(monkeypatch):
    """Counts what is given to the teachers; the encoding itself is real."""
    calls = []
    real = scoring.encode_sentences

    def counting(model, sentences, *rest, **options):
        calls.append(len(sentences))
        return real(model, sentences, *rest, **options)

    monkeypatch.setattr(scoring, "encode_sentences", counting)
    return calls


def test_scores(pairs, teachers, tmp_path, small_shards):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import pairwise_cos_sim

    output = tmp_path / "scored.tsv"
    result = scoring.score(config(f"{pairs}#train", teachers, output))
    rows = [fields for _, fields in read_rows(output)]
    before = [fields for _, fields in read_rows(pairs) if fields["split"] == "train"]
    assert [{k: v for k, v in row.items() if not k.startswith("score")} for row in rows] == before
    assert list(rows[0]) == ["premise", "hypothesis", "label", "split", "score_1", "score_2", "score"]
    for column, name in zip(("score_1", "score_2"), teachers, strict=True):
        model = SentenceTransformer(name, device="cpu")
        a, b = (
            model.encode([row[text] for row in before], convert_to_tensor=True)
            for text in ("premise", "hypothesis")
        )
        np.testing.assert_allclose(
            [float(row[column]) for row in rows], pairwise_cos_sim(a, b).numpy(), atol=2e-6
        )
    mean = [(float(row["score_1"]) + float(row["score_2"])) / 2 for row in rows]
    np.testing.assert_allclose([float(row["score"]) for row in rows], mean, atol=1e-12)
    assert any(row["score_1"] != row["score_2"] for row in rows)  # the teachers do differ

    summary = json.loads((tmp_path / "scored.tsv.json").read_text())
    assert summary == result
    assert result["rows"] == 40
    assert set(result["by_label"]) == {*LABELS[:3], "no label"}
    neutral = [value for value, row in zip(mean, before, strict=True) if row["label"] == "neutral"]
    assert result["by_label"]["neutral"]["mean"] == pytest.approx(np.mean(neutral))
    assert (tmp_path / "scored.tsv.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "scored.tsv.parts").exists()
    data = read_pairs(output)  # and what it wrote is what training reads
    assert data.score == pytest.approx(
        [value for value, row in zip(mean, before, strict=True) if row["label"] != "-"]
    )


def test_going_on_after_a_failure(pairs, teachers, tmp_path, small_shards, encoded, monkeypatch):
    whole = tmp_path / "whole.tsv"
    scoring.score(config(pairs, teachers, whole))
    shards = [16] * 6 + [4]
    assert encoded == shards * 2
    encoded.clear()
    output = tmp_path / "scored.tsv"
    counting = scoring.encode_sentences

    def failing(*arguments, **options):
        if len(encoded) == 9:
            raise RuntimeError("out of memory")
        return counting(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "encode_sentences", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            scoring.score(config(pairs, teachers, output))
    assert not output.exists()
    with pytest.raises(ValueError, match="unfinished work of other teachers"):
        scoring.score(config(pairs, teachers[::-1], output))
    encoded.clear()
    scoring.score(config(pairs, teachers, output, batch_size=2))
    assert encoded == (shards * 2)[9:]
    ours, theirs = ([f for _, f in read_rows(path)] for path in (output, whole))
    assert [row["premise"] for row in ours] == [row["premise"] for row in theirs]
    np.testing.assert_allclose(
        [float(r["score"]) for r in ours], [float(r["score"]) for r in theirs], atol=2e-6
    )
    encoded.clear()
    scoring.score(config(pairs, teachers, output))
    assert encoded == []  # done before


@pytest.mark.slow
def test_going_on_after_a_kill(pairs, teachers, tmp_path):
    """SIGKILL once the first shards are on disk; the next run must finish without redoing them."""
    more = "".join(f"a man number {i}\tpeople walk\tneutral\ttrain\n" for i in range(3000))
    pairs.write_text(pairs.read_text() + more)
    output = tmp_path / "scored.tsv"
    code = (
        "import sys, raoe_train.jobs.score as s; from raoe_train.old_recipe import load\n"
        "from raoe_train.artifacts import once; once.SHARD = 16\n"
        "s.score(load('score', None, {'data.input': sys.argv[1], 'teachers': sys.argv[2:4], "
        "'output': sys.argv[4], 'device': 'cpu'}))"
    )
    command = [sys.executable, "-c", code, str(pairs), *teachers, str(output)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    parts = tmp_path / "scored.tsv.parts"
    while process.poll() is None and len(list(parts.glob("score_*.npy"))) < 5:
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in parts.glob("score_*.npy")}
    assert 5 <= len(kept) < 380
    assert not output.exists()
    second = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    now = {}
    while second.poll() is None:
        now = {name: (parts / name).stat().st_mtime_ns for name in kept if (parts / name).exists()} or now
        time.sleep(0.01)
    assert second.returncode == 0
    assert now, "the second run ended before it was looked at"
    assert {name: kept[name] for name in now} == now
    assert [fields["premise"] for _, fields in read_rows(output)] == [
        fields["premise"] for _, fields in read_rows(pairs)
    ]


def test_shards_that_a_kill_left_of_another_job_are_not_taken(pairs, teachers, tmp_path, small_shards, encoded):
    """Killed while another job's parts were removed, the manifest first."""
    whole, output = tmp_path / "whole.tsv", tmp_path / "scored.tsv"
    scoring.score(config(pairs, teachers, whole))
    parts = tmp_path / "scored.tsv.parts"
    for manifest in (None, {"teachers": "others"}):
        parts.mkdir(exist_ok=True)
        np.save(parts / "score_1-000000.npy", np.full(8, 0.5))
        if manifest is not None:
            output.unlink()
            (parts / "manifest.json").write_text(json.dumps(manifest))
            with pytest.raises(ValueError, match="unfinished work of other teachers"):
                scoring.score(config(pairs, teachers, output))
        scoring.score(config(pairs, teachers, output, overwrite=manifest is not None))
        assert output.read_bytes() == whole.read_bytes()
        assert not parts.exists()


def test_processes_share_the_work(pairs, teachers, tmp_path, small_shards, encoded, monkeypatch):
    """Three of them, of which one dies and another never starts; then two."""
    whole, output = tmp_path / "whole.tsv", tmp_path / "scored.tsv"
    expected = scoring.score(config(pairs, teachers, whole))
    encoded.clear()
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, sizes in ((2, [16, 16]), (0, [16, 16, 4])):
        monkeypatch.setenv("RANK", str(rank))
        assert scoring.score(config(pairs, teachers, output)) == {"output": str(output), "waiting": True}
        assert encoded == sizes * 2 and not output.exists()
        encoded.clear()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        found = scoring.score(config(pairs, teachers, output))
        assert found.get("waiting", False) == (rank == 0)
        assert encoded == [16, 16]
        encoded.clear()
    assert found == {**expected, "output": str(output)}
    assert output.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "scored.tsv.parts").exists()
    assert scoring.score(config(pairs, teachers, output)) == found and encoded == []


def test_whose_place_it_is(pairs, teachers, tmp_path, encoded):
    output = tmp_path / "scored.jsonl"
    scoring.score(config(pairs, teachers, output))
    for other in (
        config(f"{pairs}#dev", teachers, output),
        config(pairs, teachers[::-1], output),
        config(pairs, teachers, output, teacher={teachers[0]: {"prompt": "q: "}}),
    ):
        with pytest.raises(ValueError, match="not from these settings"):
            scoring.score(other)
    text = pairs.read_text()
    pairs.write_text(text.replace("people walk", "people run"))
    with pytest.raises(ValueError, match="not from these settings"):
        scoring.score(config(pairs, teachers, output))
    pairs.write_text(text)
    before = output.read_bytes()
    encoded.clear()
    result = scoring.score(config(f"{pairs}#dev", teachers, output, overwrite=True))
    assert (result["rows"], encoded) == (10, [20, 20])
    assert output.read_bytes() != before


def test_options_reach_the_right_teacher(pairs, teachers, tmp_path, monkeypatch):
    seen = []
    real = scoring.encode_sentences
    monkeypatch.setattr(
        scoring, "encode_sentences", lambda *a, **options: (seen.append(options), real(*a, **options))[1]
    )
    options = {teachers[1]: {"prompt": "query: "}}
    with_prompt = scoring.score(config(pairs, teachers, tmp_path / "a.tsv", teacher=options))
    assert seen == [{}, {"prompt": "query: "}]
    without = scoring.score(config(pairs, teachers, tmp_path / "b.tsv"))
    assert with_prompt["mean"] != without["mean"]


def test_teachers():
    paper = scoring.resolve_teachers([], {})
    assert list(paper) == ["Lajavaness/bilingual-embedding-large", "jinaai/jina-embeddings-v3"]
    assert paper["jinaai/jina-embeddings-v3"] == {"trust_remote_code": True, "task": "text-matching"}
    changed = scoring.resolve_teachers([], {"jinaai/jina-embeddings-v3": {"task": "classification"}})
    assert changed["jinaai/jina-embeddings-v3"] == {"trust_remote_code": True, "task": "classification"}
    assert scoring.resolve_teachers(["a", "b"], {"b": {"prompt": "x"}}) == {"a": {}, "b": {"prompt": "x"}}
    for names in (["a"], ["a", "a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="two different encoders"):
            scoring.resolve_teachers(names, {})
    with pytest.raises(ValueError, match="not among the teachers"):
        scoring.resolve_teachers(["a", "b"], {"c": {}})
    with pytest.raises(ValueError, match="teacher options of a are task"):
        scoring.resolve_teachers(["a", "b"], {"a": {"propmt": "x"}})


def test_wrong_input_shows_before_any_teacher_is_loaded(pairs, tmp_path):
    def run(content, output="out.tsv", name="in.tsv", **more):
        (tmp_path / name).write_text(content)
        return scoring.score(
            config(tmp_path / name, ["no/such/teacher/a", "no/such/teacher/b"], tmp_path / output, **more)
        )

    header = "sentence1\tsentence2\n"
    with pytest.raises(ValueError, match="has score already"):
        run("sentence1\tsentence2\tscore\na\tb\t1\n")
    with pytest.raises(ValueError, match="line 3: 1 fields"):
        run(header + "a\tb\nc\n")
    with pytest.raises(ValueError, match="line 2: sentence1 is empty"):
        run(header + "\tb\n")
    with pytest.raises(ValueError, match="there are no rows"):
        run(header)
    with pytest.raises(ValueError, match=r"line 1: a tsv file cannot hold \['x'\]"):
        run('{"sentence1": "a", "sentence2": "b", "extra": ["x"]}\n', name="in.jsonl")
    with pytest.raises(ValueError, match="is the input itself"):
        run(header + "a\tb\n", output="in.tsv")
    with pytest.raises(ValueError, match="the suffix names no format"):
        run(header + "a\tb\n", output="out")
    with pytest.raises(FileNotFoundError, match="no such file"):
        scoring.score(config(tmp_path / "nope.tsv", ["a", "b"], tmp_path / "out.tsv"))
    with pytest.raises(FileNotFoundError, match="no such model folder: no/such/teacher/a"):
        run(header + "a\tb\n")


def test_left_out_rows_are_counted(teachers, tmp_path):
    path = tmp_path / "in.tsv"
    path.write_text("sentence1\tsentence2\na\tb\n\nbroken\nc\td\n")
    result = scoring.score(config(path, teachers, tmp_path / "out.tsv", **{"data.on_error": "skip"}))
    assert (result["rows"], result["left_out"]) == (2, {"blank line": 1, "malformed row": 1})
    assert result["by_label"] == {}
    assert not (tmp_path / "out.tsv.png").exists()

"""Scoring pairs with two teachers: numbers, resuming after a failure, the teachers, and input that cannot be scored."""

import json
import re

import numpy as np
import pytest

from raoe_train import parts, run
from raoe_train.data.pairs import read_pairs
from raoe_train.encoders import embed as frozen
from raoe_train.jobs.score import TEACHERS, resolve_teachers
from raoe_train.jobs.settings import ScoreConfig
from raoe_train.settings import FrozenEncoder
from tests.data.made import rows_in
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
        (SENTENCES[i % 11], SENTENCES[(i * i + 3) % 11], LABELS[i % 4], "train" if i % 5 else "dev") for i in range(50)
    ]
    path = tmp_path / "pairs.tsv"
    path.write_text("premise\thypothesis\tlabel\tsplit\n" + "".join("\t".join(row) + "\n" for row in rows))
    return path


def scored(pairs, teachers, output, **more):
    options = {"data.input": str(pairs), "teachers": teachers, "output": str(output), "device": "cpu", **more}
    return run("score", None, **options)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(parts, "SHARD", 8)


@pytest.fixture
def encoded(monkeypatch):
    """Counts the texts that real teachers encode."""
    calls = []
    real = frozen.encode_sentences

    def counting(model, sentences, *rest, **options):
        calls.append(len(sentences))
        return real(model, sentences, *rest, **options)

    monkeypatch.setattr(frozen, "encode_sentences", counting)
    return calls


def test_scores(pairs, teachers, tmp_path, small_shards):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import pairwise_cos_sim

    output = tmp_path / "scored.tsv"
    result = scored(f"{pairs}#train", teachers, output)
    rows = rows_in(output)
    before = [fields for fields in rows_in(pairs) if fields["split"] == "train"]
    assert [{k: v for k, v in row.items() if not k.startswith("score")} for row in rows] == before
    assert list(rows[0]) == ["premise", "hypothesis", "label", "split", "score_1", "score_2", "score"]
    for column, name in zip(("score_1", "score_2"), teachers, strict=True):
        model = SentenceTransformer(name, device="cpu")
        a, b = (
            model.encode([row[text] for row in before], convert_to_tensor=True) for text in ("premise", "hypothesis")
        )
        np.testing.assert_allclose([float(row[column]) for row in rows], pairwise_cos_sim(a, b).numpy(), atol=2e-6)
    mean = [(float(row["score_1"]) + float(row["score_2"])) / 2 for row in rows]
    np.testing.assert_allclose([float(row["score"]) for row in rows], mean, atol=1e-12)
    assert any(row["score_1"] != row["score_2"] for row in rows)  # the teachers differ

    summary = json.loads((tmp_path / "scored.tsv.json").read_text())
    assert result.items() <= summary.items()
    assert result["rows"] == 40
    assert set(result["by_label"]) == {*LABELS[:3], "no label"}
    neutral = [value for value, row in zip(mean, before, strict=True) if row["label"] == "neutral"]
    assert result["by_label"]["neutral"]["mean"] == pytest.approx(np.mean(neutral))
    assert not (tmp_path / "scored.tsv.parts").exists()
    data = read_pairs(output)  # training reads the written file
    assert data["score"] == pytest.approx(
        [value for value, row in zip(mean, before, strict=True) if row["label"] != "-"]
    )


def test_resume_after_a_failure(pairs, teachers, tmp_path, small_shards, encoded, monkeypatch):
    whole = tmp_path / "whole.tsv"
    scored(pairs, teachers, whole)
    shards = [16] * 6 + [4]
    assert encoded == shards * 2
    encoded.clear()
    output = tmp_path / "scored.tsv"
    counting = frozen.encode_sentences

    def failing(*arguments, **options):
        if len(encoded) == 9:
            raise RuntimeError("out of memory")
        return counting(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(frozen, "encode_sentences", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            scored(pairs, teachers, output)
    assert not output.exists()
    encoded.clear()
    scored(pairs, teachers, output, batch_size=2)
    assert encoded == (shards * 2)[9:]
    assert not (tmp_path / "scored.tsv.parts").exists()
    ours, theirs = map(rows_in, (output, whole))
    assert [row["premise"] for row in ours] == [row["premise"] for row in theirs]
    np.testing.assert_allclose([float(r["score"]) for r in ours], [float(r["score"]) for r in theirs], atol=2e-6)
    encoded.clear()
    scored(pairs, teachers, output)
    assert encoded == []  # from the earlier run


def test_options_reach_the_right_teacher(pairs, teachers, tmp_path, monkeypatch):
    seen = []
    real = frozen.encode_sentences
    monkeypatch.setattr(
        frozen, "encode_sentences", lambda *a, **options: (seen.append(options), real(*a, **options))[1]
    )
    options = {teachers[1]: {"prompt": "query: "}}
    with_prompt = scored(pairs, teachers, tmp_path / "a.tsv", teacher=options)
    assert seen == [{}, {"prompt": "query: "}]
    without = scored(pairs, teachers, tmp_path / "b.tsv")
    assert with_prompt["mean"] != without["mean"]


def test_teachers():
    def resolved(names, options, **more):
        return resolve_teachers(ScoreConfig(teachers=names, teacher=options, **more))

    with pytest.raises(ValueError, match=r"run custom code.*allow this with --trust_remote_code true"):
        resolved([], {})
    paper = resolved([], {}, trust_remote_code=True)
    assert [teacher.name for teacher in paper] == ["Lajavaness/bilingual-embedding-large", "jinaai/jina-embeddings-v3"]
    assert all(re.fullmatch("[0-9a-f]{40}", str(teacher.revision)) and teacher.trust_remote_code for teacher in paper)
    assert paper[1].task == "text-matching"
    one, changed = resolved([*TEACHERS], {"jinaai/jina-embeddings-v3": {"task": "classification"}})
    assert not one.trust_remote_code and not changed.trust_remote_code and changed.task == "classification"
    assert resolved(["a", "b"], {"b": {"prompt": "x"}}) == [FrozenEncoder("a"), FrozenEncoder("b", prompt="x")]
    for names in (["a"], ["a", "a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="two different encoders"):
            resolved(names, {})
    with pytest.raises(ValueError, match="options for 'c', which is not one of the teachers"):
        resolved(["a", "b"], {"c": {}})
    with pytest.raises(ValueError, match=r"unknown key teacher\.propmt \(did you mean teacher\.prompt\?\)"):
        resolved(["a", "b"], {"a": {"propmt": "x"}})


def test_folder_named_like_a_teacher_runs_no_code(pairs, tmp_path, monkeypatch):
    """The folder's code leaves a mark if it runs. It must not, by default or with a trusted hub name."""
    folder = tmp_path / "Lajavaness" / "bilingual-embedding-large"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}')
    (folder / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    for trust, message in ((False, "run custom code"), (True, "is both a local folder and a name on the hub")):
        with pytest.raises(ValueError, match=message):
            run("score", **{"data.input": str(pairs), "output": str(tmp_path / "out.tsv"), "trust_remote_code": trust})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sentence1\tsentence2\tscore\na\tb\t1\n", "already has a column score"),
        ("sentence1\tsentence2\na\tb\nc\n", "line 3: 1 fields"),
        ("sentence1\tsentence2\n", "there are no rows"),
    ],
)
def test_input_is_checked_before_teachers_are_loaded(tmp_path, content, message):
    path = tmp_path / "in.tsv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        scored(path, ["no/such/teacher/a", "no/such/teacher/b"], tmp_path / "out.tsv")


def test_skipped_rows_are_counted(teachers, tmp_path):
    path = tmp_path / "in.tsv"
    path.write_text("sentence1\tsentence2\na\tb\n\nbroken\nc\td\n")
    result = scored(path, teachers, tmp_path / "out.tsv", **{"data.on_error": "skip"})
    assert (result["rows"], result["left_out"]) == (2, {"blank line": 1, "malformed row": 1})
    assert result["by_label"] == {}

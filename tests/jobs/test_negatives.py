"""Hard negatives of rows: against brute force, in chunks, resumed, with the model's prompts, and invalid settings."""

import importlib.machinery
import itertools
import json
import sys
import types

import numpy as np
import pytest

from raoe_train import run
from raoe_train.data.rows import row_table
from raoe_train.encoders import embed as frozen
from raoe_train.jobs import mine as job
from tests.tiny import SENTENCES, saved_encoder

QUERIES, PASSAGES = [f"q{n}" for n in range(9)], [f"p{n}" for n in range(30)]
RNG = np.random.default_rng(4)
VECTORS = {text: RNG.normal(size=3).astype(np.float32) for text in (*QUERIES, *PASSAGES)}
POSITIVES = {query: PASSAGES[n : n + 1 + n % 3] for n, query in enumerate(QUERIES)}  # 1 to 3, some of two queries


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Rows with negatives p20 … p28, a corpus with p11 … p29 of which p25 is there twice, and fixed embeddings."""
    rows, corpus = tmp_path / "rows.jsonl", tmp_path / "corpus.jsonl"
    lines = [{"query": q, "pos": p, "neg": [PASSAGES[20 + n]]} for n, (q, p) in enumerate(POSITIVES.items())]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*PASSAGES[11:], PASSAGES[25]]))
    encoded = []

    def embedder(encoder, role, texts=(), kind=None):
        def embed(texts):
            encoded.extend((kind, text) for text in texts)
            return np.array([VECTORS[text] for text in texts])

        return embed

    monkeypatch.setattr(frozen, "embedder", embedder)
    return tmp_path, encoded


def mined(folder, name="mined.jsonl", **mining):
    options = {f"mining.{key}": value for key, value in {"corpus": str(folder / "corpus.jsonl"), **mining}.items()}
    output = folder / name
    result = run(
        "mine", None, **{"model.name": "x", "data.input": str(folder / "rows.jsonl")}, output=str(output), **options
    )
    return [json.loads(line) for line in output.read_text().splitlines()], result


def expected(passages, num_negatives=3, range_min=0, range_max=None, max_score=2.0, absolute=-9.0, relative=-9.0):
    """{query: negatives}, by brute force."""
    unit = {text: vector / np.linalg.norm(vector) for text, vector in VECTORS.items()}
    chosen = {}
    for query, positives in POSITIVES.items():
        cosine = {text: float(unit[query] @ unit[text]) for text in passages}
        lowest = min(cosine[text] for text in positives)
        limit = min(max_score, lowest - absolute, lowest - abs(lowest) * relative)
        ranked = sorted((text for text in passages if text not in positives), key=lambda text: -cosine[text])
        chosen[query] = [text for text in ranked if cosine[text] <= limit][range_min:range_max][:num_negatives]
    return chosen


@pytest.mark.parametrize("chunk", [1, 1 << 24])
@pytest.mark.parametrize(
    ("mining", "arguments"),
    [
        ({}, {}),
        ({"num_negatives": 5, "range_min": 2, "range_max": 30}, {"num_negatives": 5, "range_min": 2, "range_max": 30}),
        ({"max_score": 0.2, "range_max": 30}, {"max_score": 0.2}),
        ({"absolute_margin": 0.1, "range_max": 30}, {"absolute": 0.1}),
        ({"relative_margin": 0.3, "range_max": 30, "num_negatives": 20}, {"relative": 0.3, "num_negatives": 20}),
    ],
)
def test_against_brute_force(files, monkeypatch, chunk, mining, arguments):
    monkeypatch.setattr(job, "CHUNK", chunk)
    rows, result = mined(files[0], **mining)
    passages = {*PASSAGES[11:], *(text for texts in POSITIVES.values() for text in texts)}
    wanted = expected(sorted(passages), **arguments)
    assert [(row["anchor"], row["positive"]) for row in rows] == [
        (q, p) for q, texts in POSITIVES.items() for p in texts
    ]
    for row in rows:
        found = [row[name] for name in row if name.startswith("negative") and row[name] is not None]
        assert found == wanted[row["anchor"]]
    number = mining.get("num_negatives", 3)
    assert result["negatives"] == sum(len(wanted[row["anchor"]]) for row in rows) and result["passages"] == len(
        passages
    )
    assert result["fewer"] == sum(len(wanted[row["anchor"]]) < number for row in rows)
    table, _ = row_table(files[0] / "mined.jsonl")  # what `train` reads
    assert len(table) == len(rows)


def test_negatives_of_the_input_are_kept_if_asked(files, capsys):
    replaced, _ = mined(files[0])
    assert "; to keep them, set --mining.keep_negatives true" in capsys.readouterr().out
    kept, result = mined(files[0], "kept.jsonl", keep_negatives=True)
    assert "replaced" not in capsys.readouterr().out and len(kept) == len(replaced)
    for new, both in zip(replaced, kept, strict=True):
        labelled = PASSAGES[20 + QUERIES.index(new["anchor"])]
        found = [text for name, text in both.items() if name.startswith("negative") and text is not None]
        others = [text for name, text in new.items() if name.startswith("negative") and text not in (None, labelled)]
        assert found == [labelled, *others] and both["positive"] == new["positive"]
    assert result["negatives"] > 3 * len(kept)
    rows = [json.loads(line) for line in (files[0] / "rows.jsonl").read_text().splitlines()]
    rows[0]["neg"], rows[1]["neg"] = rows[1]["neg"], rows[0]["neg"]  # the same passages, of other queries
    (files[0] / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"different: data\.input"):
        mined(files[0], "kept.jsonl", keep_negatives=True)


def test_an_interrupted_job_resumes(files, monkeypatch):
    folder, encoded = files
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(job, "write_rows", lambda *_: (_ for _ in ()).throw(OSError("full")))
        mined(folder)
    assert {kind for kind, text in encoded if text in QUERIES} == {"query"}
    assert {kind for kind, text in encoded if text in PASSAGES} == {"document"}
    assert not (folder / "mined.jsonl").exists()
    encoded.clear()
    rows, _ = mined(folder)
    assert not encoded and rows and not (folder / "mined.jsonl.parts").exists()
    assert mined(folder)[0] == rows and not encoded  # finished
    with pytest.raises(ValueError, match="overwrite"):
        mined(folder, num_negatives=2)


def test_without_a_corpus_and_with_the_prompts_of_the_model(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": a, "pos": [b]}) + "\n" for a, b in itertools.pairwise(SENTENCES)))
    model, prompts = saved_encoder(tmp_path / "model"), []
    encode = frozen.encode_sentences
    monkeypatch.setattr(frozen, "prompt_of", lambda model, kind: {"query": None, "document": "document"}[kind])
    monkeypatch.setattr(frozen, "encode_sentences", lambda *a, prompt, **o: prompts.append(prompt) or encode(*a, **o))
    output = str(tmp_path / "mined.tsv")
    run("mine", None, **{"model.name": model, "data.input": str(rows), "mining.num_negatives": 1}, output=output)
    assert sorted(map(str, prompts)) == ["None", "document"]
    lines = [line.split("\t") for line in (tmp_path / "mined.tsv").read_text().splitlines()]
    assert lines[0] == ["anchor", "positive", "negative"] and len(lines) == len(SENTENCES)
    assert all(negative in SENTENCES[1:] and negative not in pair for *pair, negative in lines[1:])


def test_a_query_is_not_its_own_negative(files, capsys):
    """Although it is a passage, and the most similar one."""
    corpus = files[0] / "corpus.jsonl"
    corpus.write_text(corpus.read_text() + "".join(json.dumps({"text": text}) + "\n" for text in QUERIES[:4]))
    passages = sorted({*PASSAGES[11:], *QUERIES[:4], *(text for texts in POSITIVES.values() for text in texts)})
    for name, range_min in (("a.jsonl", 0), ("b.jsonl", 2)):
        wanted = expected(passages, num_negatives=40, range_min=range_min)
        rows, _ = mined(files[0], name, num_negatives=40, range_min=range_min)
        for row in rows:
            query = row["anchor"]
            own = [text for text in expected(passages, num_negatives=40)[query] if text != query][range_min:]
            assert [row[key] for key in row if key.startswith("negative") and row[key] is not None] == own
            assert query not in QUERIES[:4] or wanted[query] != own
    capsys.readouterr()
    mined(files[0], "c.jsonl", num_negatives=2, max_score=-0.5)
    assert "rows have fewer than 2 negatives; to find more, set a larger mining.range_max\n" in capsys.readouterr().out
    mined(files[0], "d.jsonl", num_negatives=2, max_score=-0.5, range_max=40)
    assert "rows have fewer than 2 negatives\n" in capsys.readouterr().out


class Words:
    """A cross-encoder whose score of a passage is its number."""

    def __init__(self, name, device=None):
        assert name == "cross"

    def predict(self, pairs, **_):
        import torch

        return torch.tensor([float(passage[1:]) for _, passage in pairs])


def test_scores_of_a_cross_encoder_replace_cosines(files, monkeypatch):
    monkeypatch.setattr(job, "CrossEncoder", Words)
    rows, _ = mined(files[0], cross_encoder="cross", max_score=14.0, range_max=30)
    for row in rows:
        numbers = sorted((n for n in range(15) if f"p{n}" not in POSITIVES[row["anchor"]]), reverse=True)[:3]
        assert [row["negative"], row["negative_2"], row["negative_3"]] == [f"p{n}" for n in numbers]


class Index:
    """As faiss.IndexFlatIP: the k highest inner products, and -1 where there are fewer vectors."""

    def __init__(self, width):
        self.width = width

    def add(self, vectors):
        assert vectors.shape[1] == self.width and vectors.dtype == np.float32
        self.vectors = vectors

    def search(self, queries, k):
        scores = queries @ self.vectors.T
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        missing = ((0, 0), (0, k - order.shape[1]))
        found = np.take_along_axis(scores, order, axis=1)
        return np.pad(found, missing, constant_values=-np.inf), np.pad(order, missing, constant_values=-1)


@pytest.mark.parametrize("mining", [{}, {"relative_margin": 0.1}, {"range_min": 2, "max_score": 0.9}])
@pytest.mark.parametrize("real", [False, True])
def test_faiss_finds_the_same_negatives(files, monkeypatch, mining, real):
    if real:
        pytest.importorskip("faiss")
    else:
        faiss = types.ModuleType("faiss")
        faiss.IndexFlatIP, faiss.__spec__ = Index, importlib.machinery.ModuleSpec("faiss", None)
        monkeypatch.setitem(sys.modules, "faiss", faiss)
    (plain, _), (found, result) = mined(files[0], **mining), mined(files[0], "faiss.jsonl", use_faiss=True, **mining)
    assert found == plain and result["settings"]["mining"]["use_faiss"]


def test_missing_faiss_is_reported_before_texts_are_encoded(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(job, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"mining\.use_faiss needs the package faiss: pip install faiss-cpu"):
        mined(files[0], use_faiss=True)
    assert not files[1]


@pytest.mark.parametrize(
    ("mining", "message"),
    [
        (
            {"cross_encoder": "x"},
            "mining.cross_encoder has no effect without mining.max_score, mining.absolute_margin or",
        ),
        ({"k": 3}, "mining.k has no effect on rows of queries and passages"),
        ({"max_score": -1.0}, r"rows\.jsonl: no passage is a valid negative: lower mining.absolute_margin"),
        ({"range_min": 5, "range_max": 5}, "range_min must be smaller than range_max"),
    ],
)
def test_invalid_settings(files, mining, message):
    with pytest.raises(ValueError, match=message):
        mined(files[0], **mining)

"""Mining: neighbours against brute force, hand-computed examples, the job and invalid input."""

import itertools
import json
import math

import numpy as np
import pytest

import raoe_train.encoders.embed as neighbours
from raoe_train import run
from raoe_train.data.mining import random_pairs
from raoe_train.encoders import embed as frozen

# Texts at angles on a circle: cosines are those of differences. Above 0.5 is nearer than 60 degrees.
ANGLES = {"a0": 0, "a30": 30, "a80": 80, "b10": 10, "b52": 52, "b170": 170}
TRIPLETS = [
    *[("a0", "a30", "b10"), ("a0", "a30", "b52")],
    *[("a30", "a0", "b10"), ("a30", "a0", "b52"), ("a30", "a80", "b10"), ("a30", "a80", "b52")],
    ("a80", "a30", "b52"),
    *[("b10", "b52", "a0"), ("b10", "b52", "a30")],
    # a80 is 28 degrees from b52, a30 22, a0 52, which is one too many for k = 2
    *[("b52", "b10", "a30"), ("b52", "b10", "a80")],
]
SAME, OTHER = ("a0 a30", "a30 a80", "b10 b52"), ("a0 b10", "a0 b52", "a30 b10", "a30 b52", "a80 b52")
PAIRS = {frozenset(pair.split()): int(pair in SAME) for pair in SAME + OTHER}


@pytest.fixture
def circle(tmp_path, monkeypatch):
    """A file of the texts, and an encoder that embeds them at their angles."""
    path = tmp_path / "circle.tsv"
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{text[0]}\n" for text in ANGLES), encoding="utf-8")

    def embed(texts):
        angles = [math.radians(ANGLES[text]) for text in texts]
        return np.array([[3 * math.cos(angle), 3 * math.sin(angle)] for angle in angles], dtype=np.float32)

    monkeypatch.setattr(frozen, "embedder", lambda *_: embed)
    return str(path)


def mined(source, folder, loss="triplet", **options):
    output = folder / f"{loss}.jsonl"
    options = {"mining.k": 2, "model.name": "x", "data.input": source, "output": str(output), "loss": loss, **options}
    result = run("mine", None, **options)
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()], result


def test_triplets_by_hand(tmp_path, circle):
    rows, result = mined(circle, tmp_path)
    assert sorted(tuple(row.values()) for row in rows) == sorted(TRIPLETS)
    assert list(rows[0]) == ["anchor", "positive", "negative"]
    assert result["examples"] == result["available"] == len(TRIPLETS) and result["without"] == 1  # b170
    assert result["classes"] == {"a": 3, "b": 3} and result["anchors"] == 5
    # of a0 a30 a80 b10 b52 b170: 1 2 1 1 1 0 of their own class, 2 2 1 2 2 0 others
    assert result["neighbours"] == {"own": 1.0, "others": 1.5}
    assert result.items() <= json.loads((tmp_path / "triplet.jsonl.json").read_text()).items()
    assert not (tmp_path / "triplet.jsonl.parts").exists()


@pytest.mark.parametrize("loss", ["contrastive", "online_contrastive"])
def test_labelled_pairs_by_hand(tmp_path, circle, loss):
    rows, result = mined(circle, tmp_path, loss)
    assert len(rows) == len(PAIRS)
    assert {frozenset((row["sentence1"], row["sentence2"])): row["label"] for row in rows} == PAIRS
    assert result["labels"] == {"1": 3, "0": 5}


def test_the_threshold_is_applied(tmp_path, circle):
    """Fault M2 of the published code: it computes the threshold and then ignores it."""
    rows, _ = mined(circle, tmp_path, "contrastive", **{"mining.threshold": 0.9063, "mining.k": 10**30})  # 25 degrees
    assert {frozenset((row["sentence1"], row["sentence2"])) for row in rows} == {
        frozenset(pair) for pair in (("a0", "b10"), ("a30", "b10"), ("a30", "b52"))
    }
    with pytest.raises(ValueError, match=r"no triplet .*threshold 0.97: set it below 0.8660"):
        mined(circle, tmp_path, **{"mining.threshold": 0.97})


def test_threshold_is_exclusive(tmp_path, monkeypatch):
    """The cosine of "up" with "across" is 0, exactly, and with "high" 1."""
    path = tmp_path / "x.tsv"
    path.write_text("text\tlabel\nup\t0\nhigh\t0\nacross\t0\ndown\t1\n", encoding="utf-8")
    vectors = {"up": (0, 1), "high": (0, 2), "across": (1, 0), "down": (0, -1)}
    monkeypatch.setattr(frozen, "embedder", lambda *_: lambda texts: np.array([vectors[t] for t in texts], np.float32))
    rows, _ = mined(str(path), tmp_path, "multiple_negatives", **{"mining.threshold": 0})
    assert [{*row.values()} for row in rows] == [{"up", "high"}]
    rows, _ = mined(str(path), tmp_path, "multiple_negatives", **{"mining.threshold": -0.1, "overwrite": True})
    assert len(rows) == 3


def test_thinning(tmp_path, circle):
    everything = {tuple(row.values()) for row in mined(circle, tmp_path)[0]}
    kept = {}
    for seed in (1, 2):
        rows, result = mined(circle, tmp_path, overwrite=True, **{"mining.count": 5, "mining.seed": seed})
        kept[seed] = [tuple(row.values()) for row in rows]
        assert len(set(kept[seed])) == 5 == result["examples"] and set(kept[seed]) < everything
        assert result["available"] == 11
    assert kept[1] != kept[2]
    again, _ = mined(circle, tmp_path, overwrite=True, **{"mining.count": 5, "mining.seed": 1})
    assert [tuple(row.values()) for row in again] == kept[1]
    assert len(mined(circle, tmp_path, overwrite=True, **{"mining.drop": 0.5})[0]) == 5  # 11 - round(5.5)
    assert len(mined(circle, tmp_path, overwrite=True, **{"mining.drop": 0.5, "mining.count": 3})[0]) == 3


def blobs(classes, n=70, width=5, seed=0):
    generator = np.random.default_rng(seed)
    unit = generator.normal(size=(n, width)).astype(np.float32)
    return unit / np.linalg.norm(unit, axis=1, keepdims=True), generator.integers(0, classes, n)


def brute(unit, classes, i, same, k):
    places = [j for j in range(len(unit)) if j != i and (classes[j] == classes[i]) == same]
    return sorted(places, key=lambda j: -float(unit[i].astype(float) @ unit[j].astype(float)))[:k]


@pytest.mark.parametrize("classes", [2, 4])  # of more than two: one against the rest
def test_search_against_brute_force(classes, monkeypatch):
    monkeypatch.setattr(neighbours, "CHUNK", 70 * 9)
    unit, labels = blobs(classes)
    labels[:3] = classes  # a class of three sentences, fewer than k
    result = neighbours.nearest_by_class(unit, labels, 6)
    for same, (indices, cosines) in zip((True, False), result, strict=True):
        assert indices.shape == cosines.shape == (70, 6)
        for i, (row, values) in enumerate(zip(indices, cosines, strict=True)):
            expected = brute(unit, labels, i, same, 6)
            assert row.tolist() == expected + [neighbours.NONE] * (6 - len(expected))
            assert np.allclose(values[: len(expected)], unit[expected] @ unit[i], atol=1e-6)
            assert np.isneginf(values[len(expected) :]).all()


def test_random_pairs():
    """All examples if enough are requested, also after a resume; else half of each kind."""
    classes = np.array([0, 1, 1, 2, 0, 1])
    every, available = random_pairs(classes, 100, 0)
    listed = {frozenset(row[:2]): row[2] for row in every.tolist()}
    expected = {frozenset((i, j)): int(classes[i] == classes[j]) for i, j in itertools.combinations(range(6), 2)}
    assert listed == expected and available == len(every) == 15
    some, available = random_pairs(np.arange(1000) % 3, 400, 1)
    assert available == 1000 * 999 // 2 and len(some) == 400 == len({frozenset(row[:2]) for row in some.tolist()})
    assert (some[:, 2] == 1).sum() == 200 and ((some[:, 0] % 3 == some[:, 1] % 3) == (some[:, 2] == 1)).all()
    assert (some[:, 0] != some[:, 1]).all()
    assert not np.array_equal(some, random_pairs(np.arange(1000) % 3, 400, 2)[0])


def write(folder, *rows, header="text\tlabel"):
    path = folder / "texts.tsv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "cosent"}, "loss must be one of triplet, contrastive"),
        ({"loss": "mse"}, "mining.count is missing"),
        ({"mining.threshold": 1}, "mining.threshold must be a number of at least -1 and below 1, got 1"),
        ({"model.name": None}, "--model.name is missing"),
    ],
)
def test_bad_settings(tmp_path, circle, options, message):
    settings = {"output": str(tmp_path / "x.jsonl"), "data.input": circle, "model.name": "x", **options}
    with pytest.raises(ValueError, match=message):
        run("mine", None, **settings)

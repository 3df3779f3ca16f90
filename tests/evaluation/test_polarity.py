"""Polarity and semantic scores: by hand, against brute force, as a task."""

import json
import math

import numpy as np
import pytest

from raoe_train.cli import main
from raoe_train.encoders.embed import encode_sentences
from raoe_train.evaluation.polarity import PolarityEvaluator, read_polarity
from raoe_train.evaluation.tasks import Reading
from raoe_train.settings import FrozenEncoder, Polarity
from tests.tiny import SENTENCES, evaluate_encoder, tiny_encoder


def circle(*angles):
    return np.array([[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in angles], dtype=np.float32)


def evaluator(k=2, reference=None, **options):
    """Two sentences at 0 and 90 degrees, four to find at 10, 20, 60 and 100; the reference has other angles."""
    reference = circle(0, 0, 0, 60, 90, 180) if reference is None else reference
    return PolarityEvaluator(["s", "t"], ["+", "-"], list("abcd"), list("+--+"), reference, k, **options)


EMBEDDINGS = circle(0, 90, 10, 20, 60, 100)


def test_by_hand():
    """s finds a (+) and b (-): S = cos 0 / 2 + cos 60 / 2. t finds d (+) and c (-): S = cos 180 / 2 + cos 90 / 2."""
    polarity, similarity = evaluator(discount="none").scores(EMBEDDINGS)
    assert np.allclose(polarity, [1 / 2, 1 / 2]) and np.allclose(similarity, [3 / 4, -1 / 2], atol=1e-6)


@pytest.mark.parametrize("classes", [2, 3])  # M1: the published code's y ^ ys gives -2.33 for three
def test_against_brute_force(classes):
    generator = np.random.default_rng(0)
    n, m, k = 9, 30, 5
    embeddings, reference = generator.normal(size=(2, n + m, 6))
    labels, sources = generator.integers(0, classes, n).tolist(), [*range(classes), *generator.integers(0, classes, m)]
    sources = list(map(int, sources[:m]))
    made = PolarityEvaluator(["x"] * n, labels, ["y"] * m, sources, reference, k)
    polarity, similarity = made.scores(embeddings)

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    for i in range(n):
        order = sorted(range(m), key=lambda j: -cosine(embeddings[i], embeddings[n + j]))[:k]
        w = [2 * (k + 1 - place) / (k * (k + 1)) for place in range(1, k + 1)]
        assert polarity[i] == pytest.approx(sum(a * (sources[j] == labels[i]) for a, j in zip(w, order, strict=True)))
        expected = sum(a * cosine(reference[i], reference[n + j]) for a, j in zip(w, order, strict=True))
        assert similarity[i] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 5}, "k is 5, but there are only 4 source sentences: lower k"),
        ({"reference": circle(0, 1)}, "reference needs one row per text .*: expected 6, got 2"),
    ],
)
def test_invalid_settings(change, message):
    with pytest.raises(ValueError, match=message):
        evaluator(**change)


@pytest.fixture
def folder(tmp_path):
    """A set in data_dir/polarity, one of the same name elsewhere, and two encoders."""
    rows = [("test", n % 2, text) for n, text in enumerate(SENTENCES[:3])]
    rows += [("train", n % 2, f"{text} {word}") for n, text in enumerate(SENTENCES) for word in ("", "now")]
    rows += rows[3:6]  # sources are different texts: 22
    for name in ("polarity", "transfer"):
        (tmp_path / name).mkdir()
        lines = ["split\tlabel\ttext", *("\t".join(map(str, row)) for row in rows)]
        (tmp_path / name / "set.tsv").write_text("\n".join(lines if name == "polarity" else ["x"]), encoding="utf-8")
    for name, seed in (("model", 1), ("reference", 2)):
        model = tiny_encoder(double=False).eval()
        if seed == 2:
            for parameter in model.parameters():
                parameter.data.add_(0.3 * np.cos(parameter.numel()))
        model.save(str(tmp_path / name))
    return tmp_path


def test_as_a_task(folder):
    options = Polarity(FrozenEncoder(str(folder / "reference"), cache=str(folder / "cache")), k=3)
    model = tiny_encoder(double=False).eval()
    result = evaluate_encoder(model, ["polarity:set"], folder, polarity=options)["tasks"]["polarity:set"]
    task = read_polarity("set", Reading(folder, polarity=options))
    test, sources = task.sentences[:3], task.sentences[3:]
    assert test == SENTENCES[:3] and len(sources) == 15 == result["sources"]
    class_of = {f"{text}{end}": n % 2 for n, text in enumerate(SENTENCES) for end in ("", " ", " now")}
    labels, classes = ([class_of[text] for text in texts] for texts in (test, sources))

    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(folder / "reference"), device="cpu")
    made = PolarityEvaluator(test, labels, sources, classes, reference, 3)
    expected = made(model)
    assert result["polarity"] == pytest.approx(expected["polarity"])
    assert result["similarity"] == pytest.approx(expected["similarity"], abs=1e-3)
    assert len(list((folder / "cache").glob("*/*.npy"))) == 1
    cached = next((folder / "cache").glob("*/*.npy"))
    scores, _ = task.score(encode_sentences(model, task.sentences))
    cached.unlink()
    assert task.score(encode_sentences(model, task.sentences))[0] == scores  # the reference ran once
    assert not cached.exists()
    itself = Polarity(FrozenEncoder(str(folder / "model")), k=3)
    assert evaluate_encoder(model, ["polarity:set"], folder, polarity=itself)["tasks"]["polarity:set"] != result


def test_from_the_command_line(folder, capsys):
    words = ["evaluate", "--model.name", str(folder / "model"), "--data.dir", str(folder), "--tasks", "polarity:set"]
    options = ["--polarity.reference.name", str(folder / "reference"), "--polarity.k=3"]
    assert main([*words, *options, "--output", str(folder / "scores.json")]) == 0
    written = json.loads((folder / "scores.json").read_text())["tasks"]["polarity:set"]
    assert written["k"] == 3 and f"{written['polarity']:.2f}" in capsys.readouterr().out
    assert main(words) == 2
    assert "--polarity.reference.name is missing" in capsys.readouterr().err

"""Post-training on ranking sentences: the teacher and what is kept of it, ablations, training end to end."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer

import raoe_train.training.training_data as teaching
from raoe_kernels import refine_similarity
from raoe_train import run
from raoe_train.settings import FrozenEncoder, Teacher
from tests.tiny import SENTENCES, load, tiny_encoder, training_data
from tests.training.small_runs import write_pairs

CHAINS = [SENTENCES[first : first + length] for first, length in ((0, 5), (2, 3), (4, 6), (1, 5), (5, 4), (3, 7))]


def write_chains(path, lists=CHAINS):
    path.write_text("".join(json.dumps({"id": n, "sentences": texts}) + "\n" for n, texts in enumerate(lists)))
    return str(path)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """(student, teacher): folders of two small encoders with different weights."""
    folders = []
    for name in ("student", "teacher"):
        folders.append(str(tmp_path_factory.mktemp(name)))
        model = tiny_encoder(double=False, dropout=0.1)
        if name == "teacher":
            torch.manual_seed(7)  # with words that are far apart
            torch.nn.init.normal_(model[0].model.embeddings.word_embeddings.weight, std=2)
        model.save_pretrained(folders[-1])
    return tuple(folders)


def settings(folder, encoders, **changes):
    options = {
        "model.name": encoders[0],
        "model.device": "cpu",
        "teacher.name": encoders[1],
        "teacher.device": "cpu",
        "data.train": [write_chains(folder / "chains.jsonl")],
        "data.dev": write_pairs(folder / "dev.tsv", rows=24),
        "training": {
            "num_train_epochs": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "bf16": False,
            "logging_steps": 1,
            "eval_steps": 2,
        },
        "output": str(folder / "out"),
    }
    return {**options, **changes}


def targets(made, seed=42):
    """(lists, their teachers) that a recipe trains on."""
    datasets, texts = training_data(load("train", "ranking-post", {**made, "training.seed": seed}))
    (dataset,) = datasets.values()
    lists = list(dataset["sentences"])
    assert list(texts) == [text for sentences in lists for text in sentences]
    if "label" not in dataset.column_names:
        return lists, None
    return lists, [
        torch.tensor(label).reshape(len(texts), -1) for texts, label in zip(lists, dataset["label"], strict=True)
    ]


def cosines(folder, texts):
    vectors = SentenceTransformer(folder, device="cpu").encode(texts, convert_to_tensor=True).double()
    return torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1).float()


def test_the_teacher_is_refined_raw_cosines(tmp_path, encoders):
    for information, omega, expected in (("both", 0.7, 0.7), ("semantic", 0.7, 0.0), ("both", 0.0, 0.0)):
        options = settings(tmp_path, encoders, **{"teacher.information": information, "teacher.omega": omega})
        lists, squares = targets(options)
        assert lists == CHAINS
        moved = []
        for texts, square in zip(lists, squares, strict=True):
            phi = cosines(encoders[1], texts)
            torch.testing.assert_close(square, refine_similarity(phi, expected), atol=1e-5, rtol=0)
            assert torch.equal(square, square.T)
            moved.append((square - phi).abs().max())
        assert max(moved) > 0.1 if expected else max(moved) < 1e-5


def test_shuffled_lists(tmp_path, encoders):
    """Each sentence keeps its own similarities, which are refined by the places that it now has."""
    loss = {"loss": {"class_path": "benchmarks.studies.shuffled.ShuffledListMLELoss"}}
    lists, squares = targets(settings(tmp_path, encoders, **loss))
    assert lists != CHAINS and [sorted(texts) for texts in lists] == [sorted(texts) for texts in CHAINS]
    for texts, square in zip(lists, squares, strict=True):
        expected = refine_similarity(cosines(encoders[1], texts), 0.5)
        torch.testing.assert_close(square, expected, atol=1e-5, rtol=0)
    assert targets(settings(tmp_path, encoders, **loss), seed=1)[0] == lists
    changes = {**loss, "training.max_steps": 1, "output": str(tmp_path / "trained")}
    run("train", "ranking-post", **settings(tmp_path, encoders, **changes))


def test_similarities_are_computed_once(tmp_path, encoders, monkeypatch):
    """For the same lists and teacher; how a killed process goes on is in tests/outputs/test_resume.py."""
    teacher = FrozenEncoder(encoders[1], device="cpu")
    result = teaching.similarities(CHAINS, teacher, tmp_path)
    for phi, texts in zip(result, CHAINS, strict=True):
        torch.testing.assert_close(torch.from_numpy(phi), cosines(encoders[1], texts), atol=1e-5, rtol=0)
    monkeypatch.setattr("raoe_train.encoders.embed.encode_sentences", None)
    assert all(map(np.array_equal, teaching.similarities(CHAINS, teacher, tmp_path), result))
    for lists, encoder in ((CHAINS[:1], teacher), (CHAINS, FrozenEncoder(encoders[0], device="cpu"))):
        with pytest.raises(TypeError):
            teaching.similarities(lists, encoder, tmp_path)


def test_the_cache_serves_every_omega(tmp_path, encoders, monkeypatch):
    lists = Dataset.from_dict({"sentences": CHAINS})
    teacher = Teacher(encoders[1], device="cpu", omega=0.5)
    first = teaching.add_targets(lists, teacher, tmp_path)["label"][:]
    two = replace(teacher, second=FrozenEncoder(encoders[0], device="cpu"), information="semantic")
    for texts, label in zip(CHAINS, teaching.add_targets(lists, two, tmp_path)["label"], strict=True):
        mean = (cosines(encoders[0], texts) + cosines(encoders[1], texts)) / 2  # both teachers count
        torch.testing.assert_close(torch.tensor(label).reshape(mean.shape), mean, atol=1e-5, rtol=0, check_dtype=False)
    monkeypatch.setattr("raoe_train.encoders.embed.encode_sentences", None)
    for other in (replace(teacher, omega=0.25), replace(teacher, information="semantic")):
        assert teaching.add_targets(lists, other, tmp_path)["label"][:] != first
    with pytest.raises(TypeError):
        teaching.add_targets(lists, replace(teacher, prompt="x: {text}"), tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, encoders):
    folder = tmp_path_factory.mktemp("finished")
    options = settings(folder, encoders, **{"evaluation.tasks": [str(folder / "dev.tsv")]})
    options["training"] = {**options["training"], "num_train_epochs": 6}
    return folder, options, run("train", "ranking-post", **options)


def test_trains_and_keeps_the_best(finished, encoders):
    folder, made, metrics = finished
    out = folder / "out"
    assert metrics["steps"] == 18 and metrics["pairs"] == {"chains": 6} and metrics["scale"] == {"chains": 20}
    assert not (out / "teacher").exists() and not (out / "checkpoints").exists()
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert sum(losses[-6:]) < sum(losses[:6])
    scores = {entry["step"]: entry["eval_dev_spearman_cosine"] for entry in log if "eval_dev_spearman_cosine" in entry}
    assert sorted(scores) == list(range(2, 19, 2))
    assert scores[metrics["best_step"]] == max(scores.values())
    assert metrics["after"]["spearman"] == pytest.approx(100 * max(scores.values()), abs=1e-6)
    model = SentenceTransformer(str(out), device="cpu")
    assert model.max_seq_length == 16
    card = (out / "README.md").read_text()
    assert "ListMLELoss" in card and "xia2008listwise" in card and len(card) < 40_000
    assert run("train", "ranking-post", **made) == metrics
    # Where its similarities are kept makes it no other run.
    assert run("train", "ranking-post", **made, **{"teacher.cache": str(folder / "elsewhere")}) == metrics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher.name": None}, "--teacher.name is missing"),
        ({"loss": "CoSENTLoss"}, "CoSENTLoss does not use a teacher: remove --teacher.name"),
        ({"data.dev": None}, "training.eval_strategy 'steps' needs a dev set"),
    ],
)
def test_invalid_settings(tmp_path, encoders, changes, message):
    with pytest.raises(ValueError, match=message):
        run("train", "ranking-post", **settings(tmp_path, encoders, **changes))


def test_head_is_used_in_training_only(tmp_path, encoders):
    """SimCSE's: it learns with tanh of a linear layer; what is evaluated and saved is the embedding below."""
    from raoe_train.encoders.load import load_encoder

    plain = load_encoder(encoders[0], device="cpu")
    headed = load_encoder(encoders[0], device="cpu", training_head=True, train=True)
    for module in headed.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    features = plain.preprocess(SENTENCES)
    below = plain.eval()(dict(features))["sentence_embedding"]
    torch.testing.assert_close(headed.eval()(dict(features))["sentence_embedding"], below, rtol=0, atol=0)
    linear = headed[-1].linear
    assert linear.weight.shape == (16, 16) and not linear.bias.any()
    assert 0.015 < linear.weight.std() < 0.025  # BERT's initializer_range
    expected = torch.tanh(below @ linear.weight.T + linear.bias)
    torch.testing.assert_close(headed.train()(dict(features))["sentence_embedding"], expected)
    assert torch.equal(load_encoder(encoders[0], training_head=True, train=True)[-1].linear.weight, linear.weight)
    with pytest.raises(ValueError, match=r"load_in_4bit and model.training_head need a pretrained model"):
        load_encoder("scratch", sentences=SENTENCES, training_head=True)

    made = settings(tmp_path, encoders, **{"model.training_head": True})
    run("train", "ranking-post", **made)
    saved = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert [type(module).__name__ for module in saved] == ["Transformer", "Pooling"]
    # in metrics.json is what was saved, without the head
    after = json.loads((tmp_path / "out" / "metrics.json").read_text())["after"]
    result = run("evaluate", **{"model": {"name": made["output"], "device": "cpu"}, "tasks": made["data.dev"]})["tasks"]
    assert after["pearson"] == pytest.approx(result[made["data.dev"]]["pearson"], abs=0.01)
    assert after["spearman"] == pytest.approx(result[made["data.dev"]]["spearman"], abs=0.2)  # ties

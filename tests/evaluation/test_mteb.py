"""Tasks through mteb, on tasks in memory, and the error if mteb is not installed."""

import sys

import numpy as np
import pytest

from raoe_train.cli import main
from raoe_train.evaluation.mteb import make_task
from raoe_train.evaluation.tasks import evaluate_tasks, read_tasks
from tests.tiny import SENTENCES, tiny_encoder


def test_without_mteb(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "mteb", None)
    assert main(["evaluate", "--model.name", "x", "--tasks", "SciDocsRR", "--data.dir", str(tmp_path)]) == 2
    assert "mteb is not installed: install raoe[eval]" in capsys.readouterr().err


@pytest.fixture
def mteb():
    return pytest.importorskip("mteb", reason="mteb is not installed (pip install -e '.[eval]')")


def order(encoder, first, second, prompt):
    """Ranks of the pairs' cosines, each text with this prompt before it."""
    a, b = (encoder.encode(texts, prompt=prompt, normalize_embeddings=True) for texts in (first, second))
    return np.argsort(np.argsort((a * b).sum(axis=1))).astype(float).tolist()


@pytest.fixture
def sts(mteb):
    """STS whose human scores have the order of the model's cosines: Spearman is 100."""
    from datasets import Dataset
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class TinySTS(AbsTaskSTS):
        prompt = ""
        metadata = TaskMetadata(
            type="STS", name="TinySTS", main_score="cosine_spearman", description="-",
            reference="https://example.com/", dataset={"path": "NA", "revision": "1"}, category="t2t",
            eval_splits=["test"], eval_langs=["eng-Latn"], date=("2026-01-01", "2026-01-01"), dialect=[], domains=[],
            task_subtypes=[], license="cc-by-4.0", annotations_creators="derived", modalities=["text"],
            sample_creation="found", bibtex_citation="",
        )  # fmt: skip

        def load_data(self, **options):
            first, second = SENTENCES[:5], SENTENCES[5:10]
            score = order(self.encoder, first, second, self.prompt)
            self.dataset = {"test": Dataset.from_dict({"sentence1": first, "sentence2": second, "score": score})}
            self.data_loaded = True

    return TinySTS()


def test_a_task_in_memory(mteb, sts, tmp_path, monkeypatch):
    encoder = sts.encoder = tiny_encoder(double=False)
    encoder.train()
    result = evaluate_tasks(encoder, {"tiny": make_task(sts, tmp_path / "cache")}, batch_size=2)
    assert result["tasks"]["tiny"] == {
        "kind": "mteb", "main": "main_score", "main_score": pytest.approx(100), "metric": "cosine_spearman",
        "scores": {"test": {"default": pytest.approx(100)}},
    }  # fmt: skip
    assert result["average"] == pytest.approx(100) and encoder.training
    # cached results are not computed again
    monkeypatch.setattr(type(sts), "evaluate", None)
    again = evaluate_tasks(encoder, {"tiny": make_task(sts, tmp_path / "cache")})
    assert again["average"] == pytest.approx(100)
    with pytest.raises(TypeError):
        evaluate_tasks(encoder, {"tiny": make_task(sts, tmp_path / "other")})


def test_the_encoder_keeps_its_prompt(mteb, sts):
    encoder = sts.encoder = tiny_encoder(double=False, prompt="people: {text}")
    sts.prompt = "people: "
    first, second = SENTENCES[:5], SENTENCES[5:10]
    assert order(encoder, first, second, "") != order(encoder, first, second, sts.prompt)
    assert evaluate_tasks(encoder, {"tiny": make_task(sts)})["average"] == pytest.approx(100)


def test_names(mteb, tmp_path):
    tasks = read_tasks(["mteb:STS12", "SciDocsRR"], tmp_path)
    assert [task.kind for task in tasks.values()] == ["mteb", "mteb"]
    assert [task.content[0] for task in tasks.values()] == ["STS12", "SciDocsRR"]
    (task,) = read_tasks(["AskUbuntuDupQuestions"]).values()  # no data.dir, so nothing to look for there
    assert task.kind == "mteb"
    with pytest.raises(ValueError, match=r"mteb has no task 'STS12x'.*Did you mean: 'STS12'"):
        read_tasks(["mteb:STS12x"])

"""Tasks through mteb, on tasks in memory; where mteb is not installed, what is said then."""

import shutil
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from raoe_train.cli import main
from raoe_train.evaluation.mteb import benchmark, of_task
from raoe_train.evaluation.tasks import SUITES, evaluate_tasks, read_tasks, suite_tasks, table
from tests.tiny import SENTENCES, tiny_encoder


def test_without_mteb(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "mteb", None)
    assert main(["evaluate", "--model.name", "x", "--tasks", "mteb:STS12"]) == 2
    assert "mteb is not installed: pip install 'raoe[eval]'" in capsys.readouterr().err
    assert main(["evaluate", "--model.name", "x", "--tasks", "SciDocsRR", "--data.dir", str(tmp_path)]) == 2
    assert "raoe[eval]" in capsys.readouterr().err
    assert main(["evaluate", "--model.name", "x", "--suite", "mteb-english-v1"]) == 2
    assert "raoe[eval]" in capsys.readouterr().err


@pytest.fixture
def mteb():
    return pytest.importorskip("mteb", reason="mteb is not installed (pip install 'raoe[eval]')")


def order(encoder, first, second, prompt):
    """Ranks of the pairs' cosines, each text with this prompt before it."""
    a, b = (encoder.encode(texts, prompt=prompt, normalize_embeddings=True) for texts in (first, second))
    return np.argsort(np.argsort((a * b).sum(axis=1))).astype(float).tolist()


@pytest.fixture
def sts(mteb):
    """STS whose human scores are the model's own cosines, as far as their order goes: Spearman is 100."""
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
    found = evaluate_tasks(encoder, {"tiny": of_task(sts, tmp_path / "cache")}, batch_size=2)
    assert found["tasks"]["tiny"] == {
        "kind": "mteb", "main": "main_score", "main_score": pytest.approx(100), "metric": "cosine_spearman",
        "scores": {"test": {"default": pytest.approx(100)}},
    }  # fmt: skip
    assert found["average"] == pytest.approx(100) and encoder.training
    # what is in the cache is not evaluated again
    monkeypatch.setattr(type(sts), "evaluate", None)
    again = evaluate_tasks(encoder, {"tiny": of_task(sts, tmp_path / "cache")})
    assert again["average"] == pytest.approx(100)
    with pytest.raises(TypeError):
        evaluate_tasks(encoder, {"tiny": of_task(sts, tmp_path / "other")})


def test_shares_of_tasks_are_copied_together(mteb, sts, tmp_path, monkeypatch):
    """As two GPUs make them, each with an output of its own."""

    class OtherSTS(type(sts)):
        prompt = "other: "
        metadata = sts.metadata.model_copy(update={"name": "OtherSTS"})

    encoder = tiny_encoder(double=False)
    tasks = {"tiny": sts, "other": OtherSTS()}
    for name, task in tasks.items():
        task.encoder = encoder
        evaluate_tasks(encoder, {name: of_task(task, tmp_path / name)})
        shutil.copytree(tmp_path / name, tmp_path / "both", dirs_exist_ok=True)
    monkeypatch.setattr(type(sts), "evaluate", None)
    found = evaluate_tasks(encoder, {name: of_task(task, tmp_path / "both") for name, task in tasks.items()})
    assert set(found["tasks"]) == {"tiny", "other"} and found["tasks"]["tiny"]["main_score"] == pytest.approx(100)
    with pytest.raises(TypeError):
        evaluate_tasks(encoder, {"other": of_task(tasks["other"], tmp_path / "tiny")})


def test_the_encoder_keeps_its_prompt(mteb, sts):
    encoder = sts.encoder = tiny_encoder(double=False, prompt="people: {text}")
    sts.prompt = "people: "
    first, second = SENTENCES[:5], SENTENCES[5:10]
    assert order(encoder, first, second, "") != order(encoder, first, second, sts.prompt)
    assert evaluate_tasks(encoder, {"tiny": of_task(sts)})["average"] == pytest.approx(100)


def test_reranking_has_map_and_mrr(mteb):
    from mteb.mocks.mock_tasks import MockRerankingTask

    found = evaluate_tasks(tiny_encoder(double=False), {"mock": of_task(MockRerankingTask())})["tasks"]["mock"]
    # two queries, two candidates each, one of them relevant: map and mrr are 1 or 1/2 a query
    assert found["map"] == found["mrr"] == found["main_score"] and found["map"] in (50, 75, 100)


def test_suites_are_what_leaderboards_count(mteb):
    """The papers' 56 tasks: English alone, the test split but of MSMARCO; seven categories."""
    assert len(suite_tasks(["mteb-english-v1"])) == 56 and len(suite_tasks(["mteb-english-v2"])) == 41
    words = ["sts", *suite_tasks(["mteb-english-v1"])]
    assert suite_tasks(["sts", "mteb-english-v1"])[len(SUITES["sts"]) :] == words[1:]
    of = {name: task.content[3:] for name, task in read_tasks(words[1:]).items()}
    assert of["mteb-english-v1:STS17"] == [["en-en"], ["test"]] and of["mteb-english-v1:STS22"] == [["en"], ["test"]]
    assert of["mteb-english-v1:MassiveIntentClassification"] == [["en"], ["test"]]
    assert {word for word, (_, splits) in of.items() if splits != ["test"]} == {"mteb-english-v1:MSMARCO"}
    assert Counter(task.metadata.type for task in benchmark("mteb-english-v1").values()) == {
        "Classification": 12, "Clustering": 11, "PairClassification": 3, "Reranking": 4, "Retrieval": 15, "STS": 10,
        "Summarization": 1,
    }  # fmt: skip
    (task,) = read_tasks(["mteb:STS17"]).values()
    assert task.kind == "mteb" and len(task.content) == 3
    with pytest.raises(ValueError, match=r"MTEB\(eng, v2\) has no task 'STS16' \(did you mean 'STS1"):
        read_tasks(["mteb-english-v2:STS16"])


def test_a_benchmark(mteb, tmp_path, monkeypatch):
    """Two categories, a task with one of its two languages; the mean of each, and that of all tasks."""
    from mteb.mocks.mock_tasks import MockMultilingualSTSTask, MockRerankingTask, MockSTSTask

    def multilingual(*subsets):
        return MockMultilingualSTSTask().filter_languages(None, hf_subsets=list(subsets))

    tasks = [multilingual("eng"), MockSTSTask(), MockRerankingTask()]
    monkeypatch.setattr("mteb.get_benchmark", lambda name: SimpleNamespace(tasks=tasks))
    encoder, cache = tiny_encoder(double=False), tmp_path / "cache"
    both = evaluate_tasks(encoder, {"both": of_task(multilingual("eng", "fra"), cache)})["tasks"]["both"]
    assert set(both["scores"]["test"]) == {"eng", "fra"}
    found = evaluate_tasks(encoder, read_tasks(suite_tasks(["mteb-english-v1"]), cache=cache))
    scores = {word.removeprefix("mteb-english-v1:"): task["main_score"] for word, task in found["tasks"].items()}
    # one of them, though the other one is in the cache
    assert found["tasks"]["mteb-english-v1:MockMultilingualSTSTask"]["scores"] == {
        "test": {"eng": pytest.approx(both["scores"]["test"]["eng"])}
    }
    assert found["average"] == pytest.approx(np.mean(list(scores.values())))
    sts = (scores["MockMultilingualSTSTask"] + scores["MockSTSTask"]) / 2
    assert found["categories"] == {
        "mteb-english-v1": {
            "Reranking": {"mean": scores["MockRerankingTask"], "tasks": 1},
            "STS": {"mean": pytest.approx(sts), "tasks": 2},
        }
    }
    assert f"{sts:10.2f}  2 tasks" in table(found)
    # a task at a time: what was evaluated is not evaluated again
    monkeypatch.setattr(MockSTSTask, "evaluate", None)
    tasks.pop()
    again = evaluate_tasks(encoder, read_tasks(suite_tasks(["mteb-english-v1"]), cache=cache))
    assert again["average"] == pytest.approx(sts)


def test_names(mteb, tmp_path):
    tasks = read_tasks(["mteb:STS12", "SciDocsRR"], tmp_path)
    assert [task.kind for task in tasks.values()] == ["mteb", "mteb"]
    assert [task.content[0] for task in tasks.values()] == ["STS12", "SciDocsRR"]
    (task,) = read_tasks(["AskUbuntuDupQuestions"]).values()  # no data.dir, so nothing to look for there
    assert task.kind == "mteb"
    with pytest.raises(ValueError, match=r"mteb has no task 'STS12x'.*Did you mean: 'STS12'"):
        read_tasks(["mteb:STS12x"])

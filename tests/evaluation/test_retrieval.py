"""Retrieval tasks: against sentence-transformers; ties, quantization, layouts, bad input."""

import gzip
import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers.sentence_transformer.evaluation import (
    InformationRetrievalEvaluator,
)

from raoe_train import run
from raoe_train.encoders import embed
from raoe_train.evaluation import tasks
from raoe_train.evaluation.retrieval import of_rows
from raoe_train.evaluation.sts import of_pairs
from raoe_train.evaluation.tasks import encode_tasks, evaluate_tasks, read_tasks
from raoe_train.training.report import DevEvaluator
from tests.tiny import SENTENCES, tiny_encoder

METRICS = ("ndcg@10", "recall@10", "mrr@10", "accuracy@1")
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def write_folder(folder, corpus, queries, qrels, suffix="", split="test"):
    """A folder in BEIR's layout; qrels are lines of query, passage and score."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    opened = gzip.open if suffix else open
    for name, rows in (("corpus", corpus), ("queries", queries)):
        with opened(folder / f"{name}.jsonl{suffix}", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    with opened(folder / "qrels" / f"{split}.tsv{suffix}", "wt") as file:
        file.write("query-id\tcorpus-id\tscore\n" + "".join("\t".join(map(str, line)) + "\n" for line in qrels))
    return f"retrieval:{folder}"


def read(word, **options):
    return read_tasks([word], **options)[word]


@pytest.fixture
def made(tmp_path):
    """A folder with several and graded judgements, passages with equal texts and ids in no order; and what it has."""
    rng = np.random.default_rng(3)
    ids = [f"d{number}" for number in rng.permutation(40)]  # as texts, d10 comes before d9
    corpus = {name: f"text {number % 33}" for number, name in enumerate(ids)}  # seven texts are there twice
    queries = {f"q{number}": f"query {number}" for number in range(12)}
    judged = {
        q: dict(zip(rng.choice(ids, 1 + n, replace=False).tolist(), [1, 2, 0] * 9, strict=False))
        for n, q in enumerate(queries)
    }
    lines = [(query, passage, score) for query, scores in judged.items() for passage, score in scores.items()]
    documents = [{"_id": name, "title": "", "text": text} for name, text in corpus.items()]
    word = write_folder(tmp_path / "made", documents, [{"_id": q, "text": text} for q, text in queries.items()], lines)
    relevant = {query: {passage for passage, score in scores.items() if score > 0} for query, scores in judged.items()}
    return word, corpus, queries, relevant


class Fixed:
    """A model for sentence-transformers' evaluator: the embeddings of texts, by text."""

    similarity_fn_name = "cosine"

    def __init__(self, vectors):
        self.vectors = vectors
        self.model_card_data = None

    def similarity(self, a, b):
        return torch.nn.functional.normalize(a.double()) @ torch.nn.functional.normalize(b.double()).T

    def encode_query(self, texts, **_):
        return torch.tensor(np.array([self.vectors[text] for text in texts]))

    encode_document = encode_query


def theirs(vectors, queries, corpus, relevant):
    """The metrics of sentence-transformers' evaluator, from 0 to 100."""
    evaluator = InformationRetrievalEvaluator(queries, corpus, relevant, corpus_chunk_size=7)
    evaluator.store_metrics_in_model_card_data = lambda *_: None
    metrics = evaluator(Fixed(vectors))
    return {name: 100 * metrics[f"cosine_{name}"] for name in METRICS}


@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
@pytest.mark.parametrize("kind", ["floats", "ties", "all equal"])
def test_equals_sentence_transformers(made, monkeypatch, chunk, kind):
    monkeypatch.setattr(embed, "CHUNK", chunk)
    word, corpus, queries, relevant = made
    rng = np.random.default_rng(7)
    task = read(word)
    rows = rng.normal(size=(len(task.sentences), 6)).astype(np.float32)
    if kind == "ties":  # of one norm, so that the products of both are whole numbers or exact
        rows = np.where(rows > 0, 1, -1).astype(np.float32)[:, :4]
    if kind == "all equal":
        rows = np.ones_like(rows)
    vectors = dict(zip(task.sentences, rows, strict=True))
    result, outcomes = task.score(rows)
    expected = theirs(vectors, queries, corpus, relevant)
    assert {name: result[name] for name in METRICS} == pytest.approx(expected, rel=1e-12)
    assert (result["queries"], result["passages"]) == (12, 40)
    assert len(outcomes.values) == 12 and outcomes.values.mean() == pytest.approx(expected["ndcg@10"], rel=1e-12)


def test_by_hand_fewer_than_ten_passages():
    rows = Dataset.from_dict(
        {
            "anchor": ["q", "q", "r"],
            "positive": ["a", "b", "c"],
            "negative": ["n", None, "b"],  # b is no negative of q: it is one of its positives
            "negative_2": [None, "n", "a"],
        }
    )
    task = of_rows(rows, "x")
    assert task.sentences == ["q", "r", "a", "b", "c", "n"] and task.n_queries == 2
    angles = {"q": 0, "a": 10, "n": 20, "b": 30, "c": 90, "r": 200}
    radians = np.radians([angles[text] for text in task.sentences])
    lengths = np.array([[1], [2], [3], [4], [5], [6]])  # without a part in cosines
    result, outcomes = task.score((lengths * np.stack([np.cos(radians), np.sin(radians)], 1)).astype(np.float32))
    # q ranks a n b c: relevant at 1 and 3 of 2; r ranks c (110 away) b (170) n (180) a (170 from 190): c first
    q = (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert outcomes.values == pytest.approx([100 * q, 100])
    assert result["recall@10"] == 100 and result["mrr@10"] == 100 and result["accuracy@1"] == 100


def test_evaluation_keeps_every_text(tmp_path):
    """Also what would not be trained on: a passage equal to its query, a query without a relevant passage."""
    rows = [("a", ["b"], ["a", "c"]), ("d", ["d"], ["e"]), ("f", [], ["g"]), ("a", ["c"], ["b"])]
    lines = (json.dumps({"query": query, "pos": positives, "neg": rest}) for query, positives, rest in rows)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    task = read(f"retrieval:{tmp_path / 'a.jsonl'}")
    assert {*task.sentences[2:]} == {*"abcdeg"} and task.sentences[:2] == ["a", "d"]
    assert task.score.keywords["targets"] == [[1, 2], [3]]  # places of b, c and of d among the sorted passages


def test_more_relevant_passages_than_ranks():
    rows = Dataset.from_dict({"anchor": ["q"] * 12, "positive": [f"p{number}" for number in range(12)]})
    result, outcomes = of_rows(rows, "x").score(np.ones((13, 2), np.float32))
    assert outcomes.values == pytest.approx([100]) and result["recall@10"] == pytest.approx(1000 / 12)


@pytest.mark.parametrize("passage", ["document", "passage", None])
def test_prompts_of_the_model_are_used(passage):
    model = tiny_encoder(double=False)
    rows = Dataset.from_dict({"anchor": ["people walk"], "positive": ["the dog sleeps"], "negative": ["nobody reads"]})
    task = of_rows(rows, "x")
    plain = next(encode_tasks(model, [task], 4))
    model.prompts = {"query": "two dogs ", "default": "a child ", **({passage: "music "} if passage else {})}
    model.default_prompt_name = "default"
    embeddings = next(encode_tasks(model, [task], 4))
    prefix = "music " if passage else "a child "
    texts = ["two dogs people walk", *(prefix + text for text in task.sentences[1:])]
    assert np.allclose(embeddings, model.encode(texts, prompt=""), atol=1e-6) and not np.allclose(embeddings, plain)
    pairs = of_pairs(Dataset.from_dict({"sentence1": SENTENCES[:2], "sentence2": SENTENCES[2:4], "score": [0.0, 1.0]}))
    alone = next(encode_tasks(model, [pairs], 4))
    both = [*encode_tasks(model, [task, pairs], 4)]
    assert np.allclose(both[0], embeddings, atol=1e-6) and np.allclose(both[1], alone, atol=1e-6)


def test_layouts_give_the_same_task(tmp_path):
    corpus = [
        {"_id": "2", "title": "On dogs", "text": "the dog sleeps"},
        {"_id": 10, "title": "", "text": "people walk"},
    ]
    queries = [{"_id": "a", "text": "dogs?"}, {"_id": "b", "text": "nothing judged"}]
    words = [
        write_folder(tmp_path / "plain", corpus, queries, [("a", "2", 1), ("a", "10", 0)]),
        write_folder(tmp_path / "packed", corpus, queries, [("a", "2", 1)], suffix=".gz"),
        write_folder(tmp_path / "dev", corpus, queries, [("a", "2", 3)], split="dev") + "#dev",
    ]
    for name, text in (("trec", "a 0 2 1\na\t0\t10\t-1\n"), ("other", "query_id\tcorpus_id\tscore\na\t2\t1\n")):
        words.append(write_folder(tmp_path / name, corpus, queries, []))
        (tmp_path / name / "qrels" / "test.tsv").write_text(text)
    (tmp_path / "packed" / "qrels" / "test.tsv.gz").rename(tmp_path / "packed" / "qrels.tsv.gz")
    tasks = [read(word) for word in words]
    contents = [(task.sentences, *map(list, task.score.keywords.values())) for task in tasks]
    assert contents == [contents[0]] * 5
    assert tasks[0].sentences == ["dogs?", "people walk", "On dogs the dog sleeps"]  # ids are texts: 10 before 2
    with pytest.raises(FileNotFoundError, match=r"dev has no qrels/test\.tsv or qrels\.tsv \(or \.gz\)"):
        read(words[2].removesuffix("#dev"))
    with pytest.raises(FileNotFoundError, match=r"packed has no qrels/train\.tsv \(or \.gz\)"):
        read(f"{words[1]}#train")
    (tmp_path / "trec" / "qrels" / "test.tsv").write_text("a 0 2 1\na 0 2\n")
    with pytest.raises(ValueError, match=r"test\.tsv, line 2: a line must have 4 fields"):
        read(words[3])


def test_a_corpus_is_in_memory_once(tmp_path, monkeypatch):
    """Embeddings are read part by part, scaled in place and compared in blocks."""
    n, width = 20_000, 256
    rows = Dataset.from_dict({"anchor": ["q"] * n, "positive": [f"p{i}" for i in range(n)]})
    task = of_rows(rows, "x")

    def encode(model, texts, batch_size, **options):
        return np.random.default_rng(len(texts)).normal(size=(len(texts), width)).astype(np.float32)

    monkeypatch.setattr(tasks, "encode_sentences", encode)
    monkeypatch.setattr(tasks, "prompt_of", lambda model, kind: None)
    monkeypatch.setattr(embed, "CHUNK", n)
    tasks.evaluate_tasks(None, {"x": task}, folder=tmp_path)  # writes the parts
    tracemalloc.start()
    result = tasks.evaluate_tasks(None, {"x": task}, folder=tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    lists = 5_000_000  # of texts and places
    assert result["tasks"]["x"]["passages"] == n and peak < 1.3 * n * width * 4 + lists


CORPUS = [{"_id": "1", "text": "one"}, {"_id": "2", "text": "two"}]
QUERIES = [{"_id": "a", "text": "first"}, {"_id": "b", "text": "second"}]


@pytest.mark.parametrize(
    ("corpus", "queries", "qrels", "message"),
    [
        (CORPUS, [*QUERIES, {"_id": "b", "text": "x"}], [], r"line 3: _id 'b' is already used in an earlier row"),
        ([], QUERIES, [("a", "1", 1)], r"corpus\.jsonl: no usable text in 0 rows: there are no rows"),
        (CORPUS, QUERIES, [("a", "9", 1)], r"1 rows: unknown id \(1\)\n.*line 2: '9' is not an _id"),
        (CORPUS, QUERIES, [("c", "1", 1)], r"line 2: 'c' is not an _id in queries\.jsonl"),
        (CORPUS, QUERIES, [("a", "1", 0), ("b", "2", -1)], r"test\.tsv: no query has a relevant passage"),
        (CORPUS, QUERIES, [("a", "1", "x")], r"test\.tsv, line 2: score is 'x', not a number"),
        ([{"_id": "1", "text": 5}], QUERIES, [], r"corpus\.jsonl, line 1: text is 5, not a string"),
    ],
)
def test_bad_folders(tmp_path, corpus, queries, qrels, message):
    with pytest.raises(ValueError, match=message):
        read(write_folder(tmp_path / "bad", corpus, queries, qrels))


@pytest.mark.parametrize(
    ("corpus", "qrels", "warning"),
    [
        (CORPUS, [("a", "1", 1), ("b", "9", 1), ("c", "1", 1)], "2 of 3 rows were left out: {'unknown id': 2}"),
        (CORPUS, [("a", "1", 1), ("b", "1", 0)], "1 of 2 queries have no relevant passage and are left out"),
        ([*CORPUS, {"_id": "3", "title": "", "text": " "}, {"_id": "4"}], [("a", "1", 1), ("b", "2", 1)],
         "corpus.jsonl: 2 of 4 rows were left out: {'no text': 2}"),
        (
            [*CORPUS, {"_id": "3", "text": "one"}, {"_id": "4", "text": "one"}],
            [("a", "1", 1), ("b", "4", 1)],
            "2 of 4 passages repeat the text of another passage",
        ),
    ],
)  # fmt: skip
def test_what_is_left_out_is_counted(tmp_path, caplog, corpus, qrels, warning):
    read(write_folder(tmp_path / "x", corpus, QUERIES, qrels))
    assert warning in caplog.text


def test_job_with_settings_and_examples(tmp_path):
    tiny_encoder(double=False).save_pretrained(str(tmp_path / "model"))
    rows = [
        {"query": text, "pos": [SENTENCES[n + 1]], "neg": SENTENCES[n + 2 : n + 4]}
        for n, text in enumerate(SENTENCES[:6])
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "split": "test"}) + "\n" for row in rows))
    word, output = f"retrieval:{tmp_path}/rows.jsonl#test", str(tmp_path / "scores.json")
    settings = {"model.name": str(tmp_path / "model"), "tasks": [word], "output": output}
    whole = run("evaluate", None, **settings)
    with np.load(f"{output}.examples.npz") as examples:
        values = examples[f"{word}\tvalues"]
    assert values.shape == (6,) and values.mean() == pytest.approx(whole["average"])
    assert run("evaluate", None, **settings)["tasks"] == whole["tasks"]  # finished, with the settings as before
    small = run("evaluate", None, **settings, truncate_dim=4, overwrite=True)
    assert small["settings"]["truncate_dim"] == 4
    assert small["tasks"][word]["ndcg@10"] != whole["tasks"][word]["ndcg@10"]
    with pytest.raises(ValueError, match="truncate_dim 17 exceeds the encoder's 16 dimensions"):
        run("evaluate", None, **settings, truncate_dim=17, overwrite=True)


def test_dev_evaluator_has_a_metric_for_each_width():
    model = tiny_encoder(double=False)
    rows = Dataset.from_dict({"anchor": SENTENCES[:4], "positive": SENTENCES[4:8], "negative": SENTENCES[7:11]})
    task = of_rows(rows, "x")
    metrics = DevEvaluator({"x": task}, 8, "dev", [16, 5])(model)
    names = {f"dev{width}_cosine_{name}" for width in ("", "_16", "_5") for name in METRICS}
    assert set(metrics) == names
    for width, dim in (("", None), ("_16", 16), ("_5", 5)):
        expected = evaluate_tasks(model, {"x": task}, truncate_dim=dim)["tasks"]["x"]
        assert {m: 100 * metrics[f"dev{width}_cosine_{m}"] for m in METRICS} == pytest.approx(
            {m: expected[m] for m in METRICS}
        )
    pairs = of_pairs(
        Dataset.from_dict({"sentence1": SENTENCES[:5], "sentence2": SENTENCES[5:10], "score": [1, 5, 2, 4, 3]})
    )
    metrics = DevEvaluator({"x": pairs}, 8, "dev", [2])(model)
    expected = evaluate_tasks(model, {"x": pairs}, truncate_dim=2)["tasks"]["x"]
    assert metrics["dev_2_pearson_cosine"] == pytest.approx(expected["pearson"] / 100)
    assert metrics["dev_pearson_cosine"] != pytest.approx(expected["pearson"] / 100)
    two = DevEvaluator({"x": task, "y": of_rows(rows.select([0, 1]), "y")}, 8, "dev")
    both = two(model)
    assert two.primary_metric == "dev_cosine_ndcg@10"
    assert both["dev_cosine_ndcg@10"] == pytest.approx(
        (both["dev_x_cosine_ndcg@10"] + both["dev_y_cosine_ndcg@10"]) / 2
    )


@pytest.mark.skipif(not (DATA / "retrieval").is_dir(), reason="no shared/data/retrieval")
def test_shared_data_as_typed():
    folder = DATA / "retrieval"
    tasks = read_tasks([f"retrieval:{folder}/wikiqa.jsonl.gz#test", f"retrieval:{folder}/cranfield"])
    wikiqa, cranfield = tasks.values()
    assert (wikiqa.n_queries, cranfield.n_queries) == (243, 225)
    assert len(cranfield.score(np.ones((len(cranfield.sentences), 2), np.float32))[1].values) == 225
    named = read_tasks(["retrieval:wikiqa"], DATA)["retrieval:wikiqa"]  # its test split
    assert named.sentences == wikiqa.sentences
    assert named.score.keywords["targets"] == wikiqa.score.keywords["targets"]


def test_a_query_is_not_ranked_for_itself(tmp_path, caplog):
    """As BEIR's evaluation leaves it out. Equal ids of other texts are a coincidence, as in Cranfield."""
    corpus = [{"_id": "a", "title": "On", "text": "dogs"}, {"_id": "b", "text": "cats"}, {"_id": "c", "text": "hens"},
              {"_id": "d", "text": "dogs"}]  # fmt: skip
    queries = [{"_id": "a", "text": "dogs"}, {"_id": "b", "text": "cats?"}, {"_id": "x", "text": "hens"}]
    folder = write_folder(tmp_path / "made", corpus, queries, [("a", "c", 1), ("b", "b", 1), ("x", "a", 1)])
    task = read(folder)
    assert "1 of 3 queries are also passages; each is excluded from its own ranking" in caplog.text
    angles = {"dogs": 0, "On dogs": 1, "cats": 40, "cats?": 41, "hens": 20}
    rows = np.array([[math.cos(math.radians(angles[t])), math.sin(math.radians(angles[t]))] for t in task.sentences])
    result, outcomes = task.score(rows.astype(np.float32))
    # a: d, c, b without itself; b: itself; x: c, a, d, b
    assert outcomes.values == pytest.approx([100 / math.log2(3), 100, 100 / math.log2(3)])
    assert (result["accuracy@1"], result["passages"]) == (pytest.approx(100 / 3), 4)
    task = of_rows(Dataset.from_dict({"anchor": ["dogs", "cats"], "positive": ["cats", "dogs"]}), "rows")
    vectors = {"dogs": [1.0, 0.0], "cats": [0.9, 0.1]}
    assert task.score(np.array([vectors[text] for text in task.sentences], dtype=np.float32))[0]["ndcg@10"] == 100

"""Rows as a dev set: nDCG@10 selects the checkpoint, widths are logged, queries are held out whole."""

import json
from pathlib import Path

import pytest

import raoe_train as rt
from raoe_train import run
from raoe_train.training.training_data import read_training_data, with_dev
from tests.tiny import SENTENCES, load
from tests.training.small_runs import settings, write_pairs


def write_rows(path, columns=("anchor", "positive", "negative")):
    count = len(SENTENCES)
    rows = [[SENTENCES[(n + step) % count] for step in (0, 1, 4)] for n in range(count)]
    path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    return str(path)


def train(folder, dev, **changes):
    options = settings(folder, **{"data.train": [write_rows(folder / "train.jsonl")], "data.dev": dev, **changes})
    metrics = run("train", None, loss="InfoNCELoss", **options)
    log = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    return metrics, log


def test_ndcg_selects_the_checkpoint_and_each_width_is_logged(tmp_path, capsys):
    dev = write_rows(tmp_path / "dev.jsonl", ("query", "positive", "negative"))
    training = {"num_train_epochs": 6, "per_device_train_batch_size": 8, "learning_rate": 3e-2, "save_total_limit": 9}
    metrics, log = train(tmp_path, dev, training=training, **{"loss.matryoshka_dims": [16, 4]})
    evaluated = [entry for entry in log if "eval_dev_cosine_ndcg@10" in entry]
    assert len(evaluated) == 6
    metric_names = ("ndcg@10", "recall@10", "mrr@10", "accuracy@1")
    names = [f"eval_dev{width}_cosine_{metric}" for width in ("", "_16", "_4") for metric in metric_names]
    assert all(name in entry for entry in evaluated for name in names)
    best = max(evaluated, key=lambda entry: entry["eval_dev_cosine_ndcg@10"])
    assert metrics["best_step"] == best["step"]
    assert metrics["after"]["ndcg@10"] == pytest.approx(100 * best["eval_dev_cosine_ndcg@10"], abs=0.01)
    assert set(metrics["before"]) == {"ndcg@10", "recall@10", "mrr@10", "accuracy@1"}
    output = capsys.readouterr().out
    assert f"  dev_ndcg@10 {100 * best['eval_dev_cosine_ndcg@10']:.2f}  dev_16_ndcg@10 " in output
    assert "are also training pairs" in output


@pytest.mark.parametrize("columns", [("query", "positive", "negative"), ("sentence1", "sentence2")])
def test_queries_are_held_out_whole(tmp_path, columns):
    count = len(SENTENCES)
    rows = [[SENTENCES[(n + step) % count] for step in (0, 1 + n // count, 4)] for n in range(2 * count)]
    lines = (json.dumps(dict(zip(columns, row, strict=False))) for row in rows)
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    options = settings(tmp_path, **{"data.train": [str(tmp_path / "rows.jsonl")], "data.dev_share": 0.3})
    config = load("train", None, {**options, "data.dev": None, "loss": "InfoNCELoss"})
    datasets, dev, _ = with_dev(read_training_data(config, tmp_path)[0], config)
    task = dev["held out"]
    queries = {*task.sentences[: task.n_queries]}
    assert task.kind == "retrieval" and len(queries) >= 4
    assert {*datasets["rows"]["anchor"]} == {*SENTENCES} - queries
    others = {text for name in datasets["rows"].column_names[1:] for text in datasets["rows"][name]}
    assert others <= {*task.sentences[task.n_queries :]}  # the corpus also has the passages of the training rows
    assert len(datasets["rows"]) == 2 * (count - len(queries))  # both rows of each other query


def test_dev_queries_of_a_folder_search_its_corpus(tmp_path, capsys):
    """Its judged pairs are left out of training."""
    folder, rows = tmp_path / "beir", [(f"q{n}", SENTENCES[n], f"p{n}", SENTENCES[(n + 1) % 11]) for n in range(11)]
    (folder / "qrels").mkdir(parents=True)
    (folder / "queries.jsonl").write_text("".join(json.dumps({"_id": q, "text": t}) + "\n" for q, t, *_ in rows[:4]))
    more = [("other", "a passage without a query")]
    passages = [(name, text) for *_, name, text in rows] + more
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"_id": p, "text": t}) + "\n" for p, t in passages))
    judged = [f"{query}\t{passage}\t1" for query, _, passage, _ in rows[:4]]
    (folder / "qrels/dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    lines = [json.dumps({"query": query, "positive": text}) for _, query, _, text in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    files = {"data.train": [str(tmp_path / "rows.jsonl")], "data.dev": [f"{folder}#dev"]}
    options = {**settings(tmp_path), **files, "loss": "InfoNCELoss", "evaluation.certificate": True}
    config = load("train", None, options)
    datasets, dev, _ = with_dev(read_training_data(config, tmp_path)[0], config)
    task = dev["beir#dev"]
    assert (task.n_queries, len(task.sentences)) == (4, 4 + 12)
    assert "beir#dev: 12 passages are ranked for each of 4 dev queries" in capsys.readouterr().out
    assert {*datasets["rows"]["anchor"]} == {query for _, query, *_ in rows[4:]}
    assert rt.train(None, **{**options, "training.max_steps": 2})["before"]["ndcg@10"] is not None
    (folder / "corpus.jsonl").rename(folder / "corpora.jsonl")
    with pytest.raises(ValueError, match="is a folder, not a data file"):
        with_dev(read_training_data(config, tmp_path)[0], config)


def test_dev_queries_also_search_dev_corpus(tmp_path, capsys):
    rows, corpus, pairs = (str(tmp_path / name) for name in ("dev.jsonl", "corpus.jsonl", "pairs.tsv"))
    write_rows(tmp_path / "dev.jsonl")
    texts = [*SENTENCES[:2], "one more passage", "another one"]  # two are passages of the rows, too
    Path(corpus).write_text("".join(json.dumps({"_id": str(n), "text": t}) + "\n" for n, t in enumerate(texts)))
    write_pairs(tmp_path / "pairs.tsv", 4)
    options = settings(tmp_path, **{"data.train": [write_rows(tmp_path / "train.jsonl")], "loss": "InfoNCELoss"})

    def dev_of(**changes):
        config = load("train", None, {**options, "data.dev_corpus": corpus, **changes})
        return with_dev(read_training_data(config, tmp_path)[0], config)[1]["dev.jsonl"]

    task = dev_of(**{"data.dev": [rows]})
    assert (task.n_queries, len(task.sentences)) == (11, 11 + 11 + 2)
    assert "dev.jsonl: 13 passages are ranked for each of 11 dev queries" in capsys.readouterr().out
    for dev, message in (([pairs], "on pairs.tsv, which has scored pairs"), (None, "without data.dev")):
        with pytest.raises(ValueError, match=f"data.dev_corpus has no effect {message}"):
            dev_of(**{"data.dev": dev})


def test_a_dev_set_may_have_other_columns_than_the_training_data(tmp_path):
    columns, files = {"sentence1": "Question", "sentence2": "Answer", "score": "Label"}, {}
    for name, header in (("mine", [*columns.values()]), ("other", ["text1", "text2", "score"])):
        lines = [header, *([SENTENCES[n], SENTENCES[n + 1], n] for n in range(10))]
        (tmp_path / f"{name}.tsv").write_text("\n".join("\t".join(map(str, line)) for line in lines) + "\n")
        files[name] = [str(tmp_path / f"{name}.tsv")]
    options = settings(tmp_path, **{"data.train": files["mine"], "data.dev": files["other"]})
    config = load("train", None, {**options, "data.columns": columns, "loss": "CoSENTLoss"})
    datasets, dev, _ = with_dev(read_training_data(config, tmp_path)[0], config)
    assert datasets["mine"]["score"][:] == [*dev["other.tsv"].score.keywords["scores"]] == [*range(10)]
    with pytest.raises(ValueError, match=r"no column for score \(looked for Score\)"):
        read_training_data(load("train", None, {**options, "data.columns": {**columns, "score": "Score"}}), tmp_path)


def test_a_dev_set_keeps_every_passage(tmp_path):
    """Also a passage equal to its query, which would be dropped from training data."""
    row = {"query": SENTENCES[0], "pos": [SENTENCES[1]], "neg": [SENTENCES[0], SENTENCES[2]]}
    (tmp_path / "dev.jsonl").write_text(json.dumps(row) + "\n")
    files = {"data.train": [write_rows(tmp_path / "rows.jsonl")], "data.dev": [str(tmp_path / "dev.jsonl")]}
    config = load("train", None, {**settings(tmp_path), **files, "loss": "InfoNCELoss"})
    _, dev, _ = with_dev(read_training_data(config, tmp_path)[0], config)
    assert {*dev["dev.jsonl"].sentences[1:]} == {*SENTENCES[:3]}

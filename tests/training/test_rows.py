"""Training on rows of any shape: by the command line from each format, and by the Trainer in any order of columns."""

import json

import pytest
import torch
from datasets import Dataset
from pandas import DataFrame
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer import losses as stock

import raoe_train as rt
from raoe_train.cli import main
from raoe_train.data.files import write_rows
from raoe_train.losses import AnglELoss, CoSENTLoss, InfoNCELoss, PearsonLoss
from tests.tiny import SENTENCES, tiny_encoder
from tests.training.small_runs import SCRATCH, arguments

ROWS = [
    {
        "query": SENTENCES[n],
        "pos": [SENTENCES[(n + 3) % 11]],
        "neg": [SENTENCES[(n + k) % 11] for k in range(5, 5 + n % 3)],
    }
    for n in range(10)
]
COLUMNS = [  # as ROWS
    {"anchor": row["query"], "positive": row["pos"][0],
     **{name: row["neg"][k] if k < len(row["neg"]) else None for k, name in enumerate(("negative", "negative_2"))}}
    for row in ROWS
]  # fmt: skip


def run(tmp_path, file, loss="InfoNCELoss"):
    code = main([
        "train", "--model.name", "scratch", "--model.device", "cpu", "--loss", loss, "--model.max_seq_length", "16",
        *(word for name, value in SCRATCH.items() for word in (f"--model.scratch.{name}", str(value))),
        "--data.train", str(tmp_path / file), "--training.max_steps", "3", "--training.logging_steps", "1",
        "--training.per_device_train_batch_size", "4", "--output", str(tmp_path / f"{file}.out"),
    ])  # fmt: skip
    if code:
        return code
    return [json.loads(line)["loss"] for line in (tmp_path / f"{file}.out" / "log.jsonl").read_text().splitlines()[:3]]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_each_format_trains_on_the_same_rows(tmp_path, capsys, most):
    lists = [{**row, "neg": row["neg"][:most]} for row in ROWS]
    for file, rows in (("a.jsonl", lists), ("c.tsv", [dict([*row.items()][: 2 + most]) for row in COLUMNS])):
        write_rows(tmp_path / file, [*rows[0]], rows)
        losses = run(tmp_path, file)
        output = capsys.readouterr().out
        assert f"{file}: 10 rows\n" in output
        names = ", ".join(["negative", "negative_2"][:most])
        more = f", up to {most} from its own row ({names}) and {3 * most} negatives of other rows" if most else ""
        what = f"3 positives of other rows{more}"
        assert output.count(f"{file.split('.')[0]}: negatives for each anchor: {what}\n") == 1
        assert "accumulation" not in output
        if file == "a.jsonl":
            expected = losses
        assert losses == expected
    assert len(set(expected)) == 3
    card = (tmp_path / "a.jsonl.out" / "README.md").read_text()
    assert ("<code>negative_2</code>" in card) == (most == 2)


@pytest.mark.parametrize("loss", ["TripletLoss", "AnglEContrastiveLoss"])
def test_losses_of_one_negative_refuse_other_rows(tmp_path, loss, capsys):
    for rows in ([{"query": "a", "answer": "b"}], [{"query": "a", "pos": ["b"], "neg": ["c", "d"]}]):
        write_rows(tmp_path / "a.jsonl", [*rows[0]], rows)
        assert run(tmp_path, "a.jsonl", loss) == 2
        assert "a.jsonl: the loss needs exactly one negative in every row: for" in capsys.readouterr().err


def trained(tmp_path, data, *, workers=0, loss=InfoNCELoss, trainer=rt.Trainer, **settings):
    model = tiny_encoder()
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "eval_strategy": "epoch"}
    args = arguments(tmp_path, **options, dataloader_num_workers=workers)
    trainer(model, args, data, data, loss=loss(model), **settings).train()
    return torch.cat([weight.flatten() for weight in model.parameters()])


def test_any_order_of_columns(tmp_path):
    expected = trained(tmp_path, Dataset.from_list(COLUMNS))
    for order in (["negative", "positive", "negative_2", "anchor"], ["positive", "anchor", "negative_2", "negative"]):
        data = Dataset.from_list(COLUMNS).select_columns(order)
        torch.testing.assert_close(trained(tmp_path, data), expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(trained(tmp_path, DataFrame(data.to_list())), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(trained(tmp_path, Dataset.from_list(COLUMNS), workers=2), expected)
    assert torch.equal(trained(tmp_path, Dataset.from_list(ROWS)), expected)
    full = [{**row, "negative_2": "x", "negative": "y"} for row in COLUMNS]
    with pytest.raises(ValueError, match="a row lacks a negative"):
        trained(tmp_path, Dataset.from_list(COLUMNS), loss=stock.MultipleNegativesRankingLoss)
    trained(tmp_path, Dataset.from_list(full), loss=stock.MultipleNegativesRankingLoss)


@pytest.mark.parametrize("columns", ["negative", "negative negative_2", "negative score"])
def test_angle_on_triplets_equals_sentence_transformers(tmp_path, columns):
    names = ["anchor", "positive", *columns.split()]
    rows = {name: SENTENCES[2 * n :] + SENTENCES[: 2 * n] for n, name in enumerate(names)}
    data = Dataset.from_dict(rows | ({"score": [n / 10 for n in range(11)]} if "score" in rows else {}))
    expected = trained(tmp_path, data, loss=stock.AnglELoss, trainer=SentenceTransformerTrainer)
    torch.testing.assert_close(trained(tmp_path, data, loss=AnglELoss), expected)


@pytest.mark.parametrize("loss", [PearsonLoss, CoSENTLoss, rt.losses.CosineSimilarityLoss])
def test_nli_labels_are_not_read_as_scores(tmp_path, loss):
    """0 is the most similar class, but the lowest score. Two classes are scores, as in sentence-transformers."""
    model = tiny_encoder(double=False)
    data = Dataset.from_dict({"sentence1": SENTENCES, "sentence2": SENTENCES[::-1], "label": [0, 1, 2] * 3 + [0, 1]})
    with pytest.raises(ValueError, match=r"train: \w+ would read labels \(0 = most similar\) as scores: add a column"):
        rt.Trainer(model, arguments(tmp_path, max_steps=1), data, loss=loss(model)).train()
    labels = [min(label, 1) for label in data["label"]]
    two = data.remove_columns("label").add_column("label", labels)
    rt.Trainer(model, arguments(tmp_path, max_steps=1), two, loss=loss(model)).train()


def test_columns_of_rows(tmp_path, capsys):
    model = tiny_encoder(double=False)
    data = Dataset.from_dict({"query": SENTENCES[:10], "passage": SENTENCES[1:]})
    args = arguments(tmp_path, per_device_train_batch_size=3, num_train_epochs=1, gradient_accumulation_steps=2)

    def trainer(columns, name="InfoNCELoss"):
        return rt.Trainer(model, args, columns, loss=getattr(rt.losses, name)(model))

    for name in ("label", "score"):
        with pytest.raises(ValueError, match=rf"train: InfoNCELoss does not use column '{name}': .*row_table"):
            trainer(data.add_column(name, [1, 0] * 5)).train()
    with pytest.raises(ValueError, match=r"train: SigmoidLoss needs two text columns, anchor.*got query"):
        trainer(data.select_columns("query"), "SigmoidLoss").train()
    with pytest.raises(ValueError, match=r"needs two or more columns of equal length: .* got columns of 2 rows"):
        InfoNCELoss(model)([model.tokenize(["a", "b"])])
    with pytest.raises(ValueError, match="got columns of 2, 1 rows"):
        InfoNCELoss(model)([model.tokenize(["a", "b"]), model.tokenize(["c"])])
    capsys.readouterr()
    with pytest.warns(UserWarning, match="a batch of one row has no negatives"):  # the last one
        trainer(data).train()
    assert "\n  gradient accumulation adds no negatives; " in capsys.readouterr().out


@pytest.mark.parametrize("column", ["query", "passage", "negative"])
def test_lists_are_no_texts(tmp_path, column):
    """A tokenizer would read a list of two texts as one text, "a [SEP] b"."""
    model = tiny_encoder(double=False)
    texts = {"query": SENTENCES[:10], "passage": SENTENCES[1:], "negative": SENTENCES[:10]}
    data = Dataset.from_dict({**texts, column: [[text, "b"] if text != SENTENCES[1] else [] for text in texts[column]]})
    for loss in (InfoNCELoss, rt.losses.TripletLoss):
        with pytest.raises(ValueError, match=f"column {column} contains lists, not texts: use one column per text"):
            rt.Trainer(model, arguments(tmp_path, max_steps=1), data, loss=loss(model)).train()

"""Queries with texts that a teacher scored, from a file to sentence-transformers' own losses."""

from __future__ import annotations

import json

import pytest
import torch
from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses as stock

from raoe_train import run
from raoe_train.data.retrieval import scored_tuple_table
from raoe_train.losses.registry import loss_settings, make_loss
from tests.tiny import SENTENCES, tiny_encoder

ROWS = [
    {"query": "one", "positive": "a", "negative": ["b", "c"], "score": [9.5, 2, -1]},
    {"query": "two", "positive": "d", "negative": ["e", "a"], "score": [0.5, 0.75, 0.25], "extra": 1},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows(tmp_path):
    table, counts = scored_tuple_table(write(tmp_path / "a.jsonl", ROWS))
    assert table[0] == {
        "query": "one", "positive": "a", "negative_1": "b", "negative_2": "c", "label": [9.5, 2.0, -1.0]
    }  # fmt: skip
    assert table[1]["label"] == [0.5, 0.75, 0.25] and counts == {"read": 2, "kept": 2, "dropped": {}}
    one = [{**row, "negative": row["negative"][0], "marks": row["score"][:2]} for row in ROWS]
    for row in one:
        del row["score"]
    table, _ = scored_tuple_table(write(tmp_path / "b.jsonl", one), columns={"score": "marks"})
    assert table.column_names == ["query", "positive", "negative_1", "label"]


@pytest.mark.parametrize(
    ("change", "message", "reason"),
    [
        ({"score": [1, 2]}, "2 scores, of a positive and 2 negatives", "bad score"),
        ({"score": 3.0}, "score is 3.0, not a list of numbers, the positive's first", "bad score"),
        ({"score": [1, None, 2]}, "score 1 is None, not a number", "bad score"),
        ({"negative": ["b"], "score": [1, 2]}, "1 negatives where earlier rows have 2", "other number of negatives"),
        ({"negative": []}, "negative is empty: there is nothing to rank", "no negative"),
        ({"positive": " "}, "positive is empty", "empty sentence"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, change, message, reason):
    file = write(tmp_path / "a.jsonl", [ROWS[0], {**ROWS[1], **change}])
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        scored_tuple_table(file)
    table, counts = scored_tuple_table(file, on_error="skip")
    assert len(table) == 1 and counts["dropped"] == {reason: 1}


def test_they_are_sentence_transformers_losses_by_name():
    """With the values of their formulas: dot products 1.2 and 0.4 and -0.5 where a teacher says 3, 1 and 0."""
    query = torch.tensor([[1.0, 0.0]])
    texts = [torch.tensor([[x, 1.0]]) for x in (1.2, 0.4, -0.5)]
    scores = torch.tensor([[3.0, 1.0, 0.0]])
    kl = make_loss(loss_settings({"name": "distill_kl_div", "temperature": 2}))
    assert type(kl) is stock.DistillKLDivLoss and kl.similarity_fct is util.pairwise_dot_score
    p, q = (scores / 2).softmax(1), torch.tensor([[0.6, 0.2, -0.25]]).softmax(1)
    expected = 4 * (p * (p / q).log()).sum()
    assert kl.compute_loss_from_embeddings([query, *texts], scores).item() == pytest.approx(expected.item(), rel=1e-5)
    margins = make_loss(loss_settings({"name": "margin_mse"}))
    assert type(margins) is stock.MarginMSELoss
    expected = ((0.8 - 2) ** 2 + (1.7 - 3) ** 2) / 2
    assert margins.compute_loss_from_embeddings([query, *texts], scores).item() == pytest.approx(expected, rel=1e-5)
    for name in ("distill_kl_div", "margin_mse"):
        cosine = make_loss(loss_settings({"name": name, "similarity": "cosine"}))
        assert cosine.similarity_fct is util.pairwise_cos_sim
    with pytest.raises(ValueError, match=r"loss\.temperature must be above 0"):
        loss_settings({"name": "distill_kl_div", "temperature": 0})


@pytest.mark.parametrize("name", ["distill_kl_div", "margin_mse"])
def test_a_recipe_trains_on_a_file(tmp_path, name):
    """The first step's logged loss is sentence-transformers' own of the same batch."""
    rows = [
        {"query": SENTENCES[k], "positive": SENTENCES[k + 1], "negative": [SENTENCES[k + 2], SENTENCES[k + 3]],
         "score": [2.0 + k, 1.0, -k]}
        for k in range(6)
    ]  # fmt: skip
    tiny_encoder(double=False).save_pretrained(str(tmp_path / "encoder"))
    run("train", None, **{
        "model.name": str(tmp_path / "encoder"), "model.device": "cpu",
        "data.train": write(tmp_path / "rows.jsonl", rows), "data.dev": "none", "loss.name": name,
        "training": {"epochs": 1, "batch_size": 6, "logging_steps": 1}, "output": str(tmp_path / "out"),
    })  # fmt: skip
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    columns = [[row["query"] for row in rows], [row["positive"] for row in rows]]
    columns += [[row["negative"][k] for row in rows] for k in range(2)]
    own = (stock.DistillKLDivLoss if name == "distill_kl_div" else stock.MarginMSELoss)(model)
    with torch.no_grad():
        expected = own([model.preprocess(c) for c in columns], torch.tensor([row["score"] for row in rows]))
    assert log[0]["loss"] == pytest.approx(expected.item(), rel=1e-3)

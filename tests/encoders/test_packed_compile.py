"""One compiled graph serves packed rows of all sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainingArguments
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import raoe_train as rt
from raoe_train import losses as ours
from raoe_train.losses.by_length import ByLength
from tests.encoders.test_packed import family
from tests.tiny import SENTENCES, gradients, tiny_encoder, total

# (rows, words in the longest text) of each batch: numbers of texts and buckets of longest texts stay and change
BATCHES = [(9, 4), (9, 5), (9, 4), (9, 5), (7, 3), (12, 30), (5, 20), (1, 1), (9, 3)]


def texts(rows: int, words: int, start: int) -> list[str]:
    """Distinct texts, the first of them the longest."""
    return [" ".join(f"{'dog train man'.split()[(row + start) % 3]}{row}" for _ in range(max(1, words - row)))
            for row in range(rows)]  # fmt: skip


@pytest.mark.parametrize("name", ["bert", pytest.param("modernbert", marks=pytest.mark.slow),
                                  pytest.param("roberta", marks=pytest.mark.slow),
                                  pytest.param("qwen3", marks=pytest.mark.slow)])  # fmt: skip
@pytest.mark.parametrize("cached", [{}, pytest.param({"mini_batch_num_tokens": 60}, marks=pytest.mark.slow)])
def test_one_graph_for_all_rows(name, cached):
    torch._dynamo.reset()
    counters.clear()
    model: Any = family(name)
    model.max_seq_length = 60
    eager = ByLength(ours.CoSENTLoss(copy.deepcopy(model), **cached), packed=True)
    count = CompileCounterWithBackend("eager")
    compiled = ByLength(ours.CoSENTLoss(torch.compile(model, backend=count), **cached), packed=True)
    longest = set()
    for rows, words in BATCHES:
        features = [model.preprocess(texts(rows, words, start)) for start in (0, 1)]
        scores, results = {"score": torch.arange(rows) / rows}, []
        for loss in (compiled, eager):
            loss.zero_grad()
            value = total(loss([dict(column) for column in features], scores))
            value.backward()
            results.append((value.detach(), gradients(loss)))
        torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-9)
        longest.add(max(run["max_length_q"] for run in compiled.plan(features, scores).runs))
    # a cached loss also embeds without gradients, and a row with a single text, which torch specializes
    assert not counters["graph_break"] and count.frame_count == (4 if cached else 1)
    assert len(longest) > 1


@pytest.mark.slow
def test_the_trainer_compiles_once(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which torch_compile sets, to be restored after the test
    rows = {name: [" ".join(SENTENCES[: 1 + n % part]) for n in range(44)] for name, part in (("a", 5), ("b", 7))}
    data = Dataset.from_dict({**rows, "score": [n / 44 for n in range(44)]})
    histories, graphs = [], []
    for compiled in (True, False):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(3)
        model = tiny_encoder(double=False)
        arguments = SentenceTransformerTrainingArguments(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=8, logging_steps=1, optim="sgd",
            learning_rate=0.05, report_to="none", save_strategy="no", use_cpu=True, torch_compile=compiled,
        )  # fmt: skip
        trainer = rt.Trainer(model, arguments, data, loss=ours.CoSENTLoss(model), packed=True)
        trainer.train()
        histories.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 0] and not counters["graph_break"]
    assert len(histories[0]) == 12 and histories[0] == pytest.approx(histories[1], rel=1e-4)

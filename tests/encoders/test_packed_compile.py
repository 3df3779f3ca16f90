"""One compiled graph serves packed rows of all sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from raoe_train import losses as ours
from raoe_train.losses.by_length import ByLength
from tests.encoders.test_packed import family
from tests.tiny import gradients, total

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

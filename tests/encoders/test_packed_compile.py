"""One compiled graph serves packed rows of all sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from raoe_train import losses as ours
from raoe_train.encoders.lengths import texts_of
from raoe_train.losses.by_length import ByLength
from raoe_train.training.trainer import Trainer
from tests.encoders.test_packed import family
from tests.tiny import gradients, tiny_encoder, total
from tests.training.small_runs import arguments

# (rows, words in the longest text) of each batch: numbers of texts and buckets of longest texts stay and change
BATCHES = [(9, 4), (9, 5), (9, 4), (9, 5), (7, 3), (12, 30), (5, 20), (1, 1), (9, 3)]


def texts(rows: int, words: int, start: int) -> list[str]:
    """Distinct texts, the first of them the longest."""
    return [" ".join(f"{'dog train man'.split()[(row + start) % 3]}{row}" for _ in range(max(1, words - row)))
            for row in range(rows)]  # fmt: skip


def compare(losses: Any, features: list[Any], scores: dict[str, Any], **tolerance: float) -> None:
    """Compare values and gradients of two losses."""
    results = []
    for loss in losses:
        loss.zero_grad()
        value = total(loss([dict(column) for column in features], scores))
        value.backward()
        results.append((value.detach(), gradients(loss)))
    torch.testing.assert_close(*results, **tolerance)


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
        scores = {"score": torch.arange(rows) / rows}
        compare((compiled, eager), features, scores, rtol=1e-6, atol=1e-9)
        longest.add(max(run["max_length_q"] for run in compiled.plan(features, scores).runs))
    # a cached loss also embeds without gradients, and a row with a single text, which torch specializes
    assert not counters["graph_break"] and count.frame_count == (4 if cached else 1)
    assert len(longest) > 1


@pytest.mark.parametrize("prompts", [("", ""), ("a dog ", "")])
@pytest.mark.parametrize("pooling", ["mean", "max", "cls"])
def test_rows_of_few_sizes_give_the_same_gradients(pooling, prompts):
    """Rows for CUDA graphs, here without graphs: the texts that are added change nothing."""
    model: Any = family("bert", pooling)
    sizes, exact, captured = set(), *(ByLength(ours.CoSENTLoss(model), packed=True) for _ in range(2))
    captured.captured = True
    for rows, words in [*BATCHES, (70, 40), (64, 8), (40, 64)]:
        columns = [model.preprocess(texts(rows, words, at), prompt=prompt) for at, prompt in enumerate(prompts)]
        scores = {"score": torch.arange(rows) / rows}
        compare((captured, exact), columns, scores, rtol=1e-12, atol=1e-14)
        plans = captured.plan(columns, scores), exact.plan(columns, scores)
        assert texts_of(plans[0].runs) == texts_of(plans[1].runs)
        for run in plans[0].runs:
            ends = run["cu_seq_lens_q"]
            sizes.add((run["input_ids"].shape[1], len(ends) - 1, run["max_length_q"]))
            assert (
                0 < ends.diff().min()
                and ends.diff().max() <= run["max_length_q"]
                and ends[-1] == run["input_ids"].shape[1]
            )
    assert all((tokens % 512, count % 64, longest % 64) == (0, 0, 0) for tokens, count, longest in sizes)
    assert len(sizes) < 6


def test_only_one_process_without_cached_gradients_captures_graphs(tmp_path):
    rows = Dataset.from_dict({"sentence1": ["a", "b"], "sentence2": ["c", "d"], "score": [0.0, 1.0]})
    model = tiny_encoder(double=False)
    for settings, captured in [({"torch_compile": True, "torch_compile_mode": "reduce-overhead"}, True),
                               ({"torch_compile": True}, False), ({}, False)]:  # fmt: skip
        for cached in ({}, {"mini_batch_size": 2}):
            trainer = Trainer(
                model, arguments(tmp_path, **settings), rows, loss=ours.CoSENTLoss(model, **cached), packed=True
            )
            assert trainer.computed_loss().planner().grouping.buckets == (captured and not cached)

"""With mini_batch_size a step's memory does not grow with the batch as it does without: real steps, resident memory."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import timing
from raoe_train.encoders.load import load_encoder
from raoe_train.losses import CoSENTLoss, InfoNCELoss, ListMLELoss, RAOELoss
from raoe_train.settings import Model
from tests.tiny import total

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")]
TOKENS = 16
MINI_BATCH = 32


@pytest.fixture(scope="module")
def encoder():
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256}
    return load_encoder(Model(name="scratch", scratch=shape, device="cpu"), sentences=["a b", "b c"], seed=0)


def peak(encoder, loss, columns: int, rows: int, labels) -> int:
    """Bytes that a step takes beyond those before it; the first step has made what stays."""
    ids = torch.randint(5, len(encoder.tokenizer), (columns, rows, TOKENS), generator=torch.Generator().manual_seed(0))

    def step(_: int) -> None:
        encoder.zero_grad()
        features = [{"input_ids": column, "attention_mask": torch.ones_like(column)} for column in ids]
        total(loss(features, labels)).backward()

    step(0)
    _, result = timing.single(step, "cpu")
    if result is None:
        pytest.skip("the peak of resident memory cannot be reset here")
    return result


def labels(kind, rows: int):
    if kind is ListMLELoss:
        return {"lengths": torch.full((rows // 16,), 16)}
    score = torch.linspace(0, 1, rows)
    return {"score": score, "label": torch.arange(rows) % 3} if kind is RAOELoss else score


@pytest.mark.parametrize(("kind", "columns"), [(RAOELoss, 2), (CoSENTLoss, 2), (InfoNCELoss, 3), (ListMLELoss, 1)])
def test_memory_is_bounded_by_the_mini_batch(encoder, kind, columns):
    """1,024 rows against 256: without mini-batches activations of all grow; with them what grows are the embeddings,
    their gradient and the tokens, a few numbers a row where activations are thousands."""
    grown = {}
    for size in (None, MINI_BATCH):
        loss = kind(encoder, mini_batch_size=size)
        small, large = (peak(encoder, loss, columns, rows, labels(kind, rows)) for rows in (256, 1024))
        grown[size] = large - small
    assert grown[None] > 768 * columns * TOKENS * 64 * 4 * 2  # at least a layer's output, of each layer
    assert grown[MINI_BATCH] < grown[None] / 10

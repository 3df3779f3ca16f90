"""calibrate: the scale that minimises the loss of the starting encoder."""

from __future__ import annotations

import pytest
import torch

import raoe_train as rt
from raoe_train.losses import RankMarginLoss
from raoe_train.losses.pairs import SCALES


class Known(torch.nn.Module):
    """An encoder with fixed embeddings."""

    def __init__(self, vectors):
        super().__init__()
        self.vectors = vectors

    def encode(self, texts, prompt="", **options):
        return [self.vectors[prompt + text] for text in texts]


def noisy(spread: float, noise: float, pairs: int = 512, columns=("sentence1", "sentence2")):
    """Pairs whose cosines are their scores with noise, and the encoder that gives them."""
    from datasets import Dataset

    seeded = torch.Generator().manual_seed(0)
    score = torch.rand(pairs, generator=seeded)
    cosine = (spread * (score + noise * torch.randn(pairs, generator=seeded))).clamp(-1, 1)
    vectors = {str(n): [c, (1 - c * c) ** 0.5] for n, c in enumerate(cosine.double().tolist())}
    texts = {columns[0]: ["same"] * pairs, columns[1]: list(vectors)}
    return Known({"same": [1.0, 0.0], **vectors}), Dataset.from_dict({**texts, "score": score.tolist()})


def best(spread, noise, **settings):
    model, dataset = noisy(spread, noise)
    return rt.calibrate(model, RankMarginLoss(None), dataset, seed=1, **settings)


@pytest.mark.parametrize(("size", "batches"), [(100, 5), (512, 1), (600, 1)])
def test_it_minimises_the_mean_over_whole_batches(size, batches):
    model, dataset = noisy(0.25, 0.3)
    sample = dataset.shuffle(seed=1)
    means = {}
    for scale in SCALES:
        losses = []
        for first in range(0, batches * size, size):
            rows = sample[first : first + size]
            texts = (rows[name] for name in ("sentence1", "sentence2"))
            columns = [torch.tensor([model.vectors[text] for text in column]).float() for column in texts]
            loss = RankMarginLoss(None, scale=scale)
            losses.append(loss.compute_loss_from_embeddings(columns, torch.tensor(rows["score"])).item())
        means[scale] = sum(losses)
    assert best(0.25, 0.3, batch_size=size) == min(means, key=means.get)

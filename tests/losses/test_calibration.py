"""loss.scale auto: the tau that minimises the loss of the encoder one starts from."""

from __future__ import annotations

import pytest
import torch

from raoe_train.losses import RankMarginLoss
from raoe_train.losses.scale import SCALES, calibrate, scaled


class Known:
    """An encoder whose embeddings are known."""

    training = False

    def __init__(self, vectors):
        self.vectors = vectors

    def train(self, mode):
        pass

    def forward(self, features):
        raise NotImplementedError

    def encode(self, texts, **options):
        return [self.vectors[text] for text in texts]


def noisy(spread: float, noise: float, pairs: int = 512):
    """Pairs whose cosines are their scores with noise, and the encoder that gives them."""
    from datasets import Dataset

    seeded = torch.Generator().manual_seed(0)
    score = torch.rand(pairs, generator=seeded)
    cosine = (spread * (score + noise * torch.randn(pairs, generator=seeded))).clamp(-1, 1)
    vectors = {str(n): [c, (1 - c * c) ** 0.5] for n, c in enumerate(cosine.double().tolist())}
    columns = {"sentence1": ["same"] * pairs, "sentence2": list(vectors), "score": score.tolist()}
    return Known({"same": [1.0, 0.0], **vectors}), Dataset.from_dict(columns)


def best(spread, noise):
    model, dataset = noisy(spread, noise)
    loss = RankMarginLoss(None, scale="auto")
    return scaled(loss, model, dataset, "them", batch_size=64, seed=1, shared=False).scale


def test_only_the_product_of_tau_and_the_spread_counts():
    assert best(0.1, 0.3) == pytest.approx(4 * best(0.4, 0.3), rel=0.02)


def test_noisier_scores_want_a_smaller_tau():
    chosen = [best(0.25, noise) for noise in (0.1, 0.3, 1.0)]
    assert chosen[0] > chosen[1] > chosen[2]


@pytest.mark.parametrize(("batch_size", "batches"), [(100, 5), (512, 1), (600, 1)])
def test_it_is_the_mean_over_whole_batches(batch_size, batches):
    model, dataset = noisy(0.25, 0.3)
    means = calibrate(model, RankMarginLoss(None, scale="auto"), dataset, batch_size=batch_size, seed=1)
    assert tuple(means) == SCALES
    drawn = dataset.shuffle(seed=1)
    losses = []
    for first in range(0, batches * batch_size, batch_size):
        rows = drawn[first : first + batch_size]
        columns = [torch.tensor([model.vectors[text] for text in rows[c]]).float() for c in ("sentence1", "sentence2")]
        loss = RankMarginLoss(None, scale=SCALES[5])
        losses.append(loss.compute_loss_from_embeddings(columns, torch.tensor(rows["score"])).item())
    assert means[SCALES[5]] == pytest.approx(sum(losses) / batches)


def test_two_files_have_a_scale_each(tmp_path):
    from raoe_train import run
    from raoe_train.data import read_pairs
    from tests.tiny import tiny_encoder

    tiny_encoder(double=False).save_pretrained(str(tmp_path / "tiny"), create_model_card=False)
    for name in ("some.tsv", "more.tsv"):
        pairs = read_pairs("builtin#train").shuffle(seed=len(name)).select(range(40))
        rows = zip(*pairs.to_dict().values(), strict=True)
        lines = ["\t".join(map(str, row)) for row in (("sentence1", "sentence2", "score", "label"), *rows)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    metrics = run(
        "train",
        **{
            "model.name": str(tmp_path / "tiny"),
            "data.train": [str(tmp_path / "some.tsv"), str(tmp_path / "more.tsv")],
            "training": {"batch_size": 20, "epochs": 1},
            "loss.scale": "auto",
            "output": str(tmp_path / "out"),
        },
    )
    assert set(metrics["scale"]) == {"some", "more"} and set(metrics["scale"].values()) <= set(SCALES)


def test_a_training_run_uses_it(tmp_path):
    from raoe_train import run
    from tests.tiny import tiny_encoder

    tiny_encoder(double=False).save_pretrained(str(tmp_path / "tiny"), create_model_card=False)
    options = {
        "model.name": str(tmp_path / "tiny"), "data.train": "builtin#train", "data.max_rows": 64,
        "training.batch_size": 32, "training.max_steps": 1, "output": str(tmp_path / "out"),
    }  # fmt: skip
    metrics = run("train", **{**options, "loss.scale": "auto"})
    (tau,) = metrics["scale"].values()
    assert tau in SCALES
    with pytest.raises(ValueError, match=r"loss\.scale must be above 0, got -3"):
        run("train", **{**options, "loss.scale": "-3"})

"""loss.scale auto: the tau that minimises the loss of the encoder one starts from."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import rank_margin_loss
from raoe_train.losses.scale import SCALES, best_scale


def loss_at(tau, columns, targets):
    return rank_margin_loss(columns[0][:, 0], targets["score"], tau=tau).item()


def noisy(spread: float, noise: float, pairs: int = 512):
    seeded = torch.Generator().manual_seed(0)
    score = torch.rand(pairs, generator=seeded)
    c = spread * (score + noise * torch.randn(pairs, generator=seeded))
    return [c[:, None], c[:, None]], {"score": score}


def test_only_the_product_of_tau_and_the_spread_counts():
    wide, _ = best_scale(loss_at, *noisy(1.0, 0.3), batch_size=64)
    narrow, _ = best_scale(loss_at, *noisy(0.25, 0.3), batch_size=64)
    assert narrow == pytest.approx(4 * wide, rel=0.02)


def test_noisier_scores_want_a_smaller_tau():
    chosen = [best_scale(loss_at, *noisy(0.5, noise), batch_size=64)[0] for noise in (0.1, 0.3, 1.0)]
    assert chosen[0] > chosen[1] > chosen[2]


def test_it_is_the_minimum_of_what_it_measured():
    tau, means = best_scale(loss_at, *noisy(0.5, 0.3), batch_size=100)
    assert tuple(means) == SCALES and means[tau] == min(means.values())
    full, targets = noisy(0.5, 0.3)
    by_hand = sum(
        loss_at(tau, [full[0][k : k + 100]], {"score": targets["score"][k : k + 100]}) for k in range(0, 500, 100)
    )
    assert means[tau] == pytest.approx(by_hand / 5)


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
    with pytest.raises(ValueError, match=r"loss\.scale must be a number above 0 .* or 'auto', got -3"):
        run("train", **{**options, "loss.scale": "-3"})

"""`loss.scale: auto`: the tau that fits the encoder one starts from to the scores one has.

The ranking losses see tau x c only, so scaling the cosines and scaling tau are the same. Where tau is above the value
that minimises the loss of the *starting* encoder on its training batches, the cheapest way down for the gradient is to
bring all cosines together: it unlearns the spread that made the encoder useful. docs/study.md has the measurements. The
paper's 20 fits scores that another encoder gave; scores that people gave are noisier and want a smaller tau.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import Tensor, nn

from raoe_train.encoders.embed import encode_sentences
from raoe_train.losses.base import AUTO

SCALES = tuple(round(2 ** (k / 4), 2) for k in range(0, 25))  # 1, 1.19, … 64
PAIRS = 1024  # read from a source, at most

Targets = Mapping[str, Tensor]


def best_scale(
    loss_at: Callable[[float, list[Tensor], Targets], float],
    embeddings: Sequence[Tensor],
    targets: Targets,
    batch_size: int,
) -> tuple[float, dict[float, float]]:
    """The tau of SCALES with the smallest mean loss over batches, and all the means.

    loss_at(tau, [a, b], targets of the batch) is the loss of a batch whose embeddings are a and b, each (B, D).
    """
    pairs = embeddings[0].shape[0]
    batches = [slice(first, first + batch_size) for first in range(0, pairs, batch_size)]
    if len(batches) > 1 and pairs % batch_size:
        batches.pop()  # a short batch has another, easier problem
    means = {
        tau: sum(
            loss_at(tau, [column[rows] for column in embeddings], {k: v[rows] for k, v in targets.items()})
            for rows in batches
        )
        / len(batches)
        for tau in SCALES
    }
    return min(means, key=lambda tau: means[tau]), means


def scaled(loss: Any, model: Any, dataset: Any, source: str, *, batch_size: int, seed: int) -> Any:
    """The loss with the tau of a dataset in place of "auto", with a line printed; itself where it has a number."""
    inner = innermost(loss)
    if getattr(inner, "scale", None) != AUTO:
        return loss
    tau, means = calibrate(model, inner, dataset, batch_size=batch_size, seed=seed)
    at_20 = means[min(means, key=lambda tau: abs(tau - 20))]
    print(f"{source}: scale {tau:g} (loss before training {means[tau]:.2f}; at 20 {at_20:.2f})")
    fixed = inner.with_scale(tau)
    if inner is loss:
        return fixed
    # made anew: with a gradient cache it has put itself between the other one and its mini-batches
    return MatryoshkaLoss(model, fixed, loss.matryoshka_dims, loss.matryoshka_weights, loss.n_dims_per_step)


def innermost(loss: Any) -> Any:
    """The loss inside of a MatryoshkaLoss or the like."""
    while isinstance(getattr(loss, "loss", None), nn.Module):
        loss = loss.loss
    return loss


def calibrate(model: Any, loss: Any, dataset: Any, *, batch_size: int, seed: int) -> tuple[float, dict[float, float]]:
    """`best_scale` for a loss module of raoe_train.losses and a dataset of sentence1, sentence2, score, perhaps label.

    The encoder is read without dropout on up to 1,024 pairs drawn with `seed` (or one batch, if that is larger), so
    the same run finds the same tau. loss.scale is left as it was.
    """
    chosen = dataset.shuffle(seed=seed, keep_in_memory=True).select(range(min(len(dataset), max(PAIRS, batch_size))))
    embeddings = [torch.as_tensor(encode_sentences(model, chosen[c], 64)) for c in ("sentence1", "sentence2")]
    targets = {name: torch.tensor(chosen[name]) for name in ("score", "label") if name in chosen.column_names}
    before = loss.scale

    def loss_at(tau: float, columns: list[Tensor], batch: Targets) -> float:
        loss.scale = tau
        with torch.no_grad():
            value = loss.compute_loss_from_embeddings(columns, batch)
        return float(sum(value.values()) if isinstance(value, dict) else value)

    try:
        return best_scale(loss_at, embeddings, targets, batch_size)
    finally:
        loss.scale = before

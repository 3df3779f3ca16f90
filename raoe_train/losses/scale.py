"""`loss.scale: auto`: the tau that fits the encoder one starts from to the scores one has.

The ranking losses see tau x c only, so scaling the cosines and scaling tau are the same. Where tau is above the value
that minimises the loss of the *starting* encoder on its training batches, the cheapest way down for the gradient is to
bring all cosines together: it unlearns the spread that made the encoder useful. docs/study.md has the measurements. The
paper's 20 fits scores that another encoder gave; scores that people gave are noisier and want a smaller tau.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import nn

from raoe_train.encoders.embed import encode_sentences
from raoe_train.losses.base import AUTO

SCALES = tuple(round(2 ** (k / 4), 2) for k in range(0, 25))  # 1, 1.19, … 64
PAIRS = 1024  # read from a source, at most


def scaled(loss: Any, model: Any, dataset: Any, source: str, *, batch_size: int, seed: int, shared: bool) -> Any:
    """The loss with the tau of a dataset in place of "auto", with a line printed; itself where it has a number.

    A loss with a memory that is `shared` with other datasets is made anew: their scores are on other scales.
    """
    inner = innermost(loss)
    if getattr(inner, "scale", None) != AUTO:
        apart = shared and hasattr(inner, "memory_size") and inner.memory_size
        return _remade(loss, inner.with_scale(inner.scale)) if apart else loss
    means = calibrate(model, inner, dataset, batch_size=batch_size, seed=seed)
    tau = min(means, key=lambda tau: means[tau])
    at_20 = means[min(means, key=lambda tau: abs(tau - 20))]
    print(f"{source}: scale {tau:g} (loss before training {means[tau]:.2f}; at 20 {at_20:.2f})")
    return _remade(loss, inner.with_scale(tau))


def _remade(loss: Any, inner: Any) -> Any:
    """The loss around another one of its model."""
    if not isinstance(getattr(loss, "loss", None), nn.Module):
        return inner
    # made anew: with a gradient cache it has put itself between the other one and its mini-batches
    return MatryoshkaLoss(inner.model, inner, loss.matryoshka_dims, loss.matryoshka_weights, loss.n_dims_per_step)


def innermost(loss: Any) -> Any:
    """The loss inside of a MatryoshkaLoss or the like."""
    while isinstance(getattr(loss, "loss", None), nn.Module):
        loss = loss.loss
    return loss


def calibrate(model: Any, loss: Any, dataset: Any, *, batch_size: int, seed: int) -> dict[float, float]:
    """The mean over batches, of every tau of SCALES, of a loss of scored pairs.

    Args:
        model: the encoder. It reads, without dropout, up to 1,024 pairs (or one batch, if that is larger).
        loss: a module of raoe_train.losses.
        dataset: columns sentence1, sentence2, score, perhaps label.
        batch_size: pairs.
        seed: of the draw of pairs.
    """
    pairs = min(len(dataset), max(PAIRS, batch_size))
    chosen = dataset.shuffle(seed=seed, keep_in_memory=True).select(range(pairs))
    columns = [torch.as_tensor(encode_sentences(model, chosen[c], 64)) for c in ("sentence1", "sentence2")]
    targets = {name: torch.tensor(chosen[name]) for name in ("score", "label") if name in chosen.column_names}
    size = min(batch_size, pairs)
    # whole ones only: a short batch has another, easier problem
    batches = [slice(first, first + size) for first in range(0, pairs - size + 1, size)]
    means, all_dimensions = {}, {"matryoshka_dims": ()} if getattr(loss, "matryoshka_dims", None) else {}
    for tau in SCALES:
        fixed, total = loss.with_scale(tau, **all_dimensions), 0.0
        for rows in batches:
            with torch.no_grad():
                value = fixed.compute_loss_from_embeddings(
                    [column[rows] for column in columns], {name: column[rows] for name, column in targets.items()}
                )
            total += float(sum(value.values()) if isinstance(value, dict) else value)
        means[tau] = total / len(batches)
    return means

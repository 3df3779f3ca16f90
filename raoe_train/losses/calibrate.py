"""The scale that fits an encoder to scores.

Where the scale is above the value that minimises the loss of the *starting* encoder, the cheapest way down for the
gradient is to bring all cosines together (docs/study.md). The paper's 20 fits scores that another encoder gave; scores
that people gave are noisier and want a smaller scale.
"""

import copy
from typing import Any

import torch

from raoe_train.encoders.embed import encode_sentences
from raoe_train.losses.pairs import PairLoss

SCALES = tuple(round(2 ** (k / 4), 2) for k in range(0, 25))  # 1, 1.19, … 64
PAIRS = 1024  # read at most


def calibrate(model: Any, loss: PairLoss, pairs: Any, *, batch_size: int = 64, seed: int = 42, **encode: Any) -> float:
    """The scale, of 25 from 1 to 64, at which a loss of scored pairs is smallest before training.

    Args:
        model: a SentenceTransformer, which reads up to 1,024 pairs (or one batch, if that is larger).
        loss: a loss of scored pairs, of any scale: ``rt.losses.RAOELoss(model)``.
        pairs: a datasets.Dataset of two columns of texts, `score` and, where the loss needs it, `label`.
        batch_size: pairs of a batch, as in training.
        seed: of the pairs that are drawn.
        encode: keywords of the model's `encode`, such as a prompt that training uses.

    Raises:
        ValueError: another loss, or other columns.
    """
    texts = [name for name in pairs.column_names if name not in ("score", "label")]
    if not isinstance(loss, PairLoss) or len(texts) != 2 or "score" not in pairs.column_names:
        raise ValueError(
            f"calibrate takes a loss of scored pairs and two columns of texts with a score, got {type(loss).__name__} "
            f"and columns {', '.join(pairs.column_names)}"
        )
    rows = min(len(pairs), max(PAIRS, batch_size))
    drawn = pairs.shuffle(seed=seed, keep_in_memory=True).select(range(rows))
    columns = [torch.as_tensor(encode_sentences(model, drawn[name][:], 64, **encode)) for name in texts]
    targets = {name: torch.tensor(drawn[name][:]) for name in ("score", "label") if name in drawn.column_names}
    size = min(batch_size, rows)
    # whole batches only: a short one has another, easier problem
    batches = [slice(first, first + size) for first in range(0, rows - size + 1, size)]
    trial = copy.copy(loss)
    trial.dims, trial.gather_across_devices = None, False

    def total(scale: float) -> float:
        trial.scale, found = scale, 0.0
        for batch in batches:
            with torch.no_grad():
                value = trial.compute_loss_from_embeddings(
                    [column[batch] for column in columns], {name: column[batch] for name, column in targets.items()}
                )
            found += float(sum(value.values()) if isinstance(value, dict) else value)
        return found

    return min(SCALES, key=total)

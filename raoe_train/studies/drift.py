"""How lists of sentences move away from their first one: the ranking-sentences paper's Figure 1 and Table 5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raoe_train.studies.bootstrap import interval, resampled

RESAMPLES = 10_000


def drift(lists: Sequence[np.ndarray], length: int, seed: int = 0) -> dict[str, Any]:
    """What of lists is in descending order, and their mean similarities: of each list its sentences' unit embeddings,
    [n, d], the source first, of which `length` are looked at, 16 in Figure 1. The seed is of the resampling of lists.

    Returns:
        - "chains": how many lists; "neighbours": pairs x_i, x_i+1, i >= 1.
        - "descending": the share of neighbours of which the first is the more similar one to the source, as Table 5
          marks them; 0.5 for sentences in no order. The source itself, nearest to itself, is in no pair; equal
          similarities, as a repeated sentence has, do not descend. None without neighbours.
        - "interval": [lowest, highest], 95 %, whole lists resampled.
        - "similarity": [length][length], the mean cosine of x_i and x_j over lists that have both (Figure 1), NaN for
          places that no list has.
        - "by_distance": [length], the mean cosine of all x_i and x_i+k.
        - "to_source": [length], the mean cosine of the source and x_i.
    """
    if not lists:
        raise ValueError("the files have no chains")
    total, count = np.zeros((length, length)), np.zeros((length, length))
    right, pairs = np.zeros(len(lists)), np.zeros(len(lists))
    for number, embeddings in enumerate(lists):
        unit = embeddings[:length].astype(np.float64)
        cosines = unit @ unit.T
        places = len(unit)
        total[:places, :places] += cosines
        count[:places, :places] += 1
        right[number] = (np.diff(cosines[0, 1:]) < 0).sum()
        pairs[number] = max(places - 2, 0)
    shares = resampled([right, pairs], lambda r, p: _ratio(r.sum(axis=-1), p.sum(axis=-1)), RESAMPLES, seed)
    return {
        "chains": len(lists),
        "neighbours": int(pairs.sum()),
        "descending": float(right.sum() / pairs.sum()) if pairs.any() else None,
        "interval": [*interval(shares)] if pairs.any() else None,
        "similarity": _ratio(total, count).tolist(),
        "by_distance": [float(_ratio(np.trace(total, offset=k), np.trace(count, offset=k))) for k in range(length)],
        "to_source": _ratio(total[0], count[0]).tolist(),
    }


def unrelated(sources: np.ndarray) -> float | None:
    """The mean cosine of two different rows of [n, d] unit embeddings, None for less than two: where lists that have
    lost their source end."""
    rows = sources.astype(np.float64)
    if len(rows) < 2:
        return None
    together = rows.sum(axis=0)
    return float((together @ together - (rows * rows).sum()) / (len(rows) * (len(rows) - 1)))


def _ratio(total: Any, count: Any) -> Any:
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=np.asarray(count) > 0)

"""Intervals by the bootstrap: of a statistic, and of the difference between two encoders on one task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from raoe_train.evaluation.outcomes import Outcomes

LEVEL = 95  # of intervals, in percent
DRAWN = 2**20  # numbers drawn at a time


def resampled(
    data: Sequence[np.ndarray], statistic: Callable[..., np.ndarray], resamples: int, seed: int
) -> np.ndarray:
    """A statistic of observations drawn with replacement, as many as there are, the same ones of all of `data` (Efron
    and Tibshirani 1993, chapter 8): [resamples] float64.

    `data` are arrays [n]; `statistic` takes as many of [batch, n] and gives [batch], NaN where it is undefined.
    """
    rng, count = np.random.default_rng(seed), len(data[0])
    batch = max(1, DRAWN // count)
    found = []
    for start in range(0, resamples, batch):
        drawn = rng.integers(count, size=(min(batch, resamples - start), count))
        found.append(statistic(*(of[drawn] for of in data)))
    return np.concatenate(found)


def interval(drawn: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of what was resampled, without what is undefined (the percentile interval)."""
    tail = (100 - LEVEL) / 2
    low, high = np.nanpercentile(drawn, [tail, 100 - tail])
    return float(low), float(high)


def differences(first: Outcomes, second: Outcomes, resamples: int, seed: int) -> np.ndarray:
    """Differences, second - first, of the main metric x100 on resampled examples, the same ones of both encoders:
    [resamples] float64; NaN where all that was drawn is equal, so that there is no correlation."""
    if len(first.values) != len(second.values) or not np.array_equal(np.asarray(first.gold), np.asarray(second.gold)):
        raise ValueError("the examples are not of the same data")
    if first.gold is None:
        return resampled([first.values, second.values], lambda a, b: b.mean(axis=-1) - a.mean(axis=-1), resamples, seed)

    def difference(a: np.ndarray, b: np.ndarray, gold: np.ndarray) -> np.ndarray:
        return spearman(b, gold) - spearman(a, gold)

    return resampled([first.values, second.values, first.gold], difference, resamples, seed)


def spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's correlation x100 of the rows of two arrays [batch, n]: [batch], NaN where all of a row is equal."""
    from scipy.stats import rankdata

    x, y = (ranks - ranks.mean(axis=-1, keepdims=True) for ranks in (rankdata(of, axis=-1) for of in (a, b)))
    spread = np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    return np.divide(100 * (x * y).sum(axis=-1), spread, out=np.full(spread.shape, np.nan), where=spread > 0)

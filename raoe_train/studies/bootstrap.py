"""Two encoders on one task, example by example: the paired bootstrap."""

from __future__ import annotations

import numpy as np

from raoe_train.evaluation.outcomes import Outcomes

LEVEL = 95  # of intervals, in percent


def bootstrap(first: Outcomes, second: Outcomes, resamples: int, seed: int) -> np.ndarray:
    """Differences, second - first, of the main metric x100 on as many examples drawn with replacement, the same ones
    of both encoders (Efron and Tibshirani 1993, chapter 8).

    Returns:
        [resamples] float64; NaN where all that was drawn is equal, so that there is no correlation.

    Raises:
        ValueError: examples of different data.
    """
    if len(first.values) != len(second.values) or not _same(first.gold, second.gold):
        raise ValueError("the examples are not of the same data")
    rng = np.random.default_rng(seed)
    differences = np.empty(resamples)
    for number in range(resamples):
        drawn = rng.integers(len(first.values), size=len(first.values))
        differences[number] = _metric(second, drawn) - _metric(first, drawn)
    return differences


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of a bootstrap's differences (the percentile interval)."""
    tail = (100 - LEVEL) / 2
    low, high = np.nanpercentile(differences, [tail, 100 - tail])
    return float(low), float(high)


def _metric(examples: Outcomes, drawn: np.ndarray) -> float:
    if examples.gold is None:
        return float(examples.values[drawn].mean())
    from scipy.stats import rankdata

    a, b = rankdata(examples.values[drawn]), rankdata(examples.gold[drawn])
    a, b = a - a.mean(), b - b.mean()
    spread = np.sqrt((a @ a) * (b @ b))
    return 100 * float(a @ b) / spread if spread else float("nan")


def _same(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    return first is second if first is None or second is None else np.array_equal(first, second)

"""Compare two encoders by a paired bootstrap over the examples of a task."""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from raoe_train.evaluation.tasks import Outcomes

LEVEL = 95  # confidence level of intervals, in percent
DRAWS = 2**20  # number of indices that the bootstrap draws at a time


def resample(data: Sequence[np.ndarray], statistic: Callable[..., np.ndarray], resamples: int, seed: int) -> np.ndarray:
    """Return the values of a statistic on paired bootstrap samples, [resamples]; NaN where it is undefined.

    Args:
        data: arrays [n]. A bootstrap sample draws the same indices from each array.
        statistic: a function of arrays [batch, n] and `axis`, which returns [batch].
    """
    if len(data[0]) == 1:  # scipy raises an error for one example
        return np.repeat(statistic(*data, axis=-1), resamples)
    with warnings.catch_warnings():  # scipy warns of NaN and constant values in its own interval, which is not used
        warnings.simplefilter("ignore")
        return stats.bootstrap(
            data, statistic, paired=True, vectorized=True, n_resamples=resamples, method="percentile",
            batch=max(1, DRAWS // len(data[0])), random_state=np.random.default_rng(seed),
        ).bootstrap_distribution  # fmt: skip


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the LEVEL % percentile interval of bootstrap values, (low, high). NaN values are ignored."""
    tail = (100 - LEVEL) / 2
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return float(low), float(high)


def spearman(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return Spearman's correlation x 100 along an axis; NaN where all values of `a` or all of `b` are equal."""
    x, y = (ranks - ranks.mean(axis, keepdims=True) for ranks in (stats.rankdata(of, axis=axis) for of in (a, b)))
    spread = np.sqrt((x * x).sum(axis) * (y * y).sum(axis))
    return np.divide(100 * (x * y).sum(axis), spread, out=np.full(np.shape(spread), np.nan), where=spread > 0)


def differences(first: Outcomes, second: Outcomes, resamples: int, seed: int) -> np.ndarray:
    """Return (main metric of second) - (main metric of first), x 100, for each bootstrap sample of the examples,
    [resamples]."""
    if len(first.values) != len(second.values) or not np.array_equal(np.asarray(first.gold), np.asarray(second.gold)):
        raise ValueError("the two results are for different examples: evaluate both encoders on the same data")
    if first.gold is None:
        means = lambda a, b, axis: b.mean(axis) - a.mean(axis)  # noqa: E731
        return resample([first.values, second.values], means, resamples, seed)

    def correlations(a: np.ndarray, b: np.ndarray, gold: np.ndarray, axis: int) -> np.ndarray:
        return spearman(b, gold, axis) - spearman(a, gold, axis)

    return resample([first.values, second.values, first.gold], correlations, resamples, seed)

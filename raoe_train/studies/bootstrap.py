"""Two encoders on one task, example by example: what `evaluate` keeps for it, and the paired bootstrap."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts.provenance import digest
from raoe_train.artifacts.writing import replacing
from raoe_train.evaluation.tasks import Examples

LEVEL = 95  # of intervals, in percent


def write_examples(result: Path, examples: Mapping[str, Examples], settings: Mapping[str, Any]) -> None:
    """Write the examples of each task, by its word, beside the result that has those settings, in one step."""
    arrays = {f"{word}\tvalues": of.values for word, of in examples.items()}
    arrays |= {f"{word}\tgold": of.gold for word, of in examples.items() if of.gold is not None}
    with replacing(_beside(result)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, made_from=np.array(digest(settings)), **arrays)


def read_examples(result: Path, settings: Mapping[str, Any]) -> dict[str, Examples]:
    """What write_examples wrote; nothing where there is none, or that of other settings.

    Raises:
        ValueError: a file that is not one of these.
    """
    path = _beside(result)
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            kept = dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as the examples of a result: {error}") from None
    if str(kept.get("made_from")) != digest(settings):
        return {}
    words = [name.removesuffix("\tvalues") for name in kept if name.endswith("\tvalues")]
    return {word: Examples(kept[f"{word}\tvalues"], kept.get(f"{word}\tgold")) for word in words}


def bootstrap(first: Examples, second: Examples, resamples: int, seed: int) -> np.ndarray:
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


def _beside(result: Path) -> Path:
    return result.with_name(result.name + ".examples.npz")


def _metric(examples: Examples, drawn: np.ndarray) -> float:
    if examples.gold is None:
        return float(examples.values[drawn].mean())
    from scipy.stats import rankdata

    a, b = rankdata(examples.values[drawn]), rankdata(examples.gold[drawn])
    a, b = a - a.mean(), b - b.mean()
    spread = np.sqrt((a @ a) * (b @ b))
    return 100 * float(a @ b) / spread if spread else float("nan")


def _same(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    return first is second if first is None or second is None else np.array_equal(first, second)

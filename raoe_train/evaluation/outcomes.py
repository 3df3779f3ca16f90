"""What main metrics are made of, example by example: kept beside a result, so that two encoders can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts.provenance import digest
from raoe_train.artifacts.resume import beside
from raoe_train.artifacts.writing import replacing

SUFFIX = ".examples.npz"


@dataclass(frozen=True)
class Outcomes:
    """How an encoder did on each of n examples of a task."""

    values: np.ndarray  # [n] float64, the main metric x100 of each, whose mean it is; with gold, what the encoder gives
    gold: np.ndarray | None = None  # [n] float64, of which and values the main metric is Spearman's correlation x100


def write_outcomes(result: Path, outcomes: Mapping[str, Outcomes], settings: Mapping[str, Any]) -> None:
    """Keep the outcomes of each task, by its word, beside the result that has those settings."""
    arrays = {f"{word}\tvalues": of.values for word, of in outcomes.items()}
    arrays |= {f"{word}\tgold": of.gold for word, of in outcomes.items() if of.gold is not None}
    with replacing(beside(result, SUFFIX)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, made_from=np.array(digest(settings)), **arrays)


def read_outcomes(result: Path, settings: Mapping[str, Any]) -> dict[str, Outcomes]:
    """What write_outcomes wrote; nothing where there is none, or that of other settings."""
    path = beside(result, SUFFIX)
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            kept = dict(arrays)
        of_tasks = [array for name, array in kept.items() if "\t" in name]
        if any(array.ndim != 1 or array.dtype != float or not array.size for array in of_tasks):
            raise ValueError("an array is no list of numbers")
    except Exception as error:  # zipfile's, zlib's or NumPy's
        raise ValueError(f"{path} cannot be read as the examples of a result: {error}") from None
    if str(kept.get("made_from")) != digest(settings):
        return {}
    words = [name.removesuffix("\tvalues") for name in kept if name.endswith("\tvalues")]
    return {word: Outcomes(kept[f"{word}\tvalues"], kept.get(f"{word}\tgold")) for word in words}

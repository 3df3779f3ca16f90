"""Nearest neighbours by cosine, exactly, in chunks: there is never a matrix of all queries and all candidates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

CHUNK = 1 << 24  # cosines at a time, 64 MiB
NONE = -1
"""In place of an index where there are fewer neighbours than were asked for."""

Found = tuple[np.ndarray, np.ndarray]
"""[n, k] int64 indices, NONE where there are no more, and [n, k] float32 cosines, -inf there; the nearest first."""


def nearest(queries: np.ndarray, candidates: np.ndarray, k: int) -> Found:
    """The k candidates ([m, d] unit rows) nearest to each query ([n, d] unit rows), or as many as there are."""
    return _stacked([_best(cosines, k) for _, cosines in _chunks(queries, candidates)])


def nearest_by_class(unit: np.ndarray, classes: np.ndarray, k: int, start: int, stop: int) -> tuple[Found, Found]:
    """Of the rows from start to stop: the k nearest of their own class, themselves left out, and the k nearest of all
    other classes together. `unit` are [n, d] unit rows, `classes` [n] integers."""
    import torch

    class_of = torch.from_numpy(classes)
    own, others = [], []
    for first, cosines in _chunks(unit[start:stop], unit):
        rows = torch.arange(start + first, start + first + len(cosines))
        same = class_of[rows][:, None] == class_of
        others.append(_best(cosines.masked_fill(same, -torch.inf), k))
        cosines.masked_fill_(~same, -torch.inf)[torch.arange(len(rows)), rows] = -torch.inf
        own.append(_best(cosines, k))
    return _stacked(own), _stacked(others)


def _chunks(queries: np.ndarray, candidates: np.ndarray) -> Iterator[tuple[int, Any]]:
    """(first row, [rows, m] cosines) of as many queries at a time as CHUNK allows."""
    import torch

    first, second = (torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32)) for rows in (queries, candidates))
    rows = max(1, CHUNK // max(1, len(candidates)))
    for start in range(0, len(queries), rows):
        yield start, first[start : start + rows] @ second.T


def _best(cosines: Any, k: int) -> Found:
    """The k largest of each row of [n, m] cosines; -inf is none."""
    values, places = cosines.topk(min(k, cosines.shape[1]), dim=1)
    places = places.masked_fill(values.isneginf(), NONE).numpy()
    short = ((0, 0), (0, k - places.shape[1]))
    return np.pad(places, short, constant_values=NONE), np.pad(values.numpy(), short, constant_values=-np.inf)


def _stacked(parts: list[Found]) -> Found:
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

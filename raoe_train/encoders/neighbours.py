"""Nearest neighbours by cosine, in chunks: there is never a matrix of all queries and all candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

CHUNK = 1 << 24  # cosines at a time, 64 MiB
NONE = -1
"""In place of an index where there are fewer neighbours than were asked for."""

Found = tuple[np.ndarray, np.ndarray]
"""[n, k] int64 indices, NONE where there are no more, and [n, k] float32 cosines, -inf there; the nearest first."""


def nearest(queries: np.ndarray, candidates: np.ndarray, k: int, device: str | None = None) -> Found:
    """The k candidates nearest to each query, exactly.

    Args:
        queries: [n, d] unit rows.
        candidates: [m, d] unit rows.
        k: at most so many each.
        device: where to multiply, the CPU by default.
    """
    return _stacked([_best(cosines, k) for _, cosines in _chunks(queries, candidates, device)])


def exact_search(
    unit: np.ndarray, classes: np.ndarray, k: int, device: str | None = None
) -> Callable[[int, int], tuple[Found, Found]]:
    """A function of rows start to stop: their nearest of their own class, themselves left out, and of all others.

    Args:
        unit: [n, d] unit rows.
        classes: [n] integers.
        k: at most so many each.
        device: where to multiply, the CPU by default.
    """
    import torch

    class_of = torch.from_numpy(classes).to(device)

    def search(start: int, stop: int) -> tuple[Found, Found]:
        own, others = [], []
        for first, cosines in _chunks(unit[start:stop], unit, device):
            rows = torch.arange(start + first, start + first + len(cosines), device=device)
            same = class_of[rows][:, None] == class_of
            others.append(_best(cosines.masked_fill(same, -torch.inf), k))
            cosines.masked_fill_(~same, -torch.inf)[torch.arange(len(rows)), rows] = -torch.inf
            own.append(_best(cosines, k))
        return _stacked(own), _stacked(others)

    return search


def faiss_search(unit: np.ndarray, classes: np.ndarray, k: int) -> Callable[[int, int], tuple[Found, Found]]:
    """exact_search by faiss, one flat index a class.

    Raises:
        ModuleNotFoundError: faiss is not installed.
    """
    import faiss

    unit = np.ascontiguousarray(unit, dtype=np.float32)
    members = {int(label): np.flatnonzero(classes == label) for label in np.unique(classes)}
    indexes: dict[int, Any] = {}
    for label, places in members.items():
        indexes[label] = faiss.IndexFlatIP(unit.shape[1])
        indexes[label].add(unit[places])

    def ask(label: int, start: int, stop: int) -> Found:
        # one more, since a query finds itself in its own class
        cosines, places = indexes[label].search(unit[start:stop], k + 1)
        missing = (places < 0) | (members[label][places] == np.arange(start, stop)[:, None])
        return np.where(missing, NONE, members[label][places]), np.where(missing, -np.inf, cosines).astype(np.float32)

    def search(start: int, stop: int) -> tuple[Found, Found]:
        found = {label: ask(label, start, stop) for label in members}
        own = np.stack([classes[start:stop] == label for label in members])[:, :, None]
        indices, cosines = (np.stack(side) for side in zip(*found.values(), strict=True))
        return tuple(  # type: ignore[return-value]
            _first(np.where(chosen, indices, NONE), np.where(chosen, cosines, -np.inf), k) for chosen in (own, ~own)
        )

    return search


def _first(indices: np.ndarray, cosines: np.ndarray, k: int) -> Found:
    """The k best of [classes, n, j] found ones, each row's over all classes."""
    indices, cosines = (np.concatenate(list(side), axis=1) for side in (indices, cosines))
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(indices, order, 1), np.take_along_axis(cosines, order, 1).astype(np.float32)


def _chunks(queries: np.ndarray, candidates: np.ndarray, device: str | None) -> Iterator[tuple[int, Any]]:
    """(first row, [rows, m] cosines) of as many queries at a time as CHUNK allows."""
    import torch

    there = torch.from_numpy(np.ascontiguousarray(candidates, dtype=np.float32)).to(device)
    rows = max(1, CHUNK // max(1, len(candidates)))
    for first in range(0, len(queries), rows):
        chunk = np.ascontiguousarray(queries[first : first + rows], dtype=np.float32)
        yield first, torch.from_numpy(chunk).to(device) @ there.T


def _best(cosines: Any, k: int) -> Found:
    """The k largest of each row of [n, m] cosines; -inf is none."""
    values, places = cosines.topk(min(k, cosines.shape[1]), dim=1)
    places = places.masked_fill(values.isneginf(), NONE).cpu().numpy()
    short = ((0, 0), (0, k - places.shape[1]))
    return np.pad(places, short, constant_values=NONE), np.pad(values.cpu().numpy(), short, constant_values=-np.inf)


def _stacked(parts: list[Found]) -> Found:
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

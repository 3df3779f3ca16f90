"""Examples for contrastive losses, as indices of sentences: from neighbours, thinned, or from classes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COLUMNS = {
    "triplet": ["anchor", "positive", "negative"],
    "contrastive": ["sentence1", "sentence2", "label"],
    "online_contrastive": ["sentence1", "sentence2", "label"],
    "multiple_negatives": ["sentence1", "sentence2"],
    "mse": ["sentence1", "sentence2", "score"],
}
"""What a loss trains on. For mse that is SetFit's random pairs, which need no neighbours and no encoder."""

Draw = Callable[[int], np.ndarray]
"""Which of so many examples to keep: indices, ascending."""


@dataclass(frozen=True)
class Neighbours:
    """Of n sentences those above a threshold, the nearest first."""

    own: np.ndarray  # [n, k] indices of sentences of the same class
    others: np.ndarray  # [n, k] and of the other classes
    own_count: np.ndarray  # [n] how many of them there are
    others_count: np.ndarray


def thinned(drop: float, count: int | None, seed: int) -> Draw:
    """Leaves out a share `drop` of the examples, and keeps `count` of the rest at most, at random."""

    def draw(total: int) -> np.ndarray:
        left = total - round(drop * total)
        kept = left if count is None else min(left, count)
        if kept == total:
            return np.arange(total)
        return np.sort(np.random.default_rng(seed).choice(total, kept, replace=False, shuffle=False))

    return draw


def triplets(found: Neighbours, draw: Draw) -> tuple[np.ndarray, int]:
    """([m, 3] anchor, neighbour of its class, neighbour of another one; how many combinations there are in all)."""
    sizes = found.own_count * found.others_count
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    chosen = draw(total)
    anchor = np.searchsorted(ends, chosen, side="right")
    place = chosen - (ends - sizes)[anchor]
    positive, negative = np.divmod(place, np.maximum(found.others_count[anchor], 1))
    return np.stack([anchor, found.own[anchor, positive], found.others[anchor, negative]], axis=1), total


def pairs(found: Neighbours, draw: Draw, *, others: bool) -> tuple[np.ndarray, int]:
    """([m, 3] sentence, its neighbour, 1 where they are of one class and 0 where not; how many there are in all). Two
    that are neighbours of each other are one pair. Without `others` all are of one class."""
    sides = [_listed(found.own, found.own_count, 1)]
    if others:
        sides.append(_listed(found.others, found.others_count, 0))
    directed = np.concatenate(sides)
    low, high = directed[:, :2].min(axis=1), directed[:, :2].max(axis=1)
    _, first = np.unique(low * len(found.own) + high, return_index=True)
    # by their first sentence, as triplets are
    distinct = directed[np.sort(first)]
    distinct = distinct[np.argsort(distinct[:, 0], kind="stable")]
    return distinct[draw(len(distinct))], len(distinct)


def random_pairs(classes: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, int]:
    """([m, 3] two sentences, 1 where they are of one class and 0 where not; how many there are in all): half of each
    kind, no pair twice, fewer than `count` where a kind has not so many. That is what SetFit's contrastive phase trains
    on (Tunstall et al., 2022; its default, oversampling, evens out the kinds), here without repetition."""
    members = [np.flatnonzero(classes == label) for label in np.unique(classes)]
    same = [(place, place) for place in members]
    different = [(a, b) for number, a in enumerate(members) for b in members[number + 1 :]]
    kinds, available = [], 0
    for label, blocks, wanted in ((1, same, count // 2), (0, different, count - count // 2)):
        sizes = [_size(a, b) for a, b in blocks]
        available += sum(sizes)
        ends = np.cumsum(sizes)
        chosen = thinned(0.0, wanted, seed + label)(int(ends[-1]))
        block = np.searchsorted(ends, chosen, side="right")
        for number, (a, b) in enumerate(blocks):
            inside = chosen[block == number] - (ends[number] - sizes[number])
            first, second = triangle(inside) if a is b else np.divmod(inside, len(b))
            kinds.append(np.stack([a[first], b[second], np.full(len(inside), label)], axis=1))
    return np.concatenate(kinds), available


def as_rows(columns: Sequence[str], examples: np.ndarray, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The [m, 3] examples as rows of a file with these columns, two or three of them."""
    for numbers in examples.tolist():
        yield {
            # a pair of one class carries its 1 where the loss has no column for it
            name: number if name in ("label", "score") else texts[number]
            for name, number in zip(columns, numbers, strict=False)
        }


def _listed(neighbours: np.ndarray, counts: np.ndarray, label: int) -> np.ndarray:
    there = np.arange(neighbours.shape[1]) < counts[:, None]
    sentences = np.nonzero(there)[0]
    return np.stack([sentences, neighbours[there], np.full(len(sentences), label)], axis=1)


def _size(a: np.ndarray, b: np.ndarray) -> int:
    return math.comb(len(a), 2) if a is b else len(a) * len(b)


def triangle(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first > second) of the numbers of unordered pairs: 0 is (1, 0), 1 is (2, 0), 2 is (2, 1), 3 is (3, 0) …"""
    first = np.floor((1 + np.sqrt(1 + 8 * numbers.astype(np.float64))) / 2).astype(np.int64)
    # the root is rounded, so it may be one off where numbers are large
    first -= first * (first - 1) // 2 > numbers
    first += first * (first + 1) // 2 <= numbers
    return first, numbers - first * (first - 1) // 2

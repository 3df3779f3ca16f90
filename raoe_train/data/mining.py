"""Read labelled texts or pairs, and combine texts into examples for contrastive losses."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raoe_train.data.columns import as_word, parse_sentence, parse_word
from raoe_train.data.pairs import TEXTS
from raoe_train.data.sources import Source
from raoe_train.data.tables import Table, read_table

# {loss: columns of its examples}; those for mse are SetFit's random pairs and need no encoder
COLUMNS = {
    "triplet": ["anchor", "positive", "negative"],
    "contrastive": ["sentence1", "sentence2", "label"],
    "online_contrastive": ["sentence1", "sentence2", "label"],
    "multiple_negatives": ["sentence1", "sentence2"],
    "mse": ["sentence1", "sentence2", "score"],
}
Draw = Callable[[int], np.ndarray]  # number of examples -> indices of the examples to keep, see thinned


def labelled_table(source: str | os.PathLike[str], **how: Any) -> Table:
    """Read labelled sentences or pairs. The columns are text (the sentence, or the first of a pair), for pairs also
    second, label (as in the file) and split (by default ""). `how`: the keywords columns and on_error of read_pairs."""
    return read_table(source, _parse, "example", **how)


def _parse(fields: dict[str, Any], source: Source) -> dict[str, str]:
    names = source.columns.find(fields, ("label",), (*TEXTS, "split"))
    needed = TEXTS if any(name in names for name in TEXTS) else ("sentence",)
    columns = source.columns.find(fields, needed).values()
    sentences = (parse_sentence(column, fields[column]) for column in columns)
    texts = dict(zip(("text", "second"), sentences, strict=False))
    label = parse_word(names["label"], fields[names["label"]])
    return {**texts, "label": label, "split": as_word(fields[names["split"]]) if "split" in names else ""}


def distinct(data: Any, counts: Mapping[str, Any]) -> Table:
    """Remove duplicate texts, and all texts with two classes; returns (the rest, `counts` with the removed rows)."""
    texts, labels = data["text"][:], data["label"][:]
    first: dict[str, int] = {}
    ambiguous = {text for k, text in enumerate(texts) if labels[first.setdefault(text, k)] != labels[k]}
    kept = [place for text, place in first.items() if text not in ambiguous]
    two = sum(text in ambiguous for text in texts)
    left_out = {"two labels": two, "duplicate": len(texts) - two - len(kept)}
    dropped = counts.get("dropped", {}) | {reason: rows for reason, rows in left_out.items() if rows}
    return data.select(kept), {**counts, "kept": len(kept), "dropped": dropped}


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of n sentences above a threshold, the nearest first."""

    own: np.ndarray  # [n, k] indices of sentences of the same class
    others: np.ndarray  # [n, k] indices of sentences of other classes
    own_count: np.ndarray  # [n] number of neighbours in own
    others_count: np.ndarray  # [n] number of neighbours in others


def thinned(drop: float, count: int | None, seed: int) -> Draw:
    """Create a function that drops a share `drop` of the examples at random, and keeps at most `count` others."""

    def draw(total: int) -> np.ndarray:
        kept = min(total - round(drop * total), total if count is None else count)
        return np.sort(np.random.default_rng(seed).choice(total, kept, replace=False, shuffle=False))

    return draw


def triplets(found: Neighbours, draw: Draw) -> tuple[np.ndarray, int]:
    """([m, 3] anchor, neighbour of its class, neighbour of another class; number of all combinations)."""
    sizes = found.own_count * found.others_count
    ends = np.cumsum(sizes)
    chosen = draw(int(ends[-1]))
    anchor = np.searchsorted(ends, chosen, side="right")
    place = chosen - (ends - sizes)[anchor]
    positive, negative = np.divmod(place, np.maximum(found.others_count[anchor], 1))
    return np.stack([anchor, found.own[anchor, positive], found.others[anchor, negative]], axis=1), int(ends[-1])


def pairs(found: Neighbours, draw: Draw, *, others: bool) -> tuple[np.ndarray, int]:
    """([m, 3] sentence, its neighbour, 1 if both are of one class, else 0; number of all pairs). Without `others` all
    pairs are of one class. Two sentences that are neighbours of each other are one pair."""
    sides = []
    for neighbours, counts, label in ((found.own, found.own_count, 1), (found.others, found.others_count, 0)):
        if label or others:
            exists = np.arange(neighbours.shape[1]) < counts[:, None]
            sentences = np.nonzero(exists)[0]
            sides.append(np.stack([sentences, neighbours[exists], np.full(len(sentences), label)], axis=1))
    directed = np.concatenate(sides)
    low, high = directed[:, :2].min(axis=1), directed[:, :2].max(axis=1)
    _, first = np.unique(low * len(found.own) + high, return_index=True)
    unique = directed[np.sort(first)]
    unique = unique[np.argsort(unique[:, 0], kind="stable")]  # in order of the first sentence, like triplets
    return unique[draw(len(unique))], len(unique)


def random_pairs(classes: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, int]:
    """Draw distinct pairs, half of them of one class and half of two; returns ([m, 3] two sentences, 1 or 0; number of
    all pairs). SetFit's contrastive phase trains on such pairs, with repetitions (Tunstall et al., 2022)."""
    members = [np.flatnonzero(classes == label) for label in np.unique(classes)]
    same = [(place, place) for place in members]
    different = [(a, b) for number, a in enumerate(members) for b in members[number + 1 :]]
    kinds, available = [], 0
    for label, blocks, wanted in ((1, same, count // 2), (0, different, count - count // 2)):
        sizes = [math.comb(len(a), 2) if a is b else len(a) * len(b) for a, b in blocks]
        available += sum(sizes)
        ends = np.cumsum(sizes)
        chosen = thinned(0.0, wanted, seed + label)(int(ends[-1]))
        block = np.searchsorted(ends, chosen, side="right")
        for number, (a, b) in enumerate(blocks):
            inside = chosen[block == number] - (ends[number] - sizes[number])
            if a is b:  # each unordered pair once: on a circle, neighbours at distance 1, then at distance 2, …
                first, second = inside % len(a), (inside + inside // len(a) + 1) % len(a)
            else:
                first, second = np.divmod(inside, len(b))
            kinds.append(np.stack([a[first], b[second], np.full(len(inside), label)], axis=1))
    return np.concatenate(kinds), available


def as_rows(columns: Sequence[str], examples: np.ndarray, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the [m, 3] examples as rows of a file with two or three columns."""
    for numbers in examples.tolist():
        yield {
            name: number if name in ("label", "score") else texts[number]
            for name, number in zip(columns, numbers, strict=False)
        }

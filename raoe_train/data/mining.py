"""Read labelled texts or pairs, and combine texts into examples for contrastive losses."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raoe_train.data.columns import as_word, parse_sentence, parse_word
from raoe_train.data.pairs import TEXTS
from raoe_train.data.sources import Source, Table

# {loss: columns of its examples}. Examples for mse are SetFit's random pairs, which need no encoder.
COLUMNS = {
    "triplet": ["anchor", "positive", "negative"],
    "contrastive": ["sentence1", "sentence2", "label"],
    "online_contrastive": ["sentence1", "sentence2", "label"],
    "multiple_negatives": ["sentence1", "sentence2"],
    "mse": ["sentence1", "sentence2", "score"],
}
Draw = Callable[[int], np.ndarray]  # number of examples -> indices of the examples to keep, see make_draw


def labelled_table(source: str | os.PathLike[str], **options: Any) -> Table:
    """Read labelled sentences or pairs. The result has the columns text (the sentence, or a pair's first sentence),
    second (only for pairs), label (as in the file) and split ("" by default). `options` are the arguments columns and
    on_error of read_pairs."""
    opened = Source(source, **options)

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        found = opened.columns.find(row, ("label",), (*TEXTS, "split"))
        texts = opened.columns.find(row, TEXTS if {*TEXTS} & {*found} else ("sentence",)).values()
        sentences = [parse_sentence(column, row[column]) for column in texts]
        values = dict(zip(("text", "second"), sentences, strict=False))
        values["label"] = parse_word(found["label"], row[found["label"]])
        return {**values, "split": as_word(row[found["split"]]) if "split" in found else ""}

    return opened.table(parse, "example")


def distinct(data: Any, counts: Mapping[str, Any]) -> Table:
    """Remove duplicate texts, and texts that occur with different labels. Return (remaining rows, updated `counts`)."""
    texts, labels = data["text"][:], data["label"][:]
    first_row: dict[str, int] = {}
    ambiguous = {text for k, text in enumerate(texts) if labels[first_row.setdefault(text, k)] != labels[k]}
    places = [place for text, place in first_row.items() if text not in ambiguous]
    conflicts = sum(text in ambiguous for text in texts)
    left_out = {"two labels": conflicts, "duplicate": len(texts) - conflicts - len(places)}
    dropped = counts.get("dropped", {}) | {reason: rows for reason, rows in left_out.items() if rows}
    return data.select(places), {**counts, "kept": len(places), "dropped": dropped}


@dataclass(frozen=True)
class Neighbours:
    """The neighbours (sentences with a cosine similarity above a threshold) of each of n sentences, nearest first."""

    own: np.ndarray  # [n, k] indices of sentences of the same class
    others: np.ndarray  # [n, k] indices of sentences of other classes
    own_count: np.ndarray  # [n] number of neighbours in own
    others_count: np.ndarray  # [n] number of neighbours in others


def make_draw(drop: float, count: int | None, seed: int) -> Draw:
    """Create a function that randomly drops the fraction `drop` of the examples and keeps at most `count` examples."""

    def draw(total: int) -> np.ndarray:
        size = min(total - round(drop * total), total if count is None else count)
        return np.sort(np.random.default_rng(seed).choice(total, size, replace=False, shuffle=False))

    return draw


def triplets(near: Neighbours, draw: Draw) -> tuple[np.ndarray, int]:
    """Build triplets (sentence, neighbour of the same class, neighbour of another class) and sample them with `draw`.
    Return ([m, 3] sentence indices, number of triplets before sampling)."""
    sizes = near.own_count * near.others_count
    ends = np.cumsum(sizes)
    picks = draw(int(ends[-1]))
    anchor = np.searchsorted(ends, picks, side="right")
    place = picks - (ends - sizes)[anchor]
    positive, negative = np.divmod(place, np.maximum(near.others_count[anchor], 1))
    return np.stack([anchor, near.own[anchor, positive], near.others[anchor, negative]], axis=1), int(ends[-1])


def pairs(near: Neighbours, draw: Draw, *, others: bool) -> tuple[np.ndarray, int]:
    """Pair each sentence with its neighbours. Return ([m, 3] pairs sampled with `draw`, number of pairs before
    sampling). A pair consists of two sentence indices, and 1 if the sentences have the same class, else 0. Without
    `others`, return only pairs within a class. Two sentences that are neighbours of each other form one pair."""
    sides = []
    for indices, counts, label in ((near.own, near.own_count, 1), (near.others, near.others_count, 0)):
        if label or others:
            exists = np.arange(indices.shape[1]) < counts[:, None]
            sentences = np.nonzero(exists)[0]
            sides.append(np.stack([sentences, indices[exists], np.full(len(sentences), label)], axis=1))
    directed = np.concatenate(sides)
    low, high = directed[:, :2].min(axis=1), directed[:, :2].max(axis=1)
    _, first = np.unique(low * len(near.own) + high, return_index=True)
    unique = directed[np.sort(first)]
    unique = unique[np.argsort(unique[:, 0], kind="stable")]  # sort by the first sentence, like triplets
    return unique[draw(len(unique))], len(unique)


def random_pairs(classes: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, int]:
    """Draw random pairs of sentences, half within a class and half across classes. Unlike SetFit (Tunstall et al.
    2022), draw each pair at most once. Return ([m, 3] pairs as in the function `pairs`, number of possible pairs)."""
    members = [np.flatnonzero(classes == label) for label in np.unique(classes)]
    same_class = [(place, place) for place in members]
    mixed_class = [(a, b) for number, a in enumerate(members) for b in members[number + 1 :]]
    kinds, available = [], 0
    for label, blocks, quota in ((1, same_class, count // 2), (0, mixed_class, count - count // 2)):
        sizes = [math.comb(len(a), 2) if a is b else len(a) * len(b) for a, b in blocks]
        available += sum(sizes)
        ends = np.cumsum(sizes)
        picks = make_draw(0.0, quota, seed + label)(int(ends[-1]))
        block = np.searchsorted(ends, picks, side="right")
        for number, (a, b) in enumerate(blocks):
            inside = picks[block == number] - (ends[number] - sizes[number])
            if a is b:  # each pair once: place the members on a circle; take distance 1, then 2, …
                first, second = inside % len(a), (inside + inside // len(a) + 1) % len(a)
            else:
                first, second = np.divmod(inside, len(b))
            kinds.append(np.stack([a[first], b[second], np.full(len(inside), label)], axis=1))
    return np.concatenate(kinds), available


def example_rows(columns: Sequence[str], examples: np.ndarray, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each of the [m, 3] examples as a row with two or three columns. Texts replace the sentence indices."""
    for numbers in examples.tolist():
        row = dict(zip(columns, numbers, strict=False))
        yield {name: n if name in ("label", "score") else texts[n] for name, n in row.items()}

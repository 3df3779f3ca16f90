"""Triplets of an anchor, an entailed and a contradicting text: what InfoNCE with hard negatives trains on."""

from __future__ import annotations

import itertools
import logging
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import LabelMap, RowProblem, parse_label, parse_sentence, resolve_label_map
from raoe_train.data.rows import Tally, each_kept
from raoe_train.data.sources import Source, open_source
from raoe_train.data.tables import to_table

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset

logger = logging.getLogger(__name__)

ROLES: dict[str, tuple[str, ...]] = {
    "anchor": ("anchor", "sentence0", "sent0"),
    "positive": ("positive", "sentence1", "sent1"),
    "negative": ("negative", "sentence2", "hard_neg"),
    "neutral": ("neutral",),
}
"""The columns of a file of triplets and the names they are found by; sent0, sent1, hard_neg are SimCSE's."""

CLASSES = {"entailment": 0, "contradiction": 2, "neutral": 1}
"""What a premise's hypotheses are to it, in the order of the roles positive, negative, neutral."""

PAIRINGS = ("one", "zip", "all")


def read_triplets(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Mapping[str, str | int | None] | None = None,
    labels: LabelMap | None = None,
    on_error: str = "raise",
    neutral: bool = False,
    pairing: str = "one",
    seed: int | None = None,
) -> Dataset:
    """Read triplets, or make them of NLI pairs.

    A file with a column anchor, sentence0 or sent0 (or one mapped to anchor, positive, negative or neutral)
    holds triplets, which are taken as they are, repeated ones too. Any other holds pairs of a premise and a
    hypothesis with a label; the pairs of all sources are grouped by the premise's exact text.

    SimCSE (Gao et al., EMNLP 2021, section 4) extends (premise, entailed) by a contradicting hypothesis of the
    same premise; footnote 7: "one premise can have multiple contradiction hypotheses. In our implementation,
    we only sample one as the hard negative and we did not find a difference by using more". Entailed pairs
    whose premise has no contradiction are left out (issue 238 of its repository: 275,601 triplets are left of
    314k pairs). The code that made its file is not published, so neither its draw nor whether a premise with
    several entailed hypotheses stands there once or several times is known. The default here is one triplet a
    premise: a premise that stands in a batch twice would have its own positive among the negatives.

    Args:
        source: as for `read_pairs`, one or several; all with pairs or all with triplets.
        columns: {our name: the source's column}: sentence1, sentence2, label and split of pairs; anchor,
            positive, negative, neutral and split of triplets. Positions as for `read_pairs`.
        labels: {word or int: class} with classes 0 entailment, 1 neutral, 2 contradiction, where the default
            words do not do. A class of None leaves rows with such a label out.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.
        neutral: also give each triplet a neutral hypothesis. A premise without one is then left out, since a
            column has an entry for every triplet. (SimCSE found no gain in it, section 6.3.)
        pairing: of pairs. "one": a premise's first entailed with its first contradicting hypothesis; "zip": its
            i-th with its i-th, as many as it has of the fewer; "all": every combination.
        seed: of pairs. Draws the hypotheses of "one" and "zip" at random in place of file order, as SimCSE
            samples; the same seed and rows give the same triplets.

    Rows dropped always, and counted: "no gold label"; "label left out"; "blank line"; "neutral" unless asked for;
    "duplicate hypothesis" (of the same premise and label); "text in two roles" (positive and negative alike);
    "premise without entailment", "... contradiction" or "... neutral" (the first that it lacks); "surplus"
    (hypotheses that the pairing leaves over).

    Returns:
        anchor, positive, negative and, if asked for, neutral: strings; of NLI the premise, an entailed, a contradicting
        and a neutral hypothesis. Losses of sentence-transformers go by this order: anchor, positive, then every further
        one a negative.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), a column that is missing or there twice (the
            label of pairs too), sources with pairs and with triplets, or no triplet left.
    """
    asked = {"columns": columns, "labels": labels, "neutral": neutral, "pairing": pairing, "seed": seed}
    return triplet_table(source, on_error=on_error, **asked)[0]  # type: ignore[arg-type]


def triplet_table(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Mapping[str, str | int | None] | None = None,
    labels: LabelMap | None = None,
    on_error: str = "raise",
    neutral: bool = False,
    pairing: str = "one",
    seed: int | None = None,
    path: Path | None = None,
) -> tuple[Dataset, dict[str, Any]]:
    """(read_triplets, counts): {"read": rows read, "premises": distinct anchors among the rows that could be parsed,
    "triplets", "used": rows that stand in a triplet, "other_split": rows of splits not asked for, "dropped": {reason:
    rows}}; read = used + other_split + all dropped. `path` as for to_table."""
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing must be one of {', '.join(PAIRINGS)}; got {pairing!r}")
    label_map = resolve_label_map(labels)
    if not set(label_map.values()) <= {*CLASSES.values(), None}:
        raise ValueError(f"labels must map to 0 entailment, 1 neutral, 2 contradiction; got {labels}")
    names: list[str | os.PathLike[str]] = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    if not names:
        raise ValueError("source names nothing to read")
    listed = ", ".join(map(str, names))
    mapping = dict(columns or {})
    roles = tuple(ROLES) if neutral else tuple(ROLES)[:3]

    rows = _read(names, mapping, label_map, on_error, roles)
    dropped = rows.tally.dropped
    if rows.pairs and rows.triplets:
        raise ValueError(
            f"{listed}: {len(rows.pairs)} rows are pairs and {len(rows.triplets)} are triplets; read them apart"
        )
    if rows.pairs:
        triplets = _combine(rows.pairs, list(CLASSES.values())[: len(roles) - 1], pairing, seed, dropped)
    else:
        triplets = [texts for texts in rows.triplets if len(set(texts[1:])) == len(roles) - 1]
        dropped["text in two roles"] += len(rows.triplets) - len(triplets)
    dropped = +dropped  # without reasons that no row had
    if not triplets:
        raise ValueError(f"{listed}: no triplet left of {rows.read} rows: {_why_none(rows, dropped)}")
    if dropped:
        logger.info("%s: %d of %d rows left out: %s", listed, dropped.total(), rows.read, dict(dropped))
    counts = {
        "read": rows.read + rows.other_split,
        "premises": len({texts[0] for texts in rows.pairs or rows.triplets}),
        "triplets": len(triplets),
        "used": rows.read - dropped.total(),
        "other_split": rows.other_split,
        "dropped": dict(dropped),
    }
    return to_table((dict(zip(roles, texts, strict=True)) for texts in triplets), path), counts


@dataclass
class _Rows:
    tally: Tally
    pairs: list[tuple[str, str, int]] = field(default_factory=list)
    triplets: list[tuple[str, ...]] = field(default_factory=list)
    read: int = 0
    other_split: int = 0


def _read(
    names: Sequence[str | os.PathLike[str]],
    mapping: Mapping[str, str | int | None],
    label_map: Mapping[str, int | None],
    on_error: str,
    roles: Sequence[str],
) -> _Rows:
    tally = Tally(on_error)
    rows = _Rows(tally)
    mapped = bool(set(mapping) & set(ROLES))

    def parse(fields: dict[str, Any], source: Source) -> None:
        if mapped or any(column in fields for column in ROLES["anchor"]):
            rows.triplets.append(_triplet(fields, mapping, roles))
        else:
            rows.pairs.append(_pair(fields, source, label_map))

    for opened in [_open(name, mapping) for name in names]:
        rows.read += sum(1 for _ in each_kept(opened, parse, tally))
        rows.other_split += opened.other_split
    rows.read += tally.dropped.total()
    return rows


def _open(name: str | os.PathLike[str], mapping: Mapping[str, str | int | None]) -> Source:
    opened_as = {ours: column for ours, column in mapping.items() if ours not in ROLES}
    if len(opened_as) < len(mapping):
        if besides := sorted(set(opened_as) - {"split"}):
            raise ValueError(f"columns maps {', '.join(ROLES)} and split of triplets; got {besides} besides")
        # a source knows pairs only, and tells by their columns whether the file has a header line
        pair = {"sentence1": mapping.get("anchor"), "sentence2": mapping.get("positive")}
        opened_as.update({ours: column for ours, column in pair.items() if column is not None})
    return open_source(name, opened_as)


def _pair(fields: dict[str, Any], source: Source, label_map: Mapping[str, int | None]) -> tuple[str, str, int]:
    found = source.columns.find(fields, ("label",))
    premise, hypothesis = (parse_sentence(name, fields[found[name]]) for name in ("sentence1", "sentence2"))
    return premise, hypothesis, parse_label(fields[found["label"]], label_map, found["label"])


def _triplet(fields: dict[str, Any], mapping: Mapping[str, str | int | None], roles: Sequence[str]) -> tuple[str, ...]:
    there = ", ".join(map(repr, fields))
    taken = {str(mapping[role]) for role in ROLES if role in mapping}
    texts = []
    for role in roles:
        if role in mapping:
            found = [str(mapping[role])]
        else:
            found = [column for column in ROLES[role] if column in fields and column not in taken]
        if len(found) > 1:
            raise RowProblem(f"columns {' and '.join(found)} could both be {role}; say which: columns {role}=...")
        if not found or found[0] not in fields:
            looked_for = ", ".join(found or ROLES[role])
            raise RowProblem(f"no column for {role} (looked for {looked_for}); there are: {there}")
        texts.append(parse_sentence(role, fields[found[0]]))
    return tuple(texts)


def _combine(
    pairs: Iterable[tuple[str, str, int]],
    classes: Sequence[int],
    pairing: str,
    seed: int | None,
    dropped: Counter[str],
) -> list[tuple[str, ...]]:
    """Triplets of each premise, in file order of the premises; adds to `dropped` the rows that go into none."""
    rng = None if seed is None else random.Random(seed)
    premises: dict[str, dict[str, list[int]]] = {}
    for premise, hypothesis, label in pairs:
        premises.setdefault(premise, {}).setdefault(hypothesis, []).append(label)
    triplets: list[tuple[str, ...]] = []
    for premise, hypotheses in premises.items():
        chosen: dict[int, list[str]] = {label: [] for label in classes}
        for hypothesis, its_labels in hypotheses.items():
            wanted = [label for label in its_labels if label in chosen]
            dropped["neutral"] += len(its_labels) - len(wanted)
            if len(set(wanted)) > 1:
                dropped["text in two roles"] += len(wanted)
            elif wanted:
                dropped["duplicate hypothesis"] += len(wanted) - 1
                chosen[wanted[0]].append(hypothesis)
        rows = sum(map(len, chosen.values()))
        if lacking := [name for name, label in CLASSES.items() if label in chosen and not chosen[label]]:
            dropped[f"premise without {lacking[0]}"] += rows
            continue
        if rng is not None:
            for texts in chosen.values():
                rng.shuffle(texts)
        if pairing == "all":
            combined = list(itertools.product(*chosen.values()))
        else:  # zip ends with the shortest
            combined = list(zip(*chosen.values(), strict=False))[: 1 if pairing == "one" else None]
            dropped["surplus"] += rows - len(combined) * len(chosen)
        triplets.extend((premise, *texts) for texts in combined)
    return triplets


def _why_none(rows: _Rows, dropped: Counter[str]) -> str:
    why = ", ".join(f"{count} x {reason}" for reason, count in dropped.items()) or "there are no rows"
    if rows.pairs:
        labels = {label for _, _, label in rows.pairs}
        absent = [name for name in ("entailment", "contradiction") if CLASSES[name] not in labels]
        why += "\n  A premise needs an entailed and a contradicting hypothesis, each on a row with its exact text. "
        if absent:
            why += f"No row is labelled {' or '.join(absent)}: if a word of the file means it, say so with labels. "
        why += "Without hard negatives, train on the entailed pairs of read_pairs with in-batch negatives."
    return why + rows.tally.listed()

"""Triplets of an anchor, an entailed and a contradicting text: what InfoNCE with hard negatives trains on."""

from __future__ import annotations

import itertools
import logging
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import NLI_LABELS, ROLES, LabelMap, parse_label, parse_sentence, resolve_label_map
from raoe_train.data.pairs import TEXTS
from raoe_train.data.rows import Tally, each_kept
from raoe_train.data.sources import Source, open_source
from raoe_train.data.tables import to_table

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset

logger = logging.getLogger(__name__)

CLASSES = ("entailment", "contradiction", "neutral")
"""What a premise's hypotheses are to it, in the order of the roles positive, negative, neutral."""

PAIRINGS = ("one", "zip", "all")


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
        seed: of pairs. Draws the hypotheses of "one" and "zip" at random, as SimCSE does; None: in file order.
        path: as for to_table.

    Rows dropped always, and counted: "no gold label"; "label left out"; "blank line"; "neutral" unless asked for;
    "duplicate hypothesis" (of the same premise and label); "text in two roles" (positive and negative alike);
    "premise without entailment", "... contradiction" or "... neutral" (the first that it lacks); "surplus"
    (hypotheses that the pairing leaves over).

    Returns:
        (Dataset, counts). Columns anchor, positive, negative and, if asked for, neutral: strings; of NLI the premise,
        an entailed, a contradicting and a neutral hypothesis. Losses of sentence-transformers go by this order: anchor,
        positive, then every further one a negative. Counts {"read": rows read, "premises": distinct anchors among the
        rows that could be parsed, "triplets", "used": rows that stand in a triplet, "other_split": rows of splits not
        asked for, "dropped": {reason: rows}}; read = used + other_split + all dropped.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), a column that is missing or there twice (the
            label of pairs too), sources with pairs and with triplets, or no triplet left.
    """
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing must be one of {', '.join(PAIRINGS)}; got {pairing!r}")
    label_map = resolve_label_map(labels)
    if not set(label_map.values()) <= {*NLI_LABELS.values(), None}:
        raise ValueError(f"labels must map to 0 entailment, 1 neutral, 2 contradiction; got {labels}")
    mapped = bool(set(columns or {}) & set(ROLES))
    if mapped and (besides := sorted(set(columns or {}) - {*ROLES, "split"})):
        raise ValueError(f"columns maps {', '.join(ROLES)} and split of triplets; got {besides} besides")
    names = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    if not names:
        raise ValueError("source names nothing to read")
    listed = ", ".join(map(str, names))
    roles = tuple(ROLES) if neutral else tuple(ROLES)[:3]
    pairs: list[tuple[str, str, int]] = []
    triplets: list[tuple[str, ...]] = []

    def parse(fields: dict[str, Any], source: Source) -> None:
        if mapped or any(column in fields for column in ROLES["anchor"]):
            found = source.columns.find(fields, roles)
            triplets.append(tuple(parse_sentence(role, fields[found[role]]) for role in roles))
        else:
            found = source.columns.find(fields, (*TEXTS, "label"))
            premise, hypothesis = (parse_sentence(name, fields[found[name]]) for name in TEXTS)
            pairs.append((premise, hypothesis, parse_label(fields[found["label"]], label_map, found["label"])))

    tally = Tally(on_error)
    sources = [open_source(name, columns) for name in names]
    read = sum(1 for opened in sources for _ in each_kept(opened, parse, tally)) + tally.dropped.total()
    if pairs and triplets:
        raise ValueError(f"{listed}: {len(pairs)} rows are pairs and {len(triplets)} are triplets; read them apart")
    premises = len({texts[0] for texts in pairs or triplets})
    if pairs:
        triplets = _combine(pairs, CLASSES[: len(roles) - 1], pairing, seed, tally.dropped)
    else:
        apart = [texts for texts in triplets if len(set(texts[1:])) == len(roles) - 1]
        tally.dropped["text in two roles"] += len(triplets) - len(apart)
        triplets = apart
    tally.dropped = +tally.dropped  # without reasons that no row had
    if not triplets:
        raise ValueError(f"{listed}: no triplet left of {read} rows: {tally.why()}{_advice(pairs)}{tally.listed()}")
    out, other = tally.dropped.total(), sum(opened.other_split for opened in sources)
    if out:
        logger.info("%s: %d of %d rows left out: %s", listed, out, read, dict(tally.dropped))
    counts = {
        "read": read + other,
        "premises": premises,
        "triplets": len(triplets),
        "used": read - out,
        "other_split": other,
        "dropped": dict(tally.dropped),
    }
    return to_table((dict(zip(roles, texts, strict=True)) for texts in triplets), path), counts


def _combine(
    pairs: Iterable[tuple[str, str, int]],
    classes: Sequence[str],
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
        chosen: dict[int, list[str]] = {NLI_LABELS[name]: [] for name in classes}
        for hypothesis, its_labels in hypotheses.items():
            wanted = [label for label in its_labels if label in chosen]
            dropped["neutral"] += len(its_labels) - len(wanted)
            if len(set(wanted)) > 1:
                dropped["text in two roles"] += len(wanted)
            elif wanted:
                dropped["duplicate hypothesis"] += len(wanted) - 1
                chosen[wanted[0]].append(hypothesis)
        rows = sum(map(len, chosen.values()))
        if lacking := [name for name in classes if not chosen[NLI_LABELS[name]]]:
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


def _advice(pairs: Sequence[tuple[str, str, int]]) -> str:
    """What pairs lack that gave no triplet."""
    if not pairs:
        return ""
    labels = {label for _, _, label in pairs}
    absent = [name for name in ("entailment", "contradiction") if NLI_LABELS[name] not in labels]
    why = "\n  A premise needs an entailed and a contradicting hypothesis, each on a row with its exact text. "
    if absent:
        why += f"No row is labelled {' or '.join(absent)}: if a word of the file means it, say so with labels. "
    return why + "Without hard negatives, train on the entailed pairs of read_pairs with in-batch negatives."

"""Triplets of an anchor, an entailed and a contradicting text, and lists of ranking sentences."""

import ast
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from raoe_train.data.columns import (
    NAMES,
    NLI_LABELS,
    LabelMap,
    RowProblem,
    parse_label,
    parse_sentence,
    resolve_label_map,
)
from raoe_train.data.pairs import TEXTS
from raoe_train.data.sources import Source, open_source
from raoe_train.data.tables import Parse, Table, Tally, by_column, read_table, to_table

ROLES = ("anchor", "positive", "negative", "neutral")
CLASSES = ("entailment", "contradiction", "neutral")  # of hypotheses that are positive, negative, neutral
SHORTEST = 3  # two sentences leave nothing to rank


def triplet_table(
    source: str | os.PathLike[str],
    *,
    columns: Mapping[str, str | None] | None = None,
    labels: LabelMap | None = None,
    on_error: str = "raise",
    neutral: bool = False,
    pairing: str = "one",
) -> Table:
    """Read triplets, or make them of NLI pairs.

    A file with a column anchor, sentence0 or sent0 (or one mapped to anchor, positive, negative or neutral) holds
    triplets, which are taken as they are. Any other holds pairs of a premise and a hypothesis with a label, which are
    grouped by the premise's exact text, as SimCSE does (Gao et al., EMNLP 2021, section 4). The default is one triplet
    a premise: a premise that stands in a batch twice would have its own positive among the negatives.

    Columns are anchor, positive, negative and, with `neutral`, a neutral hypothesis. `pairing`, in file order: "one", a
    premise's first entailed with its first contradicting hypothesis; "zip", its i-th with its i-th; "all", every
    combination. Other arguments are those of read_pairs. Rows that go into no triplet are dropped and counted, also as
    "neutral", "duplicate hypothesis" (of the same premise and label), "text in two roles" (positive and negative
    alike), "premise without entailment" (or another class, the first that it lacks) and "surplus" (of the pairing).
    """
    if pairing not in ("one", "zip", "all"):
        raise ValueError(f"pairing must be one of one, zip, all; got {pairing!r}")
    label_map = resolve_label_map(labels)
    if not set(label_map.values()) <= {*NLI_LABELS.values(), None}:
        raise ValueError(f"labels must map to 0 entailment, 1 neutral, 2 contradiction; got {labels}")
    roles = ROLES if neutral else ROLES[:3]
    as_triplet = by_column(dict.fromkeys(roles, parse_sentence))
    as_pair = by_column({**dict.fromkeys(TEXTS, parse_sentence), "label": partial(parse_label, label_map=label_map)})
    chosen: list[Parse] = []  # the first row decides for all

    def parse(fields: dict[str, Any], source: Source) -> tuple[Any, ...]:
        if not chosen:
            of_triplets = {*ROLES} & {*(columns or {})} or {*NAMES["anchor"]} & {*fields}
            chosen.append(as_triplet if of_triplets else as_pair)
        return tuple(chosen[0](fields, source).values())

    opened, tally = open_source(source, columns), Tally(on_error)
    rows = list(tally.kept(opened, parse))
    left_out, advice = tally.dropped.total(), ""
    if chosen == [as_pair]:
        triplets, dropped = _combine(rows, CLASSES[: len(roles) - 1], pairing)
        tally.dropped += dropped
        advice = _advice({label for _, _, label in rows}) if rows else ""
    else:
        triplets = [texts for texts in rows if len(set(texts[1:])) == len(roles) - 1]
        tally.dropped["text in two roles"] = len(rows) - len(triplets)
    counts = tally.counts(opened.name, len(rows) + left_out - tally.dropped.total(), "triplet", advice)
    return to_table(dict(zip(roles, texts, strict=True)) for texts in triplets), counts


def _combine(pairs: Sequence[Any], classes: Sequence[str], pairing: str) -> tuple[list[tuple[str, ...]], Counter[str]]:
    """(triplets of each premise, in file order of the premises; the rows that go into none, by reason)."""
    dropped: Counter[str] = Counter()
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
        elif pairing == "all":
            triplets.extend((premise, *texts) for texts in itertools.product(*chosen.values()))
        else:
            zipped = list(zip(*chosen.values(), strict=False))[: 1 if pairing == "one" else None]
            dropped["surplus"] += rows - len(zipped) * len(chosen)
            triplets.extend((premise, *texts) for texts in zipped)
    return triplets, dropped


def _advice(labels: set[int]) -> str:
    absent = [name for name in ("entailment", "contradiction") if NLI_LABELS[name] not in labels]
    why = "\n  A premise needs an entailed and a contradicting hypothesis, each on a row with its exact text. "
    if absent:
        why += f"No row is labelled {' or '.join(absent)}: if a word of the file means it, say so with labels. "
    return why + "Without hard negatives, train on the entailed pairs of read_pairs with in-batch negatives."


def list_table(source: str | os.PathLike[str], *, on_error: str = "raise") -> Table:
    """Read lists of at least three sentences, the source first: sentences; id ("line N" where a row has none), of which
    the first one stays; and method, how they were written ("" where a row does not say)."""
    lines: dict[str, int] = {}

    def parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
        sentences = parse_list(fields, source)["sentences"]
        name = f"{source.unit} {source.line}" if fields.get("id") is None else str(fields["id"])
        if name in lines:
            raise RowProblem(f"id {name!r} is that of line {lines[name]}, too", reason="duplicate id")
        lines[name] = source.line
        method = fields.get("method")
        return {"id": name, "sentences": sentences, "method": "" if method is None else str(method)}

    return read_table(source, parse, "list", on_error=on_error)


def parse_list(fields: dict[str, Any], source: Source) -> dict[str, list[str]]:
    """{"sentences"} of a row. The paper's authors publish theirs in a column list_sent, each list as text. A list is
    never closed up around a hole: the places of its sentences are what it says."""
    sentences = fields.get("sentences", fields.get("list_sent"))
    if isinstance(sentences, str) and sentences.startswith("["):
        try:
            sentences = ast.literal_eval(sentences)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            raise RowProblem(f"{sentences[:40]!r}… is no list of texts", reason="no list") from None
    if not isinstance(sentences, list):
        there = ", ".join(map(repr, fields))
        raise RowProblem(f"no list of sentences in a column 'sentences'; there are: {there}", reason="no list")
    for place, sentence in enumerate(sentences):
        try:
            parse_sentence(f"sentence {place}", sentence)
        except RowProblem as problem:
            raise RowProblem(f"{problem}; a list has no holes", reason="hole") from None
    if len(sentences) < SHORTEST:
        few = f"{len(sentences)} sentences, where a ranking takes at least {SHORTEST}"
        raise RowProblem(few, reason=f"shorter than {SHORTEST}")
    return {"sentences": sentences}

"""Read triplets (anchor, entailed and contradicting text) and lists of ranking sentences."""

import ast
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from raoe_train.data.columns import NAMES, NLI_LABELS, LabelMap, RowProblem, parse_label, parse_sentence, resolve_labels
from raoe_train.data.pairs import TEXTS
from raoe_train.data.sources import Source, open_source
from raoe_train.data.tables import Parse, Table, Tally, by_column, read_table, to_table

ROLES = ("anchor", "positive", "negative", "neutral")
CLASSES = ("entailment", "contradiction", "neutral")  # classes of positive, negative and neutral hypotheses
SHORTEST = 3  # sentences in a list: with two there is nothing to rank


def triplet_table(
    source: str | os.PathLike[str],
    *,
    columns: Mapping[str, str | None] | None = None,
    labels: LabelMap | None = None,
    on_error: str = "raise",
    neutral: bool = False,
    pairing: str = "one",
) -> Table:
    """Read triplets, or make them from NLI pairs.

    A file with a column anchor, sentence0 or sent0 (or one mapped to anchor, positive, negative or neutral) has
    triplets, which are read unchanged. Any other file has pairs of a premise and a hypothesis with a label. They are
    grouped by the exact text of the premise, as in SimCSE (Gao et al., EMNLP 2021, section 4). By default each premise
    makes one triplet: with two in a batch, the premise's own positive would also be a negative.

    The columns are anchor, positive, negative and, with `neutral`, a neutral hypothesis. `pairing`: "one" pairs the
    first entailed with the first contradicting hypothesis of a premise in file order; "zip" the i-th with the i-th;
    "all" makes every combination. For other arguments see read_pairs. Rows that make no triplet are dropped and
    counted, as "neutral", "duplicate hypothesis" (for the same premise and label), "text in two roles" (positive and
    negative), "premise without entailment" (or without another class) or "surplus" (left over by the pairing).
    """
    if pairing not in ("one", "zip", "all"):
        raise ValueError(f"pairing must be one, zip or all; got {pairing!r}")
    label_map = resolve_labels(labels)
    if not set(label_map.values()) <= {*NLI_LABELS.values(), None}:
        raise ValueError(f"labels must map to 0 entailment, 1 neutral, 2 contradiction; got {labels}")
    roles = ROLES if neutral else ROLES[:3]
    parse_triplet = by_column(dict.fromkeys(roles, parse_sentence))
    parse_pair = by_column({**dict.fromkeys(TEXTS, parse_sentence), "label": partial(parse_label, label_map=label_map)})
    parser: list[Parse] = []  # by the first row, for all rows

    def parse(fields: dict[str, Any], source: Source) -> tuple[Any, ...]:
        if not parser:
            is_triplet = {*ROLES} & {*(columns or {})} or {*NAMES["anchor"]} & {*fields}
            parser.append(parse_triplet if is_triplet else parse_pair)
        return tuple(parser[0](fields, source).values())

    stream, tally = open_source(source, columns), Tally(on_error)
    rows = list(tally.parse_rows(stream, parse))
    left_out, advice = tally.dropped.total(), ""
    if parser == [parse_pair]:
        triplets, dropped = _combine(rows, CLASSES[: len(roles) - 1], pairing)
        tally.dropped += dropped
        advice = _advice({label for _, _, label in rows}) if rows else ""
    else:
        triplets = [texts for texts in rows if len(set(texts[1:])) == len(roles) - 1]
        tally.dropped["text in two roles"] = len(rows) - len(triplets)
    counts = tally.counts(stream.name, len(rows) + left_out - tally.dropped.total(), "triplet", advice)
    return to_table(dict(zip(roles, texts, strict=True)) for texts in triplets), counts


def _combine(pairs: Sequence[Any], classes: Sequence[str], pairing: str) -> tuple[list[tuple[str, ...]], Counter[str]]:
    """Make triplets; returns (triplets in file order of the premises, number of unused rows by reason)."""
    dropped: Counter[str] = Counter()
    premises: dict[str, dict[str, list[int]]] = {}
    for premise, hypothesis, label in pairs:
        premises.setdefault(premise, {}).setdefault(hypothesis, []).append(label)
    triplets: list[tuple[str, ...]] = []
    for premise, hypotheses in premises.items():
        by_class: dict[int, list[str]] = {NLI_LABELS[name]: [] for name in classes}
        for hypothesis, labels in hypotheses.items():
            usable = [label for label in labels if label in by_class]
            dropped["neutral"] += len(labels) - len(usable)
            if len(set(usable)) > 1:
                dropped["text in two roles"] += len(usable)
            elif usable:
                dropped["duplicate hypothesis"] += len(usable) - 1
                by_class[usable[0]].append(hypothesis)
        rows = sum(map(len, by_class.values()))
        if absent := [name for name in classes if not by_class[NLI_LABELS[name]]]:
            dropped[f"premise without {absent[0]}"] += rows
        elif pairing == "all":
            triplets.extend((premise, *texts) for texts in itertools.product(*by_class.values()))
        else:
            combos = list(zip(*by_class.values(), strict=False))[: 1 if pairing == "one" else None]
            dropped["surplus"] += rows - len(combos) * len(by_class)
            triplets.extend((premise, *texts) for texts in combos)
    return triplets, dropped


def _advice(labels: set[int]) -> str:
    absent = [name for name in ("entailment", "contradiction") if NLI_LABELS[name] not in labels]
    advice = "\n  A premise needs an entailed and a contradicting hypothesis, in rows with exactly the same premise. "
    if absent:
        advice += f"No row has the label {' or '.join(absent)}: if the file uses another word, map it with labels. "
    return advice + "Without hard negatives, train on the entailed pairs with in-batch negatives."


def list_table(source: str | os.PathLike[str], *, on_error: str = "raise") -> Table:
    """Read lists of at least three sentences. The columns are sentences (the source first), id (by default "line N"; a
    second row with the same id is malformed) and method (how the list was generated, by default "")."""
    lines: dict[str, int] = {}

    def parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
        sentences = parse_list(fields, source)["sentences"]
        name = f"{source.unit} {source.line}" if fields.get("id") is None else str(fields["id"])
        if name in lines:
            raise RowProblem(f"id {name!r} is already used in line {lines[name]}", reason="duplicate id")
        lines[name] = source.line
        method = fields.get("method")
        return {"id": name, "sentences": sentences, "method": "" if method is None else str(method)}

    return read_table(source, parse, "list", on_error=on_error)


def parse_list(fields: dict[str, Any], source: Source) -> dict[str, list[str]]:
    """Read {"sentences"} from a row. (The paper's authors publish a column list_sent with each list as text.) A list
    with an empty sentence is malformed, because removing the sentence would change the ranks of the others."""
    sentences = fields.get("sentences", fields.get("list_sent"))
    if isinstance(sentences, str) and sentences.startswith("["):
        try:
            sentences = ast.literal_eval(sentences)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            raise RowProblem(f"{sentences[:40]!r}… is not a list of texts", reason="no list") from None
    if not isinstance(sentences, list):
        names = ", ".join(map(repr, fields))
        raise RowProblem(f"no list of sentences in a column 'sentences'; columns: {names}", reason="no list")
    for place, sentence in enumerate(sentences):
        try:
            parse_sentence(f"sentence {place}", sentence)
        except RowProblem as problem:
            raise RowProblem(f"{problem}; a list cannot have empty sentences", reason="hole") from None
    if len(sentences) < SHORTEST:
        message = f"{len(sentences)} sentences, but a ranking needs at least {SHORTEST}"
        raise RowProblem(message, reason=f"shorter than {SHORTEST}")
    return {"sentences": sentences}

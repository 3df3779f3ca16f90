"""Read rows of an anchor, its positive and any number of negatives, and lists of ranking sentences."""

import ast
import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from raoe_train.data.columns import (
    LISTS,
    NAMES,
    NLI_LABELS,
    LabelMap,
    RowProblem,
    parse_label,
    parse_sentence,
    resolve_labels,
)
from raoe_train.data.pairs import TEXTS
from raoe_train.data.sources import Source, open_source
from raoe_train.data.tables import Table, Tally, by_column, read_table, to_table

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame

ROLES = ("anchor", "positive", "negative", "neutral")
CLASSES = ("entailment", "contradiction", "neutral")  # classes of positive, negative and neutral hypotheses
SHORTEST = 3  # sentences in a list: with two there is nothing to rank


class Row(NamedTuple):
    """The texts of a row: of a query with all of its positives, or of one positive."""

    anchor: str
    positives: Sequence[str]
    negatives: Sequence[str]
    neutral: Sequence[str] = ()  # none or one


def row_table(
    source: Union[str, os.PathLike[str], "Dataset", "DataFrame"],
    *,
    columns: Mapping[str, str | None] | None = None,
    labels: LabelMap | None = None,
    on_error: str = "raise",
    neutral: bool = False,
    pairing: str = "one",
) -> Table:
    """Read rows of an anchor, a positive and any number of negatives, or make them from NLI pairs.

    A row has an anchor (query, question; sentence1 in a source without scores and labels), a positive (answer, passage,
    document, sentence2) and no, one or several negatives: negative, negative_1, negative_2, …, where an empty cell or
    null is no negative. The columns pos, neg, positive_passages and negative_passages (LISTS) have lists of texts or of
    {"title", "text"}, which are joined by a blank. Each positive of a query makes a row with all of its negatives.

    Any other source has pairs of a premise and a hypothesis with a label. They are grouped by the exact text of the
    premise, as in SimCSE (Gao et al., EMNLP 2021, section 4). By default each premise makes one triplet: with two in a
    batch, the premise's own positive would also be a negative. `pairing`: "one" pairs the first entailed with the first
    contradicting hypothesis of a premise in file order; "zip" the i-th with the i-th; "all" makes every combination.

    For other arguments and errors see read_pairs.

    Returns:
        (Dataset, counts). The columns, all strings, are anchor, positive, negative, negative_2, … negative_n, of which
        n are the most negatives of a row and missing ones are None, and with `neutral` a neutral text. Counts have
        "dropped", the source's rows that make no row: "no positive", "positive equal to the query", "text in two roles"
        (neutral), and of NLI pairs "neutral", "duplicate hypothesis" (for the same premise and label), "text in two
        roles", "premise without entailment" (or without another class) or "surplus" (left over by the pairing). Counts
        have "texts" if texts of other rows are left out: a positive equal to the query, a negative that is the query or
        one of its positives in any row, a repeated text.
    """
    if pairing not in ("one", "zip", "all"):
        raise ValueError(f"pairing must be one, zip or all; got {pairing!r}")
    label_map = resolve_labels(labels)
    if not set(label_map.values()) <= {*NLI_LABELS.values(), None}:
        raise ValueError(f"labels must map to 0 entailment, 1 neutral, 2 contradiction; got {labels}")
    classes = CLASSES if neutral else CLASSES[:2]
    parse_pair = by_column({**dict.fromkeys(TEXTS, parse_sentence), "label": partial(parse_label, label_map=label_map)})
    is_pair: list[bool] = []  # by the first row, for all rows

    def parse(fields: dict[str, Any], source: Source) -> Any:
        if not is_pair:
            is_pair.append(not _has_roles(fields, source.columns.mapping))
        return tuple(parse_pair(fields, source).values()) if is_pair[0] else _parse_row(fields, source, neutral)

    stream, tally = open_source(source, columns), Tally(on_error)
    parsed = list(tally.parse_rows(stream, parse))
    left_out, noun, advice, texts = tally.dropped.total(), "row", "", Counter[str]()
    if is_pair == [True]:
        triplets, dropped = _combine(parsed, classes, pairing)
        rows = [Row(anchor, [positive], [negative], rest) for anchor, positive, negative, *rest in triplets]
        noun, advice = "triplet", _advice({label for _, _, label in parsed}) if parsed else ""
    else:
        rows, dropped, texts = _usable(parsed)
    tally.dropped += dropped
    counts = tally.counts(stream.name, len(parsed) + left_out - tally.dropped.total(), noun, advice)
    width = max(len(row.negatives) for row in rows)
    negatives = [f"negative_{n}" if n > 1 else "negative" for n in range(1, width + 1)]
    names = ["anchor", "positive", *negatives, *(["neutral"] if neutral else [])]
    cells = (
        (row.anchor, positive, *row.negatives, *[None] * (width - len(row.negatives)), *row.neutral)
        for row in rows
        for positive in row.positives
    )
    table = to_table((dict(zip(names, each, strict=True)) for each in cells), {name: "string" for name in names})
    return table, counts | ({"texts": dict(texts)} if texts else {})


def _has_roles(fields: Mapping[str, Any], mapping: dict[str, str | None]) -> bool:
    """Whether a source has rows, by its first; if so, name the columns that also have other roles."""
    if {*ROLES} & {*mapping} or {*NAMES["anchor"]} & {*fields}:
        return True
    if "sentence1" not in {*fields} - {*mapping} or {*NAMES["score"], *NAMES["label"]} & {*fields}:
        return False
    mapping["anchor"] = "sentence1"
    if not {*NAMES["positive"]} & {*fields} - {"sentence1"}:
        mapping["positive"] = "sentence2"
    return True


def _parse_row(fields: Mapping[str, Any], source: Source, neutral: bool) -> Row:
    names = source.columns.find(fields, ("anchor", "positive", *(["neutral"] if neutral else [])))
    numbered = [name for name in fields if re.fullmatch(r"negative_\d+", name)]
    first = source.columns.column(fields, "negative", False)
    columns = [*filter(None, [first]), *sorted(numbered, key=lambda name: int(name[9:]))]
    return Row(
        parse_sentence(names["anchor"], fields[names["anchor"]]),
        _parse_texts(names["positive"], fields[names["positive"]]),
        [text for name in columns for text in _parse_texts(name, fields[name])],
        [parse_sentence("neutral", fields[names["neutral"]])] if neutral else [],
    )


def _parse_texts(column: str, value: Any) -> list[str]:
    """The texts in a column of texts, where an empty one is none, or in a column of lists."""
    if value is None or (value == "" and column not in LISTS):
        return []
    if column not in LISTS:
        return [parse_sentence(column, value)]
    if not isinstance(value, list):
        raise RowProblem(f"{column} is {value!r}, not a list of texts")
    return [_parse_passage(f"text {number} of {column}", each) for number, each in enumerate(value, 1)]


def _parse_passage(place: str, value: Any) -> str:
    title = value.get("title") if isinstance(value, dict) else None
    text = parse_sentence(place, value.get("text") if isinstance(value, dict) else value)
    return f"{parse_sentence(f'the title of {place}', title)} {text}" if title else text


def _usable(parsed: Sequence[Row]) -> tuple[list[Row], Counter[str], Counter[str]]:
    """Leave false negatives and unusable positives out; returns (rows, dropped rows and left out texts by reason)."""
    dropped, left_out, rows = Counter[str](), Counter[str](), list[Row]()
    positives_of: dict[str, set[str]] = {}  # and the query itself
    for row in parsed:
        positives_of.setdefault(row.anchor, {row.anchor}).update(row.positives)
    for row in parsed:
        positives, negatives = [*dict.fromkeys(row.positives)], [*dict.fromkeys(row.negatives)]
        usable = [text for text in positives if text != row.anchor]
        kept = [text for text in negatives if text not in positives_of[row.anchor]]
        if not usable:
            dropped["positive equal to the query" if positives else "no positive"] += 1
        elif {*row.neutral} & {*positives_of[row.anchor], *kept}:
            dropped["text in two roles"] += 1
        else:
            rows.append(Row(row.anchor, usable, kept, row.neutral))
            left_out["positive equal to the query"] += len(positives) - len(usable)
            left_out["negative that is the query or its positive"] += len(negatives) - len(kept)
            left_out["repeated text"] += len(row.positives) - len(positives) + len(row.negatives) - len(negatives)
    return rows, dropped, +left_out


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

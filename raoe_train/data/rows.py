"""Read rows with an anchor, a positive and any number of negatives, and read lists of ranking sentences."""

import ast
import functools
import itertools
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from raoe_train.data.columns import (
    LISTS,
    NAMES,
    NLI_LABELS,
    Columns,
    RowProblem,
    as_word,
    parse_label,
    parse_sentence,
    resolve_labels,
)
from raoe_train.data.pairs import TEXTS
from raoe_train.data.sources import Source, Table, row_values, to_table

logger = logging.getLogger(__name__)
CLASSES = ("entailment", "contradiction", "neutral")  # NLI classes of the positive, the negative and the neutral
ADVICE = """
  A premise needs an entailed and a contradicting hypothesis, in rows with exactly the same premise. If your labels have
  other names, map them with data.labels. To train without hard negatives, use entailed pairs and in-batch negatives."""
SHORTEST = 3  # minimum number of sentences in a list: the source sentence and at least two to rank
Row = tuple[str, list[Any], list[str], list[str]]  # anchor, positives, negatives, at most one neutral


def row_table(
    source: Any,
    *,
    columns: Mapping[str, str | None] | None = None,
    labels: Any = None,
    on_error: str = "raise",
    neutral: bool = False,
    pairing: str = "one",
    num_negatives: int | None = None,
    keep_all: bool = False,
) -> Table:
    """Read rows with an anchor, a positive and any number of negatives, or build such rows from NLI pairs. For the
    formats, see docs/data.md.

    If a query has several positives, each becomes a separate row. A negative is left out if it equals the query or any
    of the query's positives. If a row contains more than num_negatives negatives, num_negatives of them are drawn at
    random with a fixed seed. A passage with relevance 0 becomes a negative in all rows of the same query. With
    keep_all, which evaluation uses, no text is left out, and a row without a positive gets None as its positive.

    NLI pairs are grouped by the exact text of the premise, as in SimCSE (Gao et al., EMNLP 2021, section 4). With
    `pairing` "one", a premise yields only one triplet, with its first entailed and its first contradicting hypothesis
    in file order. If a premise had two triplets in a batch, each triplet's positive would be an in-batch negative for
    the other triplet. With `pairing` "zip", the i-th entailed and the i-th contradicting hypothesis form a triplet.
    With `pairing` "all", every combination of hypotheses forms a triplet.

    The result contains the columns anchor, positive, negative, negative_2, … and, with `neutral`, the column neutral.
    Missing negatives are None. For the other arguments, see read_pairs. Dropped rows are counted by reason, such as "no
    positive", "duplicate hypothesis" (a repeated NLI pair) and "surplus" (not used by `pairing`). Texts that are
    dropped from the remaining rows are counted under "texts".
    """
    import pyarrow
    import pyarrow.compute as pc

    label_map, opened = _nli_labels(labels), Source(source, columns, on_error)
    is_nli: bool | None = None  # decided by the first row

    def parse(row: dict[str, Any]) -> tuple[Any, ...]:
        nonlocal is_nli
        if is_nli is None:
            is_nli = not _has_roles(row, opened.columns.mapping)
        return _nli_pair(row, opened.columns, label_map) if is_nli else _by_role(row, opened.columns, neutral)

    results = opened.parse(parse)
    first = [*itertools.islice(results, 1)]  # decides is_nli
    texts = pyarrow.list_(pyarrow.string())
    types = {"anchor": "string", "positives": texts, "negatives": texts, "rest": texts}
    if is_nli:
        types = {"premise": "string", "hypothesis": "string", "label": "int64"}
    # a table, because Python objects would need several times the memory of the texts
    parsed = to_table((dict(zip(types, each, strict=True)) for each in itertools.chain(first, results)), types)
    read, advice, dropped, left_out = len(parsed) + opened.dropped.total(), "", Counter[str](), Counter[str]()
    rows: Iterable[Row]
    if is_nli:
        rows, width = _combine(row_values(parsed), CLASSES[: 2 + neutral], pairing, dropped), 1
        advice = ADVICE if first else ""
    else:
        width = pc.max(pc.list_value_length(parsed.data["negatives"])).as_py() or 0
        if keep_all:
            rows = ((anchor, positives or [None], *rest) for anchor, positives, *rest in row_values(parsed))
        else:
            rows, more = _usable(parsed, num_negatives, dropped, left_out)
            width = width + more if num_negatives is None else min(width + more, num_negatives)
    table = _to_table(rows, width, neutral)
    opened.dropped += dropped
    noun = "triplet" if is_nli else "row"
    counts = opened.counts(read - opened.dropped.total(), noun, advice)
    return table, counts | ({"texts": dict(+left_out)} if +left_out else {})


def _nli_labels(labels: Any) -> dict[str, int | None]:
    label_map: Any = resolve_labels(labels)
    if not {*label_map.values()} <= {*NLI_LABELS.values(), None}:
        classes = "0 (entailment), 1 (neutral), 2 (contradiction) or null"
        raise ValueError(f"labels must map each label to {classes}; got {labels}")
    return label_map


def _to_table(rows: Iterable[Row], width: int, neutral: bool) -> Any:
    """Create a table from rows, with a separate row for each positive. Missing negatives are None. No row has more than
    `width` negatives; columns for negatives are removed if they are empty in all rows."""
    numbered = ["negative", *(f"negative_{number}" for number in range(2, width + 1))][:width]
    names = ["anchor", "positive", *numbered, *["neutral"][:neutral]]
    cells = (
        (anchor, positive, *negatives, *[None] * (width - len(negatives)), *rest)
        for anchor, positives, negatives, rest in rows
        for positive in positives
    )
    types = dict.fromkeys(names, "string")
    table = to_table((dict(zip(names, each, strict=True)) for each in cells), types)
    return table.remove_columns([name for name in numbered if table.data[name].null_count == len(table)])


def in_our_order(data: Any, name: str, *, by_name: bool, classes: bool) -> Any:
    """Convert a dataset to the form that a loss reads. Rows with lists of texts become rows of single texts. With
    `by_name`, columns of rows are reordered to anchor, positive, negatives, neutral. With `classes`, NLI labels are
    renumbered, because a ClassLabel column may number its classes differently. `name` is used in error messages."""
    from datasets import Features, Value

    if getattr(data, "column_names", None) is None:
        advice = "create the stream with features=..." if hasattr(data, "column_names") else "use Dataset.from_list"
        raise ValueError(f"{name!r} must be a datasets.Dataset with columns, got {type(data).__name__}: {advice}")
    features = data.features or {}
    if any(not isinstance(features[each], Value) for each in LISTS if each in features):
        data, counts = row_table(data)
        logger.warning("rows of %s: %s", name, counts)
    columns = order = columns_in_order(data)
    first = [next((each for each in NAMES[role] if each in columns), None) for role in ("anchor", "positive")]
    if by_name and None not in first:
        order = [*first, *sorted((each for each in columns if each not in first), key="neutral".__eq__)]  # type: ignore
    numbers = [NLI_LABELS.get(each.lower(), -1) for each in getattr(features.get("label"), "names", [])]
    renumbers = classes and sorted(numbers) != numbers and min(numbers) >= 0
    transform = _transform_of(data) if renumbers or order != columns else None
    if transform:
        data = data.with_format(None)
    if renumbers:
        whole: dict[str, Any] = {"features": Features({**data.features, "label": Value("int64")})}
        whole |= {"keep_in_memory": True} if hasattr(data, "__len__") else {}
        of_class: dict[int | None, int | None] = {None: None, -1: -1, **dict(enumerate(numbers))}
        data = data.map(lambda row: {"label": of_class[row["label"]]}, **whole)
    if transform:
        return data.with_transform(lambda rows: {each: row[each] for row in [transform(rows)] for each in order})
    return data.select_columns(order) if order != columns else data


def columns_in_order(data: Any) -> list[str]:
    """Return the names of a dataset's columns, or of those that its transform (set_transform) returns, in order."""
    names = [*data[:1]] if _transform_of(data) and len(data) else getattr(data, "column_names", None) or []
    return [name for name in names if name != "dataset_name"]  # a column that sentence-transformers adds


def _transform_of(data: Any) -> Any:
    form = getattr(data, "format", {"type": None})
    return form["format_kwargs"]["transform"] if form["type"] == "custom" else None


def _has_roles(present: Collection[str], mapping: dict[str, str | None]) -> bool:
    """Return whether the columns `present` include an anchor (if not, the rows are NLI pairs). If sentence1 is the
    anchor, add it to `mapping`."""
    roles = {"anchor", "positive", "negative", "neutral"}
    if roles & {*mapping} or {*NAMES["anchor"]} & {*present}:
        return True
    is_pair = "sentence1" in present and not {*NAMES["score"], *NAMES["label"]} & {*present}
    if is_pair:
        mapping["anchor"] = "sentence1"
        if not {*NAMES["positive"]} & {*present} - {"sentence1"}:
            mapping["positive"] = "sentence2"
    return is_pair


def _nli_pair(row: dict[str, Any], columns: Columns, label_map: dict[str, int | None]) -> tuple[str, str, int]:
    premise, hypothesis, label = columns.find(row, (*TEXTS, "label")).values()
    texts = parse_sentence(premise, row[premise]), parse_sentence(hypothesis, row[hypothesis])
    return *texts, parse_label(label, row[label], label_map)


def _by_role(row: dict[str, Any], columns: Columns, neutral: bool) -> Row:
    required = ("anchor", "positive", *["neutral"][:neutral])
    found = columns.find(row, required, ("relevance",))
    anchor, positive, *rest = (found[name] for name in required)
    positives = _parse_texts(positive, row[positive])
    negatives = [text for name in _negatives(columns, tuple(row)) for text in _parse_texts(name, row[name])]
    if (relevance := found.get("relevance")) and not _is_relevant(relevance, row[relevance]):
        positives, negatives = [], [*positives, *negatives]
    texts = [parse_sentence(column, row[column]) for column in (anchor, *rest)]
    return texts[0], positives, negatives, texts[1:]


@functools.lru_cache(maxsize=16)
def _negatives(columns: Columns, present: tuple[str, ...]) -> list[str]:
    names = [name for name in present if re.fullmatch(r"negative_\d+", name)]
    names.sort(key=lambda name: int(name[9:]))
    if first := columns.column(present, "negative", False):
        names.insert(0, first)
    columns.read.update(names)
    return names


def _is_relevant(column: str, value: Any) -> bool:
    word = as_word(value).lower()
    if word not in ("0", "1", "false", "true"):
        rule = "a row with one query and one text needs 1 (positive) or 0 (negative)"
        advice = "to ignore the column, set --data.columns relevance=none"
        raise RowProblem(f"{column} is {value!r}, but {rule}; {advice}", reason="bad relevance")
    return word in ("1", "true")


def _parse_texts(column: str, value: Any) -> list[str]:
    """Return the texts in a cell, which contains a list or a single text. Return [] for an empty single text."""
    if value is None or value == "":
        return []
    # a string may be a list from a CSV file, or a single text
    is_list = not isinstance(value, str) or re.fullmatch(r"\[.*\]", value, re.DOTALL)
    if column not in LISTS or not is_list:
        return [parse_sentence(column, value)]
    if not isinstance(value, list):
        raise RowProblem(f"{column} is {value!r}, not a list of texts")
    texts = []
    for number, each in enumerate(value, 1):
        passage = each if isinstance(each, dict) else {"text": each}
        text = parse_sentence(f"text {number} of {column}", passage.get("text"))
        title = passage.get("title") and parse_sentence(f"title {number} of {column}", passage["title"])
        texts.append(f"{title} {text}" if title else text)
    return texts


def _usable(parsed: Any, most: int | None, dropped: Counter[str], left_out: Counter[str]) -> tuple[Iterator[Row], int]:
    """Drop positives that equal the query, and negatives that equal the query or one of its positives. Return (an
    iterator over the usable rows, the largest number of negatives that one row takes over from other rows of its
    query). The iterator counts dropped rows in `dropped`, and dropped texts in `left_out`, by reason."""
    known: dict[str, set[str]] = {}  # {query in several rows: the query and all of its positives}
    shared: dict[str, list[str]] = {}  # {query: negatives in rows without a positive}
    seen, repeated = set[int](), set[int]()  # hashes, because they need less memory than queries
    for (anchor,) in row_values(parsed, "anchor"):
        (repeated if hash(anchor) in seen else seen).add(hash(anchor))
    for anchor, positives, negatives, _ in row_values(parsed) if repeated else ():
        if hash(anchor) in repeated:
            known.setdefault(anchor, {anchor}).update(positives)
            if not positives:
                shared.setdefault(anchor, []).extend(negatives)

    def rows() -> Iterator[Row]:
        generator, moved, used = random.Random(0), Counter[str](), set[str]()
        for anchor, positives, negatives, rest in row_values(parsed):
            own = known.get(anchor) or {anchor, *positives}
            if not positives and negatives and len(own) > 1:
                moved[anchor] += 1  # its negatives go to the rows of this query that have a positive
                continue
            negatives = [*negatives, *shared.get(anchor, ())]
            usable = [text for text in dict.fromkeys(positives) if text != anchor]
            kept = [text for text in dict.fromkeys(negatives) if text not in own]
            if not usable:
                dropped["positive equal to the query" if positives else "no positive"] += 1
            elif {*rest} & {*own, *kept}:
                dropped["text in two roles"] += 1
            else:
                drawn = kept if most is None or len(kept) <= most else generator.sample(kept, most)
                left_out["more than num_negatives"] += len(kept) - len(drawn)
                repeats = len(positives) - len({*positives}) + len(negatives) - len({*negatives})
                left_out["repeated"] += repeats
                left_out["in two roles"] += len(positives) + len(negatives) - len(usable) - len(kept) - repeats
                if anchor in shared:
                    used.add(anchor)
                yield anchor, usable, drawn, rest
        dropped["no positive"] += sum(count for anchor, count in moved.items() if anchor not in used)

    return rows(), max(map(len, shared.values()), default=0)


def _combine(pairs: Iterable[Any], classes: Sequence[str], pairing: str, dropped: Counter[str]) -> list[Row]:
    """Build triplets from NLI pairs, in the order in which their premises appear in the file. Count the dropped rows in
    `dropped`, by reason."""
    premises: dict[str, dict[str, list[int]]] = {}
    for premise, hypothesis, label in pairs:
        premises.setdefault(premise, {}).setdefault(hypothesis, []).append(label)
    triplets: list[Any] = []
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
    return [(premise, [first], [second], rest) for premise, first, second, *rest in triplets]


def list_table(source: str | os.PathLike[str], *, on_error: str = "raise") -> Table:
    """Read lists of sentences into a column `sentences`, with the source sentence first. List ids must be unique."""
    ids = set[str]()

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        sentences, name = read_list(row), row.get("id")
        if name is not None and str(name) in ids:
            raise RowProblem(f"id {name!r} is already used in an earlier row", reason="duplicate id")
        ids.add(str(name))
        return sentences

    return Source(source, on_error=on_error).table(parse, "list")


def read_list(row: dict[str, Any]) -> dict[str, list[str]]:
    """Return a row's list of sentences as {"sentences": list}. In the published data of the ranking-sentences paper,
    the column list_sent contains each list as a string. A list with an empty sentence is malformed, because removing
    this sentence would change the ranks of the other sentences."""
    sentences = row.get("sentences", row.get("list_sent"))
    if isinstance(sentences, str) and sentences.startswith("["):
        try:
            sentences = ast.literal_eval(sentences)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            problem = f"{sentences[:40]!r}… is not a list of texts"
            raise RowProblem(problem, reason="no list") from None
    if not isinstance(sentences, list):
        names = ", ".join(map(repr, row))
        problem = f"no column 'sentences' with a list of sentences; columns: {names}"
        raise RowProblem(problem, reason="no list")
    for place, sentence in enumerate(sentences):
        try:
            parse_sentence(f"sentence {place}", sentence)
        except RowProblem as error:
            problem = f"{error}; a list must not contain empty sentences"
            raise RowProblem(problem, reason="empty sentence") from None
    if len(sentences) < SHORTEST:
        problem = f"the list has {len(sentences)} sentences, but a ranking needs at least {SHORTEST}"
        raise RowProblem(problem, reason=f"fewer than {SHORTEST} sentences")
    return {"sentences": sentences}

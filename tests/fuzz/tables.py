"""The kinds of tables: valid rows, the reader under test, and the naive reader."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from raoe_train.data.files import read_rows, write_rows
from raoe_train.data.mining import labelled_table
from raoe_train.data.pairs import PairsToScore, conditional_table, pair_table
from raoe_train.data.rows import list_table, row_table
from raoe_train.data.settings import Pairs
from raoe_train.data.tables import read_sentences
from raoe_train.evaluation.captions import read_captions
from tests.fuzz.mutations import Rows
from tests.fuzz.naive import Record, label, number, text, word

TEXTS = (
    "a man plays", "Zwei Hunde", 'no, "never"', "it's 5 % off", "猫が走る", "🎸 and 🥁", "tab-less",
    "one\u2028line", "x",
)  # fmt: skip
WORDS = ("entailment", "neutral", "contradiction")
DELIMITED, OBJECTS = ("tsv", "csv", "jsonl", "parquet"), ("jsonl", "parquet")


@dataclass(frozen=True)
class Table:
    """A kind of table."""

    rows: Callable[[Random], Rows]  # valid ones
    kinds: Sequence[str]  # formats
    read: Callable[[str, str], tuple[list[Any], dict[str, Any]]]  # (path, on_error) -> (rows, counts)
    right: Callable[[list[Record]], list[Any]]  # the naive reading of valid records
    ordered: bool = True  # whether rows come in the file's order, each once


def say(rng: Random, number: int) -> str:
    return f"{rng.choice(TEXTS)} {number}"


def made(table: Any, counts: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return table.to_list(), counts


def _pairs(rng: Random) -> Rows:
    with_label, with_score = rng.random() < 0.6, rng.random() < 0.8
    return [
        {"sentence1": say(rng, n), "sentence2": say(rng, -n)}
        | ({"score": rng.choice((rng.random(), float(n), n))} if with_score else {})
        | ({"label": rng.choice((*WORDS, "-"))} if with_label and n else {"label": WORDS[0]} if with_label else {})
        for n in range(rng.randrange(1, 9))
    ]


def _column(record: Record, *names: str) -> Any:
    there = [name for name in names if name in record]
    return record[there[0]] if len(there) == 1 else None


def _right_pairs(records: list[Record]) -> list[Any]:
    results = []
    for record in records:
        first, second = _column(record, "sentence1", "text1"), record.get("sentence2")
        row: Record = {"sentence1": text(first), "sentence2": text(second)}
        if "score" in record or "similarity" in record:
            row["score"] = number(_column(record, "score", "similarity"))
        if "label" in record:
            row["label"] = label(record["label"])
        if None not in row.values():
            results.append(row)
    return results


def _labelled(rng: Random) -> Rows:
    second, split = rng.random() < 0.3, rng.random() < 0.5
    return [
        {"sentence1" if second else "text": say(rng, n), "label": rng.choice(("0", "1", 1, "desc"))}
        | ({"sentence2": say(rng, n)} if second else {})
        | ({"split": rng.choice(("train", "test"))} if split else {})
        for n in range(rng.randrange(1, 9))
    ]


def _right_labelled(records: list[Record]) -> list[Any]:
    results = []
    for record in records:
        first = _column(record, "sentence1", "text1")
        row = {"text": text(first if first is not None and "sentence2" in record else record.get("text"))}
        if first is not None and "sentence2" in record:
            row["second"] = text(record["sentence2"])
        row |= {"label": word(record.get("label")), "split": word(record.get("split")) or ""}
        if None not in row.values():
            results.append(row)
    return results


LISTS = ("positives", "negatives", "pos", "neg", "positive_passages", "negative_passages")
ROLES = {
    "anchor": ("anchor", "query", "sent0", "question", "sentence0"),
    "positive": ("positive", "answer", "sent1", "sentence1", "passage", "document", *LISTS[::2]),
    "negative": ("negative", "negative", "hard_neg", "sentence2", *LISTS[1::2]),
}


def _columns_of_rows(rng: Random) -> Rows:
    """Rows with 0 to 3 negatives, or NLI pairs."""
    if rng.random() < 0.5:
        second, most = rng.randrange(3), rng.randrange(4)
        names = [names[second] for names in ROLES.values()] + ["negative_2", "negative_3"]
        return [
            {name: say(rng, 10 * n + k) if k < 2 or rng.random() < 0.6 else None
             for k, name in enumerate(names[: 2 + most])} for n in range(rng.randrange(1, 7))
        ]  # fmt: skip
    return [
        {"premise": f"premise {n // 3}", "hypothesis": say(rng, n), "label": (*WORDS[::2], rng.choice(WORDS))[n % 3]}
        for n in range(rng.randrange(2, 12))
    ]


def _lists_of_rows(rng: Random) -> Rows:
    """FlagEmbedding's and tevatron's lists; queries repeat, and so do texts."""
    titled = rng.random() < 0.5

    def texts(most: int) -> list[Any]:
        names = [say(rng, rng.randrange(9)) for _ in range(rng.randrange(most))]
        return [{"title": rng.choice(("", "T")), "text": name} for name in names] if titled else names

    names = ROLES["positive"][-1 if titled else -2], ROLES["negative"][-1 if titled else -2]
    return [{"query": say(rng, n // 2), names[0]: texts(3), names[1]: texts(5)} for n in range(rng.randrange(1, 7))]


def _texts(record: Record, *names: str) -> list[str] | None:
    """The texts of the one column with these names; None if it is malformed."""
    there = [name for name in names if name in record]
    if len(there) != 1:
        return None if there else []
    value = record[there[0]]
    if there[0] not in LISTS:
        return [] if value in (None, "") else None if text(value) is None else [value]
    result = []
    for each in [] if value is None else value if isinstance(value, list) else [None]:
        title, its = (each.get("title"), each.get("text")) if isinstance(each, dict) else (None, each)
        if text(its) is None or (title and text(title) is None):
            return None
        result.append(f"{title} {its}" if title else its)
    return result


def _right_rows(records: list[Record]) -> list[Any]:
    found: list[Any] = []
    valid, of = [], defaultdict(lambda: (list[str](), list[str]()))
    for record in records:
        anchor, positives = text(_column(record, *ROLES["anchor"])), _texts(record, *dict.fromkeys(ROLES["positive"]))
        numbers = sorted(int(name[9:]) for name in record if name in ("negative_2", "negative_3"))
        negatives = [
            _texts(record, *dict.fromkeys(ROLES["negative"])),
            *(_texts(record, f"negative_{n}") for n in numbers),
        ]
        if anchor and positives is not None and None not in negatives:
            valid.append((anchor, positives, [each for part in negatives for each in part or []]))
        first, second = text(_column(record, "premise", "text1")), text(record.get("hypothesis"))
        if first and second and (its := label(record.get("label"))) in (0, 2):
            of[first][its == 2].append(second)
    for anchor, positives, negatives in valid:
        bad = {anchor, *(each for other, those, _ in valid if other == anchor for each in those)}
        kept = [each for place, each in enumerate(negatives) if each not in bad and each not in negatives[:place]]
        found += [[anchor, each, *kept] for each in positives if each != anchor]
    for premise, (entailed, contradicting) in of.items():
        found += [[premise, a, b] for a in entailed for b in contradicting if a != b]
    return found


def _read_rows(path: str, on_error: str) -> tuple[list[Any], dict[str, Any]]:
    rows, counts = made(*row_table(path, on_error=on_error))
    return [[value for value in row.values() if value is not None] for row in rows], counts


def _lists(rng: Random) -> Rows:
    as_text = rng.random() < 0.3
    rows = []
    for n in range(rng.randrange(1, 6)):
        sentences: Any = [say(rng, 10 * n + k) for k in range(rng.randrange(3, 7))]
        its: Record = {"list_sent": repr(sentences)} if as_text else {"sentences": sentences, "method": "m"}
        rows.append({"id": n, **its})
    return rows


def _right_lists(records: list[Record]) -> list[Any]:
    import ast

    results = []
    for record in records:
        sentences = record.get("sentences", record.get("list_sent"))
        if isinstance(sentences, str):
            try:
                sentences = ast.literal_eval(sentences) if sentences.startswith("[") else None
            except Exception:  # not a list, whatever its content
                continue
        if isinstance(sentences, list) and len(sentences) > 2 and all(map(text, sentences)):
            results.append({"sentences": sentences})
    return results


def _read_lists(path: str, on_error: str) -> tuple[list[Any], dict[str, Any]]:
    return made(*list_table(path, on_error=on_error))


def _captions(rng: Random) -> Rows:
    return [{"image": f"{n // 2}.jpg", "caption": say(rng, n)} for n in range(rng.randrange(1, 9))]


def _right_captions(records: list[Record]) -> list[Any]:
    result: dict[str, list[str]] = {}
    for record in records:
        image, caption = word(record.get("image")), text(_column(record, "caption") or _column(record, "sentence"))
        if image and caption:
            result.setdefault(image, []).append(caption)
    return list(result.items())


def _conditional(rng: Random) -> Rows:
    return [
        {
            "sentence1": say(rng, n), "sentence2": say(rng, -n), "condition": say(rng, 7),
            "label": rng.choice((1, 3, "5", 2.5)),
        }
        for n in range(rng.randrange(1, 7))
    ]  # fmt: skip


def _read_conditional(path: str, on_error: str) -> tuple[list[Any], dict[str, Any]]:
    return made(*conditional_table(path, "of {condition}: {text}.", on_error=on_error))


def _right_conditional(records: list[Record]) -> list[Any]:
    results = []
    for record in records:
        first, second = text(_column(record, "sentence1", "text1")), text(record.get("sentence2"))
        condition, score = text(record.get("condition")), number(record.get("label"))
        if first and second and condition and score is not None and 1 <= score <= 5:
            begin = f"of {condition}: "
            results.append({"sentence1": begin + first, "sentence2": begin + second, "score": score})
    return results


def _sentences(rng: Random) -> Rows:
    return [{"sentence": say(rng, n)} for n in range(rng.randrange(1, 8))]


def _right_sentences(records: list[Record]) -> list[Any]:
    return [record["sentence"] for record in records if isinstance(record.get("sentence"), str)]


def _read_to_score(path: str, on_error: str) -> tuple[list[Any], dict[str, Any]]:
    read = PairsToScore(Pairs(input=path, on_error=on_error), "jsonl")  # type: ignore[arg-type]
    rows = list(read.rows())
    longest = max((len(str(value)) for row in rows for value in row.values()), default=0)
    if path.endswith((".tsv", ".csv")) and longest <= csv.field_size_limit():  # survives writing and reading
        write_rows(path + ".again.csv", read.columns, rows)
        assert [fields for _, fields in read_rows(path + ".again.csv")] == rows, "it is written as something else"
    return rows, {"read": len(rows) + sum(read.left_out.values()), "kept": len(read.pairs), "dropped": read.left_out}


def _right_to_score(records: list[Record]) -> list[Any]:
    return [
        record for record in records if text(_column(record, "sentence1", "text1")) and text(record.get("sentence2"))
    ]


def same_order(rows: list[Any], right: list[Any]) -> bool:
    """Whether rows are a part of the expected rows, in order, each once."""
    rest: Iterator[Any] = iter(right)
    return all(any(alike(row, each) for each in rest) for row in rows)


def alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, where NaN equals NaN."""
    return one == other or repr(one) == repr(other)


def _counted(read: Any) -> Callable[[str, str], tuple[list[Any], dict[str, Any]]]:
    return lambda path, how: made(*read(path, on_error=how))


def _rows(read: Any) -> Callable[[str, str], tuple[list[Any], dict[str, Any]]]:
    return lambda path, how: (read(path, on_error=how), {})


TABLES: dict[str, Table] = {
    "pairs": Table(_pairs, DELIMITED, _counted(pair_table), _right_pairs),
    "labelled": Table(_labelled, DELIMITED, _counted(labelled_table), _right_labelled),
    "rows": Table(_columns_of_rows, DELIMITED, _read_rows, _right_rows, ordered=False),
    "rows of lists": Table(_lists_of_rows, OBJECTS, _read_rows, _right_rows, ordered=False),
    "lists": Table(_lists, OBJECTS, _read_lists, _right_lists),
    "captions": Table(
        _captions,
        DELIMITED,
        _rows(lambda *of, **how: [*read_captions(*of, **how).items()]),
        _right_captions,
        ordered=False,
    ),
    "conditional": Table(_conditional, ("csv", "csv", "jsonl"), _read_conditional, _right_conditional),
    "sentences": Table(_sentences, DELIMITED, lambda path, _: (read_sentences(path), {}), _right_sentences),
    "to score": Table(_pairs, DELIMITED, _read_to_score, _right_to_score),
}

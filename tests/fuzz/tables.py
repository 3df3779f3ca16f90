"""The kinds of tables: valid rows, and the reader under test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from raoe_train.data.mining import labelled_table
from raoe_train.data.pairs import PairsToScore, conditional_table, pair_table
from raoe_train.data.rows import list_table, row_table
from raoe_train.data.sources import read_sentences
from raoe_train.settings import Pairs
from tests.fuzz.mutations import Rows

TEXTS = ("a man plays", 'no, "never"', "it's 5 % off", "猫が走る", "🎸 and 🥁", "tab-less", "one\u2028line", "x")
WORDS = ("entailment", "neutral", "contradiction")
DELIMITED, OBJECTS = ("tsv", "csv", "jsonl", "parquet"), ("jsonl", "parquet")
Read = tuple[Sequence[Any], dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """A kind of table."""

    rows: Callable[[Random], Rows]  # valid ones
    kinds: Sequence[str]  # formats
    read: Callable[[str, str], Read]  # (path, on_error) -> (rows, counts)


def say(rng: Random, number: int) -> str:
    return f"{rng.choice(TEXTS)} {number}"


def _pairs(rng: Random) -> Rows:
    rows = []
    for n in range(rng.randrange(1, 9)):
        row = {"sentence1": say(rng, n), "sentence2": say(rng, -n), "score": rng.choice((rng.random(), float(n), n))}
        rows.append({**row, "label": rng.choice(WORDS)})
    return rows


def _labelled(rng: Random) -> Rows:
    rows = []
    for n in range(rng.randrange(1, 9)):
        label, split = rng.choice(("0", "1", "desc")), rng.choice(("train", "test"))
        rows.append({"text": say(rng, n), "label": label, "split": split})
    return rows


def _triplets(rng: Random) -> Rows:
    """Rows with 0 to 2 negatives."""
    rows = []
    for n in range(rng.randrange(1, 7)):
        negatives = {name: rng.choice((say(rng, n), None)) for name in ("negative", "negative_2")}
        rows.append({"anchor": say(rng, 2 * n), "positive": say(rng, 2 * n + 1), **negatives})
    return rows


def _nli(rng: Random) -> Rows:
    return [
        {"premise": f"premise {n // 3}", "hypothesis": say(rng, n), "label": WORDS[n % 3]}
        for n in range(rng.randrange(3, 12))
    ]


def _lists_of_rows(rng: Random) -> Rows:
    """FlagEmbedding's lists; queries repeat, and so do texts."""
    rows = []
    for n in range(rng.randrange(1, 7)):
        texts = [say(rng, rng.randrange(9)) for _ in range(5)]
        rows.append({"query": say(rng, n // 2), "pos": texts[: rng.randrange(3)], "neg": texts[2:]})
    return rows


def _lists(rng: Random) -> Rows:
    rows: Rows = []
    for n in range(rng.randrange(1, 6)):
        sentences = [say(rng, 10 * n + k) for k in range(rng.randrange(3, 7))]
        rows.append({"id": n, "list_sent": repr(sentences)} if n % 3 == 2 else {"id": n, "sentences": sentences})
    return rows


def _conditional(rng: Random) -> Rows:
    rows = []
    for n in range(rng.randrange(1, 7)):
        row = {"sentence1": say(rng, n), "sentence2": say(rng, -n), "condition": say(rng, 7)}
        rows.append({**row, "label": rng.choice((1, 3, "5", 2.5))})
    return rows


def _sentences(rng: Random) -> Rows:
    return [{"sentence": say(rng, n)} for n in range(rng.randrange(1, 8))]


def _counted(read: Any) -> Callable[[str, str], Read]:
    return lambda path, how: read(path, on_error=how)


def _read_conditional(path: str, on_error: str) -> Read:
    return conditional_table(path, "of {condition}: {text}.", on_error=on_error)


def _read_to_score(path: str, on_error: str) -> Read:
    read = PairsToScore(Pairs(input=path, on_error=on_error), "jsonl")  # type: ignore[arg-type]
    rows = list(read.rows())
    return rows, {"read": len(rows) + sum(read.left_out.values()), "kept": len(read.pairs), "dropped": read.left_out}


TABLES: dict[str, Table] = {
    "pairs": Table(_pairs, DELIMITED, _counted(pair_table)),
    "labelled": Table(_labelled, DELIMITED, _counted(labelled_table)),
    "triplets": Table(_triplets, DELIMITED, _counted(row_table)),
    "nli": Table(_nli, DELIMITED, _counted(row_table)),
    "rows of lists": Table(_lists_of_rows, OBJECTS, _counted(row_table)),
    "lists": Table(_lists, OBJECTS, _counted(list_table)),
    "conditional": Table(_conditional, ("csv", "jsonl"), _read_conditional),
    "sentences": Table(_sentences, DELIMITED, lambda path, _: (read_sentences(path)["sentence"][:], {})),
    "to score": Table(_pairs, DELIMITED, _read_to_score),
}

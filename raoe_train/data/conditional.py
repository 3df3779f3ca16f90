"""Conditional STS: how similar two sentences are with regard to a condition (C-STS, Deshpande et al. 2023).

Its data is handed out on request (https://github.com/princeton-nlp/c-sts) as csts_train.csv,
csts_validation.csv and csts_test.csv, with the columns sentence1, sentence2, condition and label.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import LabelMap, RowProblem, parse_score, parse_sentence
from raoe_train.data.pairs import TEXTS, pair_table
from raoe_train.data.rows import Counts, by_column, read_table
from raoe_train.data.sources import Source

if TYPE_CHECKING:
    from datasets import Dataset

LOWEST, HIGHEST = 1, 5
HIDDEN = -1


def is_conditional(prompt: str | None) -> bool:
    """Whether a prompt asks for a condition."""
    return "{condition}" in (prompt or "")


def split_conditional(prompt: str) -> tuple[str, str]:
    """A prompt up to its {text}, and what comes after: the same for all conditions, so that an encoder can add it.

    BeLLM's prompt for C-STS (Li and Li 2024, section 5.1; {text} is its {sentence}) is 'Given the context {condition},
    summarize the sentence {text} in one word:"', whose quotation mark stays open.
    """
    fields = re.findall(r"{(.*?)}", prompt)
    if set(fields[:-1]) != {"condition"} or fields[-1] != "text":
        there = ", ".join(f"{{{name}}}" for name in fields) or "none"
        raise ValueError(
            f"prompt {prompt!r} must have {{condition}} and then {{text}}, and no other field; it has {there}"
        )
    before, _, after = prompt.partition("{text}")
    return before, after


def conditional_table(
    source: str | os.PathLike[str],
    prompt: str,
    *,
    scored: bool = True,
    columns: Mapping[str, str | None] | None = None,
    on_error: str = "raise",
) -> tuple[Dataset, Counts]:
    """Read C-STS: each sentence as `prompt` with its condition, up to the sentence's end. What comes after that is the
    encoder's to add.

    Args:
        source, columns, on_error: as for pair_table. Do not skip rows of the test set: a submission has a
            prediction for each.
        scored: whether to read the labels: 1 to 5, whole or, as re-annotated editions have them, between. The test
            set's are all -1, hidden, so that a row of it is malformed here.

    Returns:
        (Dataset, counts). Columns sentence1, sentence2 (strings) and, if scored, score (float64, similarity with regard
        to the condition); in file order. A pair commonly comes twice, with two conditions. Errors are those of
        read_pairs and split_conditional.
    """
    before, _ = split_conditional(prompt)
    read = by_column(dict.fromkeys((*TEXTS, "condition"), parse_sentence) | ({"label": _score} if scored else {}))

    def parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
        row = read(fields, source)
        begin = before.replace("{condition}", row["condition"])
        return {name: begin + row[name] for name in TEXTS} | ({"score": row["label"]} if scored else {})

    return read_table(source, parse, "pair", columns=columns, on_error=on_error)


def read_scored(
    source: str | os.PathLike[str] | Sequence[Source],
    prompt: str | None,
    *,
    columns: Mapping[str, str | None] | None = None,
    labels: LabelMap | None = None,
    on_error: str = "raise",
) -> Dataset:
    """Scored pairs for development and test, as read_pairs reads them; labels beside scores, which a set may have of
    any kind, are left unread. But where `prompt` has a {condition}, a C-STS file, as conditional_table reads it.
    ValueError, too, where all scores are equal."""
    if not is_conditional(prompt):
        asked: Any = {"columns": columns, "labels": labels, "on_error": on_error}
        pairs, _ = pair_table(source, require=("score",), any_labels=True, **asked)
    elif isinstance(source, (str, os.PathLike)):
        pairs, _ = conditional_table(source, str(prompt), columns=columns, on_error=on_error)
    else:
        raise ValueError("the prompt has a {condition}, and SentEval's sets have none")
    if len(pairs.unique("score")) < 2:
        name = source if isinstance(source, (str, os.PathLike)) else source[0].name
        raise ValueError(f"{name}: all scores are equal, so no correlation is defined")
    return pairs


def _score(column: str, value: Any) -> float:
    score = parse_score(column, value)
    if score == HIDDEN:
        raise RowProblem(f"{column} {HIDDEN} is a hidden label: nothing to train on or to compare with")
    if not LOWEST <= score <= HIGHEST:
        raise RowProblem(f"{column} {score:g} is not from {LOWEST} to {HIGHEST}", reason="bad label")
    return score

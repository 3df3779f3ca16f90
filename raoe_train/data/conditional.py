"""Conditional STS: how similar two sentences are with regard to a condition (C-STS, Deshpande et al. 2023).

Its data is handed out on request (https://github.com/princeton-nlp/c-sts) as csts_train.csv,
csts_validation.csv and csts_test.csv, with the columns sentence1, sentence2, condition and label.
"""

from __future__ import annotations

import os
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import Columns, RowProblem, parse_score, parse_sentence
from raoe_train.data.pairs import TEXTS, read_pairs
from raoe_train.data.rows import read_table
from raoe_train.data.sources import Source, open_source
from raoe_train.data.tables import to_table

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset

TEMPLATE = 'Given the context {condition}, summarize the sentence {text} in one word:"'
"""BeLLM's prompt for C-STS (Li and Li 2024, section 5.1; {text} is its {sentence}). The quotation mark stays open."""

LOWEST, HIGHEST = 1, 5
HIDDEN = -1


def with_condition(text: str, condition: str, template: str = TEMPLATE) -> str:
    """`template` with {condition} and {text}, of which it must have both and no other, filled in."""
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}") from None
    if fields != {"condition", "text"}:
        raise ValueError(
            f"template {template!r} must have the fields {{condition}} and {{text}} and no other; "
            f"it has {', '.join(f'{{{name}}}' for name in sorted(fields)) or 'none'}"
        )
    return template.format(condition=condition, text=text)


def with_conditions(pairs: Dataset, template: str = TEMPLATE) -> tuple[list[str], list[str]]:
    """The first and the second sentences of conditional_table, each with its condition in `template`."""
    conditions = pairs["condition"][:]
    first, second = (
        [with_condition(text, condition, template) for text, condition in zip(pairs[name][:], conditions, strict=True)]
        for name in TEXTS
    )
    return first, second


def is_conditional(template: str | None) -> bool:
    """Whether a prompt asks for a condition."""
    return "{condition}" in (template or "")


def split_conditional(template: str) -> tuple[str, str]:
    """A template up to its {text}, and what comes after: the same for all conditions, so that an encoder can add it."""
    with_condition("", "", template)
    before, _, after = template.partition("{text}")
    if is_conditional(after):
        raise ValueError(f"template {template!r}: {{condition}} must come before {{text}}")
    return before, after


def conditional_table(
    source: str | os.PathLike[str],
    *,
    columns: Mapping[str, str | int | None] | None = None,
    on_error: str = "raise",
) -> tuple[Dataset, dict[str, Any]]:
    """Read C-STS.

    Args:
        source: a file or dataset as for `read_pairs`, such as csts_validation.csv.
        columns: {our name: the source's column} for sentence1, sentence2, condition, label and split, where it
            is not found by its own name; label: None leaves the labels unread. Positions as for `read_pairs`.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it. Do not skip rows of the
            test set: a submission has a prediction for each.

    Labels are 1 to 5, whole or, as re-annotated editions have them, between. The test set's are all -1: hidden.

    Returns:
        (Dataset, counts as of read_table). Columns sentence1, sentence2, condition (strings), and score (float64,
        similarity with regard to the condition) where labels are neither hidden nor left unread; in file order. A pair
        commonly comes twice, with two conditions.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row, an empty text or a label out of range (named by file and line), a column
            that is missing, hidden labels beside others, or no pair left.
    """
    unread = Columns(columns).mapping.get("label", "label") is None
    must = (*TEXTS, "condition", *([] if unread else ["label"]))

    def parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
        found = source.columns.find(fields, must)
        score = {} if unread else {"score": _score(fields[found["label"]], found["label"])}
        return {name: parse_sentence(name, fields[found[name]]) for name in (*TEXTS, "condition")} | score

    opened = open_source(source, {"condition": "condition", **(columns or {})})
    table, counts = read_table([opened], parse, "pair", on_error)
    if "score" in table.column_names and HIDDEN in (scores := table["score"][:]):
        if (hidden := scores.count(HIDDEN)) < len(scores):
            raise ValueError(
                f"{opened.name}: {hidden} labels are hidden ({HIDDEN}) and {len(scores) - hidden} are not; "
                "read the test set apart"
            )
        table = table.remove_columns("score")
    return table, counts


def read_scored(
    source: str | os.PathLike[str],
    prompt: str | None,
    *,
    columns: Mapping[str, str | int | None] | None = None,
    on_error: str = "raise",
) -> Dataset:
    """Scored pairs, as read_pairs reads them; but where `prompt` has a {condition}, a C-STS file, and each text is the
    prompt up to the end of the sentence. What comes after that is the encoder's to add.

    Raises:
        ValueError: as read_pairs or conditional_table; or a C-STS file without scores.
    """
    if not is_conditional(prompt):
        return read_pairs(source, columns=columns, on_error=on_error, require=("score",))
    return prompted_table(source, str(prompt), columns=columns, on_error=on_error)[0]


def prompted_table(
    source: str | os.PathLike[str], prompt: str, *, path: Path | None = None, **asked: Any
) -> tuple[Dataset, dict[str, Any]]:
    """(read_scored of a C-STS file, counts), see read_table; `asked` as for conditional_table."""
    pairs, counts = conditional_table(source, **asked)
    if "score" not in pairs.column_names:
        raise ValueError(f"{source}: its labels are hidden (-1), so there is nothing to train on or to compare with")
    before, _ = split_conditional(prompt)
    columns = zip(*with_conditions(pairs, before + "{text}"), pairs["score"][:], strict=True)
    return to_table((dict(zip(("sentence1", "sentence2", "score"), row, strict=True)) for row in columns), path), counts


def _score(label: Any, column: str) -> float:
    score = parse_score(label, None, column)
    if score != HIDDEN and not LOWEST <= score <= HIGHEST:
        problem = f"{column} {score:g} is neither {LOWEST} to {HIGHEST} nor {HIDDEN} (hidden)"
        raise RowProblem(problem, reason="bad label")
    return score

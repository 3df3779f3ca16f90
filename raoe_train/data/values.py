"""Parse values: texts, scores and NLI labels."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raoe_train.data.columns import NLI_LABELS, RowProblem

LabelMap = Mapping[str, int | None] | Mapping[int, int | None]  # {label: class, or None to skip its rows}
TRUTH = {"true": 1, "false": 0}  # words that are read as scores
NO_GOLD_LABEL = ("-", "-1", "")


def parse_sentence(column: str, value: Any) -> str:
    """Return `value` if it is a non-empty string, else raise RowProblem."""
    try:
        value.encode()  # fails for a lone surrogate, which is possible in JSON, but not in tokenizers and tables
    except (AttributeError, UnicodeEncodeError):
        raise RowProblem(f"{column} is {value!r}, not a string") from None
    if not value.strip():
        raise RowProblem(f"{column} is empty", reason="empty sentence")
    return value


def as_word(value: Any) -> str:
    """Convert a label or name to a string. Return "" for a missing value and for lists, dicts and bytes."""
    if isinstance(value, float):  # in a column with missing values, pandas stores 1 as 1.0 and missing values as NaN
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    return "" if value is None or isinstance(value, (list, dict, bytes)) else str(value).strip()


def parse_word(column: str, value: Any) -> str:
    """Convert a label or name to a string. RowProblem if the value is missing, or is a list, dict or bytes."""
    if not (word := as_word(value)):
        raise RowProblem(f"{column} is {value!r}, not a name or label")
    return word


def parse_score(column: str, value: Any, scale: Sequence[float] | None = None) -> float:
    """Convert a score to a float. RowProblem if it is not finite, or not within `scale`, a pair (lowest, highest)."""
    try:
        if isinstance(value, bytes) or (isinstance(value, str) and "_" in value):  # Python reads 1_0 as 10
            raise TypeError
        score = float(TRUTH.get(value.lower(), value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        raise RowProblem(f"{column} is {value!r}, not a number", reason="bad score") from None
    if not math.isfinite(score):
        raise RowProblem(f"{column} is {value!r}, not a finite number", reason="bad score")
    if scale and not scale[0] <= score <= scale[1]:
        bounds = f"the declared score_scale {scale[0]:g} to {scale[1]:g}"
        raise RowProblem(f"{column} {score:g} is outside {bounds}", reason="bad score")
    return score


def resolve_labels(labels: LabelMap | None) -> dict[str, int | None]:
    """Return {lower-case word: class}. ValueError for a class that is neither None nor an integer of at least 0."""
    if labels is None:
        return {**NLI_LABELS, **{str(label): label for label in NLI_LABELS.values()}}
    if not isinstance(labels, Mapping):
        raise ValueError(f"labels must be a mapping of words or numbers to classes, got {labels!r}")
    for word, label in labels.items():
        if label is not None and (isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < 2**63):
            classes = "classes 0, 1, ..., or to null to skip rows with the label"
            raise ValueError(f"labels must map to {classes}; got {word!r}: {label!r}")
    if all(label is None for label in labels.values()):
        raise ValueError(f"labels maps every label to null: map one of {', '.join(map(str, labels))} to a class")
    return {str(word).lower(): label for word, label in labels.items()}


def parse_label(column: str, value: Any, label_map: Mapping[str, int | None]) -> int:
    """Return the class of a label. RowProblem for a label that label_map maps to None or does not contain."""
    word = as_word(value)
    if (number := word.removesuffix(".0")).removeprefix("-").isdigit():  # pandas may store 1 as 1.0
        word = number
    if not isinstance(value, bool) and word.lower() in label_map:
        label = label_map[word.lower()]
        if label is None:
            raise RowProblem(f"{column} is {value!r}, which `labels` maps to null", reason="label left out")
        return label
    if word in NO_GOLD_LABEL:
        raise RowProblem(f"{column} is {value!r}, not a gold label", reason="no gold label")
    raise RowProblem(
        f"{column} is {value!r}, which is not a known label ({', '.join(label_map)}). "
        f'Map all labels to classes, 0 = most similar, with labels {{"{word.lower()}": CLASS, ...}}, or ignore the '
        f"column with columns label=none (if it holds scores, larger = more similar: columns score={column})",
        reason="unknown label",
    )

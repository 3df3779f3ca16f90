"""Find the columns of a row that raoe uses, and parse their values (texts, scores and NLI labels)."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from raoe_train.config import nearest

LISTS = ("positives", "pos", "positive_passages", "negatives", "neg", "negative_passages")  # columns that hold lists
NAMES: dict[str, tuple[str, ...]] = {
    "sentence1": ("sentence1", "premise", "text1", "sentence_A", "question1"),
    "sentence2": ("sentence2", "hypothesis", "text2", "sentence_B", "question2"),
    "score": ("score", "similarity", "relatedness_score"),
    "label": ("label", "gold_label", "entailment_label", "entailment_judgment"),
    "subset": ("subset",),
    "split": ("split",),
    "condition": ("condition",),
    "sentence": ("sentence", "text"),
    # in rows with anchor and positive; SimCSE's names: sent0, sent1, hard_neg; MTEB's: query, positive, negative
    "anchor": ("anchor", "query", "question", "sentence0", "sent0"),
    "positive": ("positive", "answer", "passage", "document", "sentence1", "sent1", *LISTS[:3]),
    "negative": ("negative", "sentence2", "hard_neg", *LISTS[3:]),
    "neutral": ("neutral",),
    "relevance": ("relevance", "relevant", "is_relevant", "label"),
}
"""{raoe's column: its names in files}. A row may have only one of a column's names, unless the column is in FIRST."""
FIRST = ("sentence",)  # if a row has several names of such a column, the first in NAMES is used
NLI_LABELS = {"entailment": 0, "neutral": 1, "contradiction": 2}  # larger = less related; RAOE's gate compares classes
WELL_FORMED = ("no gold label", "blank line", "label left out", "unknown id", "no text")
LONGEST = 500  # maximum length of a message in characters
LabelMap = Mapping[str, int | None] | Mapping[int, int | None]  # {label: class, or None to skip its rows}
TRUTH = {"true": 1, "false": 0}  # words that are read as scores
NO_GOLD_LABEL = ("-", "-1", "")


class RowProblem(Exception):
    """An exception that says why a row cannot be used. Dropped rows are counted by `reason`. The setting on_error
    affects only `malformed` rows."""

    def __init__(self, message: str, *, reason: str = "malformed row") -> None:
        super().__init__(message if len(message) <= LONGEST else f"{message[:LONGEST]} … ({len(message)} characters)")
        self.reason, self.malformed = reason, reason not in WELL_FORMED


Row = dict[str, Any] | RowProblem
"""{column: value}, or a RowProblem that says why the row cannot be read."""
Rows = Iterator[tuple[str, Row]]
"""(place, such as "a.tsv, line 2", row)."""


class Columns:
    """Finds the columns that raoe uses, by their known names (NAMES) or by `mapping` (see `columns` of read_pairs)."""

    def __init__(self, mapping: Mapping[str, str | None] | None = None) -> None:
        if not isinstance(mapping or {}, Mapping):
            raise ValueError(f"columns must be a mapping {{raoe's column name: your column name}}, got {mapping!r}")
        nulls = ("", "none", "null")  # how recipes and command lines write None
        self.mapping: dict[str, str | None] = {}
        for name, column in (mapping or {}).items():
            roles = [name] if name in NAMES else [role for role, names in NAMES.items() if name in names]
            if len(roles) != 1 or (roles[0] in self.mapping):
                problem = f"two names for {roles[0]}" if len(roles) == 1 else f"unknown name {name!r}"
                hint = nearest(repr(name), map(repr, NAMES))
                raise ValueError(f"{problem} in columns{hint}; known names: {', '.join(NAMES)}")
            self.mapping[roles[0]] = None if column is None or str(column).lower() in nulls else str(column)
        self.seen, self.read = dict[str, None](), set[str]()  # all columns; columns that were read
        self._found = dict[tuple[str, ...], dict[tuple[str, ...], dict[str, str]]]()  # {required names: {columns: …}}

    def find(self, row: Collection[str], require: Sequence[str], optional: Iterable[str] = ()) -> dict[str, str]:
        """Return {raoe's name: column} for a row, which is given as a mapping or as the names of its columns. Raise
        RowProblem if no column matches a name in `require`, if several columns match one name, or if the matched names
        differ from those of earlier rows."""
        present, found = tuple(row), self._found.setdefault(tuple(require), {})
        if present not in found:
            columns = {name: self.column(present, name, name in require) for name in (*require, *optional)}
            names = {name: column for name, column in columns.items() if column is not None}
            self.seen |= dict.fromkeys(present)
            self.read.update(names.values())
            earlier = next(iter(found.values()), names)
            if names.keys() != earlier.keys():
                raise RowProblem(f"the row has columns {', '.join(names)}, but earlier rows have {', '.join(earlier)}")
            found[present] = names
        return found[present]

    def unread(self) -> list[str]:
        """Return the names of the columns that have not been used in any row so far."""
        return [name for name in self.seen if name not in {*self.read, self.mapping.get("split") or "split"}]

    def column(self, present: Collection[str], name: str, required: bool) -> str | None:
        """Return the column that matches one of raoe's names, or None. Raise RowProblem if several columns match, or if
        a required column is missing."""
        mapped, aliases = self.mapping.get(name), NAMES[name]
        if name in self.mapping:
            found = [mapped] if mapped in present else []
        else:
            found = [column for column in aliases if column in present and column not in self.mapping.values()]
        if len(found) > 1 and name not in FIRST:
            choices = " and ".join(map(str, found))
            raise RowProblem(f"several columns match {name} ({choices}): choose one with --data.columns {name}=COLUMN")
        if found or (mapped is None and not required):
            return found[0] if found else None
        expected, headers = mapped or ", ".join(aliases), ", ".join(map(repr, present))
        advice = f"map one of these columns with --data.columns {name}=COLUMN: {headers}"
        roles = [next((each for each in NAMES[role] if each in present), "") for role in ("anchor", "positive")]
        if name == "sentence1" and all(roles):
            advice = f"for pairs, set --data.columns sentence1={roles[0]} sentence2={roles[1]}; "
            advice += "for queries and passages, use the Python function row_table, a loss such as InfoNCELoss in "
            advice += "training, or a task retrieval:FILE in evaluation"
        raise RowProblem(f"no column for {name} (looked for {expected}); {advice}")


def parse_sentence(column: str, value: Any) -> str:
    """Return `value` if it is a non-empty string. Otherwise, raise RowProblem."""
    try:
        value.encode()  # fails for a lone surrogate, which JSON allows, but tokenizers and tables do not
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
    """Convert a label or name to a string. Raise RowProblem if the value is missing, or is a list, dict or bytes."""
    if not (word := as_word(value)):
        raise RowProblem(f"{column} must be a non-empty string or a number, got {value!r}")
    return word


def parse_score(column: str, value: Any, scale: Sequence[float] | None = None) -> float:
    """Convert a score to a float. Raise RowProblem unless the score is finite and within `scale` (lowest, highest)."""
    try:
        if isinstance(value, bytes) or (isinstance(value, str) and "_" in value):  # Python reads 1_0 as 10
            raise TypeError
        score = float(TRUTH.get(value.lower(), value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        raise RowProblem(f"{column} is {value!r}, not a number", reason="bad score") from None
    if not math.isfinite(score):
        raise RowProblem(f"{column} is {value!r}, not a finite number", reason="bad score")
    if scale and not scale[0] <= score <= scale[1]:
        bounds = f"the range of score_scale, {scale[0]:g} to {scale[1]:g}"
        raise RowProblem(f"{column} {score:g} is outside {bounds}", reason="bad score")
    return score


def resolve_labels(labels: LabelMap | None) -> dict[str, int | None]:
    """Return a label map with lower-case labels. Raise ValueError unless each class is None or an integer >= 0."""
    if labels is None:
        return {**NLI_LABELS, **{str(label): label for label in NLI_LABELS.values()}}
    if not isinstance(labels, Mapping):
        raise ValueError(f"labels must be a mapping from words or numbers to classes, got {labels!r}")
    for word, label in labels.items():
        if label is not None and (isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < 2**63):
            classes = "a class 0, 1, ..., or to null to skip the rows with this label"
            raise ValueError(f"labels must map each label to {classes}; got {word!r}: {label!r}")
    if all(label is None for label in labels.values()):
        raise ValueError(f"all labels map to null: map at least one of {', '.join(map(str, labels))} to a class")
    return {str(word).lower(): label for word, label in labels.items()}


def parse_label(column: str, value: Any, label_map: Mapping[str, int | None]) -> int:
    """Return the class to which label_map maps a label. Raise RowProblem if this class is None or missing."""
    word = as_word(value)
    if (number := word.removesuffix(".0")).removeprefix("-").isdigit():  # pandas may store 1 as 1.0
        word = number
    if not isinstance(value, bool) and word.lower() in label_map:
        label = label_map[word.lower()]
        if label is None:
            raise RowProblem(f"{column} is {value!r}, which data.labels maps to null", reason="label left out")
        return label
    if word in NO_GOLD_LABEL:
        raise RowProblem(f"{column} is {value!r}: the row has no gold label", reason="no gold label")
    raise RowProblem(
        f"{column} is {value!r}, which is not a known label ({', '.join(label_map)}). "
        f"Map all labels to classes (0 = most similar) with --data.labels {word.lower()!r}=CLASS ..., or ignore this "
        "column with --data.columns label=none. If it contains scores (larger = more similar), use --data.columns "
        f"score={column}",
        reason="unknown label",
    )

"""Read sentence pairs with scores or NLI labels, rows of Conditional STS (C-STS), and pairs for the job `score`."""

import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.data.columns import (
    LabelMap,
    RowProblem,
    as_word,
    parse_label,
    parse_score,
    parse_sentence,
    resolve_labels,
)
from raoe_train.data.files import cell
from raoe_train.data.sources import Source, Table, to_table
from raoe_train.settings import Pairs

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame

TEXTS = ("sentence1", "sentence2")
OPTIONAL = ("score", "label", "subset")


def read_pairs(
    source: "str | os.PathLike[str] | Dataset | DataFrame",
    *,
    columns: Mapping[str, str | None] | None = None,
    labels: LabelMap | None = None,
    score_scale: Sequence[float] | None = None,
    on_error: str = "raise",
    require: Sequence[str] = (),
) -> "Dataset":
    """Read sentence pairs.

    Args:
        source: FILE or FILE#SPLIT (TSV, CSV, JSONL or parquet, all except parquet also as .gz); "builtin#train" (or
            dev, test); a dataset on a hub, NAME or `hub:OWNER/NAME[:CONFIG][#SPLIT]`; a pool of such sources, A+B; a
            datasets.Dataset; or a pandas.DataFrame.
        columns: {raoe's name: your column}, if your columns have different names. {raoe's name: None} ignores a column.
        labels: {word or int: class}. By default, entailment, neutral and contradiction map to classes 0, 1 and 2, as do
            the labels 0, 1 and 2. Rows whose label maps to None are skipped.
        score_scale: (lowest, highest) possible score. With None or (), any finite score is valid.
        on_error: "raise" stops with an error at a malformed row, "skip" skips and counts such rows.
        require: list of the columns that must exist, from "score", "label" and "subset". If the required "score" is
            missing, scores are computed from labels, evenly spaced from 1 for class 0 to 0 for the largest class. In
            this case, numeric labels need an entry in `labels`.

    Rows without a gold label ("-", -1 or empty, as in SNLI) are always dropped and counted.

    Returns:
        A Dataset with sentence1 and sentence2 (in NLI, premise and hypothesis) and, if the source has them, score
        (float64, on the source's scale), label (int64) and subset (string, the part of the benchmark).

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a malformed row (with file and line), an unknown split, a missing or ambiguous column, or no pairs.
    """
    options: Any = {"columns": columns, "labels": labels, "score_scale": score_scale, "on_error": on_error}
    return pair_table(source, require=require, **options)[0]


def pair_table(
    source: Any,
    names: Sequence[str] | None = None,
    *,
    labels: LabelMap | None = None,
    score_scale: Sequence[float] | None = None,
    require: Sequence[str] = (),
    any_labels: bool = False,
    **options: Any,
) -> Table:
    """Read pairs as read_pairs does. Return (table, counts). `names` lists the columns to keep, which must exist; None
    keeps all columns. With `any_labels`, labels of scored pairs are ignored. `options` are the arguments columns and
    on_error of read_pairs."""
    if unknown := sorted(set(require) - set(OPTIONAL)):
        raise ValueError(f"require must contain only {', '.join(map(repr, OPTIONAL))}; got {unknown}")
    if score_scale and not (len(score_scale) == 2 and score_scale[0] < score_scale[1]):
        raise ValueError(f"score_scale must be two increasing numbers (lowest, highest), got {score_scale!r}")
    label_map = resolve_labels(labels)
    largest = max(label for label in label_map.values() if label is not None)
    readers: dict[str, Callable[[str, Any], Any]] = {
        **dict.fromkeys(TEXTS, parse_sentence),
        "score": partial(parse_score, scale=score_scale),
        "label": partial(parse_label, label_map=label_map),
        "subset": lambda column, value: as_word(value),
    }
    required, opened = {*require, *(names or ())}, Source(source, **options)

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        found = opened.columns.find(row, TEXTS, OPTIONAL)
        from_labels = "score" in required and "score" not in found and "label" in found
        left_out = "score" if from_labels else "label" if any_labels else None
        for name in required - {*found, left_out}:
            opened.columns.column(row, name, required=True)  # raises RowProblem
        if from_labels and labels is None:
            _refuse_number(found["label"], row[found["label"]])
        values = {name: readers[name](column, row[column]) for name, column in found.items() if name != left_out}
        return {**values, "score": 1 - values["label"] / max(largest, 1)} if from_labels else values

    table, counts = opened.table(parse, "pair")
    return table if names is None else table.select_columns(list(names)), counts


def _refuse_number(column: str, value: Any) -> None:
    """Raise RowProblem for a numeric label, because the number could also be a score."""
    if as_word(value).removesuffix(".0").isdigit():
        raise RowProblem(
            f"{column} is {value}, and there is no score column. If the numbers are scores, use --data.columns "
            f"score={column}. If they are classes, map them to raoe's classes (larger = less related), "
            "for example with --data.labels 1=0 0=1"
        )


def is_conditional(prompt: str | None) -> bool:
    return "{condition}" in (prompt or "")


def split_conditional(prompt: str) -> tuple[str, str]:
    """Split a prompt at {text}. The encoder adds the prompt's second part, which contains no {condition}. BeLLM (Li and
    Li 2024, section 5.1) uses the prompt 'Given the context {condition}, summarize the sentence {text} in one word:"'.
    """
    fields = re.findall(r"{(.*?)}", prompt)
    if set(fields[:-1]) != {"condition"} or fields[-1] != "text":
        names = ", ".join(f"{{{name}}}" for name in fields) or "none"
        rule = "the fields {condition} and {text}, in this order, and no others"
        raise ValueError(f"prompt {prompt!r} must contain {rule}; it contains {names}")
    prefix, _, suffix = prompt.partition("{text}")
    return prefix, suffix


def conditional_table(source: str | os.PathLike[str], prompt: str, *, scored: bool = True, **options: Any) -> Table:
    """Read C-STS rows (Deshpande et al. 2023, https://github.com/princeton-nlp/c-sts) into the columns sentence1,
    sentence2 and, if `scored`, score (the row's label, from 1 to 5). Rows with a hidden label (-1, as in the test set)
    are malformed. The part of `prompt` before {text}, with the row's condition filled in, is prepended to each
    sentence. The encoder adds the part of the prompt after {text}."""
    template, _ = split_conditional(prompt)
    opened = Source(source, **options)

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        found = opened.columns.find(row, (*TEXTS, "condition", *["label"][:scored]))
        texts = {name: parse_sentence(found[name], row[found[name]]) for name in (*TEXTS, "condition")}
        prefix = template.replace("{condition}", texts["condition"])
        pair: dict[str, Any] = {name: prefix + texts[name] for name in TEXTS}
        return pair | ({"score": _conditional_label(found["label"], row[found["label"]])} if scored else {})

    return opened.table(parse, "pair")


def _conditional_label(column: str, value: Any) -> float:
    score = parse_score(column, value)
    if score == -1:
        problem = f"{column} is -1, which marks a hidden label: such rows cannot be used for training or evaluation"
        raise RowProblem(problem)
    if not 1 <= score <= 5:
        raise RowProblem(f"{column} must be from 1 to 5, got {score:g}", reason="bad label")
    return score


def read_scored(
    source: str | os.PathLike[str], prompt: str | None, *, labels: LabelMap | None = None, **options: Any
) -> "Dataset":
    """Read scored pairs for a dev or test set, or C-STS rows if `prompt` contains {condition}. Raise ValueError if all
    scores are equal."""
    if not is_conditional(prompt):
        pairs, _ = pair_table(source, require=("score",), labels=labels, any_labels=True, **options)
    else:
        pairs, _ = conditional_table(source, str(prompt), **options)
    if len(pairs.unique("score")) < 2:
        raise ValueError(f"{source}: all scores are equal, so the correlation is undefined")
    return pairs


class PairsToScore:
    """The pairs to score, and the input's other columns, which are copied to the output. Rows without a gold label are
    kept. Raise ValueError if the format `kind` cannot store a value, or if the input has a column in `added`.

    Attributes:
        pairs: Dataset of sentence1 and sentence2.
        labels: [n] NLI labels, -1 if missing.
        columns: names of all columns, in order.
        left_out: {reason: number of skipped rows}.
    """

    def __init__(self, data: Pairs, kind: str, added: Sequence[str] = ()) -> None:
        label_map = resolve_labels(data.labels)
        opened, columns = Source(data.input, data.columns, data.on_error), dict[str, None]()

        def parse(row: dict[str, Any]) -> dict[str, Any]:
            found = opened.columns.find(row, TEXTS, OPTIONAL)
            values = {name: parse_sentence(found[name], row[found[name]]) for name in TEXTS}
            for value in row.values() if kind in ("tsv", "csv") else ():
                cell(value, kind)
            try:
                label = parse_label("label", row.get(found.get("label", "")), label_map)
            except RowProblem:
                label = -1  # scoring needs no label; training reports invalid labels
            columns.update(dict.fromkeys(row))
            return {**values, "label": label, "fields": pickle.dumps(row)}

        table = to_table(opened.parse(parse))
        self.left_out = opened.counts(len(table), "pair to score")["dropped"]
        if clashes := [name for name in added if name in columns]:
            raise ValueError(f"{data.input} already has a column {', '.join(clashes)}: rename or remove it first")
        self.pairs, self._fields = table.select_columns([*TEXTS]), table.select_columns(["fields"])
        self.labels, self.columns = np.array(table["label"][:]), [*columns]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each row with all of its columns."""
        return (pickle.loads(row["fields"]) for row in self._fields)

"""The rows of a source of pairs as they are, whatever their columns, to be written again with more of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raoe_train.data.columns import RowProblem, parse_label, parse_sentence, resolve_label_map
from raoe_train.data.files import cell
from raoe_train.data.pairs import OPTIONAL, TEXTS
from raoe_train.data.rows import Tally, each_kept
from raoe_train.data.settings import Input
from raoe_train.data.sources import Source, open_source
from raoe_train.data.tables import to_table


class PairsToScore:
    """Read once to be checked, so that what is wrong shows now and not after hours of encoding, and once to be written.

    Rows without a gold label are kept. A value that the format `kind` cannot hold, and a column that is to be `added`
    but is there, are errors.

    Attributes:
        pairs: datasets.Dataset of sentence1 and sentence2.
        labels: [n] NLI labels, -1 where there is none.
        columns: all that are there, in order.
        left_out: {reason: rows}.
        digest: of all rows.
    """

    def __init__(self, data: Input, kind: str, added: Sequence[str] = ()) -> None:
        self.data, self.kind, self.label_map = data, kind, resolve_label_map(data.labels)
        columns, labels, read, tally = dict[str, None](), list[int](), hashlib.sha256(), Tally(data.on_error)

        def pairs() -> Iterator[dict[str, str]]:
            for fields, sentences, label in self._checked(tally):
                columns.update(dict.fromkeys(fields))
                labels.append(label)
                read.update(json.dumps(fields, sort_keys=True, default=str).encode())
                yield sentences

        self.pairs = to_table(pairs())
        self.labels, self.columns = np.array(labels), list(columns)
        self.left_out = tally.counts(str(data.input), len(labels), "pair to score")["dropped"]
        self.digest = read.hexdigest()
        if taken := [name for name in added if name in columns]:
            raise ValueError(f"{data.input} has {', '.join(taken)} already; rename or remove the column first")

    def rows(self) -> Iterator[dict[str, Any]]:
        """The fields of each row, as they are written."""
        return (fields for fields, _, _ in self._checked(Tally(self.data.on_error)))

    def _checked(self, tally: Tally) -> Iterator[tuple[dict[str, Any], dict[str, str], int]]:
        return each_kept(open_source(str(self.data.input), self.data.columns), self._parse, tally)

    def _parse(self, fields: dict[str, Any], source: Source) -> tuple[dict[str, Any], dict[str, str], int]:
        found = source.columns.find(fields, TEXTS, OPTIONAL)
        sentences = {name: parse_sentence(found[name], fields[found[name]]) for name in TEXTS}
        label = -1
        if "label" in found:
            try:
                label = parse_label(found["label"], fields[found["label"]], self.label_map)
            except RowProblem:
                pass  # no part in the scores; reading them for training will say so
        if self.kind in ("tsv", "csv"):
            for value in fields.values():
                cell(value, self.kind)
        return fields, sentences, label

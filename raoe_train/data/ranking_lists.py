"""Ranking sentences: lists whose sentences go further and further from the first, as `generate` writes them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import RowProblem, parse_sentence
from raoe_train.data.rows import Tally, fields_of
from raoe_train.data.sources import Source, open_source

if TYPE_CHECKING:
    from datasets import Dataset

SHORTEST = 3  # of two sentences each ranks the other after itself, whatever a model thinks of them


@dataclass(frozen=True)
class ChainData:
    """Lists of sentences.

    Attributes:
        ids: of each list its id in the file, "line N" where it has none.
        sentences: of each list its sentences, at least three, the source first.
        method: how they were written, as the rows say; None where they don't, or not all the same.
        counts: {"read": rows read, "kept": lists, "sentences": in all lists, "other_split": rows of splits not asked
            for, "dropped": {reason: rows}}; read = kept + other_split + all dropped.
    """

    ids: list[str]
    sentences: list[list[str]]
    method: str | None = None
    counts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.sentences):
            raise ValueError(f"there are {len(self.ids)} ids for {len(self.sentences)} lists")

    def __len__(self) -> int:
        return len(self.sentences)

    def drawn(self, most: int, seed: int) -> ChainData:
        """At most so many of the lists, drawn with `seed`, in their order; counts are still the file's."""
        if most >= len(self):
            return self
        chosen = sorted(random.Random(seed).sample(range(len(self)), most))
        ids, sentences = [self.ids[number] for number in chosen], [self.sentences[number] for number in chosen]
        return ChainData(ids, sentences, self.method, self.counts)

    def to_dataset(self) -> Dataset:
        """A `datasets.Dataset` with one column, `sentences`: what ListCollator and ListMLELoss train on."""
        from datasets import Dataset

        return Dataset.from_dict({"sentences": self.sentences})


def read_chains(source: str | os.PathLike[str], *, on_error: str = "raise") -> ChainData:
    """Read lists of sentences: rows with `sentences`, a list of texts, and an `id` if they have one.

    Args:
        source: FILE or FILE#split (JSONL or parquet, also .gz), or a dataset on a hub, as for `read_pairs`. Of
            other columns only `method` is read.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.

    Malformed, by the reason they are counted under: "cut off" (a last line that is no JSON, as a killed job may leave
    it), "malformed row", "no list", "hole" (a sentence that is null, empty or no text), "shorter than 3", "duplicate
    id" (the first one stays). A list is never shortened or closed up around a hole: the places of its sentences are
    what it says. Blank lines are left out and counted, always.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), or no list left.
    """
    tally = Tally(on_error)
    opened = open_source(source)
    lists: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    methods: set[str | None] = set()
    for line, fields, is_last in _with_last(opened.rows):
        try:
            name, sentences, method = _parse(fields, opened, line, is_last)
            if name in lists:
                raise RowProblem(f"id {name!r} is that of line {lines[name]}, too", reason="duplicate id")
        except RowProblem as problem:
            tally.refuse(opened, line, problem)
            continue
        lists[name], lines[name] = sentences, line
        methods.add(method)
    counts = tally.counts(opened, len(lists), "list") | {"sentences": sum(map(len, lists.values()))}
    return ChainData(list(lists), list(lists.values()), methods.pop() if len(methods) == 1 else None, counts)


def _with_last(rows: Iterable[tuple[int, dict[str, Any] | str]]) -> Iterator[tuple[int, dict[str, Any] | str, bool]]:
    """The rows, each with whether it is the last."""
    held = None
    for row in rows:
        if held is not None:
            yield *held, False
        held = row
    if held is not None:
        yield *held, True


def _parse(fields: dict[str, Any] | str, source: Source, line: int, is_last: bool) -> tuple[str, list[str], str | None]:
    if isinstance(fields, str) and is_last and fields.startswith("not JSON"):
        raise RowProblem(
            f"{fields}: the last line is cut off. Run the job that writes the file again, which finishes it, or "
            "leave the line out with on_error skip",
            reason="cut off",
        )
    fields = fields_of(fields)
    sentences = fields.get("sentences")
    if not isinstance(sentences, list):
        there = ", ".join(map(repr, fields))
        raise RowProblem(f"no list of sentences in a column 'sentences'; there are: {there}", reason="no list")
    for place, sentence in enumerate(sentences):
        try:
            parse_sentence(f"sentence {place}", sentence).encode("utf-8")
        except RowProblem as problem:
            raise RowProblem(f"{problem}; a list has no holes", reason="hole") from None
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can say and no tokenizer can read
            raise RowProblem(f"sentence {place} is {sentence!r}, not a text", reason="hole") from None
    if len(sentences) < SHORTEST:
        raise RowProblem(
            f"{len(sentences)} sentences, where a ranking takes at least {SHORTEST}", reason=f"shorter than {SHORTEST}"
        )
    name = fields.get("id")
    method = str(fields["method"]) if "method" in fields else None
    return f"{source.unit} {line}" if name is None else str(name), sentences, method

"""Settings of the section `data`: the class Data for recipes, and smaller classes for the other jobs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from raoe_train.config import DataSource, NonNegativeInt, PositiveInt, Share, Source, Unrecorded
from raoe_train.data.sources import pool


@dataclass
class Rows:
    """How to read rows.

    Args:
        columns: names of columns in your files, as OUR_NAME=YOUR_NAME ...
        on_error: what to do with a malformed row; raise (stop with an error) or skip (skip and count it)
    """

    columns: dict[str, str | None] = field(default_factory=dict)
    on_error: Literal["raise", "skip"] = "raise"


@dataclass
class Input(Rows):
    """Data to read.

    Args:
        input: data to read; FILE, FILE#SPLIT, builtin#SPLIT or hub:OWNER/NAME#SPLIT
    """

    input: DataSource | None = None


@dataclass
class Pairs(Input):
    """Pairs to read.

    Args:
        labels: class of each label, as LABEL=CLASS ...; a larger class means less related
    """

    labels: dict[str, Any] | None = None


@dataclass
class Sentences(Input):
    """Sentences to read.

    Args:
        max_rows: maximum number of rows to use
    """

    max_rows: PositiveInt | None = None


@dataclass
class Tasks(Rows):
    """Data for evaluation.

    Args:
        dir: directory where evaluation tasks are looked up by name, as NAME.* or KIND/NAME.*
    """

    dir: Unrecorded[Source | None] = None


@dataclass
class Data(Rows):
    """What to train on.

    Args:
        train: training sources (FILE, FILE#SPLIT, builtin#train, hub name); each batch is from one source or pool A+B
        labels: class of each label (larger = less related; null skips rows), or {FILE NAME: {LABEL: CLASS}}
        dev: sources of the dev set; the checkpoint with the best dev score is saved
        guard: with evaluation.certificate, texts or scored pairs whose similarities must stay close to those before
            training; by default, random words of the encoder's vocabulary
        dev_share: share of the first training source to hold out as dev set, if data.dev is not set; auto holds out a
            tenth, or 200 rows if a tenth is less, but at most three tenths
        score_scale: lowest and highest possible score of data.train; two numbers, or two numbers per source
        max_rows: maximum number of rows of each source, drawn at random with training.seed
        redraw: draw a new random sample of max_rows rows in each epoch
        pairing: triplets to build for each NLI premise; one, zip (i-th entailed with i-th contradicting hypothesis) or
            all (every combination)
        neutral: also use a neutral hypothesis of the NLI premise, as a second hard negative
        num_negatives: maximum number of negatives per row, which are drawn at random if there are more
        dir: directory where evaluation tasks are looked up by name, as NAME.* or KIND/NAME.*
    """

    train: list[DataSource] = field(default_factory=list)
    labels: dict[str, Any] | None = None
    dev: list[DataSource] | None = None
    guard: list[DataSource] = field(default_factory=list)
    dev_share: Share | Literal["auto"] = 0.0
    score_scale: list[float] = field(default_factory=list)
    max_rows: PositiveInt | None = None
    redraw: bool = False
    pairing: Literal["one", "zip", "all"] = "one"
    neutral: bool = False
    num_negatives: NonNegativeInt | None = None
    dir: Unrecorded[Source | None] = None

    def labels_of(self, source: str) -> dict[str, int | None] | None:
        """Return the label map for a source: `labels`, or the entry of `labels` for the file's name ("sick" or
        "sick.tsv.gz"). ValueError for an entry that matches no source."""
        if not self.labels or not any(isinstance(entry, dict) for entry in self.labels.values()):
            return self.labels
        names = [_names_of(part) for each in (*self.train, *(self.dev or [])) for part in pool(each)]
        if unknown := {*self.labels} - {name for known in names for name in known}:
            sources = ", ".join(dict.fromkeys(known[1] for known in names))
            raise ValueError(f"data.labels has a key {min(unknown)!r}, which matches none of the sources: {sources}")
        maps = []
        for part in pool(source):
            maps.append(next((self.labels[name] for name in _names_of(part) if name in self.labels), None))
        if any(each != maps[0] for each in maps):
            raise ValueError(f"data.labels must be the same for all files of the pool {source}")
        return maps[0]


def _names_of(source: str) -> list[str]:
    """Return the names by which data.labels can refer to a source: "sick", "sick.tsv.gz", and the name as written."""
    base = source.partition("#")[0]
    return [Path(base).name.split(".")[0], Path(base).name, Path(source).name, base, source]

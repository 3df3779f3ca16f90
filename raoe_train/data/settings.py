"""Where rows come from and how they are read: the section `data` of recipes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from raoe_train.config import PositiveInt, Share
from raoe_train.data.sources import pool


@dataclass
class Rows:
    """How rows are read.

    Args:
        columns: our column name: its name in the file
        on_error: raise at a malformed row, or skip and count it
    """

    columns: dict[str, str | None] = field(default_factory=dict)
    on_error: Literal["raise", "skip"] = "raise"


@dataclass
class Input(Rows):
    """Where rows come from.

    Args:
        input: file, FILE#split, built-in or hub data set to read
    """

    input: str | None = None


@dataclass
class Pairs(Input):
    """Where pairs come from.

    Args:
        labels: label: class, larger = less related
    """

    labels: dict[str, Any] | None = None


@dataclass
class Sentences(Input):
    """Where sentences come from.

    Args:
        max_rows: largest number of rows to use
    """

    max_rows: PositiveInt | None = None


@dataclass
class Tasks(Rows):
    """Where sets to evaluate on are.

    Args:
        dir: directory where tasks are looked up by name, as NAME.* or KIND/NAME.*
        input: C-STS rows without labels, for a submission
    """

    dir: str | None = None
    input: str | None = None


@dataclass
class Data(Rows):
    """What to train on.

    Args:
        train: sources (FILE, FILE#split, builtin#train, hub name), which no batch mixes, or pools A+B
        labels: label: class, larger = less related, null to leave rows out; or such a map by file name
        dev: sources of development pairs; the best encoder on them is kept
        dev_share: share of the first source to hold out for development, where there is no dev
        score_scale: lowest and highest score of train; two numbers, or two for each source
        max_rows: largest number of rows of each source, drawn with training.seed
        redraw: draw these rows again in each epoch
        pairing: triplets of an NLI premise, one, zip (i-th with i-th) or all combinations
        neutral: a neutral hypothesis as second hard negative
        shuffle_lists: shuffle the sentences of each list, an ablation
        dir: directory where tasks are looked up by name, as NAME.* or KIND/NAME.*
    """

    train: list[str] = field(default_factory=list)
    labels: dict[str, Any] | None = None
    dev: list[str] | None = None
    dev_share: Share = 0
    score_scale: list[float] = field(default_factory=list)
    max_rows: PositiveInt | None = None
    redraw: bool = False
    pairing: Literal["one", "zip", "all"] = "one"
    neutral: bool = False
    shuffle_lists: bool = False
    dir: str | None = None

    def labels_of(self, source: str) -> dict[str, int | None] | None:
        """The label map of a source: `labels`, or its entry for the file's name ("sick" of sick.tsv.gz)."""
        if self.labels and all(isinstance(entry, dict) for entry in self.labels.values()):
            maps = [self.labels.get(Path(part).name.split(".")[0]) for part in pool(source)]
            if any(each != maps[0] for each in maps):
                raise ValueError(f"{source} is one pool, and data.labels says different things of its files")
            return maps[0]
        return self.labels

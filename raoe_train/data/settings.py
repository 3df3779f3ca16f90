"""Where rows come from and how they are read: the section `data` of recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from raoe_train.data.sources import pool
from raoe_train.recipe import Option


@dataclass
class Data:
    """Where sentences come from."""

    train: Annotated[
        list[str],
        "sources of pairs (FILE, FILE#split, builtin#train, builtin-nli#train, hub name), which no batch mixes; or A+B",
    ] = field(default_factory=list)
    dev: Annotated[
        list[str] | None, "sources of development pairs; the encoder best on them, by the mean of several, is kept"
    ] = None
    dev_share: Annotated[
        float,
        Option(
            "share of the pairs of data.train's first source to hold out for dev, where there is none", least=0, below=1
        ),
    ] = 0
    input: Annotated[str | None, "source to score, to encode or to begin chains with"] = None
    dir: Annotated[
        str | None, "directory where tasks are looked up as NAME.*, KIND/NAME.* or */NAME.*, or in SentEval's folders"
    ] = None
    columns: Annotated[dict[str, Any], "our column name: its name in the file"] = field(default_factory=dict)
    labels: Annotated[
        dict[str, Any] | None,
        "word: class (larger = less related, null leaves rows out); or such a map a file by its name, sick: {…}",
    ] = None
    score_scale: Annotated[
        list[float], "lowest and highest score in data.train; any two numbers, or two a source"
    ] = field(default_factory=list)
    on_error: Annotated[Literal["raise", "skip"], "a malformed row: raise, or skip (and count)"] = "raise"
    pairing: Annotated[
        Literal["one", "zip", "all"],
        "triplets of an NLI premise (infonce): one, zip (i-th with i-th) or all combinations",
    ] = "one"
    neutral: Annotated[bool, "a neutral hypothesis as second hard negative (infonce, angle_contrastive)"] = False
    shuffle_lists: Annotated[bool, "shuffle each list's sentences with training.seed, an ablation (listmle)"] = False
    max_rows: Annotated[
        int | None, Option("at most so many rows of each training source, drawn with training.seed", least=1)
    ] = None
    redraw: Annotated[bool, "draw those of data.max_rows anew each epoch, of all rows"] = False
    cache_dir: Annotated[
        str | None,
        Option("directory that keeps training rows and their tokens, read from disk [memory]", writes="folder"),
    ] = None

    def labels_of(self, source: str) -> dict[str, int | None] | None:
        """The label map of a source: `labels`, or its entry for the file's name ("sick" of sick.tsv.gz)."""
        if self.labels and all(isinstance(entry, dict) for entry in self.labels.values()):
            maps = [self.labels.get(Path(part).name.split(".")[0]) for part in pool(source)]
            if any(each != maps[0] for each in maps):
                raise ValueError(f"{source} is one pool, and data.labels says different things of its files")
            return maps[0]
        return self.labels

"""The job `prepare`: download public data sets and convert each set to one file."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raoe_train.config import File, Unrecorded
from raoe_train.data.files import write_rows
from raoe_train.data.public import find_public, public_rows, public_sets
from raoe_train.jobs.settings import PrepareConfig
from raoe_train.jobs.shared import job, require
from raoe_train.outputs import Output


@dataclass
class PublicSet:
    """A public data set to prepare: its name, its entry in public.yaml, and settings from PrepareConfig."""

    name: str = ""
    entry: dict[str, Any] = field(default_factory=dict)
    copies: Unrecorded[str | None] = None
    counts: bool = True
    output: File | None = None
    overwrite: Unrecorded[bool] = False


@job
def prepare(config: PrepareConfig, _: None) -> dict[str, Any]:
    """Download public data sets, check their row counts and write one file per set.

    Each file contains a column `split`. A JSON file next to each data file contains the licence, the source and a
    summary. To use the sets in another job, set that job's data.dir to the output of `prepare`. Finished sets are
    skipped.

    Returns:
        {"sets": {name: {"output": its file, "rows": {split: rows}, "left_out": {reason: rows}, "licence", "page",
        "from", "settings", "versions"}}}.
    """
    if not config.names:
        raise ValueError("--names is missing: set it to names of data sets, such as snli, or of papers, such as raoe")
    target = Path(require(config.output, "output", "the directory to write to")).expanduser()
    if config.copies and not Path(config.copies).expanduser().is_dir():
        raise FileNotFoundError(f"no such folder: {config.copies!r} (copies)")
    results: dict[str, dict[str, Any]] = {}
    for name, entry in public_sets(config.names).items():
        output = target / entry["kind"] / f"{name}.jsonl.gz"
        results[name] = prepare_set(PublicSet(name, entry, config.copies, config.counts, str(output), config.overwrite))
        rows = ", ".join(f"{split} {count:,}".strip() for split, count in results[name]["rows"].items())
        print(f"{name}: {rows} rows in {output} (licence: {entry['licence']}; {entry['page']})")
    return {"sets": results}


@job
def prepare_set(config: PublicSet, output: Output) -> dict[str, Any]:
    """Prepare one public data set, and return its entry in the result of `prepare`."""
    name, entry = config.name, config.entry
    place, splits = find_public(name, entry, Path(config.copies).expanduser() if config.copies else None)
    rows, left_out = Counter[str](), Counter[str]()

    def count_rows() -> Iterator[dict[str, Any]]:
        try:
            for row in public_rows(entry, splits, left_out):
                rows[row.get("split", "")] += 1
                yield row
        except OSError as error:
            raise OSError(
                f"{name} cannot be read from {place} ({error}): if the data set is gated, accept its terms at "
                f"{entry['page']}; without network access, set --copies to the folder with the downloaded files"
            ) from error
        for split, published in entry["counts"].items() if config.counts else ():
            if rows[split] != published:
                part = f"{name}, split {split}," if split else name
                raise ValueError(
                    f"{part} has {rows[split]} rows in {place}, but the published data has {published} "
                    f"({entry['page']}): the files are incomplete or from another version; to skip this check, pass "
                    "--counts false"
                )

    counted_rows = count_rows()
    if (first := next(counted_rows, None)) is None:
        raise ValueError(f"{name} has no rows in {place}")
    output.begin()
    write_rows(output.path, list(first), itertools.chain([first], counted_rows))
    result = {"rows": dict(rows), "left_out": dict(left_out), "from": place}
    return {**result, "licence": entry["licence"], "page": entry["page"]}

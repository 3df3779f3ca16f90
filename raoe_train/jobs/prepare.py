"""The job `prepare`: download public data sets and convert each set to one file."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raoe_train.artifacts.provenance import digest
from raoe_train.artifacts.resume import Output
from raoe_train.data.files import write_rows
from raoe_train.data.public import find_public, public_rows, public_sets
from raoe_train.jobs.settings import PrepareConfig
from raoe_train.jobs.shared import job, require


@job
def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Download public data sets, check their numbers of rows and write one file per set.

    Each file has a column split. A JSON file next to it has a summary with licence and source. To use the sets in
    another job, set its data.dir to the output of prepare. Finished sets are skipped.

    Returns:
        {"sets": {name: {"output": its file, "rows": {split: rows}, "left_out": {reason: rows}, "licence", "page",
        "from", "settings", "versions"}}}.
    """
    if not config.names:
        raise ValueError("--names is missing: set it to data sets, such as snli, or to a paper, such as raoe")
    target = Path(require(config.output, "output", "the directory to write to")).expanduser()
    folder = Path(config.copies).expanduser() if config.copies else None
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {config.copies!r} (copies)")
    results: dict[str, dict[str, Any]] = {}
    for name, entry in public_sets(config.names).items():
        settings = {"set": name, "table": digest(entry), "counts": config.counts}
        output = Output(target / entry["kind"] / f"{name}.jsonl.gz", settings, config.overwrite)
        results[name] = output.finished(say=True) or _prepare(name, entry, folder, output)
        print(f"{name}: {results[name]['rows']} -> {output.path} (licence: {entry['licence']}; {entry['page']})")
    return {"sets": results}


def _prepare(name: str, entry: dict[str, Any], folder: Path | None, output: Output) -> dict[str, Any]:
    place, splits = find_public(name, entry, folder)
    rows, left_out = Counter[str](), Counter[str]()

    def count_rows() -> Iterator[dict[str, Any]]:
        try:
            for row in public_rows(entry, splits, left_out):
                rows[row.get("split", "")] += 1
                yield row
        except OSError as error:
            raise OSError(
                f"{name} cannot be read from {place} ({error}): if it is gated, accept its terms at {entry['page']}; "
                "without a network, pass the folder of downloaded files with --copies"
            ) from error
        for split, published in entry["counts"].items() if output.settings["counts"] else ():
            if rows[split] != published:
                raise ValueError(
                    f"{name} has {rows[split]} rows{' of ' * bool(split)}{split} in {place}, but {published} were "
                    f"published ({entry['page']}): incomplete or another version; --counts false skips this check"
                )

    counted_rows = count_rows()
    if (first := next(counted_rows, None)) is None:
        raise ValueError(f"{name} has no rows in {place}")
    output.begin()
    write_rows(output.path, list(first), itertools.chain([first], counted_rows))
    result = {"rows": dict(rows), "left_out": dict(left_out), "from": place}
    return output.finish({**result, "licence": entry["licence"], "page": entry["page"]})

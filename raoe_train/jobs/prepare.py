"""The job `prepare`: public sets as our files."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raoe_train.artifacts.provenance import digest
from raoe_train.artifacts.resume import Output
from raoe_train.data.files import write_rows
from raoe_train.data.public import find_public, public_rows, public_sets
from raoe_train.jobs.shared import job, needed


@dataclass
class PrepareConfig:
    """Which sets to prepare.

    Args:
        names: sets, or papers: raoe, bellm, ranking, margins
        copies: directory of downloads: files, SentEval's folders, the hub's as OWNER/NAME
        counts: whether numbers of rows must be the published ones
        output: directory to write to: nli/snli.jsonl.gz, sts/stsb.jsonl.gz, ...
        overwrite: replace what another copy or version gave
    """

    names: list[str] = field(default_factory=list)
    copies: str | None = None
    counts: bool = True
    output: str | None = None
    overwrite: bool = False


@job
def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Public data sets as files, counted.

    Each set becomes one file, with a column split, in the folder that is data.dir to other jobs; beside it lies a
    summary with licence and source. What is there already is not made again.

    Returns:
        {"sets": {name: {"output": its file, "rows": {split: rows}, "left_out": {reason: rows}, "licence", "page",
        "from", "settings", "versions"}}}.
    """
    if not config.names:
        raise ValueError("names is empty: say which sets, such as snli, or which paper's, such as raoe")
    target = Path(needed(config.output, "output", "the directory to write to")).expanduser()
    folder = Path(config.copies).expanduser() if config.copies else None
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {config.copies!r} (copies)")
    made: dict[str, dict[str, Any]] = {}
    for name, its in public_sets(config.names).items():
        settings = {"set": name, "table": digest(its), "counts": config.counts}
        output = Output(target / its["kind"] / f"{name}.jsonl.gz", settings, config.overwrite)
        made[name] = output.finished() or _prepared(name, its, folder, output)
        print(f"{name}: {made[name]['rows']} -> {output.path} (licence: {its['licence']}; {its['page']})")
    return {"sets": made}


def _prepared(name: str, its: dict[str, Any], folder: Path | None, output: Output) -> dict[str, Any]:
    where, splits = find_public(name, its, folder)
    rows, left_out = Counter[str](), Counter[str]()

    def counted() -> Iterator[dict[str, Any]]:
        try:
            for row in public_rows(its, splits, left_out):
                rows[row.get("split", "")] += 1
                yield row
        except OSError as error:
            raise OSError(
                f"{name} cannot be read from {where} ({error}): where it is gated accept its terms at {its['page']}; "
                "where there is no network lay a download in --copies DIR"
            ) from error
        for split, published in its["counts"].items() if output.settings["counts"] else ():
            if rows[split] != published:
                raise ValueError(
                    f"{name} has {rows[split]} rows{' of ' * bool(split)}{split} in {where}, and {published} were "
                    f"published ({its['page']}): it is not whole, or another version; --counts false takes it as it is"
                )

    every = counted()
    if (first := next(every, None)) is None:
        raise ValueError(f"{name} has no rows in {where}")
    output.begin()
    write_rows(output.path, list(first), itertools.chain([first], every))
    result = {"rows": dict(rows), "left_out": dict(left_out), "from": where}
    return output.finish({**result, "licence": its["licence"], "page": its["page"]})

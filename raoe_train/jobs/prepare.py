"""The job `prepare`: public sets as our files."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from raoe_train.artifacts.once import finish, found, parts
from raoe_train.artifacts.provenance import digest
from raoe_train.data.files import write_rows
from raoe_train.data.public import find_public, public_rows, public_sets
from raoe_train.jobs.shared import job


@job
def prepare(
    names: Annotated[list[str], "sets, or papers: raoe, bellm, ranking, margins"] = [],
    copies: Annotated[str | None, "directory of downloads: files, SentEval's folders, the hub's as OWNER/NAME"] = None,
    counts: Annotated[bool, "whether numbers of rows have to be the published ones"] = True,
    output: Annotated[str | None, "directory to write to: nli/snli.jsonl.gz, sts/stsb.jsonl.gz, …"] = None,
    overwrite: Annotated[bool, "replace what another copy or version gave"] = False,
) -> dict[str, Any]:
    """Public data sets as files, counted.

    Each set becomes one file, with a column split, in the folder that is data.dir to other jobs; beside it lies a
    summary with licence and source. What is there already is not made again.

    Returns:
        {"sets": {name: {"output": its file, "rows": {split: rows}, "left_out": {reason: rows}, "licence", "page",
        "from", "settings", "versions"}}}.

    Raises:
        ValueError: an unknown name, a set that no hub has and that is not in `copies`, a malformed row, other numbers
            of rows than were published, or another version's file in the way.
        OSError: the hub cannot be reached, or does not give the set.
    """
    if not names:
        raise ValueError("names is empty: say which sets, such as snli, or which paper's, such as raoe")
    if not output:
        raise ValueError("--output is missing: the directory to write to")
    folder = Path(copies).expanduser() if copies else None
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {copies!r} (copies)")
    made: dict[str, dict[str, Any]] = {}
    for name, its in public_sets(names).items():
        path = Path(output).expanduser() / its["kind"] / f"{name}.jsonl.gz"
        settings = {"set": name, "table": digest(its), "counts": counts}
        made[name] = found(path, settings, overwrite) or _prepared(name, its, folder, path, settings)
        print(f"{name}: {made[name]['rows']} -> {path} (licence: {its['licence']}; {its['page']})")
    return {"sets": made}


def _prepared(
    name: str, its: dict[str, Any], folder: Path | None, path: Path, settings: dict[str, Any]
) -> dict[str, Any]:
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
        for split, published in its["counts"].items() if settings["counts"] else ():
            if rows[split] != published:
                raise ValueError(
                    f"{name} has {rows[split]} rows{' of ' * bool(split)}{split} in {where}, and {published} were "
                    f"published ({its['page']}): it is not whole, or another version; --counts false takes it as it is"
                )
        parts(path, settings).mkdir(parents=True, exist_ok=True)  # says whose the file is, until its summary does

    every = counted()
    if (first := next(every, None)) is None:
        raise ValueError(f"{name} has no rows in {where}")
    write_rows(path, list(first), itertools.chain([first], every))
    result = {"rows": dict(rows), "left_out": dict(left_out), "from": where}
    return finish(path, settings, {**result, "licence": its["licence"], "page": its["page"]})

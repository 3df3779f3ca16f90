"""The job `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from raoe_train.encoders.named import Model
from raoe_train.jobs.shared import job
from raoe_train.recipe import Option

RESULTS = "JSON files of evaluate and directories of train, which are compared with the first; or files of chains"


@job
def report(
    results: Annotated[list[str], RESULTS] = [],
    resamples: Annotated[int, "of the bootstrap of differences between results"] = 2000,
    model: Annotated[Model, Option(word="name")] = Model(),
    length: Annotated[int, "sentences of a chain that are looked at, its source included"] = 16,
    max_chains: Annotated[int, "at most so many of a file, drawn with seed"] = 1000,
    examples: Annotated[int, "chains that are shown, of sources that all files have"] = 3,
    seed: Annotated[int, "of max_chains and the intervals"] = 42,
    on_error: Annotated[str, "a malformed row: raise, or skip (and count)"] = "raise",
    batch_size: Annotated[int, "sentences at a time"] = 64,
    output: Annotated[str | None, "directory to write"] = None,
    overwrite: Annotated[bool, "replace the report of other settings"] = False,
) -> dict[str, Any]:
    """Results of evaluate side by side, or how chains drift from their source: a page with tables and plots.

    Returns:
        What OUTPUT/report.json holds: see report_results, and report_drift.

    Raises:
        ValueError: no results or output, both sorts of results together, what is no result, a malformed chain, an
            encoder with NaN, or the report of other settings in the way and overwrite not set.
        FileNotFoundError: no such file.
    """
    if not results:
        raise ValueError(
            "name what to report: raoe-train report RESULT.json … --output DIR, of results of evaluate, or "
            "raoe-train report CHAINS.jsonl … --model.name ENCODER --output DIR"
        )
    if not output:
        raise ValueError("output is missing: the directory to write")
    numbers = {"length": length, "max_chains": max_chains, "batch_size": batch_size, "resamples": resamples}
    for name, value in numbers.items():
        least = 3 if name == "length" else 1
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    folder = Path(output).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output {folder} is a file, not a directory")
    paths = [Path(name).expanduser() for name in results]
    measured = [path.suffix == ".json" or path.is_dir() for path in paths]
    if any(measured) and not all(measured):
        raise ValueError(
            f"results of evaluate ({results[measured.index(True)]}) and chains "
            f"({results[measured.index(False)]}) are two reports"
        )
    if all(measured):
        from raoe_train.studies.result_report import report_results

        return report_results(paths, folder, resamples, seed, overwrite)
    from raoe_train.studies.drift_report import report_drift

    return report_drift(results, model, folder, length, max_chains, seed, examples, on_error, batch_size, overwrite)

"""The job `report`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from raoe_train.artifacts.markdown import made_with
from raoe_train.artifacts.once import found
from raoe_train.artifacts.provenance import digest, versions
from raoe_train.artifacts.writing import write_json, write_text
from raoe_train.encoders.settings import Model, identity
from raoe_train.jobs.shared import job
from raoe_train.recipe import Option
from raoe_train.studies.html_page import html_page

RESULTS = "JSON files of evaluate and directories of train, which are compared with the first; or files of chains"


@job
def report(
    results: Annotated[list[str], RESULTS] = [],
    resamples: Annotated[int, Option("of the bootstrap of differences between results", least=1)] = 2000,
    model: Annotated[Model, Option(word="name")] = Model(),
    length: Annotated[int, Option("sentences of a chain that are looked at, its source included", least=3)] = 16,
    max_chains: Annotated[int, Option("at most so many of a file, drawn with seed", least=1)] = 1000,
    examples: Annotated[int, Option("chains that are shown, of sources that all files have", least=0)] = 3,
    seed: Annotated[int, Option("of max_chains and the intervals", least=0, below=2**32)] = 42,
    on_error: Annotated[Literal["raise", "skip"], "a malformed row: raise, or skip (and count)"] = "raise",
    batch_size: Annotated[int, Option("sentences at a time", least=1)] = 64,
    output: Annotated[str | None, "directory to write"] = None,
    overwrite: Annotated[bool, "replace the report of other settings"] = False,
) -> dict[str, Any]:
    """Results of evaluate side by side, or how chains drift from their source: report.md and report.html.

    Returns:
        What OUTPUT/report.json holds: what report_results or report_drift found, "settings" and "versions".

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
    if repeated := {name for name in results if results.count(name) > 1}:
        raise ValueError(f"results names {', '.join(sorted(repeated))} twice")
    paths = [Path(name).expanduser() for name in results]
    measured = [path.suffix == ".json" or path.is_dir() for path in paths]
    if any(measured) and not all(measured):
        raise ValueError(
            f"results of evaluate ({results[measured.index(True)]}) and chains "
            f"({results[measured.index(False)]}) are two reports"
        )
    stems = [path.name if path.is_dir() else Path(str(path).partition("#")[0]).stem for path in paths]
    # what tells files of one name apart is where they are
    named = {name if stems.count(stem) > 1 else stem: name for name, stem in zip(results, stems, strict=True)}
    folder = Path(output).expanduser()
    settings: dict[str, Any]
    make: Callable[[], tuple[dict[str, Any], list[str]]]
    if all(measured):
        from raoe_train.studies.result_report import read_results, report_results

        read = read_results(named)
        made_from = {result.label: digest(result.tasks) for result in read}
        examples_of = [sorted(result.outcomes) for result in read]
        settings = {"results": made_from, "examples": examples_of, "resamples": resamples, "seed": seed}
        make = partial(report_results, read, folder, resamples, seed)
    else:
        from raoe_train.studies.drift import read_lists, report_drift

        lists = read_lists(named, on_error, max_chains, seed)
        chains = {label: digest(some) for label, some in lists.items()}
        settings = {"model": identity(model), "chains": chains, "length": length, "examples": examples, "seed": seed}
        make = partial(report_drift, lists, results, model, folder, length, examples, seed, batch_size)
    page, summary = folder / "report.md", folder / "report.json"
    if done := found(page, settings, overwrite, summary):
        print(f"{page} is there already, of the same results")
        return done
    folder.mkdir(parents=True, exist_ok=True)
    result, lines = make()
    result |= {"settings": settings, "versions": versions()}
    result = json.loads(json.dumps(result), parse_constant=lambda _: None)  # NaN: a place that no list has
    lines += ["", f"Made with {made_with(result['versions'])}."]
    write_json(summary, result)
    write_text(folder / "report.html", html_page(lines, folder))
    write_text(page, "\n".join(lines) + "\n")
    print("\n".join(lines[:-2]))
    print(f"-> {page}, and report.html to sort and filter")
    return result

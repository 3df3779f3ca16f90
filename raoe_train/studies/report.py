"""The job `report`: chains of sentences, or results of `evaluate`, as a page people can read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raoe_train.config import ReportConfig


def report(config: ReportConfig) -> dict[str, Any]:
    """A page with tables and plots in ``config.output``: of chains, see report_chains; of JSON files that `evaluate`
    wrote and directories that `train` did, see report_scores.

    Raises:
        ValueError: no results or output, both sorts of results together, the report of other settings in the way and
            overwrite not set; and as those.
        FileNotFoundError: no such file.
    """
    if not config.results:
        raise ValueError(
            "name what to report: raoe-train report RESULT.json … --output DIR, of results of evaluate, or "
            "raoe-train report CHAINS.jsonl … --model.name ENCODER --output DIR"
        )
    if not config.output:
        raise ValueError("output is missing: the directory to write")
    for name, least in (("length", 3), ("max_chains", 1), ("batch_size", 1), ("resamples", 1)):
        if getattr(config, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(config, name)}")
    output = Path(config.output).expanduser()
    if output.exists() and not output.is_dir():
        raise ValueError(f"output {output} is a file, not a directory")
    scores = [_is_scores(name) for name in config.results]
    if any(scores) and not all(scores):
        raise ValueError(
            f"results of evaluate ({config.results[scores.index(True)]}) and chains "
            f"({config.results[scores.index(False)]}) are two reports"
        )
    if all(scores):
        from raoe_train.studies.score_report import report_scores

        return report_scores(config, output)
    from raoe_train.studies.drift_report import report_chains

    return report_chains(config, output)


def _is_scores(name: str) -> bool:
    path = Path(name).expanduser()
    return path.suffix == ".json" or path.is_dir()

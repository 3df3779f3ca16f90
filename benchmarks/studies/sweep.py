"""Run the cells of a study, each once, and report them."""

from __future__ import annotations

import hashlib
import json
import shutil
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.provenance import commit
from benchmarks.studies import jobs
from benchmarks.studies.cells import (
    Cell,
    Preparation,
    chosen,
    expand,
    merge,
    preparations,
    read_study,
    texts_of,
)
from benchmarks.studies.sweep_report import SweepReport, write_text


def sweep(
    study: str | Path,
    output: str | Path,
    *,
    data_dir: str | None = None,
    model: str | None = None,
    scale: str | None = None,
    only: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Train every cell of a study and write OUTPUT/results.jsonl, OUTPUT/report.md and plots.

    A finished cell has a record, OUTPUT/runs/CELL.json, and is skipped; an interrupted one resumes. A cell that fails
    does not stop the others. Weights of finished cells are removed, unless another cell still starts from them or the
    study says `keep_models`.

    Args:
        study: a shipped study's name, or a YAML file.
        output: the folder to write.
        data_dir, model: replace {data_dir} and {model} in the study; they are also data.dir and model.name.
        scale: one of the study's scales.
        only: shell patterns of the cells to run.
        changes: nested or dotted keys on top of the study.
        overwrite: train cells again whose settings changed.
        dry_run: check everything and print the names of the cells; train and write nothing.

    Returns:
        {"results": a row for each finished cell, "failed": names of cells that failed}.

    Raises:
        ValueError: the study or the configuration of a cell is invalid.
        FileNotFoundError: a file of the study, or the data of a task, does not exist and nothing prepares it.
    """
    _digest.cache_clear()
    definition = read_study(study, changes, scale)
    words = {"data_dir": data_dir, "model": model, "output": str(output)}
    cells = expand(definition, words)
    selection = chosen(cells, only or definition["only"])
    prepare_jobs = preparations(definition, words, selection)
    for job, recipe, keys in prepare_jobs.values():
        jobs.check(job, recipe, keys)
    for cell in selection:
        jobs.check("train", cell.recipe, cell.overrides)
    if prepare_jobs:
        _check_files(selection, prepare_jobs)
        # data of polarity tasks is mined, so it is among the files
        jobs.check_tasks([task for task in definition["tasks"] if not task.startswith("polarity:")], data_dir)
    if dry_run:
        print("\n".join([*(f"[prepare] {name}" for name in prepare_jobs), *(cell.name for cell in selection)]))
        return {"results": [], "failed": []}
    for name, (job, recipe, keys) in prepare_jobs.items():
        print(f"[prepare] {name}", flush=True)
        jobs.run(job, recipe, keys)
    runner = _Runner(Path(output), cells, overwrite, definition["keep_models"], definition["measure"])
    settings = {"study": str(study), "scale": scale, "data_dir": data_dir, "model": model, **definition}
    report = SweepReport(Path(output), definition["tasks"], definition["compare"], definition["measure"], settings)
    failed: list[str] = []
    for number, cell in enumerate(selection, 1):
        if runner.metrics[cell.run] is None and cell.run not in failed:
            print(f"[{number}/{len(selection)}] {cell.name}", flush=True)
            if error := runner.attempt(cell, failed):
                failed.append(cell.run)
                print(f"{cell.name} failed: {error}", flush=True)
            report.write(runner.results(), failed)
    runner.drop_weights()
    results = runner.results()
    report.write(results, failed, draw=True)
    print((Path(output) / "report.md").read_text(encoding="utf-8"))
    return {"results": results, "failed": failed}


class _Runner:
    """Trains cells and records which are finished."""

    def __init__(self, output: Path, cells: Sequence[Cell], overwrite: bool, keep: bool, measure: bool) -> None:
        self.runs, self.cells, self.overwrite, self.keep = output / "runs", cells, overwrite, keep
        self.train = jobs.run_alone if measure else jobs.run
        self.runs.mkdir(parents=True, exist_ok=True)
        # {run: its metrics, or None}
        self.metrics = {cell.run: self._recorded(cell) for cell in cells}

    def settings(self, cell: Cell) -> dict[str, Any]:
        """What a cell's result depends on; files and weights count by their content."""
        content = {text: digest for text in texts_of(cell.overrides) if (digest := _content(text))}
        start = self.settings(cell.after) if cell.after else None
        settings = {"recipe": cell.recipe, "overrides": cell.overrides, "content": content, "after": start}
        return settings | ({"random": True} if cell.random else {})

    def attempt(self, cell: Cell, failed: Sequence[str]) -> str | None:
        """Train and evaluate one cell; return the error message, or None."""
        trace = self.runs / f"{cell.run}.error.txt"
        try:
            self._make(cell, failed)
        except Exception as error:  # one cell must not stop the others
            write_text(trace, traceback.format_exc())
            return f"{type(error).__name__}: {error}"
        trace.unlink(missing_ok=True)
        return None

    def _make(self, cell: Cell, failed: Sequence[str]) -> None:
        record, folder = self.runs / f"{cell.run}.json", self.runs / cell.run
        overrides = merge(cell.overrides, {"output": str(folder), "overwrite": self.overwrite})
        if cell.after:
            if cell.after.run in failed:
                raise RuntimeError(f"{cell.after.name}, which it starts from, failed")
            start = self.runs / cell.after.run
            if not (start / "modules.json").is_file():  # its weights were removed
                self._make(cell.after, failed)
            overrides = merge(overrides, {"model": {"name": str(start)}})
        if cell.random:
            start = jobs.draw_weights(overrides["model"]["name"], cell.seed, self.runs / f"{cell.run}.start")
            overrides = merge(overrides, {"model": {"name": str(start)}})
        settings = self.settings(cell)
        if record.is_file():
            if not self.overwrite and _read(record).get("settings") != settings:
                raise ValueError(f"{record} has other settings or data: --overwrite trains the cell again")
            shutil.rmtree(folder, ignore_errors=True)
        self.metrics[cell.run] = {**self.train("train", cell.recipe, overrides), "commit": commit()}
        write_text(record, json.dumps({"settings": settings, "metrics": self.metrics[cell.run]}, indent=1) + "\n")
        shutil.rmtree(self.runs / f"{cell.run}.start", ignore_errors=True)
        self.drop_weights()

    def _recorded(self, cell: Cell) -> dict[str, Any] | None:
        record = _read(self.runs / f"{cell.run}.json")
        return record["metrics"] if record.get("settings") == self.settings(cell) else None

    def drop_weights(self) -> None:
        """Remove the weights of finished cells that no unfinished cell starts from."""
        needed = {cell.after.run for cell in self.cells if cell.after and self.metrics[cell.run] is None}
        for run, metrics in self.metrics.items():
            if metrics is None or run in needed or self.keep or not (self.runs / run / "modules.json").is_file():
                continue
            # Remove the file first that makes the folder a model.
            for pattern in ("modules.json", "**/*.safetensors", "**/pytorch_model*.bin"):
                for path in (self.runs / run).glob(pattern):
                    path.unlink()

    def results(self) -> list[dict[str, Any]]:
        """A row for each finished cell."""
        return [
            {
                "run": cell.name,
                "variant": cell.variant,
                "family": cell.family,
                "seed": cell.seed,
                "point": cell.point,
                "start": None if cell.after else {"recipe": cell.recipe, **cell.overrides.get("model", {})},
                **metrics,
            }
            for cell in self.cells
            if (metrics := self.metrics[cell.run]) is not None
        ]


def _read(record: Path) -> dict[str, Any]:
    return json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}


def _content(text: str) -> str | None:
    """SHA-256 of the files that a text names: FILE, FILE#split, FILE+FILE, or the weights of a model's folder."""
    files = []
    for part in text.split("+"):
        path = Path(part.partition("#")[0]).expanduser()
        if "\n" not in part and len(part) < 4096 and path.exists():
            files += [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return hashlib.sha256("".join(map(_digest, files)).encode()).hexdigest() if files else None


@lru_cache(None)
def _digest(path: Path) -> str:
    with path.open("rb") as file:
        result = hashlib.sha256()
        while block := file.read(1 << 20):
            result.update(block)
    return result.hexdigest()


def _check_files(cells: Sequence[Cell], prepare_jobs: Mapping[str, Preparation]) -> None:
    """Raise FileNotFoundError before hours of preparation, unless at least one cell has all its files."""
    outputs = [keys["output"] for _, _, keys in prepare_jobs.values()]

    def check(overrides: Mapping[str, Any]) -> None:
        data = overrides.get("data", {})
        for text in texts_of([data.get(key) for key in ("input", "train", "dev")]):
            for path in (part.partition("#")[0] for part in text.split("+")):
                if "/" in path and path not in outputs and not Path(path).expanduser().exists():
                    raise FileNotFoundError(f"no such file: {path}")

    for _, _, keys in prepare_jobs.values():
        check(keys)
    problems = []
    for cell in cells:
        try:
            return check(cell.overrides)
        except FileNotFoundError as error:
            problems.append(error)
    raise problems[0]

"""``raoe-train sweep``: a table of training runs, variants x seeds, each evaluated on the same tasks;
resumable."""

from __future__ import annotations

import dataclasses
import fnmatch
import gc
import itertools
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raoe_train.artifacts.provenance import digest
from raoe_train.artifacts.writing import write_json
from raoe_train.cli import load
from raoe_train.cli import run as run_job
from raoe_train.config import SweepConfig
from raoe_train.jobs.train import polarity_of, train
from raoe_train.recipe import merge, nest, to_dict
from raoe_train.studies.sweep_report import write_report
from raoe_train.training.run_directory import clear_unfinished, finished_metrics

# Keys of a variant that are not changes to the training recipe.
SPECIAL = ("base", "seeds", "grid", "after")


@dataclass
class Run:
    """One cell of the table.

    Attributes:
        name: of the cell, unique. Its directory is OUTPUT/runs/name, or that of the first run with the same settings.
        variant: name of the row, the point of its grid included.
        family: name of the variant in the sweep's recipe.
        point: {dotted key: value} of the variant's grid.
        config: the training job; its output is the run's directory.
        after: the run whose encoder this one starts from.
    """

    name: str
    variant: str
    family: str
    seed: int
    config: Any
    point: dict[str, Any] = field(default_factory=dict)
    after: Run | None = None

    @property
    def directory(self) -> Path:
        return Path(str(self.config.output))


def sweep(config: SweepConfig) -> dict[str, Any]:
    """Do the runs that are missing and write results.jsonl, report.md and plots in ``config.output``.

    A variant is a mapping of changes to the training recipe (nested or dotted keys), with these special keys:
    ``base`` (another recipe to start from), ``seeds``, ``grid`` ({key: list of values}: one row for each
    combination),
    ``after`` (the name of a variant whose encoder of the same seed, or only one, it goes on from). In any text
    ``{data_dir}``,
    ``{model}`` and ``{output}`` stand for those settings.

    What `prepare` names is done before, in its order, as far as a run (or another of them) speaks of its output:
    {"job": a job, "recipe": one of its recipes, if it has one, and keys of that job}.

    With ``measure`` each run has a process of its own, so that nothing that other runs left counts as its memory, and
    the report has columns for the costs.

    Cells with the same settings are one run, whose directory has the name of the first. A run that fails does not stop
    the others. Run again, finished runs are not redone.

    Returns:
        {"results": a dict for each finished run, "failed": names of runs that failed}.

    Raises:
        ValueError: a recipe that makes no sense, found before anything runs.
    """
    if not config.output:
        raise ValueError("--output is missing: the directory to write to")
    runs = expand(config)
    chosen = _chosen(runs, config.only)
    for name, (job, recipe, values) in preparations(config, chosen).items():
        print(f"[prepare] {name}", flush=True)
        run_job(job, recipe, **values)
    output = Path(config.output)
    (output / "runs").mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    start = _start_scores(config, chosen)
    for number, run in enumerate(chosen, 1):
        missing = finished_metrics(run.config) is None or _outdated(run)
        if missing and run.directory.name not in failed:
            print(f"[{number}/{len(chosen)}] {run.name}", flush=True)
            error = _do(run, failed, own_process if config.measure else train)
            if error is not None:
                failed.append(run.directory.name)
                print(f"{run.name} failed: {error}", flush=True)
        elif not missing:
            clear_unfinished(run.directory)  # where a kill came between
        if not config.keep_models:
            _drop_weights(runs)
        write_report(output, config, list(_results(runs)), start, failed)
        gc.collect()
    results = list(_results(runs))
    write_report(output, config, results, start, failed)
    print((output / "report.md").read_text(encoding="utf-8"))
    return {"results": results, "failed": failed}


def expand(config: SweepConfig) -> list[Run]:
    """Every run of the table, a run after those it builds on."""
    if not config.variants:
        raise ValueError("variants is empty: name at least one, {} if it changes nothing")
    for pair in config.compare:
        if not (isinstance(pair, list) and len(pair) == 2 and all(name in config.variants for name in pair)):
            raise ValueError(f"compare takes pairs of variants, got {pair!r}")
    words = _words(config)
    # What they start from is evaluated once for all runs.
    shared: dict[str, Any] = {"evaluation": {"tasks": config.tasks, "before": False}}
    if config.data_dir:
        shared["data"] = {"dir": config.data_dir}
    if config.model:
        shared["model"] = {"name": config.model}
    shared = merge(shared, _filled(config.settings, words))
    runs: dict[str, Run] = {}
    directories: dict[str, str] = {}

    def add(family: str, path: tuple[str, ...]) -> None:
        if family in path:
            raise ValueError(f"variants follow each other in a circle: {' after '.join((*path, family))}")
        if family not in config.variants:
            raise ValueError(
                f"variant {path[-1]!r} comes after {family!r}, which is none of {', '.join(config.variants)}"
            )
        values = nest(config.variants[family] or {})
        special = {key: values.pop(key) for key in SPECIAL if key in values}
        parent = special.get("after")
        if parent is not None:
            add(parent, (*path, family))
        grid = dict(_leaves(special.get("grid") or {}))
        for point in (dict(zip(grid, chosen, strict=True)) for chosen in itertools.product(*grid.values())):
            variant = "-".join([family, *(f"{key.rpartition('.')[2]}-{_short(value)}" for key, value in point.items())])
            for seed in special.get("seeds") or config.seeds:
                name = f"{variant}-seed{seed}"
                before = _parent(runs, parent, seed) if parent is not None else None
                if parent is not None and before is None:
                    raise ValueError(
                        f"variant {family!r} comes after {parent!r}, which has no run of seed {seed} alone"
                    )
                changes = merge(merge(shared, _filled(values, words)), nest(point))
                fixed: dict[str, Any] = {
                    "training": {"seed": seed},
                    "output": str(Path(str(config.output), "runs", name)),
                }
                if before is not None:
                    fixed["model"] = {"name": str(before.directory)}
                fixed["overwrite"] = config.overwrite
                job = load("train", special.get("base") or config.base or None, merge(changes, fixed))
                job.output = directories.setdefault(digest({**to_dict(job), "output": None}), str(job.output))
                runs[name] = Run(name, variant, family, seed, job, point, before)

    for family in config.variants:
        add(family, ())
    return list(runs.values())


def preparations(config: SweepConfig, runs: list[Run]) -> dict[str, tuple[str, str | None, dict[str, Any]]]:
    """{name: (job, recipe, keys)} of what has to be there before these runs."""
    found: dict[str, tuple[str, str | None, dict[str, Any]]] = {}
    spoken_of = [json.dumps(to_dict(run.config)) for run in runs]
    for name, wish in reversed(config.prepare.items()):
        values = _filled(nest(wish), _words(config))
        job, recipe = values.pop("job", None), values.pop("recipe", None)
        if job is None or "output" not in values:
            raise ValueError(f"prepare.{name} must say a job and its output, got {wish!r}")
        load(job, recipe, values)  # what it cannot be is found now
        if any(str(values["output"]) in text for text in spoken_of):
            found[name] = job, recipe, values
            spoken_of.append(json.dumps(values))
    return dict(reversed(found.items()))


def _words(config: SweepConfig) -> dict[str, str | None]:
    return {"data_dir": config.data_dir, "model": config.model, "output": config.output}


def _parent(runs: Mapping[str, Run], family: str, seed: int) -> Run | None:
    """The run of a variant that one of `seed` goes on from: that of the same seed, or the only one there is."""
    those = [run for run in runs.values() if run.family == family]
    return those[0] if len(those) == 1 else runs.get(f"{family}-seed{seed}")


def _chosen(runs: list[Run], only: list[str]) -> list[Run]:
    for pattern in only:
        if not any(_matches(run, pattern) for run in runs):
            raise ValueError(
                f"--only {pattern}: no such run; variants: {', '.join(dict.fromkeys(r.family for r in runs))}"
            )
    wanted = {run.name for run in runs if not only or any(_matches(run, pattern) for pattern in only)}
    for run in reversed(runs):  # what a wanted run builds on comes before it
        if run.name in wanted and run.after is not None:
            wanted.add(run.after.name)
    return [run for run in runs if run.name in wanted]


def _matches(run: Run, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (run.family, run.variant, run.name))


def own_process(**config: Any) -> dict[str, Any]:
    """``train`` in a new process; its errors are raised here."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # spawn: a forked process would begin with all that this one holds
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train, **config).result()


def _do(run: Run, failed: list[str], train: Callable[..., Any]) -> str | None:
    """Train and evaluate; what went wrong, if anything did."""
    try:
        if run.after is not None:
            if run.after.directory.name in failed:
                raise RuntimeError(f"{run.after.name}, which it goes on from, failed")
            if not (run.after.directory / "modules.json").is_file():  # its weights were dropped
                (run.after.directory / "metrics.json").unlink(missing_ok=True)
                train(**vars(run.after.config))
        if _outdated(run):
            (run.directory / "metrics.json").unlink(missing_ok=True)
        train(**vars(run.config))
        (run.directory / "error.txt").unlink(missing_ok=True)
    except Exception as error:  # one run must not stop the others; what happened is kept and reported
        run.directory.mkdir(parents=True, exist_ok=True)
        # In a directory of its own kind, so that the next try finds it as it was left.
        if (run.directory / "recipe.yaml").is_file():
            (run.directory / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {error}"
    return None


def _outdated(run: Run) -> bool:
    """Whether the run it builds on was made anew since."""
    mine, theirs = run.directory / "metrics.json", run.after and run.after.directory / "metrics.json"
    return bool(theirs and theirs.is_file() and mine.is_file() and theirs.stat().st_mtime > mine.stat().st_mtime)


def _drop_weights(runs: list[Run]) -> None:
    """Remove the weights of finished runs that no unfinished run goes on from."""
    needed = {run.after.name for run in runs if run.after is not None and finished_metrics(run.config) is None}
    for run in runs:
        if run.name not in needed and finished_metrics(run.config) is not None:
            # no model any more, and it must not look like one, after a kill neither
            (run.directory / "modules.json").unlink(missing_ok=True)
            for path in [*run.directory.rglob("*.safetensors"), *run.directory.rglob("pytorch_model*.bin")]:
                path.unlink()


def _results(runs: list[Run]) -> Iterator[dict[str, Any]]:
    for run in runs:
        metrics = finished_metrics(run.config)
        if metrics is not None:
            yield {
                "run": run.name,
                "variant": run.variant,
                "family": run.family,
                "seed": run.seed,
                "point": run.point,
                **metrics,
            }


def _start_scores(config: SweepConfig, runs: list[Run]) -> dict[str, Any]:
    """{starting encoder: its scores before training}, each evaluated once."""
    from raoe_train.encoders.load import SCRATCH, load_encoder

    scores: dict[str, Any] = {}
    for run in runs:
        model = run.config.model
        label = model.name + (" (random weights)" if model.random_weights else "")
        if run.after is not None or not config.tasks or label in scores or model.name == SCRATCH:
            continue
        from raoe_train.evaluation.tasks import evaluate_encoder

        path = Path(str(config.output), "start", re.sub(r"[^\w.-]+", "_", label).strip("_") + ".json")
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        polarity = polarity_of(run.config.polarity, run.config.model)
        asked = {"model": label, "tasks": config.tasks, "polarity": {**dataclasses.asdict(polarity), "cache": None}}
        if known.get("asked") != asked:
            print(f"before training: {label}", flush=True)
            encoder = load_encoder(model, seed=run.seed)
            found = evaluate_encoder(
                encoder,
                config.tasks,
                run.config.data.dir,
                run.config.evaluation.batch_size,
                polarity=polarity,
            )
            known = {"asked": asked, "scores": found}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known)
        scores[label] = known["scores"]
    return scores


def _filled(values: Any, words: Mapping[str, str | None]) -> Any:
    """`values` with {data_dir} and the like replaced in every text."""
    if isinstance(values, Mapping):
        return {key: _filled(value, words) for key, value in values.items()}
    if isinstance(values, list):
        return [_filled(value, words) for value in values]
    if isinstance(values, str):
        for word, meaning in words.items():
            if "{" + word + "}" in values:
                if meaning is None:
                    raise ValueError(f"--{word} is missing: {values!r} needs it")
                values = values.replace("{" + word + "}", meaning)
    return values


def _leaves(grid: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, list[Any]]]:
    for key, value in grid.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{where}{key}.")
        elif isinstance(value, list) and value:
            yield where + key, value
        else:
            raise ValueError(f"grid.{where}{key} must be a list of values, got {value!r}")


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]+", "_", text)

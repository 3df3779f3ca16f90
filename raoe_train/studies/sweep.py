"""The job `sweep`."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from raoe_train.artifacts.once import beside
from raoe_train.artifacts.processes import owned
from raoe_train.artifacts.provenance import DROPPED, digest, fingerprint
from raoe_train.artifacts.writing import write_text
from raoe_train.cli import load
from raoe_train.cli import run as run_job
from raoe_train.data.files import existing_file
from raoe_train.data.settings import Data
from raoe_train.data.sources import is_file, pool
from raoe_train.encoders.settings import SCRATCH, Model
from raoe_train.encoders.sizes import check_fits
from raoe_train.jobs.shared import job
from raoe_train.recipe import Option, to_dict
from raoe_train.studies.runs import OF_RUNS, Run, at_scale, chosen, expand, preparations
from raoe_train.training.measures import polarity_of, tasks_of
from raoe_train.training.run_directory import CONTENTS, changes, clear_unfinished, finished_metrics, made_from

UNTOLD = ("name", "device", "dropout", "lora", "scratch")  # of a model: what changes nothing before training


@job
def sweep(
    prepare: Annotated[dict[str, Any], "jobs that make what the runs use: name: {job, recipe, keys of that job}"] = {},
    base: Annotated[str, "training recipe that every run starts from"] = "",
    settings: Annotated[dict[str, Any], "changes to that recipe, for every run"] = {},
    variants: Annotated[dict[str, Any], "name: changes; base, seeds, grid and after are special keys"] = {},
    seeds: Annotated[list[int], Option("training.seed of the runs of a variant", least=0, below=2**32)] = [42],
    tasks: Annotated[list[str], "tasks of any kind, before and after, looked up in data_dir"] = [],
    data_dir: Annotated[str | None, "settings.data.dir; any setting may say {data_dir}"] = None,
    model: Annotated[str | None, "settings.model.name; any setting may say {model}"] = None,
    scales: Annotated[dict[str, Any], "name: what another size of the same cells changes"] = {},
    scale: Annotated[str | None, "one of scales, such as paper"] = None,
    compare: Annotated[list[Any], "pairs of variants: their difference, with a paired t-test over seeds"] = [],
    only: Annotated[list[str], "run these variants (shell patterns)"] = [],
    measure: Annotated[bool, "report peak memory and time of training; each run has a process of its own"] = False,
    keep_models: Annotated[bool, "keep the weights of finished runs"] = False,
    output: Annotated[str | None, "directory for results.jsonl, report.md and the plots"] = None,
    overwrite: Annotated[bool, "redo runs whose settings changed"] = False,
    dry_run: Annotated[bool, "say what each run would take, as that of train does, and make nothing"] = False,
) -> dict[str, Any]:
    """A table of training runs: variants x seeds, each evaluated on the same tasks.

    A variant is a mapping of changes to the training recipe (nested or dotted keys), with these special keys: ``base``
    (another recipe to start from), ``seeds``, ``grid`` ({key: list of values}: one row for each combination), ``after``
    (a variant above it, whose encoder of the same seed, or only one, it goes on from). In any text ``{data_dir}``,
    ``{model}`` and ``{output}`` stand for those settings. What `prepare` names is done before, in its order, as far as
    a run (or another of them) speaks of its output. A scale has `prepare` and `settings`, which come on top of those of
    the sweep and of every variant, `variants`, {shell pattern: changes on top of those that it matches}, and `base`,
    `tasks` and `only` in place of the sweep's.

    Cells with the same settings are one run, whose directory has the name of the first. A run that fails does not stop
    the others. Run again, finished runs are not redone. After each run results.jsonl and the tables of report.md are
    those of all that are finished; the plots are drawn in the end.

    Returns:
        {"results": a dict for each finished run, "failed": names of runs that failed}. Of dry_run the results are
        {run: what train's dry_run returns}, and failed are runs whose data or model is not there.

    Raises:
        ValueError: a recipe that makes no sense, found before anything runs.
        FileNotFoundError, ValueError: `tasks` or rows of `prepare` that are not there, or what every run lacks, rows or
            memory for its model, before anything is prepared. What some runs lack fails them alone.
    """
    asked = dict(locals())
    from raoe_train.studies.sweep_report import SweepReport

    if not output:
        raise ValueError("--output is missing: the directory to write to")
    words = {key: asked[key] for key in ("data_dir", "model", "output")}
    sized = at_scale(asked)
    runs = expand(words=words, **{key: sized[key] for key in OF_RUNS})
    prepare, tasks = sized["prepare"], sized["tasks"]
    for pair in compare:
        if not (isinstance(pair, list) and len(pair) == 2 and all(name in variants for name in pair)):
            raise ValueError(f"compare takes pairs of variants, got {pair!r}")
    wanted = chosen(runs, sized["only"])
    prepared = preparations(prepare, words, wanted)
    if dry_run:
        return _would_take(wanted, prepared)
    if prepared:
        _check_before(wanted, tasks, prepared)
    for name, (kind, recipe, values) in prepared.items():
        print(f"[prepare] {name}", flush=True)
        run_job(kind, recipe, **values)
    folder = Path(output)
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    said = {key: value for key, value in asked.items() if key not in ("output", "overwrite", "only", "dry_run")}
    report = SweepReport(folder, tasks, compare, measure, said, _starts(folder / "start", tasks, wanted))
    table = _Table(runs)
    if not keep_models:
        table.drop_weights(runs)
    failed: list[str] = []
    for number, run in enumerate(wanted, 1):
        if table.is_done(run):
            with owned(run.directory):
                clear_unfinished(run.directory)  # where a kill came between
        elif run.directory.name not in failed:
            print(f"[{number}/{len(wanted)}] {run.name}", flush=True)
            error = _make(run, failed, own_process if measure else _train)
            if error is not None:
                failed.append(run.directory.name)
                print(f"{run.name} failed: {error}", flush=True)
            before = [each for each in wanted if table.is_done(each)]
            touched = [each for each in runs if each is run or (run.after and run.after in (each, each.after))]
            table.read(touched)
            # where the run that this one goes on from was made again, and came out otherwise, others of it are old
            wanted += [each for each in touched if each in before and not table.is_done(each)]
            if not keep_models:
                table.drop_weights(touched)
            report.write(table.results(), failed)
            gc.collect()
    results = table.results()
    report.write(results, failed, draw=True)
    print((folder / "report.md").read_text(encoding="utf-8"))
    return {"results": results, "failed": failed}


def _check_before(runs: Sequence[Run], tasks: list[str], prepared: Mapping[str, Any]) -> None:
    """What is not there and nothing makes, before hours of preparing."""
    made = [str(values["output"]) for _, _, values in prepared.values()]

    def rows(data: Any) -> None:
        for source in [data.input or "", *data.train, *(data.dev or [])]:
            for part in pool(source) if source and is_file(source) and not Path(source).exists() else []:
                if (base := part.partition("#")[0]) not in made:
                    existing_file(base)

    for kind, recipe, values in prepared.values():
        rows(getattr(load(kind, recipe, values), "data", Data()))
    problems: list[Exception] = []
    for number, its in enumerate(run.arguments for run in runs):
        if not number:
            tasks_of(replace(its.evaluation, tasks=tasks), its.data, its.model, its.polarity)
        try:
            rows(its.data)
            check_fits(its.model)
            return
        except (OSError, ValueError) as error:
            problems.append(error)
    if problems:
        raise problems[0]


def _would_take(runs: Sequence[Run], prepared: Mapping[str, Any]) -> dict[str, Any]:
    for name, (kind, _, values) in prepared.items():
        if not Path(str(values["output"])).exists():
            print(f"[prepare] {name}: {values['output']} is not there yet, {kind} makes it")
    found: dict[str, dict[str, Any]] = {}
    known: dict[str, str] = {}  # seeds, and most numbers of a loss, change nothing of it
    for run in runs:
        start = run
        while start.after is not None:
            start = start.after
        said = to_dict(run.arguments)
        said["model"]["name"] = start.arguments.model.name
        loss = {key: said["loss"].get(key) for key in ("name", "gate", "mini_batch_size", "mini_batch_num_tokens")}
        key = digest({**said, "output": None, "loss": loss, "training": {**said["training"], "seed": None}})
        first = known.setdefault(key, run.name)
        print(f"{run.name}:" if first == run.name else f"{run.name}, as {first}", flush=True)
        try:
            if first == run.name:
                found[run.name] = run_job("train", **{**said, "dry_run": True})
            elif first in found:
                found[run.name] = found[first]
        except (OSError, ValueError) as error:
            print(f"  {error}")
    for gpu in next(iter(found.values()), {"hours": {}})["hours"]:
        total = sum(each["hours"][gpu] for each in found.values())
        print(f"{gpu}: {total:.2g} hours for {len(found)} of {len(runs)} runs, by arithmetic")
    return {"results": found, "failed": [run.name for run in runs if run.name not in found]}


class _Table:
    """What is done of all runs: metrics are read once, and again of a run that was just made."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self._tasks: dict[str, Any] = {}
        self.metrics: dict[Path, dict[str, Any] | None] = {}
        self.read({run.directory: run for run in runs}.values())

    def read(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.metrics[run.directory] = finished_metrics(run.arguments, self.made_from)

    def made_from(self, arguments: Any) -> dict[str, Any]:
        """What a run is made from; tasks, which most runs share, are read once a sweep."""
        data, model = arguments.data, arguments.model
        polarity = polarity_of(arguments.polarity, model)
        asked = [asdict(arguments.evaluation), data.dir, model.prompt, asdict(polarity)]
        reference = polarity.reference.name
        key = digest([asked, fingerprint(reference) if reference else None])
        if key not in self._tasks:
            self._tasks[key] = tasks_of(arguments.evaluation, data, model, polarity)
        return made_from(arguments, self._tasks[key])

    def is_done(self, run: Run) -> bool:
        return self.metrics[run.directory] is not None

    def drop_weights(self, runs: Sequence[Run]) -> None:
        """Remove the weights of those of `runs` that are finished and that no other one still has to go on from."""
        needed = {run.after.directory for run in self.runs if run.after is not None and not self.is_done(run)}
        for run in runs:
            if self.metrics[run.directory] is not None and run.directory not in needed:
                # no model any more, and it must not look like one, after a kill neither
                if (run.directory / "modules.json").is_file():
                    clear_unfinished(run.directory)  # what a kill left is no part of the model
                    write_text(run.directory / DROPPED, str(fingerprint(str(run.directory))))
                    (run.directory / "modules.json").unlink()
                for path in [*run.directory.rglob("*.safetensors"), *run.directory.rglob("pytorch_model*.bin")]:
                    path.unlink()

    def results(self) -> list[dict[str, Any]]:
        names = ("variant", "family", "seed", "point")
        return [
            {"run": run.name, **{name: getattr(run, name) for name in names}, **metrics}
            for run in self.runs
            if (metrics := self.metrics[run.directory]) is not None
        ]


def own_process(arguments: Any) -> dict[str, Any]:
    """The job `train` in a new process, in whose memory nothing is that other runs left; its errors are raised here."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # spawn: a forked process would begin with all that this one holds
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_train, arguments).result()


def _train(arguments: Any) -> dict[str, Any]:
    return run_job("train", None, **to_dict(arguments))


def _make(run: Run, failed: Sequence[str], train: Callable[[Any], Any]) -> str | None:
    """Train and evaluate; what went wrong, if anything did."""
    trace = beside(run.directory, ".error.txt")
    try:
        if run.after is not None:
            if run.after.directory.name in failed:
                raise RuntimeError(f"{run.after.name}, which it goes on from, failed")
            if not (run.after.directory / "modules.json").is_file():  # its weights were dropped
                for name in ("metrics.json", DROPPED):
                    (run.after.directory / name).unlink(missing_ok=True)
                train(run.after.arguments)
        again = changes(run.arguments, lambda: made_from(run.arguments)) == [f"{CONTENTS}model.name"]
        # the run it goes on from was made anew
        train(SimpleNamespace(**{**vars(run.arguments), "overwrite": True}) if again and run.after else run.arguments)
        trace.unlink(missing_ok=True)
    except Exception as error:  # one run must not stop the others; what happened is kept and reported
        write_text(trace, traceback.format_exc())
        return f"{type(error).__name__}: {error}"
    return None


def _starts(folder: Path, tasks: list[str], runs: Sequence[Run]) -> dict[str, Any]:
    """{encoder that runs start from, with what is said of it: what the job `evaluate` finds of it before training}."""
    found: dict[str, Any] = {}
    shown: dict[str, str] = {}  # the label of each
    for run in runs:
        model = run.arguments.model
        if run.after is not None or not tasks or model.name == SCRATCH:
            continue
        said = {key: value for key, value in asdict(model).items() if value != getattr(Model(), key)}
        told = [f"{key.replace('_', ' ')} {value}" for key, value in said.items() if key not in UNTOLD]
        asked = f" ({', '.join(told)})" if told else ""
        key = digest([model.name, told])
        if key not in shown:
            short = Path(model.name).name + asked
            shown[key] = label = model.name + asked if short in shown.values() else short
            print(f"before training: {label}", flush=True)
            found[label] = run_job(
                "evaluate",
                model=model,
                tasks=tasks,
                data={"dir": run.arguments.data.dir},
                polarity=polarity_of(run.arguments.polarity, model),
                batch_size=run.arguments.evaluation.batch_size,
                classifier=run.arguments.evaluation.classifier,
                batcher=run.arguments.evaluation.batcher,
                output=str(folder / f"{key[:16]}.json"),
                overwrite=True,  # one of other tasks
            )
    return found

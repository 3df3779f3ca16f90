"""The directory of a training run: whose it is, how far it got, what it holds."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from raoe_train.artifacts.processes import in_first
from raoe_train.artifacts.provenance import DROPPED, PICTURES, digest, fingerprint
from raoe_train.artifacts.writing import partial, read_json, replacing_folder, write_json, write_text
from raoe_train.data.sources import contents, pool
from raoe_train.encoders.named import SCRATCH, Model, second_of
from raoe_train.evaluation.tasks import Task
from raoe_train.recipe import read_yaml, to_dict
from raoe_train.training.measures import tasks_of

RECIPE, MADE_FROM, MODEL_FILES = "recipe.yaml", "made_from.json", "model_files.json"
CHECKPOINTS, INITIAL, TEACHER = "checkpoints", "initial", "teacher"  # folders of a run that is not finished
EVENTS = "tensorboard"
STATE = "trainer_state.json"  # of a checkpoint
CONTENTS = "contents of "
# keys of no result
NO_MATTER = ("output", "overwrite", "dry_run", "device", "device_map", "cache", "cache_dir", "report_to")


def made_from(arguments: Any, tasks: Mapping[str, Task] | None = None) -> dict[str, Any]:
    """{key of the recipe: what it names holds} of the data, encoders and tasks of a run with these arguments of the job
    `train`, as plain values; None of what is on a hub, or comes with us. `tasks` are those of tasks_of."""
    data = arguments.data
    if tasks is None:
        tasks = tasks_of(arguments.evaluation, data, arguments.model, arguments.polarity)
    found: dict[str, Any] = {
        f"data.train {number}": [contents(part) for part in pool(source)] for number, source in enumerate(data.train, 1)
    }
    found["data.dev"] = [contents(part) for source in data.dev for part in pool(source)] if data.dev else None
    found |= {key: fingerprint(name) if name else None for key, name in _encoders(arguments).items()}
    return {**found, **{f"evaluation.tasks {word}": digest(task.content) for word, task in tasks.items()}}


def _encoders(arguments: Any) -> dict[str, str | None]:
    """{key of the recipe: name} of the encoders that a run reads; None of one that it makes, or has none of."""
    model, teacher = arguments.model, arguments.teacher
    found = {"model.name": None if model.name == SCRATCH else model.name, "teacher.name": teacher.name}
    return {**found, "teacher.second.name": second.name} if (second := second_of(teacher)) else found


def changes(arguments: Any, made: Callable[[], Mapping[str, Any]]) -> list[str] | None:
    """In what the run in `arguments.output` differs from one with these arguments: keys of the recipe, or "contents of
    KEY" where it is the same but for what `made` gives, that of made_from; None where there is no run of ours."""
    output = Path(arguments.output or "")
    try:
        recorded = read_yaml(output / RECIPE)
    except (OSError, ValueError):
        return None
    if not isinstance(recorded, dict) or not {"model", "data", "loss"} <= recorded.keys():
        return None
    if changed := _different(_leaves(to_dict(arguments)), _leaves(recorded)):
        return changed
    return [CONTENTS + key for key in _different(made(), read_json(output / MADE_FROM))]


def finished_metrics(arguments: Any, made: Callable[[Any], Mapping[str, Any]] = made_from) -> dict[str, Any] | None:
    """What metrics.json holds if `arguments.output` has this very run, finished."""
    try:
        changed = changes(arguments, lambda: made(arguments))
    except (OSError, ValueError):  # what it is made from is not there any more
        return None
    return _metrics(Path(arguments.output or "")) if changed == [] else None


def claim(arguments: Any, made: Mapping[str, Any]) -> dict[str, Any] | None:
    """See that `arguments.output` can be the directory of a run with these arguments, of which `made` is made_from; its
    metrics if it holds that very run, finished. Where nothing is in the way the run begins, see begin.

    ValueError where a run of another recipe or of other contents is in the way and `overwrite` is not set, what is no
    run of ours, or an encoder that it needs.
    """
    output = Path(arguments.output)
    for key, name in _encoders(arguments).items():
        model = Path(name or "")
        if name and model.is_dir() and output.resolve() in (model.resolve(), *model.resolve().parents):
            raise ValueError(f"output {output} holds {key} {model}, which the run needs; choose another output")
    changed = changes(arguments, lambda: made)
    if changed == []:
        if finished := _metrics(output):
            clear_unfinished(output)
        return finished
    if changed is None:
        ours = {partial(output / name) for name in (RECIPE, MADE_FROM)} | {output / MADE_FROM}
        if output.is_dir() and set(output.iterdir()) - ours:
            raise ValueError(f"{output} is not empty and holds no run of ours; choose another output")
        begin(arguments, made)
    elif not arguments.overwrite:
        raise ValueError(
            f"{output} holds a run of {'other files' if changed[0].startswith(CONTENTS) else 'another recipe'} "
            f"(different: {', '.join(changed):.200}); choose another output, or --overwrite it"
        )
    return None


def begin(arguments: Any, made: Mapping[str, Any]) -> None:
    """Make `arguments.output` the directory of this run, unless it is: what another run left goes."""
    output = Path(arguments.output)
    if changes(arguments, lambda: made) == []:
        return
    for name in ("metrics.json", CHECKPOINTS, INITIAL, EVENTS, "log.jsonl", *PICTURES, DROPPED):
        _remove(output / name)
    saved = read_json(output / MODEL_FILES)  # an adapter among it would be loaded with what comes there
    for path in output.iterdir() if saved else ():  # not the names: they are a file's, and may lead elsewhere
        if path.name in saved:
            _remove(path)
    _remove(output / MODEL_FILES)
    write_json(output / MADE_FROM, made)
    write_text(output / RECIPE, yaml.safe_dump(to_dict(arguments), sort_keys=False, allow_unicode=True))


@contextmanager
def replacing_model(output: Path) -> Iterator[Path]:
    """A folder to save a model in: when the block ends well, its files and folders move to the run's directory, which
    is told their names before."""
    saved = partial(output / "model")
    _remove(saved)  # a killed process's: safetensors' temporary files have another name each time
    saved.mkdir()
    yield saved
    found = sorted(saved.iterdir())
    write_json(output / MODEL_FILES, {path.name: "folder" if path.is_dir() else "file" for path in found})
    for path in found:
        _remove(output / path.name)
        path.replace(output / path.name)
    saved.rmdir()


def clear_unfinished(output: Path) -> None:
    """Remove what only a run that is not finished needs."""
    for name in (CHECKPOINTS, INITIAL, TEACHER):
        _remove(output / name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def starting_encoder(model: Model, initial: Path, texts: Iterable[str], seed: int) -> Any:
    """The encoder before training; one made from scratch is kept in `initial`, for a run that goes on."""
    from raoe_train.encoders.load import load_encoder

    if model.name != SCRATCH:
        return load_encoder(model, sentences=texts, seed=seed, train=True)
    made: list[Any] = []

    def make() -> None:
        if (initial / "modules.json").is_file():
            return
        made.append(load_encoder(model, sentences=texts, seed=seed, train=True))
        with replacing_folder(initial) as whole:  # in one step: half of a tokenizer would be another one
            made[0].save_pretrained(str(whole), create_model_card=False)

    # the other processes cannot make it: in a process group, transformers saves nothing for them, where making it does
    in_first(make)
    return made[0] if made else load_encoder(replace(model, name=str(initial)), sentences=texts, seed=seed, train=True)


def newest_checkpoint(folder: Path, only_model: bool = False) -> Path | None:
    """The newest checkpoint that is whole. One that was not written to its end has no state, which comes last; one that
    is damaged, or has no optimizer though not `only_model` was saved, is left out with a line that says so."""
    steps = {path: path.name.rpartition("-")[2] for path in folder.glob("checkpoint-*")}  # of a copy it is no number
    ended = [path for path in steps if steps[path].isdecimal() and (path / STATE).exists()]
    for path in sorted(ended, key=lambda path: int(steps[path]), reverse=True):
        if (damaged := _damaged(path, only_model)) is None:
            return path
        print(f"{path} is left out: {damaged}", flush=True)
    return None


def _damaged(checkpoint: Path, only_model: bool) -> str | None:
    """What is wrong with a checkpoint, as far as its files say by themselves, without being read whole."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(checkpoint.rglob("*")):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".safetensors":
                with safe_open(str(path), "pt"):  # whose length has to be what its header says
                    pass
            elif path.suffix in (".pt", ".pth") and not zipfile.is_zipfile(path):
                raise ValueError
        except (ValueError, SafetensorError):
            return f"{path.relative_to(checkpoint)} is damaged"
    return None if only_model or any(checkpoint.rglob("*optim*")) else "it has no optimizer's state"


def log_writer(path: Path) -> Any:
    """A callback that writes the trainer's log as JSON lines; on resuming, without what came after the checkpoint."""
    from transformers import TrainerCallback

    def line(entry: dict[str, Any]) -> str:
        # transformers' train_loss divides the losses since the last resume by all steps
        return json.dumps({key: value for key, value in entry.items() if key != "train_loss"}) + "\n"

    class LogWriter(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                path.write_text("".join(map(line, state.log_history)), encoding="utf-8")

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                with path.open("a", encoding="utf-8") as file:
                    file.write(line(state.log_history[-1]))

    return LogWriter()


def keep_events(trainer: Any, folder: Path) -> None:
    """Let TensorBoard's files be in `folder`, unless its variable says where; checkpoints take theirs along."""
    from transformers.integrations import TensorBoardCallback

    for each in trainer.callback_handler.callbacks:
        if isinstance(each, TensorBoardCallback) and each.logging_dir is None:
            each.logging_dir = str(folder)


def _metrics(output: Path) -> dict[str, Any] | None:
    return read_json(output / "metrics.json") or None


def _different(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))


def _leaves(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Dotted keys and their values, without those that change no result."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in NO_MATTER:
            continue
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{where}{key}.")
        else:
            found[f"{where}{key}"] = value
    return found

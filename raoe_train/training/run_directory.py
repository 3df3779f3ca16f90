"""The directory of a training run: what it was made from, its checkpoints, the model in it."""

import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raoe_train.artifacts.processes import on_rank_zero
from raoe_train.artifacts.provenance import PICTURES, digest, fingerprint
from raoe_train.artifacts.resume import remove
from raoe_train.artifacts.writing import replacing_folder
from raoe_train.config import to_dict
from raoe_train.data.sources import contents, pool
from raoe_train.encoders.settings import SCRATCH, Model, second_of
from raoe_train.evaluation.tasks import Task

RECIPE, METRICS, LOG = "recipe.yaml", "metrics.json", "log.jsonl"
CHECKPOINTS, INITIAL, TEACHER = "checkpoints", "initial", "teacher"  # folders of a run that is not finished
EVENTS = "tensorboard"
FILES = (RECIPE, METRICS, LOG, *PICTURES, CHECKPOINTS, INITIAL, TEACHER, EVENTS)
STATE = "trainer_state.json"  # of a checkpoint
# settings that have no part in a result
WHERE_IT_RUNS = (
    ("output",),
    ("overwrite",),
    ("dry_run",),
    ("model", "device"),
    ("model", "device_map"),
    ("teacher", "device"),
    ("teacher", "cache"),
    ("teacher", "second", "device"),
    ("teacher", "second", "cache"),
    ("polarity", "reference", "device"),
    ("polarity", "reference", "cache"),
    ("training", "report_to"),
    ("training", "dataloader_num_workers"),
)


def settings_of(config: Any, tasks: Mapping[str, Task]) -> dict[str, Any]:
    """All that a run's result depends on: its recipe, and what the data, encoders and tasks in it hold."""
    return {"recipe": _without(to_dict(config), WHERE_IT_RUNS), "contents": _contents(config, tasks)}


def _contents(config: Any, tasks: Mapping[str, Task]) -> dict[str, Any]:
    """{key of the recipe: what it names holds}; None of what is on a hub, or is built in."""
    data, model, teacher = config.data, config.model, config.teacher
    encoders = {"model.name": None if model.name == SCRATCH else model.name, "teacher.name": teacher.name}
    if (second := second_of(teacher)) is not None:
        encoders["teacher.second.name"] = second.name
    return {
        "data.train": [[contents(part) for part in pool(source)] for source in data.train],
        "data.dev": [[contents(part) for part in pool(source)] for source in data.dev or []],
        **{key: fingerprint(name) if name else None for key, name in encoders.items()},
        "evaluation.tasks": {word: digest(task.content) for word, task in tasks.items()},
    }


def _without(values: dict[str, Any], paths: Iterable[tuple[str, ...]]) -> dict[str, Any]:
    """Nested values without the keys at these paths."""
    left = dict(values)
    for first, *rest in paths:
        if not rest:
            left.pop(first, None)
        elif isinstance(left.get(first), dict):
            left[first] = _without(left[first], [tuple(rest)])
    return left


def clear_unfinished(output: Path) -> None:
    """Remove what only a run that is not finished needs."""
    for name in (CHECKPOINTS, INITIAL, TEACHER):
        remove(output / name)


def starting_encoder(model: Model, initial: Path, texts: Iterable[str], seed: int) -> Any:
    """The encoder before training; one made from scratch is kept in `initial`, for a run that resumes."""
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
    on_rank_zero(make)
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

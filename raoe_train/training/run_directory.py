"""The directory of a training run: whose it is, how far it got, what it holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from raoe_train.artifacts.processes import in_first
from raoe_train.artifacts.writing import partial, read_json, write_text
from raoe_train.encoders.named import Model
from raoe_train.recipe import to_dict

CHECKPOINTS, INITIAL, TEACHER = "checkpoints", "initial", "teacher"  # folders of a run that is not finished
NO_MATTER = ("output", "overwrite", "device", "cache", "cache_dir")  # keys that change no result, in any section


def finished_metrics(arguments: SimpleNamespace) -> dict[str, Any] | None:
    """What metrics.json holds if `arguments.output` has this very run, finished. They are all of the job `train`."""
    output = Path(arguments.output or "")
    return _metrics(output) if _recorded(output) == _identity(to_dict(arguments)) else None


def claim(output: Path, recipe: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """Make `output` the directory of a run of this resolved recipe; its metrics if it holds that very run, finished.

    ValueError where another recipe's run, or anything else, is in the way and `overwrite` is not set.
    """
    file, ours, theirs = output / "recipe.yaml", _identity(recipe), _recorded(output)
    if theirs == ours:
        if finished := _metrics(output):
            clear_unfinished(output)
        return finished
    if theirs is not None and not overwrite:
        changed = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        raise ValueError(
            f"{output} holds a run of another recipe (different: {', '.join(changed)}); "
            "choose another output, or --overwrite it"
        )
    if theirs is None and output.is_dir() and set(output.iterdir()) - {partial(file)} and not overwrite:
        raise ValueError(f"{output} is not empty and holds no run of ours; choose another output, or --overwrite")
    for name in (CHECKPOINTS, INITIAL):
        shutil.rmtree(output / name, ignore_errors=True)
    for name in ("metrics.json", "log.jsonl", "run.png", "recipe.yaml"):
        (output / name).unlink(missing_ok=True)
    write_text(file, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
    return None


def clear_unfinished(output: Path) -> None:
    """Remove what only a run that is not finished needs."""
    for name in (CHECKPOINTS, INITIAL, TEACHER):
        shutil.rmtree(output / name, ignore_errors=True)


def starting_encoder(model: Model, initial: Path, texts: Iterable[str], seed: int) -> Any:
    """The encoder before training; one made from scratch is kept in `initial`, for a run that goes on."""
    from raoe_train.encoders.load import SCRATCH, load_encoder

    if model.name != SCRATCH:
        return load_encoder(model, sentences=texts, seed=seed, train=True)
    made: list[Any] = []

    def make() -> None:
        if (initial / "modules.json").is_file():
            return
        made.append(load_encoder(model, sentences=texts, seed=seed, train=True))
        made[0].save_pretrained(str(partial(initial)), create_model_card=False)
        shutil.rmtree(initial, ignore_errors=True)
        partial(initial).replace(initial)  # in one step: half of a tokenizer would be another one

    # the other processes cannot make it: in a process group, transformers saves nothing for them, where making it does
    in_first(make)
    return made[0] if made else load_encoder(replace(model, name=str(initial)), sentences=texts, seed=seed, train=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end (its state comes last)."""
    whole = [path for path in folder.glob("checkpoint-*") if read_json(path / "trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


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


def _recorded(output: Path) -> dict[str, Any] | None:
    """What decides on the run that is there; None where there is none."""
    recipe = output / "recipe.yaml"
    return _identity(yaml.safe_load(recipe.read_text(encoding="utf-8")) or {}) if recipe.is_file() else None


def _metrics(output: Path) -> dict[str, Any] | None:
    return read_json(output / "metrics.json") or None


def _identity(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Dotted keys and their values, without those that change no result."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _identity(value, f"{where}{key}.")
        elif key not in NO_MATTER:
            found[f"{where}{key}"] = value
    return found

"""The directory of a training run: whose it is, how far it got, what it holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from raoe_train.artifacts.writing import partial, write_text
from raoe_train.config import TrainConfig
from raoe_train.old_recipe import to_dict

CHECKPOINTS, INITIAL, TEACHER = "checkpoints", "initial", "teacher"  # folders of a run that is not finished
_NO_MATTER = ("model.device", "teacher.device", "teacher.cache", "polarity.cache", "data.cache_dir")


def finished_metrics(config: TrainConfig) -> dict[str, Any] | None:
    """What metrics.json holds if ``config.output`` has this very run, finished."""
    import yaml

    recipe, done = Path(config.output or "", "recipe.yaml"), Path(config.output or "", "metrics.json")
    if not (recipe.is_file() and done.is_file()):
        return None
    same = _identity(yaml.safe_load(recipe.read_text(encoding="utf-8")) or {}) == _identity(to_dict(config))
    return json.loads(done.read_text(encoding="utf-8")) if same else None


def claim_output(output: Path, config: TrainConfig) -> dict[str, Any] | None:
    """Make `output` this run's directory; its metrics if it holds this very run, finished.

    ValueError where another recipe's run, or anything else, is in the way and ``config.overwrite`` is not
    set.
    """
    import yaml

    recipe = output / "recipe.yaml"
    ours = _identity(to_dict(config))
    if recipe.is_file():
        theirs = _identity(yaml.safe_load(recipe.read_text(encoding="utf-8")) or {})
        if theirs == ours:
            finished = finished_metrics(config)
            if finished is not None:
                clear_unfinished(output)
            return finished
        if not config.overwrite:
            changed = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            raise ValueError(
                f"{output} holds a run of another recipe (different: {', '.join(changed)}); "
                "choose another output, or --overwrite it"
            )
    elif output.is_dir() and set(output.iterdir()) - {partial(recipe)} and not config.overwrite:
        raise ValueError(f"{output} is not empty and holds no run of ours; choose another output, or --overwrite")
    for name in (CHECKPOINTS, INITIAL):
        shutil.rmtree(output / name, ignore_errors=True)
    for name in ("metrics.json", "log.jsonl", "run.png", "recipe.yaml"):
        (output / name).unlink(missing_ok=True)
    write_text(recipe, yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True))
    return None


def clear_unfinished(output: Path) -> None:
    """Remove what only a run that is not finished needs."""
    for name in (CHECKPOINTS, INITIAL, TEACHER):
        shutil.rmtree(output / name, ignore_errors=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end (its state comes last)."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in found:
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return path
    return None


def log_writer(path: Path) -> Any:
    from transformers import TrainerCallback

    def line(entry: dict[str, Any]) -> str:
        # transformers' train_loss divides the losses since the last resume by all steps
        return json.dumps({key: value for key, value in entry.items() if key != "train_loss"}) + "\n"

    class LogWriter(TrainerCallback):
        """The trainer's log as JSON lines; on resuming, without what came after the checkpoint."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                path.write_text("".join(map(line, state.log_history)), encoding="utf-8")

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                with path.open("a", encoding="utf-8") as file:
                    file.write(line(state.log_history[-1]))

    return LogWriter()


def _identity(values: dict[str, Any]) -> dict[str, Any]:
    # What does not change the result: where it goes, what it may replace, what is measured afterwards.
    values = {key: value for key, value in values.items() if key not in ("output", "overwrite")}
    flat: dict[str, Any] = {}
    for section, value in values.items():
        flat.update({f"{section}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {section: value})
    return {key: value for key, value in flat.items() if key not in _NO_MATTER}

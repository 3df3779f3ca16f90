"""What a training run is measured by before and after: development pairs, and tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raoe_train.config import PositiveInt
from raoe_train.data.pairs import read_scored
from raoe_train.data.settings import Data
from raoe_train.encoders.settings import SCRATCH, FrozenEncoder, Model
from raoe_train.evaluation.classifiers import Classifier
from raoe_train.evaluation.tasks import Batcher, Polarity, Task, main_score, read_tasks


@dataclass
class Evaluation:
    """What to evaluate before and after training.

    Args:
        tasks: tasks of any kind, as of the job evaluate, looked up in data.dir
        before: evaluate them before training, too
        batch_size: sentences at a time
        classifier: classifier of transfer tasks
        batcher: change sentences of sts and transfer as the code of bellm or angle does
    """

    tasks: list[str] = field(default_factory=list)
    before: bool = True
    batch_size: PositiveInt = 64
    classifier: Classifier | None = None
    batcher: Batcher = None


def polarity_of(polarity: Polarity, model: Model) -> Polarity:
    """polarity, its reference the encoder that training starts from where the recipe names none."""
    if polarity.reference is not None or model.random_weights or model.name == SCRATCH:
        return polarity
    return replace(polarity, reference=FrozenEncoder(name=model.name))


def tasks_of(evaluation: Evaluation, data: Data, model: Model, polarity: Polarity) -> dict[str, Task]:
    """The recipe's tasks, read; {} where it names none."""
    asked: Any = {
        "prompt": model.prompt,
        "polarity": polarity_of(polarity, model),
        "classifier": evaluation.classifier,
        "batcher": evaluation.batcher,
    }
    return read_tasks(evaluation.tasks, data.dir, **asked) if evaluation.tasks else {}


def dev_pairs(data: Data, prompt: str | None) -> dict[str, Any]:
    """{name of its file: the pairs} of each source of data.dev."""
    found: dict[str, Any] = {}
    for source in data.dev or []:
        asked: Any = {"columns": data.columns or None, "labels": data.labels_of(source), "on_error": data.on_error}
        name = Path(source).name
        found[source if name in found else name] = read_scored(source, prompt, **asked)
    return found


def dev_evaluator(pairs: Mapping[str, Any], batch_size: int) -> Any:
    """The evaluator on development pairs; None where there are none."""
    if not pairs:
        return None
    from raoe_train.evaluation.sts import StsEvaluator

    return StsEvaluator(pairs, batch_size, "dev")


def dev_metrics(evaluator: Any, model: Any) -> dict[str, float | None]:
    """Correlations x 100, as of a task, the mean of several sets; None where they are undefined."""
    found = evaluator(model) if evaluator is not None else {}
    values = {name: 100 * found[f"dev_{name}_cosine"] for name in ("spearman", "pearson") if found}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def scores(metrics: Mapping[str, Any]) -> dict[str, tuple[float | None, float | None]]:
    """{name: (before, after)} training, x 100: of dev and each task's main metric, and of S of a polarity task."""
    before, after = metrics["before"], metrics["after"]
    found = {"dev": (before.get("spearman"), after.get("spearman"))} if "spearman" in after else {}
    for task, its in after.get("tasks", {}).items():
        earlier = before.get("tasks", {}).get(task, {})
        found[task] = (main_score(earlier), main_score(its))
        if "similarity" in its:
            found[f"{task} (S)"] = (earlier.get("similarity"), its.get("similarity"))
    return found


def score_rows(metrics: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """(name, before, after) of `scores`, as they are shown."""
    return [(name, *map(_shown, both)) for name, both in scores(metrics).items()]


def summary(metrics: dict[str, Any]) -> str:
    """The scores before and after, a line each."""
    scores = score_rows(metrics)
    rows = [("main metric x 100", "before", "after"), *scores] if scores else []
    width = max([24, *(len(name) for name, *_ in rows)])
    return "\n".join(f"{name:<{width}}{first:>8}{second:>8}" for name, first, second in rows)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

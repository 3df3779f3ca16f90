"""What a decoder does as an encoder, beside its scores: BeLLM's analyses, as `evaluate` asks for them by name.

Each is given a SentenceTransformer, tasks by their words (those of mteb have no sentences that are known here), the
JSON file of results, beside which plots are put, or None, and the sentences at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raoe_train.evaluation.tasks import EmbeddingTask, Task


def degradation(model: Any, tasks: Mapping[str, Task], output: Path | None, batch_size: int) -> dict[str, Any]:
    """Scores against the number of layers kept (the BeLLM paper's Figure 4)."""
    from raoe_train.studies import layers
    from raoe_train.studies.plots import plot_degradation

    found = layers.degradation(model, tasks, batch_size=batch_size)
    if output:
        plot_degradation({output.stem: found}, output.with_name(f"{output.stem}-degradation.png"))
    return found


def dependency(model: Any, tasks: Mapping[str, Task], output: Path | None, batch_size: int) -> dict[str, Any]:
    """How far a sentence's tokens depend on its pivot (Figures 2 and 5)."""
    from raoe_train.studies import dependency as dependencies
    from raoe_train.studies.plots import plot_dependency

    values = dependencies.dependency(model, _sentences(tasks), batch_size=batch_size)
    if output:
        plot_dependency({output.stem: values}, output.with_name(f"{output.stem}-dependency.png"))
    return dependencies.summary(values)


def words(model: Any, tasks: Mapping[str, Task], output: Path | None, batch_size: int) -> dict[str, Any]:
    """The words that the model would write at the pivot (Appendix A)."""
    from raoe_train.studies.words import word_report

    return word_report(model, _sentences(tasks), batch_size=batch_size)


def _sentences(tasks: Mapping[str, Task]) -> list[str]:
    embedded = [task for task in tasks.values() if isinstance(task, EmbeddingTask)]
    return list(dict.fromkeys(text for task in embedded for text in task.sentences()))

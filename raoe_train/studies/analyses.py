"""What a decoder does as an encoder, beside its scores: BeLLM's analyses, as `evaluate` writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raoe_train.evaluation.tasks import EmbeddingTask, Task


def analyse(
    names: list[str], model: Any, tasks: Mapping[str, Task], output: Path | None, batch_size: int
) -> dict[str, Any]:
    """{name: what that analysis found on the tasks' sentences}; with plots beside `output`, if that is given.

    Args:
        names: of degradation (score against layers kept, Figure 4), dependency (of tokens on the pivot, Figures 2 and
            5) and words (that the model would write at the pivot, Appendix A).
        model: a SentenceTransformer.
        tasks: by name; those of mteb have no sentences that are known here.
        output: the JSON file of results.
        batch_size: sentences at a time.

    Raises:
        ValueError: as each of them.
    """
    embedded = [task for task in tasks.values() if isinstance(task, EmbeddingTask)]
    sentences = list(dict.fromkeys(text for task in embedded for text in task.sentences()))
    return {name: ANALYSES[name](model, tasks, sentences, output, batch_size) for name in names}


def check_analyses(names: list[str]) -> None:
    """ValueError for a name that is none of ANALYSES."""
    for name in names:
        if name not in ANALYSES:
            raise ValueError(f"analyses must be of {', '.join(ANALYSES)}, got {name!r}")


def _degradation(model: Any, tasks: Any, sentences: list[str], output: Path | None, batch_size: int) -> dict[str, Any]:
    from raoe_train.studies.layers import degradation
    from raoe_train.studies.plots import plot_degradation

    found = degradation(model, tasks, batch_size=batch_size)
    if output:
        plot_degradation({_label(output): found}, _plot(output, "degradation"))
    return found


def _dependency(model: Any, tasks: Any, sentences: list[str], output: Path | None, batch_size: int) -> dict[str, Any]:
    from raoe_train.studies.dependency import dependency, summary
    from raoe_train.studies.plots import plot_dependency

    values = dependency(model, sentences, batch_size=batch_size)
    if output:
        plot_dependency({_label(output): values}, _plot(output, "dependency"))
    return summary(values)


def _words(model: Any, tasks: Any, sentences: list[str], output: Path | None, batch_size: int) -> dict[str, Any]:
    from raoe_train.studies.words import word_report

    return word_report(model, sentences, batch_size=batch_size)


def _plot(output: Path, name: str) -> Path:
    return output.with_name(f"{output.stem}-{name}.png")


def _label(output: Path) -> str:
    return output.stem


ANALYSES: dict[str, Callable[..., dict[str, Any]]] = {
    "degradation": _degradation,
    "dependency": _dependency,
    "words": _words,
}

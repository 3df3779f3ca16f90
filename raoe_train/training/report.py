"""A run's scores on the dev set and on tasks, and the outputs that show these scores: run.png, and raoe's section in
the model card."""

import itertools
import logging
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from raoe_train.config import marked
from raoe_train.evaluation.tasks import Task, encode_tasks, main_score
from raoe_train.inputs import recorded
from raoe_train.outputs import replacing
from raoe_train.training.certificate import table_of

logger = logging.getLogger(__name__)
# keys of log entries; all other keys of an entry with a loss are parts of the loss
NOT_PARTS = {"loss", "step", "epoch", "learning_rate", "grad_norm", "num_input_tokens_seen", "entropy"}
# Okabe and Ito's palette, which colour-blind readers can distinguish
COLOURS = ("#009E73", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
# {kind of task: {metric: name in logs}}; the first metric selects the best model
METRICS = {
    "sts": {"spearman": "spearman_cosine", "pearson": "pearson_cosine"},
    "retrieval": {name: f"cosine_{name}" for name in ("ndcg@10", "recall@10", "mrr@10", "accuracy@1")},
}
SELECTING = ("_spearman_cosine", "_cosine_ndcg@10")
NOT_SHOWN = re.compile("^eval_|_spearman_cosine|_cosine")  # parts of metric names that log lines and plots leave out
Log = Sequence[Mapping[str, Any]]


class DevEvaluator(SentenceEvaluator):
    """Evaluates tasks of one kind for the trainer. Returns {NAME_METRIC: mean over tasks} for the metrics in METRICS.
    The values are at most 1, or NaN if undefined. The best model is selected by NAME_spearman_cosine or
    NAME_cosine_ndcg@10. With several tasks, NAME_TASK_METRIC is the value for one task. NAME_WIDTH_METRIC is the value
    for embeddings truncated to a width in `widths`."""

    def __init__(self, tasks: Mapping[str, Task], batch_size: int, name: str, widths: Sequence[int] = ()) -> None:
        super().__init__()
        self.tasks, self.batch_size = tasks, batch_size
        self.widths = {name: None, **{f"{name}_{width}": width for width in widths}}
        self.metrics = METRICS[next(iter(tasks.values())).kind]
        self.primary_metric = f"{name}_{next(iter(self.metrics.values()))}"

    def __call__(self, model: Any, output_path: Any = None, epoch: int = -1, steps: int = -1) -> dict[str, float]:
        results: list[dict[str, dict[str, Any]]] = []
        tasks = [*self.tasks.values()]
        for task, rows in zip(tasks, encode_tasks(model, tasks, self.batch_size), strict=True):
            results.append({name: task.score(rows[:, :width].copy())[0] for name, width in self.widths.items()})
        metrics: dict[str, float] = {}
        for name in self.widths:
            for metric, key in self.metrics.items():
                values = [math.nan if each[name][metric] is None else each[name][metric] / 100 for each in results]
                metrics[f"{name}_{key}"] = sum(values) / len(values)
                if len(values) > 1:
                    metrics |= {f"{name}_{each}_{key}": value for each, value in zip(self.tasks, values, strict=True)}
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics


def _dev_metric(after: Mapping[str, Any]) -> str:
    """Return the name of the metric that selects the best checkpoint on the dev set."""
    return "spearman" if "spearman" in after else "ndcg@10"


def lower(after: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return a text such as "spearman falls from 73.63 to 30.40:" if training lowered the dev score, else ""."""
    name = _dev_metric(after)
    old, new = before.get(name), after.get(name)
    return "" if old is None or new is None or new >= old else f"{name} falls from {old:.2f} to {new:.2f}:"


def scores(metrics: Mapping[str, Any]) -> dict[str, tuple[float | None, float | None]]:
    """Return {name: (score before training, score after training)}, with scores x 100. The names are "dev" (the dev
    metric), the tasks' names and, for the similarity S of a polarity task, the task's name followed by " (S)"."""
    before, after = metrics["before"], metrics["after"]
    main = _dev_metric(after)
    table = {"dev": (before.get(main), after[main])} if main in after else {}
    for task, later in after.get("tasks", {}).items():
        earlier = before.get("tasks", {}).get(task, {})
        table[task] = (main_score(earlier), main_score(later))
        if "similarity" in later:
            table[f"{task} (S)"] = (earlier.get("similarity"), later.get("similarity"))
    return table


def summary(metrics: Mapping[str, Any]) -> str:
    """Format the scores before and after training as a table, one line for each score."""
    rows: list[tuple[str, ...]] = [("main metric x 100", "before", "after", "change")]
    for name, (before, after) in scores(metrics).items():
        change = "-" if before is None or after is None else f"{after - before:+.2f}"
        rows.append((name, *("-" if value is None else f"{value:.2f}" for value in (before, after)), change))
    width = max([24, *(len(name) for name, *_ in rows)])
    lines = [f"{name:<{width}}" + "".join(f"{value:>8}" for value in values) for name, *values in rows]
    return "\n".join(lines) if len(lines) > 1 else ""


def plot_run(log: Log, metrics: Mapping[str, Any], path: Path) -> bool:
    """Plot the scores before and after training (if there are any) as bars, and below them the logged losses and the
    dev metric x 100 over the steps. Return True if the plot was written, and False if no loss was logged or matplotlib
    failed. The suffix of `path` sets the file format."""
    if not any("loss" in entry for entry in log):
        return False
    try:
        figure = run_figure(pd.DataFrame(log).set_index("step"), scores(metrics))
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=150)
    except Exception as error:  # a plot must not stop the job; matplotlib may read a name as a formula
        logger.warning("cannot draw plots: %s", error)
        return False
    return True


def run_figure(log: pd.DataFrame, bars: Mapping[str, tuple[float | None, float | None]]) -> Any:
    from matplotlib.figure import Figure  # does not change the user's pyplot backend

    heights = [1 + 0.5 * len(bars), 4.0] if bars else [4.0]
    figure = Figure(figsize=(7.0, sum(heights)), layout="constrained")
    *top, left = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    for axes in top:
        for number, (label, colour) in enumerate((("before", COLOURS[-1]), ("after", COLOURS[1]))):
            widths = np.array([pair[number] for pair in bars.values()], float)  # None becomes NaN
            places = np.arange(len(bars)) + 0.4 * number - 0.2
            drawn = axes.barh(places, widths, 0.4, color=colour, label=label)
            axes.bar_label(drawn, ["" if math.isnan(width) else f"{width:.2f}" for width in widths], padding=2)
        axes.set_yticks(range(len(bars)), [*bars], parse_math=False)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title("scores before and after training (main metric x 100)")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    parts = log[log["loss"].notna()].dropna(axis=1, how="all").columns.difference([*NOT_PARTS])
    colours = itertools.cycle(COLOURS)
    for key in ["loss", *parts]:
        left.plot(log[key].dropna(), color=next(colours), label=key)
    left.set(xlabel="step", ylabel="training loss")
    left.locator_params("x", integer=True)
    if dev := sorted(key for key in log if key.endswith(SELECTING)):
        right = left.twinx()
        right.set_ylabel("dev metric x 100")
        for key in dev:
            label = f"{NOT_SHOWN.sub('', key)} (right)"
            right.plot(100 * log[key].dropna(), "o-", markersize=3, color=next(colours), label=label)
    handles = [line for axes in figure.axes[len(top) :] for line in axes.lines]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


def card_section(config: Any, metrics: Mapping[str, Any], picture: str | None) -> list[str]:
    """Return the paragraphs of raoe's section in the model card: the recipe, the scores in `metrics` (the content of
    metrics.json), the file name of the plot, and the certificate."""
    recipe = yaml.safe_dump(recorded(config, digests=False), sort_keys=False, allow_unicode=True)
    for _, path in marked(config, "read"):
        if os.path.isabs(path):
            recipe = recipe.replace(path, Path(path).name)
    versions = ", ".join(f"{name} {version}" for name, version in metrics["versions"].items())
    paragraphs = [
        "## Recipe and scores",
        "`raoe-train train recipe.yaml --output DIR` repeats this training. The recipe (also saved as recipe.yaml):",
        _code(recipe),
        f"{metrics['steps']:,} steps in {metrics['seconds']:,} s, with {versions}.",
        _code(summary(metrics)),
        f"![{Path(picture).stem}]({picture})" if picture else "",
        _code(table_of(metrics["certificate"])) if "certificate" in metrics else "",
    ]
    return [paragraph for paragraph in paragraphs if paragraph]


def _code(text: str) -> str:
    """Indent lines, so that Markdown shows them as code and does not interpret them."""
    return textwrap.indent(text.rstrip(), "    ")

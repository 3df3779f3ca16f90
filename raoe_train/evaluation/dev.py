"""The evaluator that scores an encoder on the dev set during training."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from raoe_train.evaluation.tasks import Task, encode_tasks

# {kind of task: {metric: name in logs}}; the first metric selects the best model
METRICS = {
    "sts": {"spearman": "spearman_cosine", "pearson": "pearson_cosine"},
    "retrieval": {name: f"cosine_{name}" for name in ("ndcg@10", "recall@10", "mrr@10", "accuracy@1")},
}
SELECTING = ("_spearman_cosine", "_cosine_ndcg@10")
NOT_SHOWN = re.compile("^eval_|_spearman_cosine|_cosine")  # parts of metric names that log lines and plots leave out


class DevEvaluator(SentenceEvaluator):
    """Evaluates tasks of one kind for the trainer. Returns {NAME_METRIC: mean over tasks} for METRICS, with values up
    to 1, or NaN. NAME_spearman_cosine or NAME_cosine_ndcg@10 selects the best model. With several tasks,
    NAME_TASK_METRIC is the value of one task. NAME_WIDTH_METRIC is for embeddings truncated to a width in `widths`."""

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
            results.append({name: task.score(rows[:, :width])[0] for name, width in self.widths.items()})
        metrics: dict[str, float] = {}
        for name in self.widths:
            for metric, key in self.metrics.items():
                values = [math.nan if each[name][metric] is None else each[name][metric] / 100 for each in results]
                metrics[f"{name}_{key}"] = sum(values) / len(values)
                if len(values) > 1:
                    metrics |= {f"{name}_{each}_{key}": value for each, value in zip(self.tasks, values, strict=True)}
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

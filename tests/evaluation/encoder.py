"""Evaluate an encoder in one call."""

from raoe_train.evaluation.tasks import evaluate_tasks, read_tasks


def evaluate_encoder(model, tasks, data_dir=None, batch_size=64, **how):
    return evaluate_tasks(model, read_tasks(tasks, data_dir, **how), batch_size)

"""The job `evaluate`: compute an encoder's metrics on evaluation tasks."""

from typing import TYPE_CHECKING, Any

from raoe_train.config import merge
from raoe_train.evaluation.sts import conditional_prompt
from raoe_train.evaluation.tasks import encode_tasks, evaluate_tasks, read_tasks, suite_tasks, table, write_outcomes
from raoe_train.inputs import recorded
from raoe_train.jobs.settings import EvaluateConfig
from raoe_train.jobs.shared import check_paths, job, output_of, require
from raoe_train.outputs import Output, versions
from raoe_train.processes import print_on_rank_zero, rank_and_world

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


@job(together=True)
@print_on_rank_zero()
def evaluate(config: EvaluateConfig, output: Output | None) -> dict[str, Any]:
    """Evaluate an encoder on similarity, transfer, polarity and retrieval tasks.

    The result is printed as a table and, if `output` is set, written to OUTPUT. OUTPUT.examples.npz stores the
    per-example results from which the main metrics are computed. Finished embeddings are stored in OUTPUT.parts/ until
    OUTPUT is written, so that an interrupted job can resume, even with a different number of processes. Under torchrun,
    `output` must be set. Each process then encodes its share of the texts, and rank 0 computes the scores.

    Returns:
        {"tasks": {task: {"kind", "main": name of the main metric, metric: value, …}}, "average": mean of the main
        metrics, x100, "averages": {kind: mean of its tasks} if there are several kinds, "model": its name, or None for
        a model in memory, "versions", "settings"}. Undefined metrics and their averages are None.
    """
    return _evaluate(config, output, None)


def evaluate_model(model: "SentenceTransformer", **settings: Any) -> dict[str, Any]:
    """Evaluate a SentenceTransformer in memory, with the settings of the job `evaluate`. An earlier result is never
    reused, because the job cannot tell whether the weights in memory have changed."""
    if not hasattr(model, "prompts"):
        raise ValueError(f"evaluate_model needs a loaded encoder, got {model!r}: pass rt.load_encoder(name)")
    config = merge(EvaluateConfig, [settings])
    check_paths(config)
    output = output_of(config)
    if output and output.finished() and not config.overwrite:
        problem = "exists and may belong to another model"
        raise ValueError(f"output {config.output} {problem}: choose another output, or set overwrite=True")
    result = _evaluate(config, output, model)
    return output.finish(result) if output else result


def _evaluate(config: EvaluateConfig, output: Output | None, model: Any) -> dict[str, Any]:
    if model is None:
        require(config.model.name, "model.name", "the encoder to evaluate")
        if output is None and rank_and_world()[1] > 1:
            raise ValueError("--output is missing: several processes need it to exchange embeddings in OUTPUT.parts")
    # read tasks before the model is loaded, so that a misspelt task name is reported at once
    data = config.data
    tasks = read_tasks(
        [*config.tasks, *(task for task in suite_tasks(config.suite) if task not in config.tasks)],
        data.dir,
        columns=data.columns,
        on_error=data.on_error,
        prompt=conditional_prompt(config.model if model is None else model),
        polarity=config.polarity,
        classifier=config.classifier,
    )

    from raoe_train.encoders.load import load_encoder, warn_without_cosine

    encoder = load_encoder(config.model) if model is None else model
    warn_without_cosine(encoder)
    for word, task in tasks.items():
        task.print_cut(encoder, word)
    folder = output.parts if output and model is None else None  # weights in memory may have changed since
    if rank_and_world()[0] > 0 and folder:
        for _ in encode_tasks(encoder, [*tasks.values()], config.batch_size, folder):
            pass
        return {}
    outcomes: dict[str, Any] = {}
    result = evaluate_tasks(encoder, tasks, config.batch_size, outcomes, config.truncate_dim, folder)
    result.update(model=config.model.name if model is None else None)
    if output:
        write_outcomes(output.path, outcomes, output.settings)
    else:
        result.update(versions=versions(), settings=recorded(config))
    print(table(result))
    return result

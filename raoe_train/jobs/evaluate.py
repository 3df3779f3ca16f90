"""The job `evaluate`, and the same from Python for an encoder in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raoe_train.artifacts.provenance import commit, digest, earlier_result, identity, versions
from raoe_train.artifacts.writing import write_json
from raoe_train.evaluation.outcomes import Outcomes, write_outcomes
from raoe_train.evaluation.submission import conditional_prompt, read_unlabelled, submit
from raoe_train.evaluation.tasks import Task, evaluate_tasks, read_tasks, suite_tasks, table
from raoe_train.studies.analyses import analyse, check_analyses

if TYPE_CHECKING:
    from raoe_train.config import EvaluateConfig


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """The job `evaluate`: see evaluate_encoder; writes the result to `output` if that is given, and prints it
    as a table. With `suite`, the tasks of SUITES beside those named; with `analyses`, see there; with `submission`,
    predictions for Conditional STS. What main metrics are made of, example by example, goes to OUTPUT.examples.npz, for
    the job `report`. Results of mteb's tasks are kept in OUTPUT.mteb/, as they come.

    Returns:
        {"tasks": {word: {"kind", "main", metric: value, …}}, "average", "analyses": {name: …}, "model", "versions",
        "commit", "settings"}.

    Raises:
        ValueError: as evaluate_encoder; or the output of other settings is there and overwrite is not set.
    """
    # before the model is loaded, so that a misspelt task costs no time
    prompt = conditional_prompt(config.model.name, config.model.prompt)
    check_analyses(config.analyses)
    rows = None
    if config.submission:
        if not config.data.input:
            raise ValueError("data.input is missing: the C-STS rows to predict")
        rows = read_unlabelled(config.data.input, config.data.columns, prompt)
    output = Path(config.output).expanduser() if config.output else None
    model_settings = identity(config.model)
    words = [*config.tasks, *(task for task in suite_tasks(config.suite) if task not in config.tasks)]
    tasks: dict[str, Task] = {}
    if words or rows is None:
        tasks = read_tasks(
            words,
            config.data.dir,
            columns=config.data.columns,
            on_error=config.data.on_error,
            prompt=prompt,
            # a folder for each state of the model: mteb tells models by their names, which a model trained anew keeps
            cache=output and output.with_name(output.name + ".mteb") / digest(model_settings)[:16],
            polarity=config.polarity,
            batch_size=config.batch_size,
        )
    settings = {
        "model": model_settings,
        "tasks": {word: digest(task.content()) for word, task in tasks.items()},
        "analyses": config.analyses,
    }
    result = None
    if output and rows is None:
        result = earlier_result(output, output, settings, config.overwrite)
    if result is None:
        from raoe_train.encoders.load import load_encoder

        model = load_encoder(config.model)
        outcomes: dict[str, Outcomes] = {}
        result = evaluate_tasks(model, tasks, config.batch_size, outcomes)
        if config.analyses:
            result["analyses"] = analyse(config.analyses, model, tasks, output, config.batch_size)
        if rows is not None:
            result["predictions"] = submit(model, rows, str(prompt), str(config.submission), config.batch_size)
        result.update(model=config.model.name, versions=versions(), commit=commit(), settings=settings)
        if output:
            write_outcomes(output, outcomes, settings)
            write_json(output, result)
    if tasks:
        print(table(result))
    for name, found in result.get("analyses", {}).items():
        print(f"{name}: {json.dumps({key: value for key, value in found.items() if key != 'examples'})}")
    return result

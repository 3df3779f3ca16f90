"""The job `evaluate`, and the same from Python for an encoder in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raoe_train.data.files import write_json
from raoe_train.evaluation.analyses import analyse, check_analyses
from raoe_train.evaluation.comparing import write_examples
from raoe_train.evaluation.conditional import conditional_prompt, read_unlabelled, submit
from raoe_train.evaluation.tasks import Examples, Task, evaluate_tasks, read_tasks, suite_tasks, table
from raoe_train.provenance import commit, digest, earlier_result, identity, versions

if TYPE_CHECKING:
    from raoe_train.config import EvaluateConfig, PolarityConfig


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
        from raoe_train.encoder import load_encoder

        model = load_encoder(config.model)
        examples: dict[str, Examples] = {}
        result = evaluate_tasks(model, tasks, config.batch_size, examples)
        if config.analyses:
            result["analyses"] = analyse(config.analyses, model, tasks, output, config.batch_size)
        if rows is not None:
            result["predictions"] = submit(model, rows, str(prompt), str(config.submission), config.batch_size)
        result.update(model=config.model.name, versions=versions(), commit=commit(), settings=settings)
        if output:
            write_examples(output, examples, settings)
            write_json(output, result)
    if tasks:
        print(table(result))
    for name, found in result.get("analyses", {}).items():
        print(f"{name}: {json.dumps({key: value for key, value in found.items() if key != 'examples'})}")
    return result


def evaluate_encoder(
    model: Any,
    tasks: Sequence[str],
    data_dir: str | Path | None = None,
    batch_size: int = 64,
    *,
    prompt: str | None = None,
    polarity: PolarityConfig | None = None,
) -> dict[str, Any]:
    """Scores of an encoder on tasks of any kind.

    Args:
        model: a SentenceTransformer.
        tasks: KIND:NAME or KIND:FILE, with KIND of KINDS: sts (Spearman of cosines and human scores), transfer
            (accuracy of a logistic regression), rerank (MAP), captions (strict retrieval), mteb, polarity. A bare NAME
            is of the kind that SUITES says, others and bare files (FILE, FILE#split, builtin#test) are sts. NAME is
            found in data_dir as NAME.*, KIND/NAME.* or else */NAME.*, or in SentEval's folders. For sts, rerank and
            captions NAME is the test split where the file has splits; NAME#dev is another one of its splits; NAME-all
            is all. Of polarity NAME is the file with its splits train and test.
        data_dir: folder of the sets.
        batch_size: sentences at a time.
        prompt: where it has a {condition}, the sets are C-STS files, see read_scored.
        polarity: of tasks of kind polarity.

    Returns:
        {"tasks": {word: {"kind", "main": name of the main metric, metric: value, …}}, "average": mean of the main
        metrics, x100}, of several kinds also "averages": {kind: that of its tasks}. A metric is None, and so are the
        averages over it, where it is undefined, as a correlation is where all cosines of a set are equal.

    Raises:
        ValueError: an unknown or ambiguous task, or data that its kind cannot use; see the kinds' readers.
    """
    found = read_tasks(tasks, data_dir, prompt=prompt, polarity=polarity, batch_size=batch_size)
    return evaluate_tasks(model, found, batch_size)

"""The job `evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from raoe_train.artifacts.once import beside, found
from raoe_train.artifacts.provenance import commit, digest, versions
from raoe_train.artifacts.writing import write_json
from raoe_train.data.settings import Data
from raoe_train.encoders.named import Model, identity
from raoe_train.evaluation.analyses import ANALYSES, is_decoder
from raoe_train.evaluation.classifiers import Classifier
from raoe_train.evaluation.outcomes import Outcomes, write_outcomes
from raoe_train.evaluation.submission import conditional_prompt, read_unlabelled, submit
from raoe_train.evaluation.tasks import Batcher, Polarity, Task, evaluate_tasks, read_tasks, suite_tasks, table
from raoe_train.jobs.shared import job
from raoe_train.recipe import Option


@job
def evaluate(
    model: Annotated[Model, Option(word="name", live=True)] = Model(),
    tasks: Annotated[
        list[str],
        "NAME (looked up in data.dir), FILE, or KIND:NAME and KIND:FILE of sts, transfer, rerank, captions, mteb, "
        "polarity",
    ] = [],
    data: Annotated[Data, Option(word="dir")] = Data(),
    suite: Annotated[list[str], "tasks beside these: sts, transfer, rerank or all; mteb-english-v1, or -v2"] = [],
    polarity: Annotated[Polarity, Option()] = Polarity(),
    classifier: Annotated[Classifier, Option(word="name")] = Classifier(),
    batcher: Annotated[Batcher, "sentences of sts and transfer as bellm's code, or angle's, hands them over"] = None,
    analyses: Annotated[list[str], "of the tasks' sentences: degradation, dependency, words"] = [],
    submission: Annotated[
        str | None, Option("JSON file of predictions for data.input, C-STS rows without labels", writes="file")
    ] = None,
    batch_size: Annotated[int, Option("sentences at a time", least=1)] = 64,
    output: Annotated[str | None, "JSON file to write"] = None,
    overwrite: Annotated[bool, "replace the output of another setting"] = False,
) -> dict[str, Any]:
    """Scores of an encoder: similarity, transfer, reranking, captions, MTEB.

    The result is printed as a table. With `output` it is written, and beside it OUTPUT.examples.npz, what main metrics
    are made of, for the job `report`; results of mteb's tasks are kept in OUTPUT.mteb/, as they come. From Python the
    model may also be a SentenceTransformer in memory; what it gave is never found again, as nothing tells its weights
    from others. The analyses are BeLLM's: degradation (Figure 4), dependency (Figures 2 and 5) and words (Appendix A),
    with plots beside `output`.

    Returns:
        {"tasks": {word: {"kind", "main": name of the main metric, metric: value, …}}, "average": mean of the main
        metrics, x100, "averages": {kind: that of its tasks} where there are several, "categories" of the suites
        mteb-english, {kind: {category: {"mean", "tasks"}}}, "analyses": {name: …},
        "predictions": how many of a submission, "model": its name, None of one in memory, "versions", "commit",
        "settings"}. A metric that is undefined, and averages over it, are None.

    Raises:
        ValueError: an unknown or ambiguous task, data that its kind cannot use, or the output of other settings (or of
            a model in memory) in the way.
        FileNotFoundError: a file or a model that is not there.
    """
    # before the model is loaded, so that a misspelt task costs no time
    prompt = conditional_prompt(model)
    for name in analyses:
        if name not in ANALYSES:
            raise ValueError(f"analyses must be of {', '.join(ANALYSES)}, got {name!r}")
    rows = read_unlabelled(data.input, data.columns, prompt) if submission else None
    path = Path(output).expanduser() if output else None
    named = isinstance(model, Model)
    model_settings = identity(model) if named else None
    words = [*tasks, *(task for task in suite_tasks(suite) if task not in tasks)]
    read: dict[str, Task] = {}
    if words or rows is None:
        read = read_tasks(
            words,
            data.dir,
            columns=data.columns,
            on_error=data.on_error,
            prompt=prompt,
            # a folder for each state of the model: mteb tells models by their names, which a model trained anew keeps
            cache=beside(path, ".mteb") / digest(model_settings)[:16] if path and named else None,
            polarity=polarity,
            classifier=classifier,
            batcher=batcher,
        )
    settings = {
        "model": model_settings,
        "tasks": {word: digest(task.content) for word, task in read.items()},
        "analyses": analyses,
    }
    result = None
    if path and path.is_dir():
        raise ValueError(f"output {path} is a folder: name a file")
    if path and not named and path.exists() and not overwrite:
        raise ValueError(f"output {path} is there already, and the model is one in memory; overwrite replaces it")
    if path and named and rows is None:
        result = found(path, settings, overwrite, summary=path)
    if result is None:
        from raoe_train.encoders.load import load_encoder

        encoder = load_encoder(model) if named else model
        if "words" in analyses and not is_decoder(encoder):
            raise ValueError(f"analyses words: {model.name if named else 'the model'} is no decoder: it writes none")
        outcomes: dict[str, Outcomes] = {}
        result = evaluate_tasks(encoder, read, batch_size, outcomes)
        if analyses:
            result["analyses"] = {name: ANALYSES[name](encoder, read, path, batch_size) for name in analyses}
        if rows is not None:
            result["predictions"] = submit(encoder, rows, str(submission), batch_size)
        made_by = model.name if named else None
        result.update(model=made_by, versions=versions(), commit=commit(), settings=settings)
        if path:
            write_outcomes(path, outcomes, settings)
            write_json(path, result)
    if read:
        print(table(result))
    for name, analysed in result.get("analyses", {}).items():
        print(f"{name}: {json.dumps({key: value for key, value in analysed.items() if key != 'examples'})}")
    return result

"""The job `merge`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from raoe_train.artifacts.provenance import commit, versions
from raoe_train.artifacts.writing import replacing_folder, write_json
from raoe_train.data.settings import Data
from raoe_train.encoders.interpolation import best_between, weights_of
from raoe_train.encoders.named import Model
from raoe_train.evaluation.tasks import evaluate_encoder, main_score
from raoe_train.jobs.shared import folder_to_write, job
from raoe_train.recipe import Option
from raoe_train.training.measures import dev_evaluator, dev_metrics, dev_pairs


@job
def merge(
    model: Annotated[Model, Option(word="name")] = Model(),
    start: Annotated[str | None, "the encoder that model was trained from, by name or path"] = None,
    weights: Annotated[list[float], Option("of model's weights, the rest of start's", least=0, most=1)] = [0.5],
    data: Annotated[Data, Option(word="dev")] = Data(),
    tasks: Annotated[list[str], "to evaluate at every weight, as of the job evaluate, looked up in data.dir"] = [],
    batch_size: Annotated[int, Option("sentences at a time", least=1)] = 64,
    output: Annotated[str | None, "directory to write the encoder to"] = None,
    overwrite: Annotated[bool, "replace what is in output"] = False,
) -> dict[str, Any]:
    """Go part of the way from an encoder to the one it was trained to.

    The encoder saved in `output` has weights between both (Wortsman et al. 2022). Of several `weights` it is the one
    best on data.dev; all of them are evaluated, and shown as a table.

    Returns:
        {"weight": of the encoder that is saved, "curve": [{"weight", "dev": its Spearman x 100, "tasks": …, "average"}
        for each], "model", "start", "versions", "commit"}, also written to output/merge.json.

    Raises:
        ValueError: encoders that differ in more than weights, a weight beyond 0 and 1, or several to choose from and no
            data.dev; an output that is not empty and not to be overwritten.
        FileNotFoundError: an encoder or data that is not there.
    """
    from raoe_train.encoders.load import load_encoder

    if not start:
        raise ValueError("--start is missing: the encoder that the model was trained from")
    if not weights:
        raise ValueError("weights is empty: say numbers from 0, the encoder before training, to 1, after it")
    if len(weights) > 1 and output and not data.dev:
        raise ValueError(f"--data.dev is missing: the pairs to choose one of {len(weights)} weights by")
    folder = folder_to_write(output, overwrite, model.name, start) if output else None
    encoder, first = load_encoder(model), load_encoder(replace(model, name=start))
    ends = weights_of(first), weights_of(encoder)
    evaluator = dev_evaluator(dev_pairs(data, model.prompt), batch_size)

    def measure() -> dict[str, Any]:
        found = {"dev": dev_metrics(evaluator, encoder)["spearman"]} if evaluator else {}
        return {
            **found,
            **(evaluate_encoder(encoder, tasks, data.dir, batch_size, prompt=model.prompt) if tasks else {}),
        }

    weight, curve = best_between(encoder, *ends, weights, measure)
    made = {"model": model.name, "start": start, "versions": versions(), "commit": commit()}
    result = {"weight": weight, "curve": curve, **made}
    print("\n".join(map(_line, curve)))
    if folder:
        with replacing_folder(folder) as whole:
            encoder.save_pretrained(str(whole))
            write_json(whole / "merge.json", result)
        print(f"weight {weight:g} saved to {folder}")
    return result


def _line(row: dict[str, Any]) -> str:
    scores = {"dev": row["dev"]} if "dev" in row else {}
    scores |= {task: main_score(found) for task, found in row.get("tasks", {}).items()}
    if len(row.get("tasks", {})) > 1:
        scores["average"] = row["average"]
    shown = (f"{name} {'-' if value is None else format(value, '.2f')}" for name, value in scores.items())
    return "  ".join([f"weight {row['weight']:<5g}", *shown])

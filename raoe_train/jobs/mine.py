"""The job `mine`: examples for contrastive losses from labelled texts, by their neighbours under a frozen encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from raoe_train.artifacts import once
from raoe_train.artifacts.provenance import digest
from raoe_train.data.files import write_rows
from raoe_train.data.labelled import classes as classes_of
from raoe_train.data.labelled import distinct, labelled_table
from raoe_train.data.mined_examples import COLUMNS, Neighbours, as_rows, pairs, random_pairs, thinned, triplets
from raoe_train.data.settings import Data
from raoe_train.encoders.embed import unit_rows
from raoe_train.encoders.frozen import embeddings
from raoe_train.encoders.named import FrozenEncoder, identity
from raoe_train.encoders.neighbours import nearest_by_class
from raoe_train.jobs.shared import file_to_write, job
from raoe_train.recipe import Option


@dataclass
class Mining:
    """Which neighbours make examples."""

    GONE: ClassVar[dict[str, str]] = {
        "search": "exact search is all there is; leave it out",
        "batch_size": "say model.batch_size",
    }

    k: Annotated[int, Option("nearest neighbours of each sentence, of its own class and of the others", least=1)] = 16
    threshold: Annotated[float, Option("only neighbours whose cosine is above it", least=-1, below=1)] = 0.5
    drop: Annotated[float, Option("share of the examples to leave out, at random", least=0, below=1)] = 0.0
    count: Annotated[int | None, Option("at most so many examples, drawn at random", least=1)] = None
    seed: Annotated[int, Option("of what is left out", least=0, below=2**32)] = 42
    cache: Annotated[
        str | None,
        Option("directory that keeps embeddings and neighbours for other losses [until the end]", writes="folder"),
    ] = None


@job
def mine(
    data: Annotated[Data, Option(word="input")] = Data(),
    model: Annotated[FrozenEncoder, Option(word="name")] = FrozenEncoder(),
    loss: Annotated[str, f"{', '.join(COLUMNS)} (random pairs)"] = "triplet",
    mining: Mining = Mining(),
    output: Annotated[str | None, "file to write"] = None,
    overwrite: Annotated[bool, "replace the output of another setting"] = False,
) -> dict[str, Any]:
    """Examples for contrastive losses from labelled texts, by their neighbours.

    The margins paper's section 3.4: of every sentence the k nearest of its own class and the k nearest of all other
    classes, above a threshold, are combined to what `train` with loss.name `loss` reads, one example a row, and
    thinned. Embeddings and neighbours are kept in OUTPUT.parts/ until OUTPUT is written, or in mining.cache.

    Returns:
        {"output", "examples", "available": before thinning, "labels": {"1": of one class, "0": not} of pairs that say
        it, "anchors": different first sentences, "classes": {class: sentences}, "read": counts of the rows,
        "settings", "versions"}; where neighbours were looked for also "neighbours": {"own", "others"}, their mean
        number, and "without": sentences that have none. Also written to OUTPUT.json.

    Raises:
        ValueError: no input, output or encoder, a loss that nothing is mined for, fewer than two classes, a threshold
            that leaves nothing, an encoder that gives NaN, a malformed row, or the output of other settings in the way.
        FileNotFoundError: no such input or encoder.
    """
    path = file_to_write(output, data.input, "the labelled texts")
    if loss not in COLUMNS:
        raise ValueError(f"loss must be one of {', '.join(COLUMNS)}, got {loss!r}")
    if loss == "mse" and mining.count is None:
        raise ValueError("mining.count is missing: how many random pairs to draw for loss mse")
    if loss != "mse" and not model.name:
        raise ValueError("--model.name is missing: the encoder whose neighbours make examples")
    texts, counts = distinct(*labelled_table(str(data.input), columns=data.columns or None, on_error=data.on_error))
    if "second" in texts.column_names:
        raise ValueError(f"{data.input}: its examples are pairs of sentences; texts to mine are single")
    sentences, labels, sizes = texts["text"][:], texts["label"][:], classes_of(texts)
    if not sentences:
        raise ValueError(f"{data.input}: every text stands there with two classes, which says nothing of either")
    if len(sizes) < 2:
        raise ValueError(
            f"{data.input}: all {len(sentences)} texts are of one class, {labels[0]!r}; it takes two or more"
        )
    columns = COLUMNS[loss]
    settings = {
        "model": None if loss == "mse" else identity(model),
        "input": digest([sentences, labels]),
        "columns": columns,
        "mining": {key: value for key, value in asdict(mining).items() if key != "cache"},
    }
    if done := once.found(path, settings, overwrite):
        print(f"{path} is there already, from the same texts and settings")
        return done

    classes = np.unique(labels, return_inverse=True)[1]
    result: dict[str, Any] = {}
    if loss == "mse":
        examples, available = random_pairs(classes, int(mining.count or 0), mining.seed)
    else:
        cache = Path(mining.cache).expanduser() if mining.cache else once.parts(path, settings)
        found = neighbours(model, sentences, classes, mining, cache)
        draw = thinned(mining.drop, mining.count, mining.seed)
        if loss == "triplet":
            examples, available = triplets(found, draw)
        else:
            examples, available = pairs(found, draw, others=loss != "multiple_negatives")
        result["neighbours"] = {"own": float(found.own_count.mean()), "others": float(found.others_count.mean())}
        result["without"] = int(((found.own_count == 0) & (found.others_count == 0)).sum())
    if not available:
        raise ValueError(
            f"{data.input}: no sentence has the neighbours of a {loss} example above mining.threshold "
            f"{mining.threshold:g}: lower it"
        )
    once.claim(path, settings)
    write_rows(path, columns, as_rows(columns, examples, sentences))
    kinds = (1, 0) if columns[-1] in ("label", "score") else ()
    result |= {
        "examples": len(examples),
        "available": available,
        "labels": {str(label): int((examples[:, 2] == label).sum()) for label in kinds},
        "anchors": len(np.unique(examples[:, 0])),
        "classes": sizes,
        "read": counts,
    }
    result = once.finish(path, settings, result)
    _print(result, mining.count)
    return result


def neighbours(
    model: FrozenEncoder, texts: Sequence[str], classes: np.ndarray, mining: Mining, cache: Path
) -> Neighbours:
    """The neighbours of each text above mining.threshold; embeddings and neighbours are kept in `cache`."""
    unit = unit_rows(embeddings(model, texts, "reference", cache))

    def found(rows: Sequence[int]) -> np.ndarray:
        table = np.empty((len(rows), 2, mining.k), dtype=[("index", np.int64), ("cosine", np.float32)])
        for side, (indices, cosines) in enumerate(nearest_by_class(unit, classes, mining.k, rows[0], rows[-1] + 1)):
            table["index"][:, side], table["cosine"][:, side] = indices, cosines
        return table

    made_from = {"model": identity(model), "texts": digest([list(texts), classes.tolist()]), "k": mining.k}
    folder = cache / digest({**made_from, "shard": once.SHARD})[:16]
    table = np.concatenate(once.in_shards(folder, range(len(texts)), once.SHARD, found, "neighbours"))
    counts = (table["cosine"] > mining.threshold).sum(axis=2)
    if not counts.any():
        own, others = table["cosine"].max(axis=(0, 2))
        raise ValueError(
            f"no two texts have a cosine above mining.threshold {mining.threshold:g}: the highest is {own:.3f} within "
            f"a class and {others:.3f} between classes"
        )
    return Neighbours(table["index"][:, 0], table["index"][:, 1], counts[:, 0], counts[:, 1])


def _print(result: dict[str, Any], count: int | None) -> None:
    labels = result["labels"]
    kinds = f" ({labels['1']} of one class, {labels['0']} not)" if labels else ""
    print(f"{result['examples']} of {result['available']} examples{kinds} -> {result['output']}")
    if count is not None and result["examples"] < count:
        print(f"{count} were asked for: lower mining.threshold or mining.drop, or raise mining.k")
    if result.get("without"):
        print(f"{result['without']} sentences have no neighbour above the threshold")

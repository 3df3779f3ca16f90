"""The job `mine`: examples for contrastive losses from labelled texts, by their neighbours under a frozen encoder.

The margins paper's section 3.4 (example generation): of every sentence the k nearest of its own class and the k nearest
of all other classes, above a threshold, are combined to what a loss takes, and thinned.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.artifacts import once
from raoe_train.artifacts.provenance import digest, earlier_result, identity, versions
from raoe_train.artifacts.writing import write_json
from raoe_train.data.files import data_kind, write_rows
from raoe_train.data.labelled import classes as classes_of
from raoe_train.data.labelled import distinct, labelled_table
from raoe_train.data.mined_examples import Neighbours, pairs, random_pairs, thinned, triplets
from raoe_train.encoders.embed import unit_rows
from raoe_train.encoders.frozen import embeddings
from raoe_train.encoders.neighbours import exact_search, faiss_search

if TYPE_CHECKING:
    from raoe_train.config import MineConfig

SEARCHES = ("exact", "faiss")
COLUMNS = {
    "triplet": ["anchor", "positive", "negative"],
    "contrastive": ["sentence1", "sentence2", "label"],
    "online_contrastive": ["sentence1", "sentence2", "label"],
    "multiple_negatives": ["sentence1", "sentence2"],
    "mse": ["sentence1", "sentence2", "score"],
}
"""What a loss trains on. For mse that is SetFit's random pairs, which need no neighbours and no encoder."""


def mine(config: MineConfig) -> dict[str, Any]:
    """The job `mine`: write the examples that `train` with loss.name `config.loss` reads, one a row.

    Beside OUTPUT: OUTPUT.json, a summary, which is also returned. Embeddings and neighbours are kept in OUTPUT.parts/
    until OUTPUT is written (or in mining.cache, for other losses, too), so a killed job goes on after the last of them.

    Returns:
        {"output", "examples", "available": before thinning, "labels": {"1": of one class, "0": not} of pairs that say
        it, "anchors": different first sentences, "classes": {class: sentences}, "read": counts of the rows,
        "settings", "versions"}; where neighbours were looked for also "neighbours": {"own", "others"}, their mean
        number, and "without": sentences that have none.

    Raises:
        ValueError: no input or output, a loss that nothing is mined for, fewer than two classes, a threshold that
            leaves nothing, an encoder that gives NaN, a malformed row, or the output of other settings in the way and
            overwrite not set.
        FileNotFoundError: no such input or encoder.
    """
    output = _checked(config)
    wish, data = config.mining, config.data
    texts, counts = distinct(*labelled_table(str(data.input), columns=data.columns or None, on_error=data.on_error))
    if "second" in texts.column_names:
        raise ValueError(f"{data.input}: its examples are pairs of sentences; texts to mine are single")
    sentences, labels = texts["text"][:], texts["label"][:]
    sizes = classes_of(texts)
    _check_classes(sizes, str(data.input), wish.k)
    columns = COLUMNS[config.loss]
    settings = {
        "model": None if config.loss == "mse" else identity(config.model),
        "input": digest([sentences, labels]),
        "columns": columns,
        "mining": {**asdict(wish), "cache": None},
    }
    summary = output.with_name(output.name + ".json")
    if done := earlier_result(summary, output, settings, config.overwrite):
        print(f"{output} is there already, from the same texts and settings")
        return done

    classes = np.unique(labels, return_inverse=True)[1]
    parts = output.with_name(output.name + ".parts")
    result: dict[str, Any] = {"output": str(output)}
    if config.loss == "mse":
        examples, available = random_pairs(classes, int(wish.count or 0), wish.seed)
    else:
        cache = Path(wish.cache).expanduser() if wish.cache else parts
        found = neighbours(config, sentences, classes, cache)
        draw = thinned(wish.drop, wish.count, wish.seed)
        if config.loss == "triplet":
            examples, available = triplets(found, draw)
        else:
            examples, available = pairs(found, draw, others=config.loss != "multiple_negatives")
        result["neighbours"] = {"own": float(found.own_count.mean()), "others": float(found.others_count.mean())}
        result["without"] = int(((found.own_count == 0) & (found.others_count == 0)).sum())
    if not available:
        raise ValueError(
            f"{data.input}: no sentence has the neighbours of a {config.loss} example above mining.threshold "
            f"{wish.threshold:g}: lower it"
        )
    write_rows(output, columns, _rows(columns, examples, sentences))
    result |= {
        "examples": len(examples),
        "available": available,
        "labels": _labels(columns, examples),
        "anchors": len(np.unique(examples[:, 0])),
        "classes": sizes,
        "read": counts,
        "settings": settings,
        "versions": versions(),
    }
    write_json(summary, result)
    shutil.rmtree(parts, ignore_errors=True)
    _print(result, wish.count)
    return result


def neighbours(config: MineConfig, texts: Sequence[str], classes: np.ndarray, cache: Path) -> Neighbours:
    """The neighbours of each text above mining.threshold; embeddings and neighbours are kept in `cache`."""
    wish = config.mining
    unit = unit_rows(embeddings(config.model, texts, "reference", cache, wish.batch_size))
    search = (faiss_search if wish.search == "faiss" else exact_search)(unit, classes, wish.k)

    def found(rows: Sequence[int]) -> np.ndarray:
        sides = search(rows[0], rows[-1] + 1)
        table = np.empty((len(rows), 2, wish.k), dtype=[("index", np.int64), ("cosine", np.float32)])
        for side, (indices, cosines) in enumerate(sides):
            table["index"][:, side], table["cosine"][:, side] = indices, cosines
        return table

    made_from = {
        "model": identity(config.model),
        "texts": digest([list(texts), classes.tolist()]),
        "k": wish.k,
        "search": wish.search,
        "shard": once.SHARD,
    }
    folder = cache / digest(made_from)[:16]
    table = np.concatenate(once.in_shards(folder, range(len(texts)), once.SHARD, found, "neighbours"))
    counts = (table["cosine"] > wish.threshold).sum(axis=2)
    if not counts.any():
        own, others = table["cosine"].max(axis=(0, 2))
        raise ValueError(
            f"no two texts have a cosine above mining.threshold {wish.threshold:g}: the highest is {own:.3f} within a "
            f"class and {others:.3f} between classes"
        )
    return Neighbours(table["index"][:, 0], table["index"][:, 1], counts[:, 0], counts[:, 1])


def _checked(config: MineConfig) -> Path:
    wish = config.mining
    if not config.data.input:
        raise ValueError("--data.input is missing: the labelled texts")
    if not config.output:
        raise ValueError("--output is missing: the file to write")
    if config.loss not in COLUMNS:
        raise ValueError(f"loss must be one of {', '.join(COLUMNS)}, got {config.loss!r}")
    if config.loss == "mse" and wish.count is None:
        raise ValueError("mining.count is missing: how many random pairs to draw for loss mse")
    if wish.k < 1 or (wish.count is not None and wish.count < 1):
        raise ValueError(f"mining.k and mining.count must be at least 1, got {wish.k} and {wish.count}")
    if not -1 <= wish.threshold < 1:
        raise ValueError(f"mining.threshold is a cosine from -1 to below 1, got {wish.threshold}")
    if not 0 <= wish.drop < 1:
        raise ValueError(f"mining.drop is a share from 0 to below 1, got {wish.drop}")
    if wish.search not in SEARCHES:
        raise ValueError(f"mining.search must be one of {', '.join(SEARCHES)}, got {wish.search!r}")
    output = Path(config.output).expanduser()
    if data_kind(output) is None:
        raise ValueError(f"output {output}: the suffix names no format; .jsonl, .tsv or .parquet, perhaps with .gz")
    return output


def _check_classes(classes: dict[str, int], source: str, k: int) -> None:
    if len(classes) < 2:
        label, size = next(iter(classes.items()))
        raise ValueError(f"{source}: all {size} texts are of one class, {label!r}; it takes two or more")
    for label, size in classes.items():
        if size == 1:
            print(f"class {label!r} has a single sentence, which has no neighbour of its class")
        elif size <= k:
            print(f"class {label!r} has {size} sentences, so each has {size - 1} neighbours in it at most, not {k}")


def _rows(columns: Sequence[str], examples: np.ndarray, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    for numbers in examples.tolist():
        yield {
            # a pair of one class carries its 1 where the loss has no column for it
            name: number if name in ("label", "score") else texts[number]
            for name, number in zip(columns, numbers, strict=False)
        }


def _labels(columns: Sequence[str], examples: np.ndarray) -> dict[str, int]:
    if columns[-1] not in ("label", "score"):
        return {}
    return {str(label): int((examples[:, 2] == label).sum()) for label in (1, 0)}


def _print(result: dict[str, Any], count: int | None) -> None:
    labels = result["labels"]
    kinds = f" ({labels['1']} of one class, {labels['0']} not)" if labels else ""
    print(f"{result['examples']} of {result['available']} examples{kinds} -> {result['output']}")
    if count is not None and result["examples"] < count:
        print(f"{count} were asked for: lower mining.threshold or mining.drop, or raise mining.k")
    if result.get("without"):
        print(f"{result['without']} sentences have no neighbour above the threshold")

"""Tasks polarity:NAME: the polarity and semantic scores of an encoder on labelled texts in a file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.data.files import data_kind
from raoe_train.data.labelled import LabelledData, read_labelled
from raoe_train.data.sources import is_file
from raoe_train.frozen import embedder, in_shards
from raoe_train.provenance import digest, fingerprint

if TYPE_CHECKING:
    from raoe_train.config import PolarityConfig

PREFIX = "polarity:"  # of a task's name
SHARD = 4096  # sentences of a reference's cache


def evaluate_polarity(
    model: Any, task: str, data_dir: str | Path | None, options: PolarityConfig, batch_size: int = 64
) -> dict[str, Any]:
    """PolarityEvaluator.report of a SentenceTransformer on a task.

    Args:
        model: the SentenceTransformer.
        task: polarity:NAME, found as data_dir/polarity/NAME.* or data_dir/NAME.*, or polarity:FILE; a file of labelled
            texts with splits test and train, see read_labelled.
        data_dir: folder of the sets.
        options: of all of test (or options.max_sentences of it) the scores are; the source sentences, options.sources
            times as many, are drawn from train (the margins paper, section 3.2).
        batch_size: sentences at a time.

    Raises:
        ValueError: no reference, too few sentences in train, or as PolarityEvaluator and read_labelled.
        FileNotFoundError: no such file.
    """
    if not options.reference:
        raise ValueError(
            f"polarity.reference is missing: the frozen encoder whose cosines the semantic score of {task} is made of"
        )
    from raoe_train.evaluation.polarity_evaluator import PolarityEvaluator

    test, sources = read_polarity(task, data_dir, options)
    texts = [*test.text, *sources.text]
    evaluator = PolarityEvaluator(
        test.text,
        test.label,
        sources.text,
        sources.label,
        _reference(texts, options, batch_size),
        options.k,
        options.discount,
        batch_size,
    )
    return evaluator.report(evaluator.embed(model), options.curve)


def read_polarity(
    task: str, data_dir: str | Path | None, options: PolarityConfig
) -> tuple[LabelledData, LabelledData]:
    """(the sentences that are scored, those that are retrieved) of a task, see evaluate_polarity."""
    source = _find(task.removeprefix(PREFIX), data_dir)
    test = _drawn(read_labelled(f"{source}#test", repeats=True), options.max_sentences, options.seed)
    train, wanted = read_labelled(f"{source}#train"), options.sources * len(test)
    if len(train) < wanted:
        raise ValueError(
            f"{source}: {options.sources} times the {len(test)} sentences of test are {wanted}, and train has "
            f"{len(train)}: lower polarity.sources or polarity.max_sentences"
        )
    return test, _drawn(train, wanted, options.seed)


def _find(name: str, data_dir: str | Path | None) -> str:
    if is_file(name):
        return name
    if not data_dir:
        raise ValueError(f"data.dir is missing: the folder where task {PREFIX}{name} is looked up")
    folder = Path(data_dir).expanduser()
    for place in (folder / "polarity", folder):
        if found := sorted(path for path in place.glob(f"{name}.*") if data_kind(path)):
            return str(found[0])
    raise ValueError(f"no task {PREFIX}{name}: neither {folder}/polarity/{name}.* nor {folder}/{name}.*")


def _drawn(data: LabelledData, most: int | None, seed: int) -> LabelledData:
    if most is None or most >= len(data):
        return data
    chosen = sorted(random.Random(seed).sample(range(len(data)), most))
    return LabelledData([data.text[place] for place in chosen], [data.label[place] for place in chosen], data.counts)


def _reference(texts: list[str], options: PolarityConfig, batch_size: int) -> np.ndarray:
    from raoe_train.config import ModelConfig

    config = ModelConfig(name=str(options.reference))
    embed = embedder(config, batch_size, "reference")
    if options.cache is None:
        return embed(texts)
    made_from = {"reference": config.name, "files": fingerprint(config.name), "texts": digest(texts), "shard": SHARD}
    folder = Path(options.cache).expanduser() / digest(made_from)[:16]
    return np.concatenate(in_shards(folder, texts, SHARD, embed, f"reference {config.name}"))

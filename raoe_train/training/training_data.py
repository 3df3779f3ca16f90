"""What a recipe trains on: its sources as datasets with the columns that its loss reads."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch.utils.data import RandomSampler

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.data.pairs import TEXTS
from raoe_train.data.settings import Data
from raoe_train.data.sources import pool
from raoe_train.data.tables import BATCH, Texts
from raoe_train.losses.reads import LISTS
from raoe_train.training.list_targets import with_targets
from raoe_train.training.measures import dev_pairs

FEWEST = 16  # pairs; of fewer none are held out


def read_training_data(config: Any, cache: Path) -> tuple[Any, Texts]:
    """(DatasetDict of one dataset a source, all their sentences), with a line printed for each source.

    The columns are those that the loss of a TrainConfig reads, as Arrow tables in memory. What a teacher says of lists
    is kept in the folder `cache`, see with_targets.
    """
    from datasets import DatasetDict

    data, seed, reads = config.data, config.training.seed, config.loss.chosen.reads
    scale = data.score_scale
    datasets: dict[str, Any] = {}
    for number, source in enumerate(data.train):
        its = replace(
            data,
            labels=data.labels_of(source),
            score_scale=(scale[2 * number : 2 * number + 2] or scale[:2]) if scale else [],
        )
        dataset, counts = reads.read(source, its, config.model.prompt, config.loss.init_args)
        if data.max_rows is not None and len(dataset) > data.max_rows and not data.redraw:
            # in memory: a table that is memory-mapped would get files of indices beside it
            drawn = dataset.shuffle(seed=seed, keep_in_memory=True).select(range(data.max_rows), keep_in_memory=True)
            dataset = drawn.flatten_indices(keep_in_memory=True)
        if reads is LISTS:
            shuffled = seed if data.shuffle_lists else None
            teacher = config.teacher
            dataset = with_targets(dataset, teacher, Path(teacher.cache or cache), shuffled=shuffled)
        name = _name_of(source)
        while name in datasets:
            name = f"{name} ({number + 1})"
        datasets[name] = dataset
        dropped = "".join(f", {rows} rows dropped ({reason})" for reason, rows in counts.get("dropped", {}).items())
        print(f"{source}: {len(dataset)} {reads.name}{dropped}")
    return DatasetDict(datasets), Texts(datasets)


def with_dev(datasets: Any, data: Data, prompt: str | None, seed: int) -> tuple[Any, Any]:
    """(datasets, {name: pairs} of data.dev, or data.dev_share of the first dataset's, which it is without then). A line
    is printed where pairs for development are trained on, too."""
    dev = dev_pairs(data, prompt)
    if data.dev_share and not dev:
        datasets, pairs = held_out(datasets, data.dev_share, seed)
        dev = {"held out": pairs}
    for name, pairs in dev.items():
        say_shared(datasets, pairs, name)
    return datasets, dev


def held_out(datasets: Any, share: float, seed: int) -> tuple[Any, Any]:
    """(datasets, without them; pairs held out of the first for development): all of so many first sentences, drawn,
    that they are a `share` of its pairs, and differ in score. ValueError where there are fewer than FEWEST, no scores,
    or too few different ones for both parts."""
    from datasets import DatasetDict

    name, whole = next(iter(datasets.items()))
    if "score" not in whole.column_names:
        raise ValueError("data.dev_share is for scored pairs: name development pairs, --data.dev, or leave it out")
    if len(whole) < FEWEST:
        raise ValueError(
            f"{name} has {len(whole)} pairs: {FEWEST} at least, of which some are held out (data.dev_share)"
        )
    places: dict[str, list[int]] = {}
    for place, text in enumerate(whole["sentence1"][:]):
        places.setdefault(text, []).append(place)
    drawn, different, by_first, scores = set[int](), set[float](), [*places.values()], whole["score"][:]
    for number in np.random.default_rng(seed).permutation(len(by_first))[1:]:  # one is left to train on
        if len(drawn) >= max(2, share * len(whole)) and len(different) > 1:
            break
        drawn.update(by_first[number])
        different.update(scores[place] for place in by_first[number])
    rest = [place for place in range(len(whole)) if place not in drawn]
    if min(len(different), len({scores[place] for place in rest})) < 2:
        raise ValueError(
            f"{name} has too few first sentences, held out whole, or different scores to hold some out "
            "(data.dev_share): name development pairs"
        )
    print(f"{name}: {len(drawn)} of {len(whole)} pairs are held out for development")
    kept = whole.select(rest).flatten_indices(keep_in_memory=True)
    return DatasetDict({**datasets, name: kept}), whole.select(sorted(drawn))


def enough_steps(settings: dict[str, Any], datasets: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The trainer's settings with as many epochs as make at least training.min_steps steps, and batches that are drawn
    again in each epoch, where data.redraw says so."""
    data, drawn = config.data, None
    if data.redraw:
        if "batch_sampler" in settings:
            raise ValueError("data.redraw draws batches by itself: leave training.batch_sampler out")
        drawn = data.max_rows
        settings = {**settings, "batch_sampler": partial(redrawn, rows=drawn)}
    together = settings["per_device_train_batch_size"] * rank_and_world()[1]
    batches = sum(math.ceil(min(len(dataset), drawn or len(dataset)) / together) for dataset in datasets.values())
    steps = math.ceil(batches / settings["gradient_accumulation_steps"])
    return {**settings, "num_train_epochs": max(settings["num_train_epochs"], config.training.min_steps / steps)}


def redrawn(dataset: Any, rows: int, **settings: Any) -> DefaultBatchSampler:
    """Batches of so many rows, other ones each epoch: a permutation of all is cut off, which the trainer's generator
    draws by seed and epoch, so that a run that goes on draws the same."""
    drawn = RandomSampler(dataset, num_samples=min(rows, len(dataset)), generator=settings["generator"])
    return DefaultBatchSampler(drawn, **settings)  # type: ignore[arg-type]


def say_shared(datasets: Mapping[str, Any], dev: Any, name: str) -> None:
    """A line printed where development pairs are trained on, too, their sentences in this order or the other."""

    def unordered(rows: Mapping[str, Any]) -> list[frozenset[str]]:
        return [frozenset(pair) for pair in zip(*(rows[name] for name in TEXTS), strict=True)]

    pairs, seen = unordered(dev[:]), set[frozenset[str]]()
    wanted = {*pairs}
    for dataset in datasets.values():
        if {*TEXTS} <= {*dataset.column_names}:
            for rows in dataset.select_columns([*TEXTS]).iter(BATCH):
                seen |= wanted.intersection(unordered(rows))
    if shared := sum(pair in seen for pair in pairs):
        print(f"{name}: {shared} of {len(pairs)} pairs are trained on, too: of these it tells what was learnt by heart")


def check_sizes(datasets: Mapping[str, Any], batch_size: int, world: int) -> None:
    """ValueError for a source without one whole batch, of which nothing would be trained on."""
    for name, dataset in datasets.items():
        if len(dataset) < batch_size:
            raise ValueError(
                f"{name} has {len(dataset)} rows, less than a batch of {batch_size} ({world} processes), and "
                "incomplete batches are dropped: make training.per_device_train_batch_size smaller"
            )


def _name_of(source: str) -> str:
    """sick#train for …/sick.tsv.gz#train: torch allows no dot in the name of one of several losses."""
    parts = (Path(part).name.partition("#") for part in pool(source))
    return "+".join(file.split(".")[0] + mark + split.replace(".", "_") for file, mark, split in parts)


class PremiseBatchSampler(DefaultBatchSampler):
    """Batches of rows in an order that is random but for rows with the same first text, which follow each other.

    An NLI premise stands with three hypotheses; in one batch raoe_train.losses.ByLength encodes it once. What a batch
    compares is then more alike, see docs/by-length.md. It is for batch_sampler of the training arguments.
    """

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, **others: Any) -> None:
        first = dataset.with_format("arrow")[:].column(0).combine_chunks().dictionary_encode()
        rows = _Grouped(torch.from_numpy(first.indices.to_numpy().copy()), others.get("generator"))
        super().__init__(rows, batch_size=batch_size, drop_last=drop_last, **others)


class _Grouped(torch.utils.data.Sampler[int]):
    """Row numbers, those of a group after each other, groups in random order."""

    def __init__(self, group: torch.Tensor, generator: Any) -> None:
        self.group, self.generator = group.long(), generator

    def __len__(self) -> int:
        return len(self.group)

    def __iter__(self) -> Iterator[int]:
        place = torch.randperm(int(self.group.max()) + 1, generator=self.generator)
        yield from torch.argsort(place[self.group], stable=True).tolist()

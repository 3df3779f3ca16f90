"""What a recipe trains on: its sources as datasets with the columns that its loss reads."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch.utils.data import RandomSampler

from raoe_kernels import refine_similarity
from raoe_train.artifacts import resume
from raoe_train.artifacts.processes import rank_and_world
from raoe_train.artifacts.provenance import digest
from raoe_train.config import NonNegativeFloat
from raoe_train.data.pairs import TEXTS, read_scored
from raoe_train.data.settings import Data
from raoe_train.data.sources import pool
from raoe_train.data.tables import BATCH, Texts
from raoe_train.encoders.embed import embedder, unit_rows
from raoe_train.encoders.settings import FrozenEncoder, identity
from raoe_train.losses.reads import LISTS

FEWEST = 16  # pairs; of fewer none are held out


@dataclass
class Teacher(FrozenEncoder):
    """The frozen encoder whose similarities order the sentences of a list, or are learned as they are.

    Args:
        cache: directory that keeps its embeddings for other runs; of lists by default OUTPUT/teacher, until the end
        information: what a list teaches; both, its order alone (ranking) or similarities alone (semantic)
        omega: how far similarities are moved towards the order of the list (information both)
        second: another encoder, whose cosines are averaged with the first one's
    """

    information: Literal["both", "ranking", "semantic"] = "both"
    omega: NonNegativeFloat = 0.5
    second: FrozenEncoder | None = None


def read_training_data(config: Any, cache: Path) -> tuple[Any, Texts]:
    """(DatasetDict of one dataset a source, all their sentences), with a line printed for each source.

    The columns are those that the loss of a TrainConfig reads, as Arrow tables in memory. What a teacher says of lists
    is kept in the folder `cache`, see with_targets.
    """
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


def with_targets(dataset: Any, teacher: Teacher, cache: Path, *, shuffled: int | None = None) -> Any:
    """A dataset of lists, column `sentences`, with what each is to be ranked by: `label`, its n x n values, row by row.

    By `teacher.information`: "both", the teacher's cosines refined by `teacher.omega`; "semantic", as they are;
    "ranking", no column and no teacher, so that the lists' own order is all there is. Where `shuffled` is a seed each
    list is shuffled first, its source too. `cache` is a folder of what was made before. (Table 3 of the
    ranking-sentences paper: (d) is "ranking", (e) "semantic", (c) shuffled.)
    """
    lists = [list(sentences) for sentences in dataset["sentences"]]
    orders = [list(range(len(sentences))) for sentences in lists]
    if shuffled is not None:
        rng = random.Random(shuffled)
        for order in orders:
            rng.shuffle(order)
    columns: dict[str, Any] = {
        "sentences": [[sentences[k] for k in order] for sentences, order in zip(lists, orders, strict=True)]
    }
    if teacher.information != "ranking":
        omega = teacher.omega if teacher.information == "both" else 0.0
        # of the lists as they were: the cosines of a shuffled list are the same, elsewhere
        columns["label"] = [
            refine_similarity(torch.from_numpy(phi[np.ix_(order, order)]), omega).numpy().ravel()
            for phi, order in zip(similarities(lists, teacher, cache), orders, strict=True)
        ]
    return Dataset.from_dict(columns)


def similarities(lists: Sequence[Sequence[str]], teacher: FrozenEncoder, cache: Path) -> list[np.ndarray]:
    """The teacher's raw cosines within each list, [n, n] float32 each; 0 where an embedding is zero.

    They are kept, not the embeddings: 4 n^2 bytes a list (4 kB for 33 sentences), and omega, the ablations and seeds
    share them.
    """
    size = max(1, resume.SHARD // 16)  # lists, of some 16 sentences each
    made_from = {"teacher": identity(teacher), "lists": digest([list(texts) for texts in lists]), "shard": size}
    embed = embedder(teacher, "teacher")

    def cosines(some: Sequence[Sequence[str]]) -> np.ndarray:
        unit = unit_rows(embed([text for texts in some for text in texts]).astype(np.float64))
        ends = np.cumsum([len(texts) for texts in some])[:-1]
        squares = [np.clip(part @ part.T, -1, 1).ravel() for part in np.split(unit, ends)]
        return np.concatenate(squares).astype(np.float32)

    folder = cache / digest(made_from)[:16]
    flat = resume.gathered(resume.share(folder, lists, size, cosines, f"teacher {teacher.name}"))
    ends = np.cumsum([len(texts) ** 2 for texts in lists])[:-1]
    return [part.reshape(len(texts), -1) for part, texts in zip(np.split(flat, ends), lists, strict=True)]


def with_dev(datasets: Any, data: Data, prompt: str | None, seed: int) -> tuple[Any, Any]:
    """(datasets, {name: pairs} of data.dev, or data.dev_share of the first dataset's, which it is without then). A line
    is printed where pairs for development are trained on, too."""
    dev: dict[str, Any] = {}
    for source in data.dev or []:
        asked: Any = {"columns": data.columns or None, "labels": data.labels_of(source), "on_error": data.on_error}
        name = Path(source).name
        dev[source if name in dev else name] = read_scored(source, prompt, **asked)
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

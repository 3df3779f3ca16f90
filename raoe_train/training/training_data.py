"""A recipe's training data: its sources, as datasets with the columns that the loss reads."""

import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch.utils.data import RandomSampler

from raoe_kernels import refine_similarity
from raoe_train.data.columns import NAMES
from raoe_train.data.pairs import TEXTS, is_conditional, read_scored
from raoe_train.data.rows import columns_in_order, row_table
from raoe_train.data.sources import Texts, columns_in, is_benchmark_folder, labels_of, pool, roles_in, row_values
from raoe_train.encoders.embed import embedder, prompt_of, unit_rows
from raoe_train.evaluation.retrieval import of_rows, read_passages, read_retrieval, relevant_pairs
from raoe_train.evaluation.sts import of_pairs
from raoe_train.evaluation.tasks import Reading, Task
from raoe_train.inputs import recorded
from raoe_train.losses.collators import LISTS, RANKING
from raoe_train.outputs import digest
from raoe_train.parts import read_parts, write_parts
from raoe_train.settings import FrozenEncoder, Teacher

logger = logging.getLogger(__name__)
ROOM = 1 << 28  # bytes of training data up to which all texts are tokenized before training
FEWEST = 16  # minimum number of rows of data from which a dev set is held out
OTHER_ROWS = 500  # training rows whose passages join a held-out dev set's corpus, which would otherwise be too small
LISTS_IN_PART = 256  # of about 16 sentences each
DEV_ROWS = 200  # with fewer, a gain of a few points is rarely significant
FEW = 2000  # number of rows below which a certificate uses folds, so that each row is a dev row once
FOLDS, ROWS_OF_FOLD = 5, 20  # number of folds, and minimum number of rows in a fold, for a reliable bootstrap


def read_training_data(config: Any, cache: Path) -> tuple[Any, Texts]:
    """Read the training sources of a TrainConfig, and print a line for each source.

    Return (DatasetDict with one dataset per source, all sentences in the datasets). The datasets are Arrow tables in
    memory, with the columns that the loss reads. The teacher's cosines for lists of sentences are cached in `cache`.
    """
    data, seed, reads = config.data, config.training.seed, config.loss.chosen.reads
    scale = data.score_scale
    datasets: dict[str, Any] = {}
    for number, source in enumerate(data.train):
        source_data = replace(
            data,
            labels=labels_of(source, data),
            score_scale=(scale[2 * number : 2 * number + 2] or scale[:2]) if scale else [],
        )
        with_label = config.loss.chosen.needs_label(config.loss.init_args)
        dataset, counts = reads.read(source, source_data, config.model.prompt, with_label)
        if data.max_rows is not None and len(dataset) > data.max_rows and not data.redraw:
            # in memory, because datasets would write an index file next to a memory-mapped table
            sample = dataset.shuffle(seed=seed, keep_in_memory=True).select(range(data.max_rows), keep_in_memory=True)
            dataset = sample.flatten_indices(keep_in_memory=True)
        if reads.name == LISTS.name:
            dataset = add_targets(dataset, config.teacher, Path(config.teacher.cache or cache))
        parts = (Path(part).name.partition("#") for part in pool(source))
        # no folders, suffixes or dots: the loss module gets the same name, and torch allows no dots in module names
        name = "+".join(file.split(".")[0] + mark + split.replace(".", "_") for file, mark, split in parts)
        while name in datasets:
            name = f"{name} ({number + 1})"
        datasets[name] = dataset
        dropped = "".join(f", {rows} rows dropped ({reason})" for reason, rows in counts.get("dropped", {}).items())
        dropped += "".join(f", {texts} texts dropped ({reason})" for reason, texts in counts.get("texts", {}).items())
        names = ", ".join(name or repr(name) for name in counts.get("unread", ()))
        unread = f"; columns not read: {names}" if names else ""
        print(f"{source}: {len(dataset)} {reads.name}{dropped}{unread:.200}")
    return DatasetDict(datasets), Texts(datasets)


def add_targets(dataset: Any, teacher: Teacher, cache: Path) -> Any:
    """Add the training targets to a dataset of lists of sentences. For a list of n sentences, the column `label`
    contains the n x n matrix of targets, flattened row by row.

    `teacher.information` selects the targets. With "both", the targets are the teacher's cosines, refined with
    `teacher.omega`. With "semantic", the targets are the unrefined cosines. With "ranking", no column is added and no
    teacher is needed, because the loss uses the order of each list. The cosines are cached in the folder `cache`. In
    Table 3 of the ranking-sentences paper, "ranking" is variant (d), and "semantic" is variant (e).
    """
    lists = [list(sentences) for sentences in dataset["sentences"]]
    columns: dict[str, Any] = {"sentences": lists}
    if teacher.information != "ranking":
        omega = teacher.omega if teacher.information == "both" else 0.0
        # without settings that do not change the cosines, so that runs with another omega find them in the cache
        encoder = replace(teacher, information=Teacher.information, omega=Teacher.omega)
        columns["label"] = [
            refine_similarity(torch.from_numpy(phi), omega).numpy().ravel()
            for phi in similarities(lists, encoder, cache)
        ]
    return Dataset.from_dict(columns)


def similarities(lists: Sequence[Sequence[str]], teacher: FrozenEncoder, cache: Path) -> list[np.ndarray]:
    """Return the teacher's raw cosines as one float32 array [n, n] per list. The cosines of a zero embedding are 0. The
    cache stores these cosines, not embeddings, in 4 n^2 bytes per list (4 kB for 33 sentences). Runs with the same
    lists and the same teacher settings can share the cache.
    """
    key = {"teacher": recorded(teacher), "lists": digest([list(texts) for texts in lists])}
    embed = embedder(teacher, "teacher")

    def cosines(shard: Sequence[Sequence[str]]) -> np.ndarray:
        unit = unit_rows(embed([text for texts in shard for text in texts]).astype(np.float64))
        ends = np.cumsum([len(texts) for texts in shard])[:-1]
        squares = [np.clip(part @ part.T, -1, 1).ravel() for part in np.split(unit, ends)]
        return np.concatenate(squares).astype(np.float32)

    folder = cache / digest(key)[:16]
    flat = read_parts(write_parts(folder, lists, cosines, f"teacher {teacher.name}", LISTS_IN_PART, sync=True))
    ends = np.cumsum([len(texts) ** 2 for texts in lists])[:-1]
    return [part.reshape(len(texts), -1) for part, texts in zip(np.split(flat, ends), lists, strict=True)]


def with_dev(datasets: Any, config: Any) -> tuple[Any, dict[str, Task], list[Any]]:
    """Read the dev sets of a TrainConfig, or hold out a share (data.dev_share) of the first dataset. Return (training
    datasets, {name: dev task}, folds), and print a warning if dev pairs also occur in the training data. If the loss
    reads rows, a dev set without scores is a retrieval task. All other dev sets consist of scored pairs.

    With a certificate and data.dev_share auto, a small first dataset (fewer than FEW rows) is divided into FOLDS dev
    sets. The dataset is not divided if training.patience is set, or if a dev set would have fewer than ROWS_OF_FOLD
    rows. For each of the FOLDS dev sets, `folds` contains the training datasets without this dev set. Otherwise,
    `folds` is empty."""
    data, prompt, seed = config.data, config.model.prompt, config.training.seed
    may_have_rows = config.loss.chosen.reads in RANKING and not is_conditional(prompt)
    certified, tasks, folds = config.evaluation.certificate, dict[str, Task](), list[Any]()
    more = [*read_passages(data.dev_corpus, data.on_error).values()] if data.dev_corpus else []
    for source in data.dev or []:
        name = source if Path(source).name in tasks else Path(source).name
        if is_benchmark_folder(source):
            task = read_retrieval(source, Reading(on_error=data.on_error))
            rows = relevant_pairs(task)
        else:
            options: Any = {"columns": columns_in(source, data.columns), "on_error": data.on_error}
            options |= {"labels": labels_of(source, data)}
            is_rows = may_have_rows and "score" not in roles_in(source, options["columns"])
            rows = row_table(source, keep_all=True, **options)[0] if is_rows else read_scored(source, prompt, **options)
            if more and "anchor" not in rows.column_names:
                raise ValueError(f"data.dev_corpus has no effect on {name}, which has scored pairs: remove it")
            task = of_rows(rows, name, more) if "anchor" in rows.column_names else of_pairs(rows)
        datasets = without_dev_pairs(datasets, rows, name, leave_out=certified)
        tasks[name] = task
    if more and not tasks:
        raise ValueError("data.dev_corpus has no effect without data.dev")
    if data.dev_share and not tasks:
        folds_fit = FOLDS * ROWS_OF_FOLD <= len(next(iter(datasets.values()))) < FEW
        is_folded = folds_fit and certified and data.dev_share == "auto"
        is_folded = is_folded and config.training.patience is None  # which needs one dev set
        splits = hold_out(datasets, data.dev_share, seed, FOLDS if is_folded else 1)
        for number, (rest, rows) in enumerate(splits, 1):
            name = f"fold {number}" if len(splits) > 1 else "held out"
            if {*rows.column_names} == {*TEXTS}:  # pairs of anchor and positive, without scores
                rows = rows.rename_columns(dict(zip(TEXTS, ("anchor", "positive"), strict=True)))
            folds.append(without_dev_pairs(rest, rows, name, leave_out=certified))
            tasks[name] = of_pairs(rows) if "score" in rows.column_names else _among_others(rows, folds[-1], name, seed)
        if len(splits) == 1:
            datasets = folds.pop()
    for name, task in tasks.items():
        if task.n_queries:
            passages = len(task.sentences) - task.n_queries
            print(f"{name}: {passages} passages are ranked for each of {task.n_queries} dev queries")
    if len({task.kind for task in tasks.values()}) > 1:
        raise ValueError("data.dev mixes scored pairs and rows without scores: use only one kind")
    return datasets, tasks, folds


def _among_others(rows: Any, datasets: Any, name: str, seed: int) -> Task:
    """Create a retrieval task from held-out rows; its corpus includes passages from up to OTHER_ROWS training rows."""
    others = next(iter(datasets.values())).shuffle(seed=seed, keep_in_memory=True)
    others = others.remove_columns(others.column_names[0]).select(range(min(len(others), OTHER_ROWS)))
    return of_rows(rows, name, Texts({"": others}))


def hold_out(datasets: Any, share: float | Literal["auto"], seed: int, folds: int = 1) -> list[tuple[Any, Any]]:
    """Hold out a `share` of the first dataset as a dev set. Return [(datasets without these rows, dev set)]. The share
    "auto" holds out a tenth of the rows or DEV_ROWS rows, whichever is more, but at most three tenths of the rows.

    With several folds, divide the first dataset into that many dev sets of about equal size, and return one such tuple
    per dev set. If the dataset cannot be divided, hold out a `share` instead.

    All rows with the same first text stay together. The dev set and the remaining rows each have at least two distinct
    scores or, without scores, two distinct first texts. Raise ValueError if no such split exists, if there are labels
    but no scores, or if there are fewer than FEWEST rows."""
    name, dataset = next(iter(datasets.items()))
    first = "anchor" if "anchor" in dataset.column_names else TEXTS[0]
    counted = "score" if "score" in dataset.column_names else first
    if first not in dataset.column_names or (counted == first and "label" in dataset.column_names):
        raise ValueError("data.dev_share needs a column with scores or positives: set data.dev, or data.dev_share to 0")
    rows = len(dataset)
    if rows < FEWEST:
        raise ValueError(f"{name} has only {rows} rows: data.dev_share needs at least {FEWEST}; set data.dev instead")
    wanted = max(rows / 10, min(DEV_ROWS, 0.3 * rows)) if share == "auto" else max(2, share * rows)
    places: dict[str, list[int]] = {}
    for place, text in enumerate(dataset[first][:]):
        places.setdefault(text, []).append(place)
    groups, values = [*places.values()], dataset[counted][:]
    parts, order = [list[int]() for _ in range(folds)], np.random.default_rng(seed).permutation(len(groups))
    for number in order if folds > 1 else order[1:]:  # keep one for training
        if folds == 1 and len(parts[0]) >= wanted and len({values[place] for place in parts[0]}) > 1:
            break
        min(parts, key=len).extend(groups[number])
    rest = [[place for place in range(rows) if place not in held] for held in map(set, parts)]
    if min(len({values[place] for place in each}) for each in (*parts, *rest)) < 2:
        if folds > 1:
            return hold_out(datasets, share, seed)
        raise ValueError(
            f"{name} cannot be split with data.dev_share: the dev set and the training rows each need at least 2 "
            f"distinct values of {counted}, and rows with the same {first} stay together. Set data.dev instead"
        )
    if folds > 1:
        print(f"{name}: {rows} rows are divided into {folds} folds, each of which is held out once")
    else:
        print(f"{name}: {len(parts[0])} of {rows} rows are held out as a dev set")
    result = []
    for held, train_rows in zip(parts, rest, strict=True):
        train = dataset.select(train_rows)
        train = train if folds > 1 else train.flatten_indices(keep_in_memory=True)  # faster for large data
        result.append((DatasetDict({**datasets, name: train}), dataset.select(sorted(held))))
    return result


def check_scores(name: str, loss: Any, data: Any) -> None:
    """Raise ValueError if a loss would read NLI labels as scores, because the data have a column `label` but no column
    `score`."""
    kind = str(getattr((data.features or {}).get("label"), "dtype", ""))
    is_read = isinstance(data, Dataset) and "score" not in data.column_names and kind.startswith(("int", "uint"))
    if is_read and max(filter(None, data.unique("label")), default=0) > 1:
        advice = "add a column score (larger = more similar), such as 1 - label / 2, or rename label to score"
        raise ValueError(f"{name}: {type(loss).__name__} would read labels (0 = most similar) as scores: {advice}")


def redraw(dataset: Any, rows: int, **settings: Any) -> DefaultBatchSampler:
    """Create a batch sampler over `rows` random rows, which are redrawn in each epoch. The drawn rows depend only on
    the seed and the epoch, so a resumed run draws the same rows as an uninterrupted run."""
    sampler = RandomSampler(dataset, num_samples=min(rows, len(dataset)), generator=settings["generator"])
    return DefaultBatchSampler(sampler, **settings)  # type: ignore[arg-type]


def without_dev_pairs(datasets: Any, dev: Any, name: str, *, leave_out: bool) -> Any:
    """Print how many pairs in a dev set are also training pairs; the order of the two texts does not matter. With
    `leave_out`, return the datasets without these pairs, and raise ValueError if no pair is left. Otherwise, return the
    datasets unchanged."""
    columns = TEXTS if "sentence1" in dev.column_names else ("anchor", "positive")

    def unordered(rows: Any) -> Iterator[frozenset[str]]:
        yield from map(frozenset, row_values(rows, *columns))

    pairs = [*unordered(dev)]
    dev_pairs, shared, kept = {*pairs}, set[frozenset[str]](), dict(datasets)
    for key, dataset in datasets.items():
        if {*columns} <= {*dataset.column_names}:
            places = []
            for place, pair in enumerate(unordered(dataset)):
                if pair in dev_pairs:
                    shared.add(pair)
                else:
                    places.append(place)
            if leave_out and not places:
                raise ValueError(f"all pairs of {key} are also dev pairs of {name}: no training pair is left")
            if leave_out and len(places) < len(dataset):
                kept[key] = dataset.select(places).flatten_indices(keep_in_memory=True)
    if count := sum(pair in shared for pair in pairs):
        what = "they are left out of training" if leave_out else "dev scores will be too high"
        print(f"warning: {count} of the {len(pairs)} dev pairs of {name} are also training pairs: {what}")
    return DatasetDict(kept)


def check_sizes(datasets: Mapping[str, Any], args: Any) -> None:
    """Raise ValueError for a dataset with fewer rows than a batch, because incomplete batches are dropped."""
    size, world = args.train_batch_size * args.world_size, args.world_size
    for name, dataset in datasets.items():
        if hasattr(dataset, "__len__") and len(dataset) < size:
            raise ValueError(
                f"{name} has {len(dataset)} rows, fewer than a batch of {size} rows (processes: {world}), and "
                "incomplete batches are dropped: lower training.per_device_train_batch_size"
            )


def to_pretokenize(wanted: bool | Literal["auto"], loader: Any, args: Any) -> list[Dataset]:
    """Return the datasets of a DataLoader if their texts should be tokenized before the first step, else []."""
    parts = getattr(loader.dataset, "datasets", [loader.dataset])
    if not wanted or not all(isinstance(part, Dataset) for part in parts):
        return []  # a stream may be endless
    steps, epochs = args.max_steps * args.gradient_accumulation_steps, args.num_train_epochs
    batches = steps if steps > 0 else len(loader) * epochs
    reads_all = batches * loader.batch_sampler.batch_size >= len(loader.dataset)
    return parts if wanted is True or (reads_all and sum(part.data.nbytes for part in parts) <= ROOM) else []


def check_rows(name: str, loss: Any, data: Any, args: Any) -> None:
    """For a loss with in-batch negatives, print how many negatives each row has. Raise ValueError for rows without
    negatives, and for columns that the loss does not use."""
    columns = columns_in_order(data)
    if ignored := {*columns} & {"label", "score"}:
        advice = "remove it, or use raoe_train.data.rows.row_table to convert rows with the labels 1 and 0"
        raise ValueError(f"{name}: {type(loss).__name__} does not use column {min(ignored)!r}: {advice}")
    world = args.world_size if loss.gather_across_devices else 1
    rows = min(args.train_batch_size * world, len(data) if hasattr(data, "__len__") else sys.maxsize)
    own = len(columns) - 2
    if own < 0:
        needs = "needs two text columns, anchor and positive"
        raise ValueError(f"{name}: {type(loss).__name__} {needs}; got {', '.join(columns)}")
    if rows < 2 and own < 1:
        raise ValueError(f"{name}: a batch of one row has no negatives: use larger batches")
    more = f", up to {own} from its own row ({', '.join(columns[2:])})" if own else ""
    more += f" and {own * (rows - 1)} negatives of other rows" if own else ""
    print(f"{name}: negatives for each anchor: {rows - 1} positives of other rows{more}")
    if args.gradient_accumulation_steps > 1:
        print("  gradient accumulation adds no negatives; loss.mini_batch_size allows larger batches")


def check_prompts(prompts: Any, *data: Any) -> None:
    """Warn about prompts for columns or datasets that do not exist."""
    names = {name for each in data if isinstance(each, Mapping) for name in each}
    tables = [table for each in data for table in (each.values() if isinstance(each, Mapping) else [each])]
    known = names | {name for table in tables if table is not None for name in columns_in_order(table)}
    mappings = [each for each in (prompts, *prompts.values()) if isinstance(each, Mapping)] if known else []
    if unknown := sorted({name for each in mappings for name in each} - known):
        listed = f"known: {', '.join(sorted(known))}"
        logger.warning("prompts: %r is not a column or dataset (%s), so its prompt is not used", unknown[0], listed)


def own_prompts(model: Any, data: Any) -> Any:
    """Return the encoder's own prompts for the columns of a dataset, or of {name: dataset}. If the first column does
    not contain queries, or the prompts for queries and documents are equal, return the default prompt."""
    if isinstance(data, Mapping):
        own = {name: own_prompts(model, each) for name, each in data.items()}
        different = [each for each in own.values() if each != next(iter(own.values()))]
        return own if different else next(iter(own.values()), None)
    query, document = prompt_of(model, "query"), prompt_of(model, "document")
    first, *others = columns_in_order(data) or [""]
    default = model.prompts.get(model.default_prompt_name)
    if query == document:
        if default:
            print(f"the encoder's default prompt is added to all texts: {default!r}")
        return default
    if first not in NAMES["anchor"]:
        reason = f"{first} is not a query column ({', '.join(NAMES['anchor'])})"
        print(f"the encoder's prompts for queries and documents are not used: {reason}")
        return default
    print(f"the encoder's own prompts are used: {query or ''!r} for {first}, {document or ''!r} for other columns")
    return {first: query or "", **dict.fromkeys(others, document or "")}


def without_gaps(data: Any) -> Any:
    """Return a view of a Dataset or DatasetDict whose missing values are filled after the dataset's own transform."""
    if isinstance(data, Mapping):
        return DatasetDict({name: without_gaps(each) for name, each in data.items()})
    if not isinstance(data, Dataset):
        return data
    transform = data.format["format_kwargs"].get("transform", dict)

    def filled(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        fills = {name: math.nan if name in ("score", "label") else "" for name in rows}
        return {n: [fills[n] if value is None else value for value in column] for n, column in transform(rows).items()}

    return data.with_transform(filled)

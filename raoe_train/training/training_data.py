"""What a recipe trains on: its sources as datasets with the columns that its loss takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from raoe_train.config import TrainConfig
from raoe_train.data.columns import resolve_label_map
from raoe_train.data.conditional import is_conditional, prompted_table
from raoe_train.data.pairs import pair_table
from raoe_train.data.ranking_lists import list_table
from raoe_train.data.sources import contents
from raoe_train.data.tables import Texts, kept, to_table
from raoe_train.data.triplets import triplet_table
from raoe_train.losses.registry import reads
from raoe_train.training.list_targets import with_targets

SENTENCES = ["sentence1", "sentence2"]


def read_training_data(config: TrainConfig, seed: int) -> tuple[Any, Texts]:
    """(DatasetDict of one dataset a source, all their sentences), with a line printed for each source.

    Columns are sentence1, sentence2, score and, where the loss wants it, label; or anchor, positive, negative and,
    with data.neutral, neutral; or sentences, a list, and label, its teacher; or text alone. They are Arrow tables in
    memory; with data.cache_dir those of files are memory-mapped, and made once.

    Raises:
        ValueError, FileNotFoundError: as the readers in raoe_train.data; or scores that loss mse cannot compare.
        OSError: data.cache_dir cannot be written.
    """
    from datasets import DatasetDict

    data, scale, kind = config.data, config.data.score_scale, reads(config.loss.name)
    datasets: dict[str, Any] = {}
    for number, source in enumerate(data.train):
        lowest_highest = (scale[2 * number : 2 * number + 2] or scale[:2]) if scale else None
        if kind == "lists":
            dataset, counts = list_table(source, on_error=data.on_error)
            dataset = dataset.select_columns(["sentences"])
        else:
            dataset, counts = _table(source, config, lowest_highest)
        if data.max_rows is not None and len(dataset) > data.max_rows:
            # in memory: a table that is memory-mapped would get files of indices beside it
            drawn = dataset.shuffle(seed=seed, keep_in_memory=True).select(range(data.max_rows), keep_in_memory=True)
            dataset = drawn.flatten_indices(keep_in_memory=True)
        if config.loss.name == "mse":
            dataset = _to_unit_scores(dataset, lowest_highest, source)
        if kind == "lists":
            dataset = with_targets(dataset, config, seed)
        name = _name_of(source)
        datasets[name if name not in datasets else f"{name} ({number + 1})"] = dataset
        print(f"{source}: {len(dataset)} {kind}{_dropped(counts)}")
    return DatasetDict(datasets), Texts(datasets)


def _table(source: str, config: TrainConfig, scale: list[float] | None) -> tuple[Any, dict[str, Any]]:
    """(dataset, counts) of a source of anything but lists, by way of data.cache_dir."""
    data, kind = config.data, reads(config.loss.name)
    labels = _labels_of(source, data.labels)
    # what is asked of the reader, and so what the rows depend on beside the file
    make: Callable[..., tuple[Any, dict[str, Any]]] = pair_table
    asked: dict[str, Any] = {"columns": dict(data.columns), "on_error": data.on_error}
    if kind == "scored pairs":
        needs_label = config.loss.name in ("raoe", "gated_angular") and config.loss.gate != "score"
        if is_conditional(config.model.prompt):
            if needs_label:
                raise ValueError("C-STS has no NLI labels: use loss rank_margin or cosent, or loss.gate score")
            asked |= {"prompt": config.model.prompt}
            make = prompted_table
        else:
            asked |= {"names": [*SENTENCES, "score", *(["label"] if needs_label else [])]}
            asked |= {"labels": labels, "score_scale": scale}
    elif kind == "triplets":
        if data.neutral and config.loss.name == "triplet":
            raise ValueError("loss triplet has one negative: data.neutral is for infonce and angle_contrastive")
        asked |= {"labels": labels, "neutral": data.neutral, "pairing": data.pairing}
        make = triplet_table
    elif kind == "labelled pairs":  # 1 similar, 0 not
        asked["columns"] |= {"score": "none"}
        asked |= {"names": [*SENTENCES, "label"], "labels": labels or {"0": 0, "1": 1}}
    else:  # all positive, or their sentences; labels and scores have no part in this
        asked["columns"] |= {"score": "none", "label": "none"}
        asked |= {"names": SENTENCES}
        if kind == "sentences":
            make = _sentences
    made_from = None
    if data.cache_dir is not None and (file := contents(source)) is not None:
        made_from = {"file": file, "kind": kind, **asked}
        if asked.get("labels"):
            made_from["labels"] = resolve_label_map(asked["labels"])  # keys of one kind
    dataset, counts = kept(data.cache_dir, made_from, lambda path: make(source, path=path, **asked))
    if kind == "labelled pairs" and (beyond := sorted(set(dataset.unique("label")) - {0, 1})):
        raise ValueError(f"{source}: labels are 1 for similar and 0 for not, got {', '.join(map(str, beyond))}")
    return dataset, counts


def _sentences(source: str, names: list[str], path: Path | None, **asked: Any) -> tuple[Any, dict[str, Any]]:
    """The different sentences of a source of pairs."""
    import pyarrow

    pairs, counts = pair_table(source, names, **asked)
    chunks = [chunk for name in names for chunk in pairs.data.column(name).chunks]
    texts = pyarrow.chunked_array(chunks).unique()
    return to_table(({"text": text.as_py()} for text in texts), path), counts


def _name_of(source: str) -> str:
    """sick#train for …/sick.tsv.gz#train: torch allows no dot in the name of one of several losses."""
    file, mark, split = Path(source).name.partition("#")
    return file.split(".")[0] + mark + split.replace(".", "_")


def _labels_of(source: str, labels: dict[str, Any] | None) -> dict[str, int | None] | None:
    """The label map of a source: data.labels, or its entry for the file's name ("sick" of sick.tsv.gz)."""
    if labels and all(isinstance(entry, dict) for entry in labels.values()):
        return labels.get(Path(source).name.split(".")[0])
    return labels


def _dropped(counts: dict[str, Any]) -> str:
    return "".join(f", {number} rows dropped ({reason})" for reason, number in counts.get("dropped", {}).items())


def _to_unit_scores(dataset: Any, scale: list[float] | None, source: str) -> Any:
    scores = dataset.data.column("score").to_pylist()
    if scale is None:
        if min(scores) < -1 or max(scores) > 1:
            raise ValueError(
                f"{source}: loss mse compares scores with cosines, and these run from {min(scores)} to "
                f"{max(scores)}; declare data.score_scale LOWEST HIGHEST"
            )
        return dataset
    lowest, highest = scale
    unit = [(score - lowest) / (highest - lowest) for score in scores]
    return dataset.remove_columns("score").add_column("score", unit)

"""What a recipe trains on: its sources as datasets with the columns that its loss takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raoe_train.config import DataConfig, TrainConfig
from raoe_train.data.conditional import is_conditional, read_scored
from raoe_train.data.lists import read_chains
from raoe_train.data.pairs import read_pairs
from raoe_train.objectives import reads
from raoe_train.teaching import with_targets


def read_training_data(config: TrainConfig, seed: int) -> tuple[Any, list[str]]:
    """(DatasetDict of one dataset a source, all their sentences), with a line printed for each source.

    Columns are sentence1, sentence2, score and, where the loss wants it, label; or anchor, positive, negative and,
    with data.neutral, neutral; or sentences, a list, and label, its teacher; or text alone.

    Raises:
        ValueError, FileNotFoundError: as the readers in raoe_train.data; or scores that loss mse cannot compare.
    """
    from datasets import DatasetDict

    data, scale, kind = config.data, config.data.score_scale, reads(config.loss.name)
    datasets: dict[str, Any] = {}
    texts: list[str] = []
    for number, source in enumerate(data.train):
        lowest_highest = (scale[2 * number : 2 * number + 2] or scale[:2]) if scale else None
        if kind == "sentences":
            dataset, counts = _sentences(source, data)
        elif kind == "triplets":
            dataset, counts = _triplets(source, config)
        elif kind == "lists":
            chains = read_chains(source, on_error=data.on_error)
            dataset, counts = chains.to_dataset(), chains.counts
        elif kind == "scored pairs":
            dataset, counts = _scored_pairs(source, config, lowest_highest)
        else:
            dataset, counts = _pairs(source, data, labelled=kind == "labelled pairs")
        if data.max_rows is not None and len(dataset) > data.max_rows:
            dataset = dataset.shuffle(seed=seed).select(range(data.max_rows)).flatten_indices()
        if config.loss.name == "mse":
            dataset = _to_unit_scores(dataset, lowest_highest, source)
        if kind == "lists":
            dataset = with_targets(dataset, config, seed)
        name = _name_of(source)
        datasets[name if name not in datasets else f"{name} ({number + 1})"] = dataset
        for column in dataset.column_names:
            if column not in ("score", "label"):
                texts += (text for value in dataset[column] for text in ([value] if isinstance(value, str) else value))
        print(f"{source}: {len(dataset)} {kind}{_dropped(counts)}")
    return DatasetDict(datasets), texts


def _scored_pairs(source: str, config: TrainConfig, scale: list[float] | None) -> tuple[Any, dict[str, Any]]:
    data = config.data
    needs_label = config.loss.name in ("raoe", "gated_angular") and config.loss.gate != "score"
    require = ("score", "label") if needs_label else ("score",)
    if is_conditional(config.model.prompt):
        if needs_label:
            raise ValueError("C-STS has no NLI labels: use loss rank_margin or cosent, or loss.gate score")
        pairs = read_scored(source, config.model.prompt, columns=data.columns or None, on_error=data.on_error)
    else:
        pairs = read_pairs(
            source,
            columns=data.columns or None,
            labels=_labels_of(source, data.labels),
            score_scale=scale,
            on_error=data.on_error,
            require=require,
        )
    return pairs.to_dataset().select_columns(["sentence1", "sentence2", *require]), pairs.counts


def _pairs(source: str, data: DataConfig, *, labelled: bool) -> tuple[Any, dict[str, Any]]:
    """Pairs that are all positive, or pairs with labels 1 (similar) and 0 (not)."""
    columns = {**data.columns, "score": "none"} | ({} if labelled else {"label": "none"})
    pairs = read_pairs(
        source,
        columns=columns,
        labels=(_labels_of(source, data.labels) or {"0": 0, "1": 1}) if labelled else None,
        on_error=data.on_error,
        require=("label",) if labelled else (),
    )
    if labelled and (beyond := sorted(set(pairs.label or ()) - {0, 1})):
        raise ValueError(f"{source}: labels are 1 for similar and 0 for not, got {', '.join(map(str, beyond))}")
    return pairs.to_dataset().select_columns(["sentence1", "sentence2", *(["label"] if labelled else [])]), pairs.counts


def _sentences(source: str, data: DataConfig) -> tuple[Any, dict[str, Any]]:
    """The different sentences of a source of pairs; labels and scores have no part in this."""
    from datasets import Dataset

    columns = {**data.columns, "label": "none", "score": "none"}
    pairs = read_pairs(source, columns=columns, on_error=data.on_error)
    return Dataset.from_dict({"text": list(dict.fromkeys([*pairs.sentence1, *pairs.sentence2]))}), pairs.counts


def _triplets(source: str, config: TrainConfig) -> tuple[Any, dict[str, Any]]:
    from raoe_train.data.triplets import read_triplets

    data = config.data
    if data.neutral and config.loss.name == "triplet":
        raise ValueError("loss triplet has one negative: data.neutral is for infonce and angle_contrastive")
    triplets = read_triplets(
        source,
        columns=data.columns or None,
        labels=_labels_of(source, data.labels),
        on_error=data.on_error,
        neutral=data.neutral,
        pairing=data.pairing,
    )
    return triplets.to_dataset(), triplets.counts


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
    scores = dataset["score"]
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

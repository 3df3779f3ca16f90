"""Collators: for pairs with a score and an NLI label, for rows that lack negatives, for rows with their texts, and for
lists of sentences; and the one that plans batches for ByLength."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from raoe_train.data.columns import NLI_LABELS


class ScoreLabelCollator(SentenceTransformerDataCollator):
    """Collator for datasets with a column ``score`` and optionally ``label``; sentence-transformers' own cannot have
    both. The labels of a batch are ``{"score": float64 (B,), "label": int64 (B,)}``, for the columns in the dataset.

    Labels must be whole numbers or NLI words (larger = less related) and scores numbers; otherwise ValueError. Other
    datasets are collated as in sentence-transformers.

    raoe_train.Trainer uses it by default. For another trainer, pass what its own collator gets, such as prompts:

        ScoreLabelCollator(preprocess_fn=model.preprocess, prompts=args.prompts)
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        columns = features[0] if features else {}
        if "score" not in columns or isinstance(columns.get("label"), (list, torch.Tensor)):
            return super().__call__(features)
        # float64, because distinct scores can be equal in float32; Apple's GPUs have no float64
        kind = torch.float32 if torch.backends.mps.is_available() else torch.float64
        labels = {"score": torch.tensor([_score(row["score"]) for row in features], dtype=kind)}
        if "label" in columns:
            labels["label"] = torch.tensor([_label(row["label"]) for row in features])
        texts = [{key: value for key, value in row.items() if key not in ("score", "label")} for row in features]
        return {**super().__call__(texts), "label": labels}


class RowCollator(SentenceTransformerDataCollator):
    """Collator for rows of anchor, positive and negatives, of which some rows lack a negative (None).

    A missing negative is replaced by the positive of another row, which the encoder reads anyway. The labels of a batch
    with a missing negative are {"missing": bool (B, columns)}.

    Created like ScoreLabelCollator. ValueError for a row without its first or second text.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        rows, missing = self.fill(features)
        return {**super().__call__(rows), **({} if missing is None else {"label": {"missing": missing}})}

    def fill(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """Replace missing negatives; returns (rows, where they were missing or None)."""
        names = [name for name in (rows[0] if rows else ()) if name not in (*self.valid_label_columns, "dataset_name")]
        missing = torch.tensor([[row[name] is None for name in names] for row in rows], dtype=torch.bool)
        if not missing.any():
            return rows, None
        if missing[:, :2].any():
            raise ValueError(f"a row has no {names[int(missing[:, 1].any())]}: only negatives may be missing")
        positives = [row[names[1]] for row in rows]
        # one distinct text for each place of a row: copies within a row would be encoded again
        filled = [
            {name: positives[(i + names.index(name)) % len(rows)] if value is None else value
             for name, value in row.items()}
            for i, row in enumerate(rows)
        ]  # fmt: skip
        return filled, missing


class TextCollator(RowCollator):
    """Collator that adds the columns' texts, for losses whose teacher reads them: the labels of a batch are {"texts":
    [B texts of the first column, …]}, without prompts, and "missing" as those of RowCollator.

    Created like ScoreLabelCollator.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        labels = self.valid_label_columns
        texts, missing = self.fill([{k: value for k, value in row.items() if k not in labels} for row in features])
        columns = [name for name in (texts[0] if texts else ()) if name != "dataset_name"]
        of_columns = [[row[name] for row in texts] for name in columns]
        label = {"texts": of_columns, **({} if missing is None else {"missing": missing})}
        return {**super().__call__(texts), "label": label}


class ListCollator(SentenceTransformerDataCollator):
    """Collator for lists of sentences, for ListMLELoss.

    Rows have a column `sentences`, a list of texts, and optionally `label`, the teacher's n x n values row by row. A
    batch is one tokenised column with all sentences in order, and labels {"lengths": int64 (B,), "teacher": float32 (B,
    n, n), where n is the longest list, padded by 0}; without `label` there is no "teacher".

    Created like ScoreLabelCollator. ValueError for a missing column `sentences`, an empty list, or a wrong number of
    teacher values.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        if not features:
            return {}
        for row in features:
            if not isinstance(row.get("sentences"), (list, tuple)) or not row["sentences"]:
                raise ValueError(f"a row must have a column 'sentences', a list of texts; got {row.get('sentences')!r}")
        lengths = [len(row["sentences"]) for row in features]
        # other columns, such as the dataset's name if there are several
        extra = {key: value for key, value in features[0].items() if key not in ("sentences", "label")}
        batch = super().__call__([{**extra, "sentences": text} for row in features for text in row["sentences"]])
        batch["label"] = {"lengths": torch.tensor(lengths)}
        if "label" in features[0]:
            batch["label"]["teacher"] = teacher = torch.zeros(len(features), max(lengths), max(lengths))
            for square, row, length in zip(teacher, features, lengths, strict=True):
                values = torch.as_tensor(row["label"], dtype=torch.float32)
                if values.numel() != length * length:
                    raise ValueError(
                        f"a list of {length} sentences needs {length} x {length} teacher values, got {values.numel()}"
                    )
                square[:length, :length] = values.reshape(length, length)
        return batch


def columns_of(batch: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """The tokenised columns and the labels of a collated batch."""
    # the method reads nothing of a trainer, and takes negative_2_input_ids for a feature 2_input_ids of `negative`, too
    columns, labels = SentenceTransformerTrainer.collect_features(None, batch)  # type: ignore[arg-type]
    return [{name: value for name, value in each.items() if not name[0].isdigit()} for each in columns], labels


class PlanningCollator:
    """A collator that replaces the columns of another collator's batch by their plan (ByLength.plan), so that the
    processes of a DataLoader plan while the device computes. Batches of other losses keep their columns.

    Args:
        collate: the other collator.
        loss: the trainer's loss, or one for each dataset by name.
    """

    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]], loss: Any) -> None:
        self.collate, self.loss = collate, loss

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        if type(self.collate) is SentenceTransformerDataCollator and any(None in row.values() for row in rows):
            raise ValueError("a row lacks a text, which only InfoNCELoss, GISTLoss and SigmoidLoss of raoe_train allow")
        batch = self.collate(rows)
        loss = self.loss[batch["dataset_name"]] if isinstance(self.loss, Mapping) else self.loss
        features, labels = columns_of(batch)
        plan = loss.plan(features, labels) if hasattr(loss, "plan") and features else None
        if plan is None:
            return batch
        name = {key: batch[key] for key in ("dataset_name",) if key in batch}
        # transformers reads the batch size from the first array
        return {**name, "rows": np.arange(len(plan.rows[0])), "plan": plan}


def _score(value: Any) -> float:
    if value is None or isinstance(value, str):
        raise ValueError(f"a score must be a number, got {value!r}")
    return float(value)


def _label(value: Any) -> int:
    number = NLI_LABELS.get(value) if isinstance(value, str) else value
    if number is None or int(number) != number:
        raise ValueError(f"a label must be a whole number or one of {', '.join(NLI_LABELS)}, got {value!r}")
    return int(number)

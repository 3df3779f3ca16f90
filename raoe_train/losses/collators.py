"""Collators for pairs with a score and an NLI label, for rows that lack negatives, for rows with their texts, for lists
of sentences, and a collator that plans batches for ByLength."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from raoe_train.data.columns import NLI_LABELS


class RowCollator(SentenceTransformerDataCollator):
    """sentence-transformers' collator, extended to rows of anchor, positive and negatives that lack negatives (None).

    The labels of a batch with missing negatives are {"missing": bool (B, columns)}. A missing negative is replaced by
    the positive of another row, which is encoded anyway. ValueError for a row without its first or second text.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        others = (*self.valid_label_columns, "dataset_name")
        names = [name for name in (features[0] if features else ()) if name not in others]
        numbers = [name for name, value in (features[0] if features else {}).items() if isinstance(value, int | float)]
        if len(numbers) > 1 or {*numbers} - {*others}:
            raise ValueError(f"columns {', '.join(numbers)} hold numbers, not texts: keep at most one label or score")
        missing = torch.tensor([[row[name] is None for name in names] for row in features], dtype=torch.bool)
        if not missing.any():
            return super().__call__(features)
        if missing[:, :2].any():
            raise ValueError(f"a row has no {names[int(missing[:, 1].any())]}: only negatives may be missing")
        # Equal texts in a row are encoded separately, so use distinct texts; short ones are quick to tokenize.
        rows = [dict(row) for row in features]
        short = sorted(dict.fromkeys(row[names[1]] for row in rows), key=len)[: len(names)]
        for i, k in missing.nonzero().tolist():
            fills = [text for text in short if text != rows[i][names[1]]] or short
            rows[i][names[k]] = fills[k % len(fills)]
        return super().__call__(rows) | {"label": {"missing": missing}}


class ScoreLabelCollator(RowCollator):
    """Collator for datasets with a column ``score`` and optionally ``label``; the collator of sentence-transformers
    does not support both. The labels of a batch are ``{"score": float64 (B,), "label": int64 (B,)}``; a column that the
    dataset lacks is left out.

    Labels must be whole numbers (larger = less related) or NLI words, and scores must be numbers, otherwise ValueError.
    Datasets without a score are collated as in sentence-transformers.

    raoe_train.Trainer uses this collator by default. For another trainer, pass the prompts of its arguments:

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


class TextCollator(RowCollator):
    """Collator that adds the texts of the columns, for losses whose teacher reads texts. The labels of a batch have
    "texts": [B texts of the first column, …], without prompts, and "missing" as in RowCollator.

    Create it like a ScoreLabelCollator.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        labels = self.valid_label_columns
        rows = [{name: value for name, value in row.items() if name not in labels} for row in features]
        batch = super().__call__(rows)
        columns = [name for name in (rows[0] if rows else ()) if name != "dataset_name"]
        # a missing text has no influence: use the row's positive in its place
        texts = [[row[columns[1]] if row[name] is None else row[name] for row in rows] for name in columns]
        return batch | {"label": {**(batch.get("label") or {}), "texts": texts}}


class ListCollator(SentenceTransformerDataCollator):
    """Collator for lists of sentences, for ListMLELoss.

    Rows have a column `sentences`, a list of texts, and optionally `label`, the teacher's n x n values row by row. A
    batch is one tokenised column with all sentences in order, and the labels {"lengths": int64 (B,), "teacher": float32
    (B, n, n)}. n is the length of the longest list; shorter lists are padded with 0. Without `label` there is no
    "teacher".

    Create it like a ScoreLabelCollator. ValueError for a missing column `sentences`, an empty list, or a wrong number
    of teacher values.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        if not features:
            return {}
        for row in features:
            if not isinstance(row.get("sentences"), (list, tuple)) or not row["sentences"]:
                raise ValueError(f"a row must have a column 'sentences', a list of texts; got {row.get('sentences')!r}")
        lengths = [len(row["sentences"]) for row in features]
        # other columns, such as the name of the dataset if there are several datasets
        extra = {key: value for key, value in features[0].items() if key not in ("sentences", "label")}
        batch = super().__call__([{**extra, "sentences": text} for row in features for text in row["sentences"]])
        batch["label"] = {"lengths": torch.tensor(lengths)}
        if "label" in features[0]:
            batch["label"]["teacher"] = teacher = torch.zeros(len(features), max(lengths), max(lengths))
            for square, row, length in zip(teacher, features, lengths, strict=True):
                values = torch.as_tensor(row["label"], dtype=torch.float32)
                if values.numel() != length * length:
                    raise ValueError(f"{length} sentences need {length} x {length} values, got {values.numel()}")
                square[:length, :length] = values.reshape(length, length)
        return batch


def columns_of(batch: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Return the tokenised columns and the labels of a collated batch."""
    # the method reads no attribute of a trainer, but takes negative_2_input_ids for a feature 2_input_ids of `negative`
    columns, labels = SentenceTransformerTrainer.collect_features(None, batch)  # type: ignore[arg-type]
    return [{name: value for name, value in each.items() if not name[0].isdigit()} for each in columns], labels


class PlanningCollator:
    """A collator that replaces the columns of another collator's batch by their plan (ByLength.plan), so that
    DataLoader workers plan batches while the device computes. Batches for losses without a plan keep their columns.

    Args:
        collate: the collator whose batches are planned.
        loss: the loss of the trainer, or {name of a dataset: its loss}.
    """

    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]], loss: Any) -> None:
        self.collate, self.loss = collate, loss

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        batch = self.collate(rows)
        loss = self.loss[batch["dataset_name"]] if isinstance(self.loss, Mapping) else self.loss
        features, labels = columns_of(batch)
        inner = loss
        while isinstance(getattr(inner, "loss", None), torch.nn.Module):
            inner = inner.loss
        if isinstance(labels, dict) and "missing" in labels and not getattr(inner, "allows_missing", False):
            raise ValueError("a row lacks a negative, which only InfoNCELoss, GISTLoss and SigmoidLoss allow")
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

"""The kinds of training data that losses read, and their collators: for pairs with scores and NLI labels, for rows that
lack negatives, for losses that also need the texts, and for lists of sentences. PlanningCollator plans batches for
ByLength.

The functions that read such data from files are in raoe_train.training.reads. Losses do not import these functions,
because a loss can also be used with data that raoe did not read."""

import copy
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from tqdm import tqdm

from raoe_train.data.columns import NLI_LABELS
from raoe_train.encoders.tokens import CHUNK, RowTokenizer, is_plain

HOME = "raoe_train.training.reads"


class RowCollator(SentenceTransformerDataCollator):
    """sentence-transformers' collator, extended to rows in which negatives are missing (None).

    If negatives are missing, the batch's labels are {"missing": bool (B, columns)}, where True marks a missing text.
    Each missing text is replaced by another row's positive, which is encoded anyway. Raise ValueError if the first or
    second text of a row is missing.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        others = (*self.valid_label_columns, "dataset_name")
        names = [name for name in (features[0] if features else ()) if name not in others]
        numbers = [name for name, value in (features[0] if features else {}).items() if isinstance(value, int | float)]
        if len(numbers) > 1 or {*numbers} - {*others}:
            advice = "rename the score column to 'score', and remove the other numeric columns"
            raise ValueError(f"columns {', '.join(numbers)} contain numbers, not texts: {advice}")
        for name, value in ((name, row[name]) for row in features for name in names):
            if isinstance(value, list) and not isinstance((value or [""])[0], dict):  # dicts: a conversation
                advice = "use one column per text, or rename a column with lists of negatives to 'negatives'"
                raise ValueError(f"column {name} contains lists, not texts: {advice}")
        if empty := [name for row in features for name in others[:-1] if row.get(name, 0) is None]:
            raise ValueError(f"a row has no {empty[0]} (None): remove the row, or add the value")
        missing = torch.tensor([[row[name] is None for name in names] for row in features], device="cpu").bool()
        if not missing.any():
            return super().__call__(features)
        if missing[:, :2].any():
            raise ValueError(f"a row has no {names[int(missing[:, 1].any())]}: only negatives may be missing")
        # Fill gaps with distinct texts, because copies within a row are encoded again, and short ones to save time.
        rows = [dict(row) for row in features]
        short = sorted(dict.fromkeys(row[names[1]] for row in rows), key=len)[: len(names)]
        for i, k in missing.nonzero().tolist():
            fills = [text for text in short if text != rows[i][names[1]]] or short
            rows[i][names[k]] = fills[k % len(fills)]
        return super().__call__(rows) | {"label": {"missing": missing}}


class ScoreLabelCollator(RowCollator):
    """Collator for datasets with a column ``score`` and, optionally, a column ``label``. (sentence-transformers'
    collator does not support datasets that have both columns.) A batch's labels are ``{"score": float64 (B,), "label":
    int64 (B,)}``, without "label" if the dataset lacks this column. For ranks instead of scores, see
    PairLoss.reads_order.

    Raise ValueError if a score is not a number, or if a label is neither a whole number (larger = less related) nor the
    name of an NLI class. Datasets without a column ``score`` are collated as in sentence-transformers.

    `raoe_train.Trainer` uses this collator for pair losses. With another trainer, pass the prompts from its training
    arguments to the collator:

        ScoreLabelCollator(preprocess_fn=model.preprocess, prompts=args.prompts)
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        columns = features[0] if features else {}
        if "score" not in columns or isinstance(columns.get("label"), (list, torch.Tensor)):
            return super().__call__(features)
        # float64, because distinct scores can be equal in float32; Apple's GPUs have no float64
        kind = torch.float32 if torch.backends.mps.is_available() else torch.float64
        labels = {"score": torch.tensor([_score(row["score"]) for row in features], dtype=kind, device="cpu")}
        if "label" in columns:
            labels["label"] = torch.tensor([_label(row["label"]) for row in features], device="cpu")
        texts = [{key: value for key, value in row.items() if key not in ("score", "label")} for row in features]
        return {**super().__call__(texts), "label": labels}


class TextCollator(RowCollator):
    """Collator that adds each column's texts to the labels, for losses with a teacher or guide. A batch's labels are
    {"texts": one list of B texts (without prompts) per column}. If negatives are missing, the labels also contain
    "missing" (see RowCollator)."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        labels = self.valid_label_columns
        rows = [{name: value for name, value in row.items() if name not in labels} for row in features]
        batch = super().__call__(rows)
        columns = [name for name in (rows[0] if rows else ()) if name != "dataset_name"]
        # the loss ignores missing texts, so fill their places with the row's positive
        texts = [[row[columns[1]] if row[name] is None else row[name] for row in rows] for name in columns]
        return batch | {"label": {**(batch.get("label") or {}), "texts": texts}}


class ListCollator(SentenceTransformerDataCollator):
    """Collator for lists of sentences, for ListMLELoss.

    Each row contains `sentences`, a list of n texts, and optionally `label`, the teacher's n x n values as a flat list.
    A batch consists of one tokenized column, with the sentences of all lists in order, and the labels {"lengths": int64
    (B,), "teacher": float32 (B, m, m)}. Here, m is the length of the longest list, and smaller matrices are padded with
    0. If the column `label` is missing, the labels contain no "teacher".

    Raise ValueError for a missing column `sentences`, an empty list, or a wrong number of teacher values.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        if not features:
            return {}
        for row in features:
            if not isinstance(row.get("sentences"), (list, tuple)) or not row["sentences"]:
                raise ValueError(f"each row needs a list of texts in column 'sentences', got {row.get('sentences')!r}")
        lengths = [len(row["sentences"]) for row in features]
        # keep other columns, such as the name of the dataset if there are several datasets
        extra = {key: value for key, value in features[0].items() if key not in ("sentences", "label")}
        batch = super().__call__([{**extra, "sentences": text} for row in features for text in row["sentences"]])
        batch["label"] = {"lengths": torch.tensor(lengths, device="cpu")}
        if "label" in features[0]:
            batch["label"]["teacher"] = teacher = torch.zeros(len(features), *2 * [max(lengths)], device="cpu")
            for square, row, length in zip(teacher, features, lengths, strict=True):
                values = torch.as_tensor(row["label"], dtype=torch.float32, device="cpu")
                if values.numel() != length * length:
                    raise ValueError(f"{length} sentences need {length} x {length} label values, got {values.numel()}")
                square[:length, :length] = values.reshape(length, length)
        return batch


@dataclass(frozen=True)
class Reads:
    """The kind of training data that a loss needs."""

    name: str  # for messages, such as "triplets"
    # arguments: source; data with this source's labels and score_scale; model.prompt; whether to read
    # NLI labels. Result: (datasets.Dataset, counts), with counts as in raoe_train.data.sources.
    reader: str  # MODULE:FUNCTION
    collator: type[SentenceTransformerDataCollator] = RowCollator

    def read(self, *arguments: Any) -> tuple[Any, dict[str, Any]]:
        return pkgutil.resolve_name(self.reader)(*arguments)


SCORED_PAIRS = Reads("scored pairs", f"{HOME}:ranked_pairs", ScoreLabelCollator)
COSINES = Reads("scored pairs", f"{HOME}:cosines")  # RowCollator passes the scores as labels
ROWS = Reads("rows", f"{HOME}:rows")  # anchor, positive, any number of negatives
ROWS_WITH_TEXTS = Reads("rows", f"{HOME}:rows", TextCollator)
TRIPLETS = Reads("triplets", f"{HOME}:triplets")  # with a neutral text if data.neutral is set
ONE_NEGATIVE = Reads("triplets", f"{HOME}:one_negative")
LABELLED_PAIRS = Reads("labelled pairs", f"{HOME}:two_classes")
CLASSES = Reads("NLI pairs", f"{HOME}:nli_classes")
LISTS = Reads("lists", f"{HOME}:lists", ListCollator)  # training_data adds the targets
RANKING = (ROWS, ROWS_WITH_TEXTS, TRIPLETS, ONE_NEGATIVE)  # dev sets may lack scores


def columns_of(batch: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Return the tokenized columns and the labels of a collated batch."""
    # collect_features does not use self. It wrongly adds negative_2_input_ids to `negative`, as feature 2_input_ids.
    columns, labels = SentenceTransformerTrainer.collect_features(None, batch)  # type: ignore[arg-type]
    return [{name: value for name, value in each.items() if not name[0].isdigit()} for each in columns], labels


class PlanningCollator:
    """Collator that replaces the columns of another collator's batch with a plan (see ByLength.plan), so that
    DataLoader workers plan batches while the device computes. If the loss has no `plan`, batches are not changed.

    Args:
        collate: the collator whose batches are planned.
        loss: the trainer's loss, or {dataset name: loss}.

    Attributes:
        tokenizer: the RowTokenizer that replaces the encoder's `preprocess`, or None.
    """

    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]], loss: Any) -> None:
        losses = loss if isinstance(loss, Mapping) else {None: loss}
        # planners instead of losses, because each DataLoader worker gets a copy of the collator
        self.planners = {name: each.planner() if hasattr(each, "plan") else None for name, each in losses.items()}
        self.allow_missing = {name for name, each in losses.items() if _allows_missing(each)}
        self.collate: Any = collate
        self.tokenizer: Any = None
        model = getattr(getattr(collate, "preprocess_fn", None), "__self__", None)
        reads_rows = all(getattr(each, "plans_rows", False) for each in losses.values())
        is_cut = getattr(collate, "max_length", None) is not None  # the trainer's max_length, since version 6.2
        if reads_rows and is_plain(model) and not is_cut:
            self.tokenizer = RowTokenizer(model)
            self.collate = copy.copy(collate)
            self.collate.preprocess_fn = self.tokenizer

    def pretokenize(self, datasets: Iterable[Any], bar: bool = True) -> None:
        """Tokenize all texts in `datasets` once, so that later batches only copy tokens. `bar`: show a progress bar."""
        texts = dict[str, None]()

        def collect(inputs: list[str], prompt: str | None = None, **_: Any) -> dict[str, Any]:
            texts.update(dict.fromkeys((prompt or "") + text for text in inputs))
            return {}

        collate: Any = copy.copy(self.collate)  # only this collator knows which columns contain texts, and the prompts
        collate.preprocess_fn = collect
        for dataset in datasets:
            for start in tqdm(range(0, len(dataset), CHUNK), "reading texts to tokenize", disable=not bar):
                collate(dataset.__getitems__([*range(start, min(start + CHUNK, len(dataset)))]))
        if texts:
            self.tokenizer.remember(texts)

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        batch = self.collate(rows)
        name = batch["dataset_name"] if None not in self.planners else None
        features, labels = columns_of(batch)
        if isinstance(labels, dict) and "missing" in labels and name not in self.allow_missing:
            raise ValueError("a row lacks a negative: use InfoNCELoss, GISTLoss or SigmoidLoss, or remove the row")
        planner = self.planners[name]
        plan = planner.plan(features, labels) if planner is not None and features else None
        if plan is None:
            return batch
        kept = {key: batch[key] for key in ("dataset_name",) if key in batch}
        # transformers reads the batch size from the first array
        return {**kept, "rows": np.arange(len(plan.rows[0])), "plan": plan}


def _allows_missing(loss: Any) -> bool:
    while isinstance(getattr(loss, "loss", None), torch.nn.Module):
        loss = loss.loss
    return getattr(loss, "allows_missing", False)


def _score(value: Any) -> float:
    if value is None or isinstance(value, str):
        raise ValueError(f"a score must be a number, got {value!r}")
    return float(value)


def _label(value: Any) -> int:
    number = NLI_LABELS.get(value) if isinstance(value, str) else value
    if number is None or int(number) != number:
        raise ValueError(f"a label must be a whole number or one of {', '.join(NLI_LABELS)}, got {value!r}")
    return int(number)


def collator_of(losses: list[Any]) -> Any:
    """Return the collator class that all losses need. Raise ValueError if the losses need different collators."""
    classes = {loss.reads.collator for loss in losses if hasattr(loss, "reads")} - {RowCollator}
    if len(classes) > 1:
        names = " and ".join(sorted(each.__name__ for each in classes))
        raise ValueError(f"the losses need different collators, {names}: pass a data_collator")
    return next(iter(classes), RowCollator)

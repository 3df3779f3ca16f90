"""Transfer tasks: a logistic regression on frozen embeddings, by SentEval's protocol (Conneau and Kiela 2018; the
BeLLM paper's Section 5.2).

Of its scikit-learn classifiers (senteval/tools/validation.py with usepytorch False): their seed, folds, order of
examples and grids of C, the inverse of the L2 penalty. Features of a pair are |u - v| and u * v (senteval/mrpc.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from raoe_train.data.labelled import labelled_table
from raoe_train.evaluation.finding import TEST, TRAIN, find_source
from raoe_train.evaluation.outcomes import Outcomes
from raoe_train.evaluation.tasks import Reading, Task

SEED = 1111
FOLDS = 10
DEV = ("dev", "validation", "valid")
# SentEval's, by protocol
GRID = [2.0**power for power in range(-2, 4)]
TRAIN_TEST_GRID = [2.0**power for power in range(-1, 6)]


def read_transfer(name: str, reading: Reading) -> Task:
    """The labelled sentences or pairs of a task, with all their splits."""
    source = find_source(name, reading.data_dir, "transfer", whole=True)
    data, _ = labelled_table(source, columns=reading.columns, on_error=reading.on_error)
    there = data.to_dict()
    columns = [there.get(name) for name in ("text", "second", "label", "split")]
    first, second, labels, split = columns
    _check(labels, split, source if isinstance(source, str) else f"task {name!r}")
    return Task("transfer", "accuracy", columns, [*first, *(second or [])], partial(classify, data=columns))


def classify(embeddings: np.ndarray, data: Sequence[Any]) -> tuple[dict[str, Any], Outcomes]:
    """Accuracy, x100, of the classifier.

    - Splits train, dev and test: C is the best on dev; trained on train, tested on test.
    - Splits train and test: C is the best in 10-fold cross-validation of train.
    - No splits, or one: mean accuracy of 10 folds, C of each the best in 10 folds of what it trains on.

    Of equally good C the smallest is taken; good is the accuracy in per cent, rounded to two digits.

    Returns:
        {"accuracy", "dev_accuracy": that by which C was chosen, "examples": tested}, and "f1", x100, of class 1 where
        examples are pairs of classes 0 and 1 and there is a test split. And 100 for each tested example that is right,
        0 for others, in an order that is the same for all encoders.
    """
    texts, second, labels, split = data
    # SentEval's order, by the number of tokens, then by class: the folds depend on it
    tokens = [[len(text.split()) for text in column or texts] for column in (texts, second)]
    order = sorted(range(len(labels)), key=lambda row: (tokens[0][row], tokens[1][row], labels[row]))
    labels, split = np.asarray(labels)[order], np.asarray(split)[order]
    features = embeddings.astype(np.float64)
    if second is not None:
        first, other = np.split(features, 2)
        features = np.concatenate([np.abs(first - other), first * other], axis=1)
    features = features[order]
    train, dev, test = (np.flatnonzero(np.isin(split, names)) for names in (TRAIN, DEV, TEST))
    given = bool(len(train) and len(test))
    folded = not (given and len(dev))
    outer = [(train, test)] if given else tqdm(_folds(labels), desc="folds", disable=None)
    right, accuracies, chosen_by = np.full(len(labels), np.nan), [], []
    for train, test in outer:
        inner = [(train[part], train[rest]) for part, rest in _folds(labels[train])] if folded else [(train, dev)]
        chosen, best = _best(features, labels, inner, TRAIN_TEST_GRID if given and folded else GRID)
        found = _classifier(chosen).fit(features[train], labels[train]).predict(features[test])
        right[test] = 100.0 * (found == labels[test])
        accuracies.append(right[test].mean())
        chosen_by.append(best)
    tested = right[~np.isnan(right)]
    result = {
        "accuracy": float(np.mean(accuracies)),  # of folds, whose sizes may differ by one
        "dev_accuracy": float(np.mean(chosen_by)),
        "examples": len(tested),
    }
    if given and second is not None and set(labels.tolist()) == {"0", "1"}:
        from sklearn.metrics import f1_score

        result["f1"] = 100 * float(f1_score(labels[test], found, pos_label="1", zero_division=0))
    return result, Outcomes(tested)


def _check(labels: list[str], split: list[str], where: str) -> None:
    """ValueError for splits that the protocol does not know, and classes that cannot be learnt."""
    splits = set(split)
    given = {TRAIN, TEST} <= splits
    if len(splits) > 1 and not (given and splits - {TRAIN, TEST, *DEV} == set()):
        raise ValueError(
            f"{where} has splits {', '.join(sorted(splits))}; known are {TRAIN}, {' or '.join(DEV)}, and {TEST}, "
            f"or one split for {FOLDS} folds of it: FILE#SPLIT"
        )
    counts = Counter(label for label, its in zip(labels, split, strict=True) if its == TRAIN or not given)
    if len(counts) < 2:
        raise ValueError(f"{where}: all examples to train on are of class {next(iter(counts))!r}; there must be two")
    if unknown := sorted(set(labels) - set(counts)):
        raise ValueError(f"{where}: class {unknown[0]!r} has no example to train on")
    label, fewest = min(counts.items(), key=lambda item: item[1])
    # an outer fold takes the most, a tenth rounded up, from what the inner folds divide
    left = fewest if given else fewest - -(-fewest // FOLDS)
    if left < FOLDS and not splits & set(DEV):
        raise ValueError(
            f"{where}: class {label!r} has {fewest} examples to train on, which is too few for {FOLDS} folds"
        )


def _classifier(chosen: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    # scikit-learn's own tolerance of 1e-4 stops at places that depend on the last bits of embeddings, and so on the
    # batch size they were made with: TREC's accuracy of all-MiniLM-L6-v2 was 90.0 and 90.4
    return LogisticRegression(C=chosen, random_state=SEED, tol=1e-6, max_iter=10_000)


def _folds(labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(places to train on, places to test on) of each fold."""
    from sklearn.model_selection import StratifiedKFold

    return list(StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(labels, labels))


def _best(features: np.ndarray, labels: np.ndarray, folds: Any, grid: Sequence[float]) -> tuple[float, float]:
    """(C, its mean accuracy x100 on the folds' second parts)."""
    from sklearn.model_selection import GridSearchCV

    search = GridSearchCV(_classifier(1.0), {"C": list(grid)}, cv=folds, refit=False, error_score="raise")
    scores = np.round(100 * search.fit(features, labels).cv_results_["mean_test_score"], 2)
    return grid[int(np.argmax(scores))], float(scores.max())

"""Transfer tasks: a classifier on frozen embeddings, by SentEval's protocol (Conneau and Kiela 2018; the BeLLM paper's
Section 5.2), which says the folds, the order of examples and the choice of the penalty."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold
from tqdm import tqdm

from raoe_train.data.mining import labelled_table
from raoe_train.evaluation.classifiers import SEED, Classifier, classifier
from raoe_train.evaluation.tasks import TEST, TRAIN, Outcomes, Reading, Task, find_task

DEV = ("dev", "validation", "valid")


def read_transfer(name: str, reading: Reading) -> Task:
    """The labelled sentences or pairs of a task, with all their splits."""
    source = find_task(name, reading.data_dir, "transfer", whole=True)
    data = labelled_table(source, **reading.rows)[0].to_dict()
    columns = [data.get(name) for name in ("text", "second", "label", "split")]
    first, second, labels, split = columns
    settings = (reading.classifier or Classifier()).settings()
    _check(labels, split, str(source), settings["kfold"])
    # the default classifier is not part of the content, so that results from before there were others stay valid
    content = columns if settings == Classifier().settings() else [*columns, settings]
    score = partial(classify, data=columns, settings=settings)
    return Task("transfer", "accuracy", content, [*first, *(second or [])], score)


def classify(embeddings: np.ndarray, data: Sequence[Any], settings: dict[str, Any]) -> tuple[dict[str, Any], Outcomes]:
    """{"accuracy", x100, "dev_accuracy": by which penalties were chosen, "examples": tested}, "f1", x100, of class 1
    for a test split of pairs of classes 0 and 1, and "classifier", the settings, unless they are of scikit-learn's; and
    100 for each tested example that is right, 0 for others, in the same order for all encoders.

    - Splits train, dev and test: the penalty is the best on dev; trained on train, tested on test.
    - Splits train and test: it is the best in cross-validation of train.
    - No splits, or one: mean accuracy of the folds, the penalty of each the best in folds of what it trains on.
    """
    texts, second, words, split = data
    # SentEval's order, by the number of tokens, then by class: the folds depend on it
    tokens = [[len(text.split()) for text in column or texts] for column in (texts, second)]
    order = sorted(range(len(words)), key=lambda row: (tokens[0][row], tokens[1][row], words[row]))
    classes, labels = np.unique(np.asarray(words)[order], return_inverse=True)
    split = np.asarray(split)[order]
    features = embeddings.astype(np.float64)
    if second is not None:  # the features of senteval/mrpc.py
        first, other = np.split(features, 2)
        features = np.concatenate([np.abs(first - other), first * other], axis=1)
    model = classifier(features[order], labels, settings)
    train, dev, test = (np.flatnonzero(np.isin(split, names)) for names in (TRAIN, DEV, TEST))
    given = bool(len(train) and len(test))
    dev = dev if given else dev[:0]
    grid = model.split_grid if given and not len(dev) else model.grid
    outer = [(train, test)] if given else _folds(np.arange(len(labels)), labels, settings)
    right, accuracies, chosen_by = np.full(len(labels), np.nan), [], []
    for train, test in tqdm(outer, desc="folds", disable=given or None):
        folds = [(train, dev)] if len(dev) else _folds(train, labels, settings)
        scores = np.round(100 * model.validated(folds, grid).mean(0), 2)  # ties go to the first of the grid
        found = model.predicted(train, dev, test, grid[int(scores.argmax())])
        right[test] = 100.0 * (found == labels[test])
        accuracies.append(right[test].mean())
        chosen_by.append(scores.max())
    tested = right[~np.isnan(right)]
    # a mean of folds, whose sizes may differ by one
    accuracy, dev_accuracy = float(np.mean(accuracies)), float(np.mean(chosen_by))
    result: dict[str, Any] = {"accuracy": accuracy, "dev_accuracy": dev_accuracy, "examples": len(tested)}
    if settings["name"] != Classifier.name:
        result["classifier"] = settings
    if given and second is not None and classes.tolist() == ["0", "1"]:
        result["f1"] = 100 * float(f1_score(labels[test], found, zero_division=0))
    return result, Outcomes(tested)


def _check(labels: list[str], split: list[str], where: str, kfold: int) -> None:
    """ValueError for splits that the protocol does not know, and classes that cannot be learnt."""
    splits = set(split)
    given = {TRAIN, TEST} <= splits
    if len(splits) > 1 and not (given and splits - {TRAIN, TEST, *DEV} == set()):
        known = f"{TRAIN}, {' or '.join(DEV)}, and {TEST}, or one split for {kfold} folds of it: FILE#SPLIT"
        raise ValueError(f"{where} has splits {', '.join(sorted(splits))}; known are {known}")
    counts = Counter(label for label, its in zip(labels, split, strict=True) if its == TRAIN or not given)
    if len(counts) < 2:
        raise ValueError(f"{where}: all examples to train on are of class {next(iter(counts))!r}; there must be two")
    if unknown := sorted(set(labels) - set(counts)):
        raise ValueError(f"{where}: class {unknown[0]!r} has no example to train on")
    label, fewest = min(counts.items(), key=lambda item: item[1])
    # an outer fold takes the most, a tenth rounded up, from what the inner folds divide
    left = fewest if given else fewest - -(-fewest // kfold)
    if left < kfold and not splits & set(DEV):
        few = f"{fewest} examples to train on, which is too few for {kfold} folds"
        raise ValueError(f"{where}: class {label!r} has {few}")


def _folds(places: np.ndarray, labels: np.ndarray, settings: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(places to train on, places to test on) of each fold."""
    folds = StratifiedKFold(settings["kfold"], shuffle=True, random_state=SEED).split(places, labels[places])
    return [(places[part], places[rest]) for part, rest in folds]

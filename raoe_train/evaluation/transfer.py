"""Transfer tasks: train a classifier on frozen embeddings with SentEval's protocol (Conneau and Kiela 2018; BeLLM,
section 5.2). The protocol fixes the folds, the order of the examples and how the regularization parameter ("penalty")
is selected. The classifier is scikit-learn's logistic regression, or SentEval's linear layer (validation.py and
classifier.py in senteval/tools)."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression as Regression
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold
from tqdm import tqdm

from raoe_train.data.mining import labelled_table
from raoe_train.evaluation.tasks import TEST, TRAIN, Outcomes, Reading, Task, find_task
from raoe_train.settings import Classifier

DEV = ("dev", "validation", "valid")
SEED = 1111
HELD_OUT = 0.05  # share of the train split for early stopping if there is no dev split
MAX_EPOCHS = 200
TOLERANCE = 1e-7  # solver tolerance for the mean gradient
Folds = Sequence[tuple[np.ndarray, np.ndarray]]  # (training rows, test rows) of each fold


def read_transfer(name: str, reading: Reading) -> Task:
    """Read the labelled sentences or pairs of a transfer task, with all splits."""
    source = find_task(name, reading.data_dir, "transfer", whole=True)
    data = labelled_table(source, **reading.rows)[0].to_dict()
    columns = [data.get(name) for name in ("text", "second", "label", "split")]
    first, second, labels, split = columns
    settings = (reading.classifier or Classifier()).settings()
    _check(labels, split, str(source), settings["kfold"])
    score = partial(classify, data=columns, settings=settings)
    return Task("transfer", "accuracy", [*first, *(second or [])], score)


def classify(embeddings: np.ndarray, data: Sequence[Any], settings: dict[str, Any]) -> tuple[dict[str, Any], Outcomes]:
    """Classify the examples of a transfer task. Return (result, Outcomes). Outcomes contain 100 for each correctly
    classified example and 0 for any other example. The order of the examples is fixed. The result contains "accuracy"
    (x100), "dev_accuracy" (validation accuracy with the selected penalty, x100) and "examples" (number of tested
    examples). For a test split of pairs with classes 0 and 1, the result also contains "f1" (x100). If the classifier
    is not scikit-learn's, the result also contains "classifier" (the settings).

    With the splits train and test, the classifier is trained on the train split and tested on the test split. The
    strength of the L2 penalty is selected on the dev split or, if there is none, by cross-validation on the train
    split. Without these splits, the accuracy is the mean over folds, and the strength of the penalty is selected by
    cross-validation in the training part of each fold.
    """
    texts, second, words, split = data
    # sort as SentEval does, by number of tokens and then by class, because the folds depend on the order
    tokens = [[len(text.split()) for text in column or texts] for column in (texts, second)]
    order = sorted(range(len(words)), key=lambda row: (tokens[0][row], tokens[1][row], words[row]))
    classes, labels = np.unique(np.asarray(words)[order], return_inverse=True)
    split = np.asarray(split)[order]
    features = embeddings.astype(np.float64)
    if second is not None:  # features as in senteval/mrpc.py
        first, other = np.split(features, 2)
        features = np.concatenate([np.abs(first - other), first * other], axis=1)
    kind = LinearLayer if settings["name"] == "senteval" else LogisticRegression
    model = kind(features[order], labels, settings)
    train, dev, test = (np.flatnonzero(np.isin(split, names)) for names in (TRAIN, DEV, TEST))
    has_splits = bool(len(train) and len(test))
    dev = dev if has_splits else dev[:0]
    grid = model.split_grid if has_splits and not len(dev) else model.grid
    rounds = [(train, test)] if has_splits else _folds(np.arange(len(labels)), labels, settings)
    correct, accuracies, dev_accuracies = np.full(len(labels), np.nan), [], []
    for train, test in tqdm(rounds, desc="folds", disable=has_splits):
        folds = [(train, dev)] if len(dev) else _folds(train, labels, settings)
        scores = np.round(100 * model.validate(folds, grid).mean(0), 2)  # argmax returns the first of equal scores
        predictions = model.predict(train, dev, test, grid[int(scores.argmax())])
        correct[test] = 100.0 * (predictions == labels[test])
        accuracies.append(correct[test].mean())
        dev_accuracies.append(scores.max())
    results = correct[~np.isnan(correct)]
    # the mean over folds differs from the mean over examples if fold sizes differ
    accuracy, dev_accuracy = float(np.mean(accuracies)), float(np.mean(dev_accuracies))
    result: dict[str, Any] = {"accuracy": accuracy, "dev_accuracy": dev_accuracy, "examples": len(results)}
    if settings["name"] != Classifier.name:
        result["classifier"] = settings
    if has_splits and second is not None and classes.tolist() == ["0", "1"]:
        result["f1"] = 100 * float(f1_score(labels[test], predictions, zero_division=0))
    return result, Outcomes(results)


def _check(labels: list[str], split: list[str], source: str, kfold: int) -> None:
    """Raise ValueError for splits that the protocol does not support, and for classes with too few examples."""
    splits = set(split)
    has_splits = {TRAIN, TEST} <= splits
    if len(splits) > 1 and not (has_splits and splits - {TRAIN, TEST, *DEV} == set()):
        choices = f"{TRAIN} and {TEST}, optionally {' or '.join(DEV)}; to cross-validate on one split, use FILE#SPLIT"
        raise ValueError(f"{source} has splits {', '.join(sorted(splits))}; they must be {choices}")
    counts = Counter(label for label, part in zip(labels, split, strict=True) if part == TRAIN or not has_splits)
    if len(counts) < 2:
        raise ValueError(f"{source}: all training examples belong to class {next(iter(counts))!r}: add a second class")
    if unknown := sorted(set(labels) - set(counts)):
        raise ValueError(f"{source}: class {unknown[0]!r} has no training example: add one, or remove the class")
    label, fewest = min(counts.items(), key=lambda item: item[1])
    # an outer fold holds out up to 1/kfold of the examples (rounded up); the inner folds divide the rest
    rest = fewest if has_splits else fewest - -(-fewest // kfold)
    if rest < kfold and not splits & set(DEV):
        message = f"{fewest} training examples, too few for {kfold} folds: lower classifier.kfold"
        raise ValueError(f"{source}: class {label!r} has {message}")


def _folds(places: np.ndarray, labels: np.ndarray, settings: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    folds = StratifiedKFold(settings["kfold"], shuffle=True, random_state=SEED).split(places, labels[places])
    return [(places[part], places[rest]) for part, rest in folds]


class LinearLayer:
    """SentEval's classifier: a linear layer trained with cross entropy. The weights of the round with the best dev
    accuracy are kept. All layers (one per penalty) share initial weights and batches, so they are trained together."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, settings: dict[str, Any]) -> None:
        with_ones = np.column_stack([features, np.ones(len(features))])
        self.features, self.labels, self.settings = with_ones.astype(np.float32), labels, settings
        self.grid = self.split_grid = [10.0**power for power in range(-5, -1)]

    def validate(self, folds: Folds, grid: Sequence[float]) -> np.ndarray:
        """Return accuracies from 0 to 1, [folds, penalties], on the test rows of each fold."""
        return np.array([self._fit(train, grid, dev)[0] for train, dev in folds])

    def predict(self, train: np.ndarray, dev: np.ndarray, test: np.ndarray, penalty: float) -> np.ndarray:
        _, (weight,) = self._fit(train, [penalty], dev)
        return (self.features[test] @ weight.T).argmax(1)

    def _fit(self, train: np.ndarray, penalties: Sequence[float], dev: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each penalty's best dev accuracy, [penalties], and its weights, [penalties, classes, columns]."""
        settings, random = self.settings, np.random.RandomState(SEED)
        if not len(dev):
            dev, train = np.split(train[random.permutation(len(train))], [int(HELD_OUT * len(train))])
        columns, count = self.features.shape[1], self.labels.max() + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            layer = torch.nn.Linear(columns - 1, count, device="cpu")
        # [penalties * classes, columns]
        weight = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach().repeat(len(penalties), 1)
        optimizer = torch.optim.Adam([weight], fused=True)
        decay = torch.tensor(penalties, device="cpu").repeat_interleave(count)[:, None]
        x, held_out = (torch.from_numpy(self.features[places]) for places in (train, dev))
        targets = torch.nn.functional.one_hot(torch.from_numpy(self.labels[train]), count)[:, None].float()
        shape = (-1, len(penalties), count)
        best, weights = np.full(len(penalties), -1.0), np.zeros((len(penalties), count, columns), np.float32)
        misses, epochs = np.zeros(len(penalties), int), 0
        while epochs <= MAX_EPOCHS and (misses <= settings["tenacity"]).any():
            for _ in range(settings["epoch_size"]):
                for places in torch.from_numpy(random.permutation(len(x))).split(settings["batch_size"]):
                    batch = x[places]
                    error = (batch @ weight.T).view(shape).softmax(-1) - targets[places]
                    weight.grad = error.flatten(1).T @ batch / len(batch) + decay * weight
                    optimizer.step()
            epochs += settings["epoch_size"]
            accuracy = ((held_out @ weight.T).view(shape).argmax(2).numpy() == self.labels[dev, None]).mean(0)
            active = misses <= settings["tenacity"]
            better = active & (accuracy > best)
            best[better] = accuracy[better]
            weights[better] = weight.numpy().reshape(weights.shape)[better]
            misses += active & ~better
        return best, weights


class LogisticRegression:
    """scikit-learn's logistic regression in float64. A penalty is a value of C, the inverse regularization strength."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, settings: dict[str, Any]) -> None:
        self.features, self.labels = features.astype(np.float64), labels
        self.grid, self.split_grid = ([2.0**power for power in range(*ends)] for ends in ((-2, 4), (-1, 6)))

    def validate(self, folds: Folds, grid: Sequence[float]) -> np.ndarray:
        x, labels = self.features, self.labels
        return np.array([[self._fit(train, C).score(x[dev], labels[dev]) for C in grid] for train, dev in folds])

    def predict(self, train: np.ndarray, dev: np.ndarray, test: np.ndarray, penalty: float) -> np.ndarray:
        return self._fit(train, penalty).predict(self.features[test])

    def _fit(self, train: np.ndarray, C: float) -> Any:
        # With the default tolerance of 1e-4, the last bits of embeddings change the accuracy, and these bits depend on
        # the encoding batch size: on TREC, the accuracy of all-MiniLM-L6-v2 was 90.0 or 90.4.
        return Regression(C=C, tol=TOLERANCE, max_iter=10_000).fit(self.features[train], self.labels[train])

"""The classifiers of transfer tasks: scikit-learn's logistic regression, or SentEval's linear layer, as in
senteval/tools/validation.py and classifier.py (Conneau and Kiela 2018)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression as Regression

SEED = 1111
HELD_OUT = 0.05  # share of train for early stopping if there is no dev split
MAX_EPOCHS = 200
TOLERANCE = 1e-7  # for the mean gradient
Folds = Sequence[tuple[np.ndarray, np.ndarray]]  # (training rows, test rows) of each fold


class LinearLayer:
    """SentEval's classifier: a linear layer with cross entropy and the best round on dev. The layers for several
    penalties have the same start and batches, so they are trained side by side."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, settings: dict[str, Any]) -> None:
        with_ones = np.column_stack([features, np.ones(len(features))])
        self.features, self.labels, self.settings = with_ones.astype(np.float32), labels, settings
        self.grid = self.split_grid = [10.0**power for power in range(-5, -1)]

    def validate(self, folds: Folds, grid: Sequence[float]) -> np.ndarray:
        """[folds, penalties] accuracies, from 0 to 1, on each fold's second part."""
        return np.array([self._fit(train, grid, dev)[0] for train, dev in folds])

    def predict(self, train: np.ndarray, dev: np.ndarray, test: np.ndarray, penalty: float) -> np.ndarray:
        """Train a layer on train, and return its [test] classes."""
        _, (weight,) = self._fit(train, [penalty], dev)
        return (self.features[test] @ weight.T).argmax(1)

    def _fit(self, train: np.ndarray, penalties: Sequence[float], dev: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """([penalties] best accuracies, [penalties, classes, columns] the weights with these accuracies)."""
        settings, random = self.settings, np.random.RandomState(SEED)
        if not len(dev):
            dev, train = np.split(train[random.permutation(len(train))], [int(HELD_OUT * len(train))])
        columns, count = self.features.shape[1], self.labels.max() + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            layer = torch.nn.Linear(columns - 1, count)
        # [penalties * classes, columns]
        weight = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach().repeat(len(penalties), 1)
        optimizer = torch.optim.Adam([weight], fused=True)
        decay = torch.tensor(penalties).repeat_interleave(count)[:, None]
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
    """scikit-learn's logistic regression in float64; the penalties are its C."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, settings: dict[str, Any]) -> None:
        self.features, self.labels = features.astype(np.float64), labels
        self.grid, self.split_grid = ([2.0**power for power in range(*ends)] for ends in ((-2, 4), (-1, 6)))

    def validate(self, folds: Folds, grid: Sequence[float]) -> np.ndarray:
        x, labels = self.features, self.labels
        return np.array([[self._fit(train, C).score(x[dev], labels[dev]) for C in grid] for train, dev in folds])

    def predict(self, train: np.ndarray, dev: np.ndarray, test: np.ndarray, penalty: float) -> np.ndarray:
        return self._fit(train, penalty).predict(self.features[test])

    def _fit(self, train: np.ndarray, C: float) -> Any:
        # with the default tolerance of 1e-4 the accuracy depends on the last bits of embeddings, and so on the batch
        # size of encoding: all-MiniLM-L6-v2 had 90.0 and 90.4 on TREC
        return Regression(C=C, tol=TOLERANCE, max_iter=10_000).fit(self.features[train], self.labels[train])


def classifier(features: np.ndarray, labels: np.ndarray, settings: dict[str, Any]) -> LinearLayer | LogisticRegression:
    """Create the classifier that the settings name, for [n, columns] features and [n] classes 0 … k - 1."""
    return (LinearLayer if settings["name"] == "senteval" else LogisticRegression)(features, labels, settings)

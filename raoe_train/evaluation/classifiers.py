"""What transfer tasks train on frozen embeddings: a logistic regression that is solved, or SentEval's own linear layer.

Of senteval/tools/validation.py and classifier.py (Conneau and Kiela 2018): seed, grids of penalties, and of the linear
layer what it starts from, the order of its examples and when it stops, so that the same embeddings give the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raoe_train.config import AtLeast2, NonNegativeInt, PositiveInt, nearest

SEED = 1111
HELD_OUT = 0.05  # of train, to stop by where no dev is given
MAX_EPOCHS = 200
TOLERANCE = 1e-6  # of the mean gradient
MOST_STEPS = 1000
NAMES: dict[str, dict[str, Any]] = {
    "scikit-learn": {"kfold": 10},
    # "comparable to the literature" and "prototyping" in SentEval's README
    "senteval": {"kfold": 10, "optim": "adam", "batch_size": 64, "tenacity": 5, "epoch_size": 4},
    "senteval-prototype": {"kfold": 5, "optim": "rmsprop", "batch_size": 128, "tenacity": 3, "epoch_size": 2},
}

Folds = Sequence[tuple[np.ndarray, np.ndarray]]
"""(places to train on, places to test on) of each."""


@dataclass
class Classifier:
    """What transfer tasks are classified with; other defaults depend on the name.

    Args:
        name: scikit-learn, senteval (a linear layer and Adam, as papers use it) or senteval-prototype
        kfold: folds of cross-validation
        optim: adam or rmsprop
        batch_size: examples of a step
        tenacity: rounds in all that may be no better than the best
        epoch_size: epochs of a round
    """

    name: str = "scikit-learn"
    kfold: AtLeast2 | None = None
    optim: str | None = None
    batch_size: PositiveInt | None = None
    tenacity: NonNegativeInt | None = None
    epoch_size: PositiveInt | None = None

    def settings(self) -> dict[str, Any]:
        """All that holds, name included; ValueError for what is unknown, or no setting of this one."""
        if self.name not in NAMES:
            near = nearest(self.name, NAMES)
            raise ValueError(f"classifier must be of {', '.join(NAMES)}, got {self.name!r}{near}")
        known = NAMES[self.name]
        given = {key: value for key, value in vars(self).items() if key != "name" and value is not None}
        if others := [key for key in given if key not in known]:
            raise ValueError(f"classifier.{others[0]} is no setting of {self.name}, which has {', '.join(known)}")
        if given.get("optim", "adam") not in UPDATES:
            raise ValueError(f"classifier.optim must be of {', '.join(UPDATES)}, got {self.optim!r}")
        return {"name": self.name, **known, **given}


class LinearLayer:
    """SentEval's own: one linear layer, cross entropy, steps of an optimizer, the best round on dev.

    Layers of several penalties see the same batches from the same start, so that they are trained side by side.
    """

    def __init__(self, features: np.ndarray, labels: np.ndarray, settings: dict[str, Any]) -> None:
        self.features, self.labels, self.settings = _with_ones(features, np.float32), labels, settings
        self.grid = self.split_grid = [10.0**power for power in range(-5, -1)]

    def validated(self, train: np.ndarray, folds: Folds, grid: Sequence[float]) -> np.ndarray:
        """[folds, penalties] accuracies on each fold's second part, of 1, by the best round on it."""
        return np.array([self._fit(its, grid, held)[0] for its, held in folds])

    def predicted(self, train: np.ndarray, dev: np.ndarray, test: np.ndarray, penalty: float) -> np.ndarray:
        """[test] classes, of the layer trained on train."""
        _, (weight,) = self._fit(train, [penalty], dev)
        return (self.features[test] @ weight.T).argmax(1)

    def _fit(self, train: np.ndarray, penalties: Sequence[float], dev: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """([penalties] best accuracies, [penalties, classes, columns] the weights that had them)."""
        its, random = self.settings, np.random.RandomState(SEED)
        if not len(dev):
            held = int(HELD_OUT * len(train))
            dev, train = np.split(train[random.permutation(len(train))], [held])
        x, labels, count = self.features[train], self.labels[train], self.labels.max() + 1
        weight = np.tile(_first_layer(x.shape[1] - 1, count), (len(penalties), 1))
        decay = np.repeat(np.array(penalties, np.float32), count)[:, None]
        expected = np.eye(count, dtype=np.float32)[labels][:, None]
        update = UPDATES[its["optim"]](weight)
        best, chosen = np.full(len(penalties), -1.0), np.zeros((len(penalties), count, x.shape[1]), np.float32)
        misses, epochs = np.zeros(len(penalties), int), 0
        while epochs <= MAX_EPOCHS and (misses <= its["tenacity"]).any():
            for _ in range(its["epoch_size"]):
                order = random.permutation(len(x))
                for start in range(0, len(order), its["batch_size"]):
                    places = order[start : start + its["batch_size"]]
                    batch = x[places]
                    error = _softmax((batch @ weight.T).reshape(len(batch), len(penalties), count)) - expected[places]
                    update(error.reshape(len(batch), -1).T @ batch / len(batch) + decay * weight)
            epochs += its["epoch_size"]
            logits = (self.features[dev] @ weight.T).reshape(len(dev), len(penalties), count)
            accuracy = (logits.argmax(2) == self.labels[dev, None]).mean(0)
            going = misses <= its["tenacity"]
            better = going & (accuracy > best)
            best[better] = accuracy[better]
            chosen[better] = weight.reshape(chosen.shape)[better]
            misses += going & ~better
        return best, chosen


class LogisticRegression:
    """The minimum of C times the sum of log losses and half the squared weights without the intercepts', scikit-learn's
    in float64. Of two classes by Newton's method, each problem from the solution and the curvature of one near it."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, settings: dict[str, Any]) -> None:
        self.features, self.labels, self.settings = _with_ones(features, np.float64), labels, settings
        self.grid = [2.0**power for power in range(-2, 4)]
        self.split_grid = [2.0**power for power in range(-1, 6)]

    def validated(self, train: np.ndarray, folds: Folds, grid: Sequence[float]) -> np.ndarray:
        """[folds, C] accuracies on each fold's second part, of 1."""
        x, labels = self.features, self.labels
        near = _path(x[train], labels[train], grid, [None] * len(grid))
        found = []
        for its, held in folds:
            regressions = _path(x[its], labels[its], grid, near)
            found.append([(_classes(x[held], each) == labels[held]).mean() for each in regressions])
        return np.array(found)

    def predicted(self, train: np.ndarray, dev: np.ndarray, test: np.ndarray, penalty: float) -> np.ndarray:
        """[test] classes, of the regression on train alone."""
        (regression,) = _path(self.features[train], self.labels[train], [penalty], [None])
        return _classes(self.features[test], regression)


class Minimum(NamedTuple):
    """Of a problem that was solved."""

    weights: np.ndarray  # [columns]
    factor: Any  # of its curvature, a Cholesky factor


def _path(x: np.ndarray, labels: np.ndarray, grid: Sequence[float], near: Sequence[Any]) -> list[Any]:
    """The regression of each C, of two classes started from `near`, or from that of the C before."""
    from sklearn.linear_model import LogisticRegression as Multinomial

    found: list[Any] = []
    for chosen, start in zip(grid, near, strict=True):
        if labels.max() == 1:
            found.append(minimum(x, labels, chosen, start or (found or [None])[-1]))
        else:
            # its own tolerance of 1e-4 stops at places that depend on the last bits of embeddings, and so on the batch
            # size they were made with: TREC's accuracy of all-MiniLM-L6-v2 was 90.0 and 90.4
            found.append(Multinomial(C=chosen, tol=TOLERANCE, max_iter=10_000).fit(x[:, :-1], labels))
    return found


def _classes(x: np.ndarray, regression: Any) -> np.ndarray:
    if isinstance(regression, Minimum):
        return (x @ regression.weights > 0).astype(int)
    return regression.predict(x[:, :-1])


def minimum(x: np.ndarray, labels: np.ndarray, chosen: float, near: Minimum | None = None) -> Minimum:
    """The logistic regression of classes 0 and 1, [n], on x, [n, columns] of which the last is 1 and has no penalty.

    Newton's method with the curvature of `near`, made anew where a step with it does not at least halve the gradient.
    """
    from scipy.linalg import cho_factor, cho_solve
    from scipy.special import expit

    penalty = np.full(x.shape[1], 1 / chosen)
    penalty[-1] = 0

    def loss(weights: np.ndarray, logits: np.ndarray) -> float:
        return float(np.logaddexp(0, logits).sum() - labels @ logits + penalty @ weights**2 / 2)

    weights, factor = near or Minimum(np.zeros(x.shape[1]), None)
    logits = x @ weights
    at, before = loss(weights, logits), np.inf
    for _ in range(MOST_STEPS):
        probability = expit(logits)
        gradient = x.T @ (probability - labels) + penalty * weights
        size = np.abs(gradient).max()
        if size <= TOLERANCE * len(x):
            break
        if factor is None or size > before / 2:
            factor = cho_factor((x.T * (probability * (1 - probability))) @ x + np.diag(penalty))
        step, lowest, before = cho_solve(factor, gradient), at, size
        while True:
            logits = x @ (weights - step)
            at = loss(weights - step, logits)
            if at <= lowest + 1e-12 * abs(lowest):  # but for what rounding does to it
                break
            step /= 2
        weights = weights - step
    return Minimum(weights, factor)


def _with_ones(features: np.ndarray, kind: Any) -> np.ndarray:
    return np.column_stack([features, np.ones(len(features))]).astype(kind)


def _first_layer(columns: int, count: int) -> np.ndarray:
    """[classes, columns + 1] what torch's linear layer starts from, its bias last."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layer = torch.nn.Linear(columns, count)
    return torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach().numpy()


def _softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def adam(weight: np.ndarray) -> Callable[[np.ndarray], None]:
    """torch.optim.Adam at its defaults: gradient -> a step of `weight`, in place."""
    mean, square, steps = np.zeros_like(weight), np.zeros_like(weight), itertools.count(1)

    def step(gradient: np.ndarray) -> None:
        nonlocal mean, square, weight
        taken = next(steps)
        mean += 0.1 * (gradient - mean)
        square += 0.001 * (gradient * gradient - square)
        weight -= 1e-3 / (1 - 0.9**taken) * mean / (np.sqrt(square / (1 - 0.999**taken)) + 1e-8)

    return step


def rmsprop(weight: np.ndarray) -> Callable[[np.ndarray], None]:
    """torch.optim.RMSprop at its defaults, as adam."""
    square = np.zeros_like(weight)

    def step(gradient: np.ndarray) -> None:
        nonlocal square, weight
        square += 0.01 * (gradient * gradient - square)
        weight -= 1e-2 * gradient / (np.sqrt(square) + 1e-8)

    return step


UPDATES = {"adam": adam, "rmsprop": rmsprop}


def classifier(features: np.ndarray, labels: np.ndarray, settings: dict[str, Any]) -> LinearLayer | LogisticRegression:
    """The one that the settings name, for [n, columns] features and [n] classes 0 … k - 1."""
    return (LinearLayer if "optim" in settings else LogisticRegression)(features, labels, settings)

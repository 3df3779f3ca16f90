"""The classifiers of transfer tasks: SentEval's layer against torch's layers and optimizers, one penalty at a time."""

import numpy as np
import pytest
import torch

from raoe_train.data.files import write_rows
from raoe_train.evaluation.tasks import read_tasks
from raoe_train.evaluation.transfer import SEED, LinearLayer, LogisticRegression
from raoe_train.settings import CLASSIFIERS, Classifier


def classifier(features, labels, its):
    return {"senteval": LinearLayer, "scikit-learn": LogisticRegression}[its["name"]](features, labels, its)


def examples(count=200, columns=6, classes=2, scale=1.0, noise=1.0):
    rng = np.random.default_rng(0)
    features = scale * rng.normal(size=(count, columns))
    logits = features @ rng.normal(size=(columns, classes)) / scale + noise * rng.normal(size=(count, classes))
    return features, logits.argmax(1)


def by_torch(features, labels, train, dev, penalty, its):
    """SentEval's procedure of torch's own parts, a layer at a time: (best accuracy, rounds, the best layer)."""
    random = np.random.RandomState(SEED)
    torch.manual_seed(SEED)
    layer = torch.nn.Linear(features.shape[1], int(labels.max()) + 1)
    if dev is None:
        order = train[random.permutation(len(train))]
        dev, train = order[: len(train) // 20], order[len(train) // 20 :]
    step = torch.optim.Adam(layer.parameters(), weight_decay=penalty)
    x, y = torch.tensor(features[train], dtype=torch.float32), torch.tensor(labels[train])
    best, misses, rounds, chosen = -1.0, 0, 0, None
    while misses <= its["tenacity"] and rounds * its["epoch_size"] <= 200:
        for _ in range(its["epoch_size"]):
            for places in torch.tensor(random.permutation(len(x))).split(its["batch_size"]):
                step.zero_grad()
                torch.nn.functional.cross_entropy(layer(x[places]), y[places]).backward()
                step.step()
        rounds += 1
        output = layer(torch.tensor(features[dev], dtype=torch.float32)).argmax(1).numpy()
        accuracy = (output == labels[dev]).mean()
        if accuracy > best:
            best, chosen = accuracy, [part.detach().clone() for part in layer.parameters()]
        else:
            misses += 1
    return best, rounds, chosen


@pytest.mark.parametrize(("classes", "tenacity"), [(2, 0), (4, 2)])
def test_the_layer_is_that_of_torch(classes, tenacity):
    features, labels = examples(classes=classes)
    its = Classifier("senteval", batch_size=16, tenacity=tenacity, epoch_size=2).settings()
    model = classifier(features, labels, its)
    train, dev, test = np.split(np.arange(200), [100, 150])
    penalties = [1e-5, 0.05, 0.5, 5.0]  # which stop after different numbers of rounds
    accuracies, weights = model._fit(train, penalties, dev)
    assert (model.validate([(train, dev)], penalties) == accuracies).all()
    for at, penalty in enumerate(penalties):
        best, _, (weight, bias) = by_torch(features, labels, train, dev, penalty, its)
        assert accuracies[at] == best
        assert weights[at] == pytest.approx(np.column_stack([weight, bias]), abs=2e-5)
        # without dev a twentieth of train says when to stop
        _, _, (weight, bias) = by_torch(features, labels, train, None, penalty, its)
        said = (features[test] @ weight.numpy().T + bias.numpy()).argmax(1)
        assert (model.predict(train, dev[:0], test, penalty) == said).all()


def test_grids_and_settings_of_senteval():
    """senteval/tools/validation.py, and what its README calls "comparable to the literature"."""
    assert Classifier().settings() == {"name": "scikit-learn", "kfold": 10}
    assert Classifier("senteval").settings() == {
        "name": "senteval", "kfold": 10, "batch_size": 64, "tenacity": 5, "epoch_size": 4
    }  # fmt: skip
    assert Classifier("senteval", kfold=4).settings()["kfold"] == 4
    features, labels = examples(20)
    grids = {}
    for name in CLASSIFIERS:
        model = classifier(features, labels, Classifier(name).settings())
        grids[name] = model.grid, model.split_grid
    assert grids["senteval"] == ([1e-5, 1e-4, 1e-3, 1e-2],) * 2
    assert grids["scikit-learn"] == ([0.25, 0.5, 1, 2, 4, 8], [0.5, 1, 2, 4, 8, 16, 32])


def test_task_with_this_classifier(tmp_path):
    """Two folds in which one of 40 examples has features of the other class; what a result depends on."""
    rows = [{"text": f"w{label}{number}", "label": label} for label in "01" for number in range(20)]
    write_rows(tmp_path / "set.jsonl", ["text", "label"], rows)
    word = f"transfer:{tmp_path}/set.jsonl"
    plain, task, rest = (
        read_tasks([word], classifier=its)[word]
        for its in (Classifier(), Classifier("senteval", kfold=2, epoch_size=201), Classifier("senteval", kfold=5))
    )
    at = np.zeros((40, 100), dtype=np.float32)  # the wider, the nearer to 0 the layer starts
    at[:, 0] = [1.0 if row["label"] == "1" or row["text"] == "w00" else -1.0 for row in rows]
    found, right = task.score(at)
    assert (found["accuracy"], found["examples"]) == (pytest.approx(97.5), 40) and right.values.sum() == 3900
    assert task.score.keywords["data"] == plain.score.keywords["data"]
    settings = [each.score.keywords["settings"] for each in (plain, task, rest)]
    assert settings[0] != settings[1] != settings[2]
    with pytest.raises(ValueError, match="20 training examples, too few for 20 folds"):
        read_tasks([word], classifier=Classifier("senteval", kfold=20))

"""Transfer tasks: SentEval's protocol, step by step, on invented features."""

from pathlib import Path

import numpy as np
import pytest

from raoe_train.data.files import write_rows
from raoe_train.evaluation.tasks import read_tasks
from raoe_train.evaluation.transfer import LogisticRegression
from raoe_train.settings import Classifier

APART = {"0": [-1.0, 0.0], "1": [1.0, 0.0]}


def read(folder, rows, name="set", **options):
    columns = dict.fromkeys(key for row in rows for key in row)
    write_rows(folder / f"{name}.jsonl", list(columns), rows)
    return read_tasks([f"transfer:{folder}/{name}.jsonl"], **options).popitem()[1]


def score(task, features):
    """The task's score where `features` maps texts to embeddings."""
    result, examples = task.score(np.array([features[text] for text in task.sentences], dtype=np.float32))
    assert examples.values.mean() == pytest.approx(result["accuracy"], abs=0.5)  # folds may differ in size by one
    assert len(examples.values) == result["examples"] and set(examples.values) <= {0, 100}
    return result


def single(count=20, noisy=0):
    """`count` examples of each class, all of the same length; the first `noisy` ones of class 0 look like class 1."""
    rows, features = [], {}
    for label in "01":
        for number in range(count):
            text = f"word{label}{number}"
            rows.append({"text": text, "label": label})
            features[text] = APART["1" if label == "0" and number < noisy else label]
    return rows, features


def split_rows():
    """Train: classes at -1 and 1. Test: of class 1 three at 1 and one at -1; of class 0 five at -1 and one at 1."""
    rows = [
        {"split": "train", "text": f"t{label}{number}", "label": label, "at": APART[label]}
        for label in "01"
        for number in range(10)
    ]
    test = [("1", "1")] * 3 + [("1", "0")] + [("0", "0")] * 5 + [("0", "1")]
    rows += [
        {"split": "test", "text": f"e{number}", "label": label, "at": APART[looks]}
        for number, (label, looks) in enumerate(test)
    ]
    return rows


def test_pairs_have_the_features_of_senteval_and_an_f1(tmp_path):
    at = {"same": [1.0, 0.0, 0.0], "near": [0.0, 0.0, 0.0], "far": [0.0, 3.0, 0.0]}

    def pairs(like_1, like_0):
        return [
            {"split": row["split"], "label": row["label"], "sentence1": first, "sentence2": second}
            for row in split_rows()
            for first, second in [like_1 if row["at"] == APART["1"] else like_0]
        ]

    # true positives 3, false negatives 1, false positives 1: precision and recall are 3/4
    expected = {"accuracy": pytest.approx(80.0), "dev_accuracy": 100.0, "examples": 10, "f1": pytest.approx(75.0)}
    # only |u - v| tells these apart, all products are 0
    assert score(read(tmp_path, pairs(("near", "near"), ("near", "far"))), at) == expected
    # and only u * v these, all differences are 0
    assert score(read(tmp_path, pairs(("same", "same"), ("near", "near"))), at) == expected


def sentevals(kind, rows, vectors):
    """(test accuracy, dev accuracy) by senteval/tools/validation.py and what calls it (binary.py, trec.py, mrpc.py,
    sst.py), step by step: scikit-learn's logistic regression on numpy arrays, 5 folds."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    def fit(power, x, y):
        return LogisticRegression(C=2.0**power, tol=1e-8, max_iter=10_000).fit(x, y)

    def features(some):
        if kind != "pairs":
            return np.array([vectors[row["text"]] for row in some]), np.array([row["label"] for row in some])
        a, b = (np.array([vectors[row[name]] for row in some]) for name in ("sentence1", "sentence2"))
        return np.c_[np.abs(a - b), a * b], np.array([row["label"] for row in some])

    def in_folds(powers, x, y):
        scores = []
        for power in powers:
            folds = StratifiedKFold(n_splits=5, shuffle=True, random_state=1111).split(x, y)
            scores.append(round(100 * np.mean([fit(power, x[a], y[a]).score(x[b], y[b]) for a, b in folds]), 2))
        return powers[int(np.argmax(scores))], max(scores)

    names = ("sentence1", "sentence2") if kind == "pairs" else ("text",)
    rows = sorted(rows, key=lambda row: (*(len(row[name].split()) for name in names), row["label"]))
    if kind == "folds":  # InnerKFoldClassifier
        (x, y), tests, devs = features(rows), [], []
        for train, test in StratifiedKFold(n_splits=5, shuffle=True, random_state=1111).split(x, y):
            power, dev = in_folds(range(-2, 4), x[train], y[train])
            tests.append(100 * fit(power, x[train], y[train]).score(x[test], y[test]))
            devs.append(dev)
        return np.mean(tests), np.mean(devs)
    splits = {row["split"] for row in rows}
    parts = {split: features([row for row in rows if row["split"] == split]) for split in splits}
    if kind == "dev":  # SplitClassifier
        scores = [round(100 * fit(power, *parts["train"]).score(*parts["dev"]), 2) for power in range(-2, 4)]
        power, dev = range(-2, 4)[int(np.argmax(scores))], max(scores)
    else:  # KFoldClassifier
        power, dev = in_folds(range(-1, 6), *parts["train"])
    return 100 * fit(power, *parts["train"]).score(*parts["test"]), dev


@pytest.mark.parametrize("kind", ["folds", "test", "pairs", "dev"])
def test_sentevals_protocol_step_by_step(kind, tmp_path):
    """With overlapping classes, so that every fold and every penalty matters."""
    rng = np.random.default_rng(0)
    names = ("sentence1", "sentence2") if kind == "pairs" else ("text",)
    rows, vectors = [], {}
    for number in range(150):
        label, row = number % 2, {}
        for name in names:  # the number of characters says nothing of that of tokens
            row[name] = " ".join(["a" * rng.integers(1, 30)] * rng.integers(1, 4) + [f"{name}{number}"])
            vectors[row[name]] = rng.normal(label * 0.25, [0.5, 0.1, 1.0, 0.3]).astype(np.float32)
        row["label"] = str(label)
        if kind != "folds":
            row["split"] = "train" if number < 90 else "dev" if number < 120 and kind == "dev" else "test"
        rows.append(row)
    result = score(read(tmp_path, rows, classifier=Classifier(kfold=5)), vectors)
    accuracy, dev = sentevals(kind, rows, {text: vector.astype(np.float64) for text, vector in vectors.items()})
    assert result["accuracy"] == pytest.approx(accuracy, abs=1e-9)
    assert result["dev_accuracy"] == pytest.approx(dev, abs=1e-9)


@pytest.mark.parametrize(
    ("accuracies", "chosen"), [([0.70001, 0.70004, 0.7], 0.25), ([0.7, 0.70006, 0.7], 0.5), ([0.7, 0.6, 0.8], 1.0)]
)
def test_accuracies_are_compared_to_two_digits(accuracies, chosen, tmp_path, monkeypatch):
    """70.00, 70.00 and 70.00 per cent; 70.00, 70.01 and 70.00."""
    used = []
    inputs = np.array([accuracies + [0.0] * 3])
    monkeypatch.setattr(LogisticRegression, "validate", lambda self, folds, grid: inputs)
    real = LogisticRegression.predict
    monkeypatch.setattr(LogisticRegression, "predict", lambda *its: (used.append(its[-1]), real(*its))[1])
    score(read(tmp_path, single()[0]), single()[1])
    assert set(used) == {chosen}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a", "label": "1"}] * 20, r"all training examples belong to class '1'"),
        (single(11)[0], r"class '0' has 11 training examples, too few for 10 folds"),
        ([row for row in split_rows() if row["text"] != "t03"], r"'0' has 9 training examples"),
        ([*split_rows(), {"split": "test", "text": "new", "label": "2"}], r"class '2' has no training example"),
        ([{**row, "split": "a" if row["split"] == "test" else "b"} for row in split_rows()], "splits a, b; they"),
        ([*single()[0], {"text": "a", "label": ""}], r"line 41: label must be a non-empty string or a number, got ''"),
        ([{"words": "a", "label": "1"}], r"line 1: no column for sentence \(looked for sentence, text\)"),
    ],
)
def test_invalid_settings(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, rows)


REAL = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not REAL.is_dir(), reason="the benchmark data beside the project is not here")
def test_real_sets_have_the_sizes_of_senteval():
    tasks = read_tasks(["mr", "cr", "sst2", "trec", "mrpc"], REAL)
    columns = {name: task.score.keywords["data"] for name, task in tasks.items()}
    sizes = {name: (len(texts), split.count("test")) for name, (texts, _, _, split) in columns.items()}
    assert sizes == {"mr": (10662, 0), "cr": (3771, 0), "sst2": (9613, 1821), "trec": (5952, 500), "mrpc": (5801, 1725)}

"""The margins losses: their values, and training on what is mined for them."""

import json
import math

import pytest
import torch

from raoe_train import losses as ours
from raoe_train import run
from tests.tiny import SENTENCES

# Unit vectors at 0, 60 and 90 degrees from the anchor: cosine distances 0.5 and 1, euclidean 1 and sqrt 2.
LOSSES = {
    "triplet": "TripletLoss",
    "contrastive": "ContrastiveLoss",
    "online_contrastive": "OnlineContrastiveLoss",
    "multiple_negatives": "InfoNCELoss",
    "mse": "CosineSimilarityLoss",
}
ANCHOR, AT60, AT90 = ([[1.0, 0.0]], [[0.5, math.sqrt(0.75)]], [[0.0, 1.0]])


def value(name, embeddings, labels=None, **settings):
    loss = getattr(ours, name)(None, **settings)
    labels = None if labels is None else torch.tensor(labels)
    return float(loss.compute_loss_from_embeddings([torch.tensor(rows) for rows in embeddings], labels))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"margin": 0.1, "distance": "cosine"}, 0.0),
        ({"margin": 0.7, "distance": "cosine"}, 0.5 - 1 + 0.7),
        ({"margin": 0.7, "distance": "euclidean"}, 1 - math.sqrt(2) + 0.7),
        ({}, 1 - math.sqrt(2) + 5),  # sentence-transformers' own
    ],
)
def test_triplet_by_hand(settings, expected):
    assert value("TripletLoss", [ANCHOR, AT60, AT90], **settings) == pytest.approx(expected, abs=1e-5)


def labelled(path):
    """Sentences of two classes, with test and train, each train sentence in three variants."""
    rows = [("test", n % 2, text) for n, text in enumerate(SENTENCES[:6])]
    rows += [("train", n % 2, f"{text}{word}") for n, text in enumerate(SENTENCES) for word in ("", " now", " then")]
    path.parent.mkdir(exist_ok=True)
    path.write_text("split\tlabel\ttext\n" + "".join("\t".join(map(str, row)) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "loss", ["triplet", *(pytest.param(name, marks=pytest.mark.slow) for name in LOSSES if name != "triplet")]
)
def test_trains_on_mined_examples(tmp_path, encoder, loss):
    """And learns: what was mined for a loss has a lower one afterwards."""
    source, mined = labelled(tmp_path / "polarity" / "set.tsv"), str(tmp_path / "mined.jsonl")
    options = {"mining.threshold": 0.0, "mining.k": 3, "mining.count": 60}
    options |= {"data.input": f"{source}#train", "model.name": encoder, "loss": loss, "output": mined}
    run("mine", None, **options)
    settings = {
        "model.name": encoder,
        "model.device": "cpu",
        "data.train": [mined],
        "data.dir": str(tmp_path),
        "loss": LOSSES[loss],
        **({} if loss in ("multiple_negatives", "mse") else {"loss.margin": 0.5}),
        "training": {
            "num_train_epochs": 6,
            "per_device_train_batch_size": 16,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "seed": 1,
        },
        "evaluation.tasks": ["polarity:set"],
        "polarity": {"k": 4, "sources": 4},
        "output": str(tmp_path / "out"),
    }
    metrics = run("train", None, **settings)
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert sum(losses[-4:]) < sum(losses[:4])
    before, after = (metrics[when]["tasks"]["polarity:set"] for when in ("before", "after"))
    assert before != after and after["sentences"] == 6 and after["sources"] == 24
    assert metrics["pairs"] == {"mined": 60}


def test_labels_that_are_not_0_or_1(tmp_path, encoder):
    path = tmp_path / "pairs.tsv"
    path.write_text("sentence1\tsentence2\tlabel\na\tb\t1\nc\td\t2\n")
    settings = {"model.name": encoder, "loss": "ContrastiveLoss", "data.train": [str(path)]}
    with pytest.raises(ValueError, match=r"line 3: label is '2', which is not a known label .0, 1"):
        run("train", None, **settings, output=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"labels must be 1 .similar. or 0 .dissimilar., got 2"):
        run("train", None, **settings, output=str(tmp_path / "other"), **{"data.labels": {"1": 1, "2": 2}})
    with pytest.raises(ValueError, match="TripletLoss cannot use"):
        settings = {**settings, "loss": "TripletLoss", "data.neutral": True}
        run("train", None, **settings, output=str(tmp_path / "third"))

"""The built-in corpus is equal on every machine, has correct targets and disjoint splits."""

import gzip
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from raoe_train.data.pairs import read_pairs
from tests.data import builtin_corpus as made
from tests.data.builtin_corpus import Filler, Scene, compare

ROOT = Path(__file__).parents[2]
MAN = Filler("man|gentleman", "man")
SCENE = Scene(
    agent=MAN,
    action=Filler("opening", "opening"),
    object=Filler("box|carton", "box"),
    place=Filler("in the park", "in the park"),
    agent_modifier=Filler("old|elderly", "old"),
    object_modifier=None,
)


@pytest.fixture(scope="module")
def splits():
    return {name: read_pairs(f"builtin#{name}") for name in ("train", "dev", "test")}


@pytest.mark.parametrize(
    ("change", "similarity", "label"),
    [
        # weights of the filled slots: action .30 agent .25 object .20 place .13 modifier .06, together .94
        ({}, 1.0, 0),
        ({"agent": Filler("man|gentleman", "gentleman")}, (0.94 - 0.25 * 0.05) / 0.94, 0),
        ({"agent": Filler("man|gentleman", "person")}, (0.94 - 0.25 * 0.25) / 0.94, 0),
        ({"place": None}, (0.94 - 0.13 * 0.6) / 0.94, 0),
        ({"object_modifier": Filler("red", "red")}, (0.94 + 0.06 * 0.4) / 1.0, 1),
        ({"object": Filler("book", "book")}, (0.94 - 0.20) / 0.94, 1),
        ({"negated": True}, 0.5, 2),
        ({"negated": True, "place": None}, 0.5 * (0.94 - 0.13 * 0.6) / 0.94, 2),
        ({"action": Filler("closing|shutting", "shutting")}, 0.5 * (0.94 - 0.30 * 0.7) / 0.94, 2),
    ],
)
def test_targets_by_hand(change, similarity, label):
    assert compare(SCENE, replace(SCENE, **change)) == (pytest.approx(similarity, abs=5e-5), label)


def test_corpus(splits):
    assert {name: len(data) for name, data in splits.items()} == {"train": 6000, "dev": 1000, "test": 1000}
    for data in splits.values():
        labels = Counter(data["label"][:])
        assert max(labels.values()) - min(labels.values()) <= 1
        assert set(labels) == {0, 1, 2}
        assert all(0 <= score <= 1 for score in data["score"][:])
        assert len(set(zip(data["sentence1"][:], data["sentence2"][:], strict=True))) == len(data)
        assert all(first != second for first, second in zip(data["sentence1"][:], data["sentence2"][:], strict=True))
        assert len(set(data["score"][:])) > 150  # graded, not a few levels
    mean = [
        sum(s for s, k in zip(data["score"], data["label"], strict=True) if k == label) / Counter(data["label"])[label]
        for label in (0, 1, 2)
    ]
    assert mean[0] > mean[1] > mean[2]  # the order of NLI data scored by teachers
    texts = [text for name in ("sentence1", "sentence2") for text in splits["train"][name]]
    words = {word for text in texts for word in re.findall(r"\w+", text.lower())}
    assert 150 < len(words) < 500


def test_splits_share_no_premise_and_no_pair(splits):
    unordered = {
        name: {frozenset(pair) for pair in zip(data["sentence1"][:], data["sentence2"][:], strict=True)}
        for name, data in splits.items()
    }
    for one, other in (("train", "dev"), ("train", "test"), ("dev", "test")):
        assert not set(splits[one]["sentence1"][:]) & set(splits[other]["sentence1"][:])
        assert not unordered[one] & unordered[other]
        # a premise of one split is not the other sentence of a pair in another either
        assert not set(splits[one]["sentence1"][:]) & set(splits[other]["sentence2"][:])
        assert not set(splits[one]["sentence2"][:]) & set(splits[other]["sentence1"][:])
    # nor does another seed carry a split's scenes elsewhere
    other = made.pair_rows(2000, 7, "train")
    assert not {row["sentence1"] for row in other} & set(splits["test"]["sentence1"][:])


def test_the_whole_corpus_by_name(splits):
    assert len(read_pairs("builtin")) == 8000
    with pytest.raises(ValueError, match=r"no split 'valid'; splits: train \(6000\), dev \(1000\), test \(1000\)"):
        read_pairs("builtin#valid")


def test_the_files_are_what_the_generator_writes(tmp_path):
    """Under any hash seed. The compressed bytes can differ between versions of zlib."""
    code = f"import pathlib; from tests.data.builtin_corpus import main; main(pathlib.Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"}, cwd=ROOT, check=True)
    for path in tmp_path.iterdir():
        assert gzip.decompress(path.read_bytes()) == gzip.decompress((made.DATA / path.name).read_bytes())
    assert len(list(tmp_path.iterdir())) == 2

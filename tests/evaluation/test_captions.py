"""Strict caption retrieval, with captions at hand-picked angles."""

import numpy as np
import pytest

from raoe_train.data.files import write_rows
from raoe_train.evaluation import captions
from raoe_train.evaluation.tasks import read_tasks

# degrees of each image's captions on a circle, the query first
IMAGES = {
    "one": [0, 5, -5, 10, -10],  # its four are the nearest
    "two": [180, 185, 175, 190, 100],  # "three" has a caption at 105, 75 away; its own last one is 80 away
    "three": [90, 105, 85, 80, 70],  # the farthest of its own is 20 away; "two" has one at 100, 10 away
}


def write(folder, images, name="flickr.tsv"):
    table = [{"image": image, "caption": f"{image} {n}"} for image, all_ in images.items() for n in range(len(all_))]
    write_rows(folder / name, ["image", "caption"], table)
    return f"captions:{folder}/{name}"


def score(word, images):
    (task,) = read_tasks([word]).values()
    angles = {f"{image} {n}": angle for image, all_ in images.items() for n, angle in enumerate(all_)}
    radians = np.radians([angles[text] for text in task.sentences])
    # lengths have no part in cosines; by products the others' captions would be nearer to "one" than its own
    lengths = np.array([[1 if text.startswith("one") else 10] for text in task.sentences])
    result, examples = task.score((lengths * np.stack([np.cos(radians), np.sin(radians)], axis=1)).astype(np.float32))
    assert examples.values.mean() == result["accuracy"] and len(examples.values) == result["images"]
    return result


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
        read_tasks([write(tmp_path, {**IMAGES, "short": [0, 1, 2, 3]})])
    with pytest.raises(ValueError, match="need at least 2 images, got 1"):
        read_tasks([write(tmp_path, {"one": IMAGES["one"]})])

"""Strict caption retrieval: do an image's captions find each other? The BeLLM paper's Section 5.4."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from raoe_train.data.retrieval import read_captions
from raoe_train.encoders.embed import unit_rows
from raoe_train.evaluation.finding import find_task
from raoe_train.evaluation.outcomes import Outcomes
from raoe_train.evaluation.tasks import Reading, Task

CAPTIONS = 5  # of an image: the query and the 4 that it is to find
LISTED = 100  # queries of which a result says what they found
BLOCK = 256  # queries at a time: their similarities to all captions are in memory


def read_caption_task(name: str, reading: Reading) -> Task:
    """The first five captions of each image; ValueError where one has fewer, or is the only one."""
    source = find_task(name, reading.data_dir, "captions")
    images = read_captions(source, columns=reading.columns, on_error=reading.on_error)
    for image, captions in images.items():
        if len(captions) < CAPTIONS:
            raise ValueError(
                f"{source}: image {image!r} has {len(captions)} captions; the protocol needs {CAPTIONS} of each image"
            )
    if len(images) < 2:
        raise ValueError(f"{source}: there is one image, so that every search finds its captions")
    texts = [caption for captions in images.values() for caption in captions[:CAPTIONS]]
    return Task("captions", "accuracy", texts, texts, partial(strict_accuracy, captions=texts))


def strict_accuracy(embeddings: np.ndarray, captions: list[str]) -> tuple[dict[str, Any], Outcomes]:
    """{"accuracy", "images", "captions", "retrieved"}, and 100 for each image that is right, 0 for others: its first
    caption's four nearest, by cosine, among all captions but itself are its own four. A tie counts against the encoder.
    "retrieved" is Table 5 for the first LISTED images: [{"query", "captions": the four, "own": whether each is}]."""
    # one column a distinct text, so that equal captions are equally near to the last bit
    _, first, place = np.unique(np.asarray(captions, dtype=object), return_index=True, return_inverse=True)
    unit = unit_rows(embeddings)
    distinct = unit[first].T
    images = len(captions) // CAPTIONS
    right, listed = np.zeros(images), []
    for start in range(0, images, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, images))
        similarity = (unit[numbers * CAPTIONS] @ distinct)[:, place]
        rows = np.arange(len(numbers))[:, None]
        own = numbers[:, None] * CAPTIONS + np.arange(CAPTIONS)
        farthest = similarity[rows, own[:, 1:]].min(axis=1)
        similarity[rows, own[:, :1]] = -np.inf
        for image, near in zip(numbers[: max(0, LISTED - start)].tolist(), similarity, strict=False):
            places = np.argsort(-near, kind="stable")[: CAPTIONS - 1].tolist()
            found, ours = [captions[place] for place in places], [place // CAPTIONS == image for place in places]
            listed.append({"query": captions[CAPTIONS * image], "captions": found, "own": ours})
        similarity[rows, own] = -np.inf
        right[numbers] = 100 * (farthest > similarity.max(axis=1))
    result = {"accuracy": float(right.mean()), "images": images, "captions": len(captions), "retrieved": listed}
    return result, Outcomes(right)

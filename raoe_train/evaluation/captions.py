"""Strict caption retrieval (Section 5.4 of the BeLLM paper)."""

from functools import partial
from typing import Any

import numpy as np

from raoe_train.data.columns import parse_sentence, parse_word
from raoe_train.data.tables import by_column, read_table
from raoe_train.encoders.embed import unit_rows
from raoe_train.evaluation.tasks import Outcomes, Reading, Task, find_task

CAPTIONS = 5  # captions per image: the query and the 4 captions to find
LISTED = 100  # number of queries whose retrieved captions are listed in a result
BLOCK = 256  # number of queries whose similarities to all captions are in memory at a time


def read_captions(source: str, **options: Any) -> dict[str, list[str]]:
    """Read {image: captions}, in file order, from a file with columns image and caption."""
    parse = by_column({"image": parse_word, "caption": parse_sentence})
    table, _ = read_table(source, parse, "caption", **options)
    images: dict[str, list[str]] = {}
    for image, caption in zip(table["image"][:], table["caption"][:], strict=True):
        images.setdefault(image, []).append(caption)
    return images


def read_caption_task(name: str, reading: Reading) -> Task:
    """Read a caption task. It uses the first five captions of each image."""
    source = find_task(name, reading.data_dir, "captions")
    images = read_captions(source, **reading.rows)
    for image, captions in images.items():
        if len(captions) < CAPTIONS:
            raise ValueError(f"{source}: image {image!r} has {len(captions)} captions, but each image needs {CAPTIONS}")
    if len(images) < 2:
        raise ValueError(f"{source}: need at least 2 images, got 1")
    texts = [caption for captions in images.values() for caption in captions[:CAPTIONS]]
    return Task("captions", "accuracy", texts, texts, partial(strict_accuracy, captions=texts))


def strict_accuracy(embeddings: np.ndarray, captions: list[str]) -> tuple[dict[str, Any], Outcomes]:
    """Return ({"accuracy" (x100), "images", "captions", "retrieved"}, Outcomes: 100 for a correct image, else 0). An
    image is correct if the four captions nearest to its first caption are its other four captions. Ties count as wrong.
    "retrieved": for each of the first LISTED images, {"query", "captions": nearest four, "own": [is of the image]}."""
    # compute one column per distinct text, so that equal captions have exactly the same similarity
    _, first, place = np.unique(np.asarray(captions, dtype=object), return_index=True, return_inverse=True)
    unit = unit_rows(embeddings)
    distinct = unit[first].T
    images = len(captions) // CAPTIONS
    scores, examples = np.zeros(images), []
    for start in range(0, images, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, images))
        similarity = (unit[numbers * CAPTIONS] @ distinct)[:, place]
        rows = np.arange(len(numbers))[:, None]
        own = numbers[:, None] * CAPTIONS + np.arange(CAPTIONS)
        farthest = similarity[rows, own[:, 1:]].min(axis=1)
        similarity[rows, own[:, :1]] = -np.inf
        for image, row in zip(numbers[: max(0, LISTED - start)].tolist(), similarity, strict=False):
            places = np.argsort(-row, kind="stable")[: CAPTIONS - 1].tolist()
            texts, is_own = [captions[place] for place in places], [place // CAPTIONS == image for place in places]
            examples.append({"query": captions[CAPTIONS * image], "captions": texts, "own": is_own})
        similarity[rows, own] = -np.inf
        scores[numbers] = 100 * (farthest > similarity.max(axis=1))
    result = {"accuracy": float(scores.mean()), "images": images, "captions": len(captions), "retrieved": examples}
    return result, Outcomes(scores)

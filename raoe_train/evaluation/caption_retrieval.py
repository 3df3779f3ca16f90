"""Strict caption retrieval: do an image's captions find each other? The BeLLM paper's Section 5.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from raoe_train.data.retrieval import read_captions
from raoe_train.encoders.embed import unit_rows
from raoe_train.evaluation.finding import find_task
from raoe_train.evaluation.outcomes import Outcomes
from raoe_train.evaluation.tasks import EmbeddingTask, Reading

CAPTIONS = 5  # of an image: the query and the 4 that it is to find
BLOCK = 256  # queries at a time: their similarities to all captions are in memory


@dataclass(frozen=True)
class CaptionTask(EmbeddingTask):
    """Captions, five an image, one image after the other."""

    kind = "captions"
    main = "accuracy"
    captions: list[str]

    def content(self) -> Any:
        return self.captions

    def sentences(self) -> list[str]:
        return self.captions

    def score(self, embeddings: np.ndarray) -> tuple[dict[str, Any], Outcomes]:
        """{"accuracy", "images", "captions"}, and 100 for each image that is right, 0 for others: its first caption's
        four nearest, by cosine, among all captions but itself are its own four. A tie counts against the encoder."""
        # one column a distinct text, so that equal captions are equally near to the last bit
        _, first, place = np.unique(np.asarray(self.captions, dtype=object), return_index=True, return_inverse=True)
        unit = unit_rows(embeddings)
        distinct = unit[first].T
        images = len(self.captions) // CAPTIONS
        right = np.zeros(images)
        for start in range(0, images, BLOCK):
            numbers = np.arange(start, min(start + BLOCK, images))
            similarity = (unit[numbers * CAPTIONS] @ distinct)[:, place]
            rows = np.arange(len(numbers))[:, None]
            own = numbers[:, None] * CAPTIONS + np.arange(CAPTIONS)
            farthest = similarity[rows, own[:, 1:]].min(axis=1)
            similarity[rows, own] = -np.inf
            right[numbers] = 100 * (farthest > similarity.max(axis=1))
        result = {"accuracy": float(right.mean()), "images": images, "captions": len(self.captions)}
        return result, Outcomes(right)


def read_caption_task(name: str, reading: Reading) -> CaptionTask:
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
    return CaptionTask([caption for captions in images.values() for caption in captions[:CAPTIONS]])

"""Strict caption retrieval (Section 5.4 of the BeLLM paper):

    python -m benchmarks.studies.captions FILE --model ENCODER --output captions.json

FILE (.tsv or .csv) has the columns image and caption, with one caption per row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas

CAPTIONS = 5  # captions per image: the query and the 4 captions to find
LISTED = 100  # number of queries whose retrieved captions are listed in a result
BLOCK = 256  # number of queries whose similarities to all captions are in memory at a time


def read_captions(path: Path) -> list[str]:
    """Read the first five captions of each image, in file order. ValueError for fewer captions, or a single image."""
    table = pandas.read_csv(path, sep="\t" if path.suffix == ".tsv" else ",", dtype=str, keep_default_na=False)
    images = table.groupby("image", sort=False)["caption"].apply(list)
    for image, captions in images.items():
        if len(captions) < CAPTIONS:
            raise ValueError(f"{path}: image {image!r} has {len(captions)} captions, but each image needs {CAPTIONS}")
    if len(images) < 2:
        raise ValueError(f"{path}: need at least 2 images, got {len(images)}")
    return [caption for captions in images for caption in captions[:CAPTIONS]]


def strict_accuracy(embeddings: np.ndarray, captions: list[str]) -> dict[str, Any]:
    """Return {"accuracy" (x100), "images", "captions", "retrieved"} from the embeddings of five captions per image. An
    image is correct if the four captions nearest to its first caption are its other four captions. Ties count as wrong.
    "retrieved": for each of the first LISTED images, {"query", "captions": nearest four, "own": [is of the image]}."""
    # compute one column per distinct text, so that equal captions have exactly the same similarity
    _, first, place = np.unique(np.asarray(captions, dtype=object), return_index=True, return_inverse=True)
    unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
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
    return {"accuracy": float(scores.mean()), "images": images, "captions": len(captions), "retrieved": examples}


def main(arguments: list[str] | None = None) -> None:
    from sentence_transformers import SentenceTransformer

    parser = argparse.ArgumentParser("python -m benchmarks.studies.captions", allow_abbrev=False)
    parser.add_argument("captions", type=Path, help="file with columns image and caption")
    parser.add_argument("--model", required=True, help="the encoder")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    given = parser.parse_args(arguments)
    captions = read_captions(given.captions)
    result = strict_accuracy(SentenceTransformer(given.model).encode(captions, show_progress_bar=True), captions)
    given.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"accuracy {result['accuracy']:.2f} of {result['images']} images: {given.output}")


if __name__ == "__main__":
    main()

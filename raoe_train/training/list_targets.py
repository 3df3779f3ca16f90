"""The teacher of ranking sentences: an encoder's similarities within each list, moved towards the list's order.

They are made once, before training: a pass over the lists costs what the student's forward pass does, and its result is
4 n^2 bytes a list (4 kB for 33 sentences). What is kept is the raw cosines, which omega, the ablations and seeds share.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raoe_train.artifacts import resume
from raoe_train.artifacts.provenance import digest
from raoe_train.config import NonNegativeFloat
from raoe_train.encoders.embed import embedder, unit_rows
from raoe_train.encoders.settings import FrozenEncoder, identity


@dataclass
class Teacher(FrozenEncoder):
    """The frozen encoder whose similarities order the sentences of a list, or are learned as they are.

    Args:
        cache: directory that keeps its embeddings for other runs; of lists by default OUTPUT/teacher, until the end
        information: what a list teaches; both, its order alone (ranking) or similarities alone (semantic)
        omega: how far similarities are moved towards the order of the list (information both)
        second: another encoder, whose cosines are averaged with the first one's
    """

    information: Literal["both", "ranking", "semantic"] = "both"
    omega: NonNegativeFloat = 0.5
    second: FrozenEncoder | None = None


def with_targets(dataset: Any, teacher: Teacher, cache: Path, *, shuffled: int | None = None) -> Any:
    """A dataset of lists, column `sentences`, with what each is to be ranked by: `label`, its n x n values, row by row.

    By `teacher.information`: "both", the teacher's cosines refined by `teacher.omega`; "semantic", as they are;
    "ranking", no column and no teacher, so that the lists' own order is all there is. Where `shuffled` is a seed each
    list is shuffled first, its source too. `cache` is a folder of what was made before. (Table 3 of the
    ranking-sentences paper: (d) is "ranking", (e) "semantic", (c) shuffled.)
    """
    import torch
    from datasets import Dataset

    from raoe_kernels import refine_similarity

    lists = [list(sentences) for sentences in dataset["sentences"]]
    orders = [list(range(len(sentences))) for sentences in lists]
    if shuffled is not None:
        rng = random.Random(shuffled)
        for order in orders:
            rng.shuffle(order)
    columns: dict[str, Any] = {
        "sentences": [[sentences[k] for k in order] for sentences, order in zip(lists, orders, strict=True)]
    }
    if teacher.information != "ranking":
        omega = teacher.omega if teacher.information == "both" else 0.0
        # of the lists as they were: the cosines of a shuffled list are the same, elsewhere
        columns["label"] = [
            refine_similarity(torch.from_numpy(phi[np.ix_(order, order)]), omega).numpy().ravel()
            for phi, order in zip(similarities(lists, teacher, cache), orders, strict=True)
        ]
    return Dataset.from_dict(columns)


def similarities(lists: Sequence[Sequence[str]], teacher: FrozenEncoder, cache: Path) -> list[np.ndarray]:
    """The teacher's raw cosines within each list, [n, n] float32 each; 0 where an embedding is zero."""
    size = max(1, resume.SHARD // 16)  # lists, of some 16 sentences each
    made_from = {"teacher": identity(teacher), "lists": digest([list(texts) for texts in lists]), "shard": size}
    embed = embedder(teacher, "teacher")

    def cosines(some: Sequence[Sequence[str]]) -> np.ndarray:
        unit = unit_rows(embed([text for texts in some for text in texts]).astype(np.float64))
        ends = np.cumsum([len(texts) for texts in some])[:-1]
        squares = [np.clip(part @ part.T, -1, 1).ravel() for part in np.split(unit, ends)]
        return np.concatenate(squares).astype(np.float32)

    folder = cache / digest(made_from)[:16]
    flat = np.concatenate(resume.in_shards(folder, lists, size, cosines, f"teacher {teacher.name}"))
    ends = np.cumsum([len(texts) ** 2 for texts in lists])[:-1]
    return [part.reshape(len(texts), -1) for part, texts in zip(np.split(flat, ends), lists, strict=True)]

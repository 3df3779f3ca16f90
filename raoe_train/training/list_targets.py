"""The teacher of ranking sentences: an encoder's similarities within each list, moved towards the list's order.

They are made once, before training, and kept in shards that appear in one step each: a pass over the lists costs what
the student's forward pass does, again in every epoch, and its result is 4 n^2 bytes a list (4 kB for 33 sentences).
What is kept is the raw cosines, so that omega, the ablations and seeds share it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts import once
from raoe_train.artifacts.processes import rank_and_world
from raoe_train.artifacts.provenance import digest
from raoe_train.artifacts.writing import write_json
from raoe_train.config import TeacherConfig, TrainConfig
from raoe_train.encoders import frozen
from raoe_train.encoders.embed import unit_rows
from raoe_train.encoders.named import FrozenEncoder, identity
from raoe_train.recipe import parameters
from raoe_train.training.run_directory import TEACHER

INFORMATION = ("both", "ranking", "semantic")


def check_teacher(config: TeacherConfig) -> None:
    """ValueError where post-training cannot have such a teacher."""
    if config.information not in INFORMATION:
        raise ValueError(f"teacher.information must be one of {', '.join(INFORMATION)}, got {config.information!r}")
    if not 0 <= config.omega < math.inf:
        raise ValueError(f"teacher.omega must be a number from 0, got {config.omega!r}")
    if config.name is None and config.information != "ranking":
        raise ValueError(
            "--teacher.name is missing: the encoder whose similarities are learned "
            "(--teacher.information ranking takes the order of the lists alone)"
        )


def with_targets(dataset: Any, config: TrainConfig, seed: int) -> Any:
    """A dataset of lists, column `sentences`, with what each is to be ranked by: `label`, its n x n values, row by row.

    By `teacher.information`: "both", the teacher's cosines refined by `teacher.omega`; "semantic", as they are;
    "ranking", no column and no teacher, so that the lists' own order is all there is. With `data.shuffle_lists` each
    list is shuffled first, its source too, with `seed`. (Table 3 of the ranking-sentences paper: (d) is "ranking", (e)
    "semantic", (c) shuffled.)

    Raises:
        ValueError: the teacher gives NaN for a sentence, which is named.
    """
    from datasets import Dataset

    lists = [list(sentences) for sentences in dataset["sentences"]]
    orders = [list(range(len(sentences))) for sentences in lists]
    if config.data.shuffle_lists:
        rng = random.Random(seed)
        for order in orders:
            rng.shuffle(order)
    columns: dict[str, Any] = {
        "sentences": [[sentences[k] for k in order] for sentences, order in zip(lists, orders, strict=True)]
    }
    if config.teacher.information != "ranking":
        cache = Path(config.teacher.cache or Path(config.output or "", TEACHER))
        # Of the lists as they were: the cosines of a shuffled list are the same, elsewhere.
        found = similarities(lists, config.teacher, cache)
        omega = config.teacher.omega if config.teacher.information == "both" else 0.0
        columns["label"] = [
            refined(phi[np.ix_(order, order)], omega).ravel() for phi, order in zip(found, orders, strict=True)
        ]
    return Dataset.from_dict(columns)


def refined(phi: np.ndarray, omega: float) -> np.ndarray:
    """raoe_kernels.refine_similarity of one list's [n, n] cosines, float32; omega 0 leaves them as they are."""
    import torch

    from raoe_kernels import refine_similarity

    return refine_similarity(torch.from_numpy(phi), omega).numpy()


def similarities(lists: Sequence[Sequence[str]], teacher: TeacherConfig, cache: Path) -> list[np.ndarray]:
    """The teacher's raw cosines within each list, [n, n] float32 each; 0 where an embedding is zero.

    Args:
        lists: of sentences.
        teacher: the encoder.
        cache: folder of what was made before. Each teacher and each set of lists has a folder of its own there.
    """
    size = max(1, once.SHARD // 16)  # lists, of some 16 sentences each
    made_from = {
        "teacher": identity(as_frozen(teacher)),
        "lists": digest([list(texts) for texts in lists]),
        "shard": size,
    }
    folder = cache / digest(made_from)[:16]
    if not (folder / "made_from.json").exists() and rank_and_world()[0] == 0:
        write_json(folder / "made_from.json", made_from)
    embed = embedder(teacher)

    def cosines(some: Sequence[Sequence[str]]) -> np.ndarray:
        unit = unit_rows(embed([text for texts in some for text in texts]).astype(np.float64))
        ends = np.cumsum([len(texts) for texts in some])[:-1]
        squares = [np.clip(part @ part.T, -1, 1).ravel() for part in np.split(unit, ends)]
        return np.concatenate(squares).astype(np.float32)

    flat = np.concatenate(once.in_shards(folder, lists, size, cosines, f"teacher {teacher.name}"))
    ends = np.cumsum([len(texts) ** 2 for texts in lists])[:-1]
    return [part.reshape(len(texts), -1) for part, texts in zip(np.split(flat, ends), lists, strict=True)]


def embedder(teacher: TeacherConfig) -> Callable[[Sequence[str]], np.ndarray]:
    """Sentences to the teacher's embeddings, see raoe_train.encoders.frozen."""
    return frozen.embedder(as_frozen(teacher), "teacher")


def as_frozen(teacher: TeacherConfig) -> FrozenEncoder:
    """The encoder of the section: TRANSITION, until the section is one."""
    return FrozenEncoder(**{key: value for key, value in asdict(teacher).items() if key in parameters(FrozenEncoder)})

"""The job `lists`: ranking lists from pairs of sentences and an encoder, where there is no LLM to generate them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from raoe_train.artifacts import once
from raoe_train.artifacts.provenance import digest, versions
from raoe_train.data.files import data_kind, write_rows
from raoe_train.data.pairs import pair_table
from raoe_train.data.ranking_lists import SHORTEST
from raoe_train.data.settings import Data
from raoe_train.encoders.embed import unit_rows
from raoe_train.encoders.frozen import embeddings
from raoe_train.encoders.named import FrozenEncoder, identity
from raoe_train.jobs.shared import file_to_write, job
from raoe_train.recipe import Option

COLUMNS = ["id", "sentences", "similarity", "method", "settings", "model", "versions"]


@job
def lists(
    data: Annotated[Data, Option(word="input")] = Data(),
    teacher: Annotated[FrozenEncoder, Option(word="name")] = FrozenEncoder(),
    length: Annotated[int, Option("sentences of a list, its premise included", least=SHORTEST)] = 33,
    max_lists: Annotated[int | None, Option("at most so many lists, drawn with seed", least=1)] = None,
    seed: Annotated[int, Option("of max_lists", least=0, below=2**32)] = 42,
    output: Annotated[str | None, "JSONL or parquet file to write"] = None,
    overwrite: Annotated[bool, "replace the output of another setting"] = False,
) -> dict[str, Any]:
    """Ranking lists without an LLM: premises, their hypotheses and other sentences, ordered by a teacher.

    One list a premise of data.input's pairs, as `generate` writes chains: rows of id, sentences, similarity (of each
    sentence to the premise), method "pairs", settings, model (the teacher), versions. Labels and scores have no part in
    it. Embeddings are kept in OUTPUT.parts/ until OUTPUT is written, or in teacher.cache.

    Returns:
        {"output", "lists", "sentences", "similarity": mean by place, "read": counts of the pairs, "settings",
        "versions"}, also written to OUTPUT.json.

    Raises:
        ValueError: no input, output or teacher, too few sentences, a malformed row, a teacher with NaN, or the output
            of other settings in the way.
        FileNotFoundError: no such input.
    """
    path = file_to_write(output, data.input, "the pairs of sentences")
    if data_kind(path) not in ("jsonl", "parquet"):
        raise ValueError(f"output {path}: lists are written as .jsonl, .jsonl.gz or .parquet")
    if teacher.name is None:
        raise ValueError("--teacher.name is missing: the encoder whose similarities order the lists")
    columns = {**data.columns, "label": "none", "score": "none"}
    pairs, counts = pair_table(str(data.input), columns=columns, on_error=data.on_error)
    texts = pairs.to_dict()
    pool = list(dict.fromkeys([*texts["sentence1"], *texts["sentence2"]]))
    if len(pool) < SHORTEST:
        raise ValueError(f"{len(pool)} different sentences are too few: a list takes at least {SHORTEST}")
    settings = {
        "teacher": identity(teacher),
        "input": digest(texts),
        "length": length,
        "max_lists": max_lists,
        "seed": seed,
    }
    if done := once.found(path, settings, overwrite):
        print(f"{path} is there already, from the same input and teacher")
        return done

    premises: dict[str, list[str]] = {}
    for premise, hypothesis in zip(texts["sentence1"], texts["sentence2"], strict=True):
        premises.setdefault(premise, []).append(hypothesis)
    chosen = list(premises)
    if max_lists is not None and max_lists < len(chosen):
        drawn = sorted(random.Random(seed).sample(range(len(chosen)), max_lists))
        chosen = [chosen[number] for number in drawn]
    found = embeddings(teacher, pool, "teacher", cache=teacher.cache or once.parts(path, settings))
    made = lists_from_pairs({premise: premises[premise] for premise in chosen}, pool, found, length)
    same = {"method": "pairs", "settings": {"length": length}, "model": teacher.name, "versions": versions()}
    # the id of a premise is the same in every file, so that a premise of two files is seen to be one
    rows = (
        {"id": hashlib.sha256(some[0].encode()).hexdigest()[:16], "sentences": some, "similarity": values, **same}
        for some, values in made
    )
    once.claim(path, settings)
    write_rows(path, COLUMNS, rows)
    shortest = min(len(values) for _, values in made)
    result = {
        "lists": len(made),
        "sentences": sum(len(some) for some, _ in made),
        "similarity": np.mean([values[:shortest] for _, values in made], axis=0).round(4).tolist(),
        "read": counts,
    }
    print(f"{result['lists']} lists of {result['sentences']} sentences in all -> {path}")
    return once.finish(path, settings, result)


def lists_from_pairs(
    premises: dict[str, list[str]], pool: Sequence[str], embeddings: np.ndarray, length: int
) -> list[tuple[list[str], list[float]]]:
    """For each premise a list of at most `length` sentences and their cosines with it: itself, its hypotheses, and
    others, in descending order of the cosine.

    The others are drawn by their rank among the rest of the pool, in geometric steps from the nearest to the farthest:
    drawn evenly, nearly all would have nothing to do with the premise. No chance is involved.

    Args:
        premises: {premise: its hypotheses}; of more than length - 1 the first ones.
        pool: different sentences, the premises and hypotheses among them.
        embeddings: of pool, [sentences, d].
    """
    place = {text: number for number, text in enumerate(pool)}
    unit = unit_rows(embeddings)
    made = []
    for premise, hypotheses in premises.items():
        own = [place[text] for text in dict.fromkeys([premise, *hypotheses])][:length]
        cosine = np.clip(unit @ unit[own[0]], -1, 1)
        free = np.ones(len(pool), dtype=bool)
        free[own] = False
        others = np.flatnonzero(free)
        others = others[np.argsort(-cosine[others], kind="stable")]
        rest = own[1:] + others[geometric_ranks(len(others), length - len(own))].tolist()
        rest.sort(key=lambda number: -cosine[number])
        members = [own[0], *rest]
        made.append(([pool[number] for number in members], [round(float(cosine[number]), 4) for number in members]))
    return made


def geometric_ranks(ranks: int, count: int) -> list[int]:
    """`count` different numbers below `ranks`, or all of them, the first 0 and the last ranks - 1, each a like factor
    above the one before."""
    count = min(count, ranks)
    places = np.arange(count)
    wanted = np.geomspace(1, max(ranks, 1), count).round().astype(int) - 1
    # where the factor is below 1 step: the next one
    return (np.maximum.accumulate(wanted - places) + places).tolist()

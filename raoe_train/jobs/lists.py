"""The job `lists`: ranking lists from pairs of sentences and an encoder, where there is no LLM to generate them."""

from __future__ import annotations

import hashlib
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.artifacts import once
from raoe_train.artifacts.provenance import digest, earlier_result, versions
from raoe_train.artifacts.writing import write_json
from raoe_train.data.files import data_kind, write_rows
from raoe_train.data.pairs import pair_table
from raoe_train.data.ranking_lists import SHORTEST
from raoe_train.encoders.embed import unit_rows
from raoe_train.encoders.named import identity
from raoe_train.training.list_targets import as_frozen, embedder

if TYPE_CHECKING:
    from raoe_train.config import ListsConfig

COLUMNS = ["id", "sentences", "similarity", "method", "settings", "model", "versions"]


def lists(config: ListsConfig) -> dict[str, Any]:
    """The job `lists`: write one list a premise of data.input's pairs, as `generate` writes chains: rows of id,
    sentences, similarity (of each sentence to the premise), method "pairs", settings, model (the teacher), versions.

    Labels and scores have no part in it. Beside OUTPUT: OUTPUT.json, a summary, which is also returned. Embeddings are
    kept in OUTPUT.parts/ until OUTPUT is written, so a killed job goes on after the last of them.

    Args:
        config: see ListsConfig and lists_from_pairs.

    Returns:
        {"output", "lists", "sentences", "similarity": mean by place, "read": counts of the pairs, "settings",
        "versions"}.

    Raises:
        ValueError: no input, output or teacher, a length below 3, too few sentences, a malformed row, a teacher with
            NaN, or the output of other settings in the way and overwrite not set.
        FileNotFoundError: no such input.
    """
    output = _checked(config)
    data = config.data
    columns = {**data.columns, "label": "none", "score": "none"}
    pairs, counts = pair_table(str(data.input), columns=columns, on_error=data.on_error)
    texts = pairs.to_dict()
    premises = _hypotheses(texts["sentence1"], texts["sentence2"])
    settings = {
        "teacher": identity(as_frozen(config.teacher)),
        "input": digest(texts),
        "length": config.length,
        "max_lists": config.max_lists,
        "seed": config.seed,
    }
    summary = output.with_name(output.name + ".json")
    if done := earlier_result(summary, output, settings, config.overwrite):
        print(f"{output} is there already, from the same input and teacher")
        return done

    pool = list(dict.fromkeys([*texts["sentence1"], *texts["sentence2"]]))
    parts = output.with_name(output.name + ".parts")
    folder = parts / digest({"teacher": settings["teacher"], "input": settings["input"], "shard": once.SHARD})[:16]
    embed = embedder(config.teacher)
    embeddings = np.concatenate(once.in_shards(folder, pool, once.SHARD, embed, f"teacher {config.teacher.name}"))
    chosen = list(premises)
    if config.max_lists is not None and config.max_lists < len(chosen):
        drawn = sorted(random.Random(config.seed).sample(range(len(chosen)), config.max_lists))
        chosen = [chosen[number] for number in drawn]
    made = lists_from_pairs({premise: premises[premise] for premise in chosen}, pool, embeddings, config.length)
    same = {
        "method": "pairs",
        "settings": {"length": config.length},
        "model": config.teacher.name,
        "versions": versions(),
    }
    rows = ({"id": _name(some[0]), "sentences": some, "similarity": values, **same} for some, values in made)
    write_rows(output, COLUMNS, rows)
    shortest = min(len(values) for _, values in made)
    result = {
        "output": str(output),
        "lists": len(made),
        "sentences": sum(len(some) for some, _ in made),
        "similarity": np.mean([values[:shortest] for _, values in made], axis=0).round(4).tolist(),
        "read": counts,
        "settings": settings,
        "versions": versions(),
    }
    write_json(summary, result)
    shutil.rmtree(parts)
    print(f"{result['lists']} lists of {result['sentences']} sentences in all -> {output}")
    return result


def lists_from_pairs(
    premises: dict[str, list[str]], pool: Sequence[str], embeddings: np.ndarray, length: int
) -> list[tuple[list[str], list[float]]]:
    """For each premise a list of at most `length` sentences and their cosines with it: itself, its hypotheses, and
    others, in descending order of the cosine.

    The others come from all over the pool, closely where it is alike: by their rank among all sentences that are
    neither the premise nor its hypotheses, in geometric steps from the nearest to the farthest. (Drawn evenly, nearly
    all would be alike in having nothing to do with the premise.) No chance is involved.

    Args:
        premises: {premise: its hypotheses}; of more than length - 1 the first ones.
        pool: different sentences, the premises and hypotheses among them.
        embeddings: of pool, [sentences, d].
        length: of a list; one is shorter where the pool is.
    """
    place = {text: number for number, text in enumerate(pool)}
    unit = unit_rows(embeddings)
    made = []
    for premise, hypotheses in premises.items():
        own = [place[premise], *(place[text] for text in hypotheses if text != premise)][:length]
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
    if count < 2:
        return list(range(count))
    chosen: list[int] = []
    for number in range(count):
        wanted = round(math.exp(math.log(ranks) * number / (count - 1))) - 1
        # where the factor is below 1 step: the next one
        chosen.append(max(wanted, chosen[-1] + 1 if chosen else 0))
    return chosen


def _checked(config: ListsConfig) -> Path:
    if not config.data.input:
        raise ValueError("--data.input is missing: the pairs of sentences")
    if not config.output:
        raise ValueError("--output is missing: the file to write")
    if config.teacher.name is None:
        raise ValueError("--teacher.name is missing: the encoder whose similarities order the lists")
    if config.length < SHORTEST:
        raise ValueError(f"length must be at least {SHORTEST}, got {config.length}")
    if config.max_lists is not None and config.max_lists < 1:
        raise ValueError(f"max_lists must be at least 1, got {config.max_lists}")
    output = Path(config.output).expanduser()
    if data_kind(output) not in ("jsonl", "parquet"):
        raise ValueError(f"output {output}: lists are written as .jsonl, .jsonl.gz or .parquet")
    return output


def _hypotheses(first: Sequence[str], second: Sequence[str]) -> dict[str, list[str]]:
    """{premise: its different hypotheses}, in file order; ValueError where all sentences make no list."""
    premises: dict[str, dict[str, None]] = {}
    for premise, hypothesis in zip(first, second, strict=True):
        premises.setdefault(premise, {})[hypothesis] = None
    sentences = len({*first, *second})
    if sentences < SHORTEST:
        raise ValueError(f"{sentences} different sentences are too few: a list takes at least {SHORTEST}")
    return {premise: list(hypotheses) for premise, hypotheses in premises.items()}


def _name(premise: str) -> str:
    """The id of a premise's list: the same in every file, so that a premise of two files is seen to be one."""
    return hashlib.sha256(premise.encode()).hexdigest()[:16]

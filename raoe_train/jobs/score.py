"""The job `score`: similarity scores of sentence pairs from two teacher encoders."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from raoe_train.artifacts import figures, once
from raoe_train.artifacts.processes import rank_and_world
from raoe_train.data.columns import NLI_LABELS
from raoe_train.data.files import known_kind, write_rows
from raoe_train.data.pairs_to_score import PairsToScore
from raoe_train.data.settings import Data
from raoe_train.encoders.embed import cosines
from raoe_train.encoders.frozen import embedder
from raoe_train.encoders.named import FrozenEncoder, identity
from raoe_train.jobs.shared import file_to_write, job
from raoe_train.recipe import Option, convert

ADDED = ("score_1", "score_2", "score")
TEACHERS: dict[str, dict[str, Any]] = {
    "Lajavaness/bilingual-embedding-large": {"revision": "e83179d7a66e8aed1b3015e98bb5ae234ed89598"},
    "jinaai/jina-embeddings-v3": {
        "revision": "215a6e121fa0183376388ac6b1ae230326bfeaed",
        "task": "text-matching",
    },
}
"""The paper's teachers, at the revisions that MTEB names. The paper does not say which of jina-embeddings-v3's task
adapters it used; this is the one for similarity. Both bring code, which runs only where it is asked for."""


@job(together=True)
def score(
    data: Annotated[Data, Option(word="input")] = Data(),
    teachers: Annotated[list[str], "encoders by name or path; by default the paper's two"] = [],
    teacher: Annotated[dict[str, Any], "options of one teacher: {NAME: {prompt: ..., task: ...}}"] = {},
    trust_remote_code: Annotated[bool, "run code that comes with the teachers, as the paper's two need"] = False,
    batch_size: Annotated[int, Option("sentences at a time", least=1)] = 64,
    device: Annotated[str | None, "torch device"] = None,
    output: Annotated[str | None, "file to write"] = None,
    overwrite: Annotated[bool, "replace the output of another setting"] = False,
) -> dict[str, Any]:
    """Add S = (S1 + S2) / 2 from teacher encoders to sentence pairs.

    (The RAOE paper's Eq. 4.) OUTPUT has data.input's rows as they are, those without a gold label too, with columns
    score_1, score_2 (the teachers' raw cosines) and score (their mean). Beside it: OUTPUT.json, a summary, and, where
    the rows have NLI labels, OUTPUT.png, the distribution of the score by label (the paper's Figure 1).

    A teacher's options are those of any frozen encoder. What they say is kept in OUTPUT.parts/ until OUTPUT is written.
    Of several processes each makes its share, and the first writes OUTPUT; a rerun may have more or fewer of them.

    Returns:
        {"output", "rows", "left_out": {reason: rows}, "mean", "by_label": {label: {"rows", "mean", "std"}},
        "teachers", "settings", "versions"}.

    Raises:
        ValueError: not two teachers, options for an unknown one, columns score_1, score_2 or score already there, a
            malformed row, nothing to score, or the output of other settings in the way.
        FileNotFoundError: no such input or teacher.
    """
    path = file_to_write(output, data.input, "the pairs to score")
    chosen = resolve_teachers(teachers, teacher, batch_size, device, trust_remote_code)
    table = PairsToScore(data, known_kind(path), ADDED)
    settings = {
        "teachers": [identity(encoder) for encoder in chosen],
        "input": table.digest,
        "rows": len(table.labels),
        "shard": once.SHARD,
    }
    if done := once.found(path, settings, overwrite):
        print(f"{path} is there already, from the same input and teachers")
        return done
    shards = []
    for number, encoder in enumerate(chosen, 1):
        folder = once.parts(path, settings) / f"score_{number}"
        shards.append(once.share(folder, table.pairs, once.SHARD, _scorer(encoder), str(encoder.name)))
        gc.collect()  # one teacher in memory at a time
    if rank_and_world()[0] > 0:
        return once.awaited(path, settings)
    first, second = (np.concatenate(once.gathered(files)) for files in shards)
    mean = (first + second) / 2
    added = (dict(zip(ADDED, map(float, values), strict=True)) for values in zip(first, second, mean, strict=True))
    rows = ({**fields, **values} for fields, values in zip(table.rows(), added, strict=True))
    write_rows(path, [*table.columns, *ADDED], rows)
    by_label = _by_label(table.labels, mean)
    if by_label:
        figures.pictures(lambda: _plot(by_label, once.beside(path, ".png")))
    result = {
        "rows": len(mean),
        "left_out": table.left_out,
        "mean": float(mean.mean()),
        "by_label": {
            name: {"rows": len(values), "mean": float(values.mean()), "std": float(values.std())}
            for name, values in by_label.items()
        },
        "teachers": [encoder.name for encoder in chosen],
    }
    print(f"{len(mean)} pairs scored, mean {result['mean']:.4f} -> {path}")
    return once.finish(path, settings, result)


def resolve_teachers(
    names: list[str], options: Mapping[str, Any], batch_size: int = 64, device: str | None = None, trust: bool = False
) -> list[FrozenEncoder]:
    """Two teachers with their options, the paper's by default; ValueError for unknown teachers or options, the paper's
    without `trust` in their code, or a folder that has the name of one of them."""
    if not names and not trust and not any(of.get("trust_remote_code") for of in options.values()):
        raise ValueError(
            f"the paper's teachers ({', '.join(TEACHERS)}) bring code of their own, which would run here: "
            "--trust_remote_code true says so, or --teachers names two others"
        )
    for name in TEACHERS:
        if Path(name).exists() and name in (names or TEACHERS):
            raise ValueError(f"{name} is a folder here, and a name on the hub: --teachers ./{name} … means the folder")
    names = list(names) or list(TEACHERS)
    if len(names) != 2 or names[0] == names[1]:
        raise ValueError(f"teachers must name two different encoders, got {names}")
    for name, given in options.items():
        if name not in names:
            raise ValueError(f"teacher has options for {name!r}, which is not among the teachers: {', '.join(names)}")
        if not isinstance(given, Mapping):
            raise ValueError(f"teacher.{name} must be a mapping of keys, got {given!r}")
    runs = {"batch_size": batch_size, "device": device, "trust_remote_code": trust}
    return [
        convert(
            FrozenEncoder, {**runs, **TEACHERS.get(name, {}), **options.get(name, {}), "name": name}, f"teacher.{name}"
        )
        for name in names
    ]


def _scorer(teacher: FrozenEncoder) -> Callable[[Any], np.ndarray]:
    embed = embedder(teacher, "teacher")

    def raw_cosines(pairs: Mapping[str, list[str]]) -> np.ndarray:
        embeddings = embed([*pairs["sentence1"], *pairs["sentence2"]])
        return cosines(*np.split(embeddings, 2))

    return raw_cosines


def _by_label(labels: np.ndarray, scores: np.ndarray) -> dict[str, np.ndarray]:
    """The scores of each label that is there; rows without one under "no label" where others have one."""
    if (labels < 0).all():
        return {}
    names = {-1: "no label", **{number: name for name, number in NLI_LABELS.items()}}
    there = sorted(set(labels.tolist()), key=lambda label: (label < 0, label))
    return {names.get(label, str(label)): scores[labels == label] for label in there}


def _plot(groups: dict[str, np.ndarray], path: Path) -> list[Path]:
    """The distribution of the score by label; each label's area is 1, so that those of different size compare."""
    made, axes = figures.figure()
    edges = np.histogram_bin_edges(np.concatenate(list(groups.values())), bins=60)
    for (label, scores), colour in zip(groups.items(), figures.colours(len(groups)), strict=True):
        name = f"{label} ({len(scores)} pairs, mean {scores.mean():.3f})"
        axes.hist(scores, edges, density=True, histtype="stepfilled", alpha=0.35, color=colour)
        axes.hist(scores, edges, density=True, histtype="step", color=colour, label=name)
    axes.set(xlabel="similarity score S", ylabel="density")
    axes.legend(frameon=False)
    figures.save(made, path)
    return [path]

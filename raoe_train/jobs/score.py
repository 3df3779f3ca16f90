"""The job `score`: compute similarity scores of sentence pairs with two teacher encoders."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.config import merge
from raoe_train.data.columns import NLI_LABELS
from raoe_train.data.files import known_kind, write_rows
from raoe_train.data.pairs import PairsToScore
from raoe_train.data.sources import Texts
from raoe_train.encoders.embed import cosines, embedder
from raoe_train.jobs.settings import ScoreConfig
from raoe_train.jobs.shared import job, require
from raoe_train.outputs import Output
from raoe_train.parts import read_parts, write_parts
from raoe_train.processes import rank_and_world
from raoe_train.settings import FrozenEncoder

ADDED = ("score_1", "score_2", "score")
TEACHERS: dict[str, dict[str, Any]] = {
    "Lajavaness/bilingual-embedding-large": {"revision": "e83179d7a66e8aed1b3015e98bb5ae234ed89598"},
    "jinaai/jina-embeddings-v3": {"revision": "215a6e121fa0183376388ac6b1ae230326bfeaed", "task": "text-matching"},
}
"""The RAOE paper's teachers, at the revisions used in MTEB. The paper does not say which task adapter of
jina-embeddings-v3 it uses. text-matching is the adapter for similarity. Both teachers need trust_remote_code."""


@job(together=True)
def score(config: ScoreConfig, output: Output) -> dict[str, Any]:
    """Add the score S = (S1 + S2) / 2 of two teacher encoders to sentence pairs (Eq. 4 of the RAOE paper).

    OUTPUT contains all rows of data.input, even rows without a gold label. Three columns are added: score_1 and score_2
    are the two teachers' raw cosine similarities, and score is their mean. OUTPUT.json contains a summary, with
    statistics for each label if the rows have NLI labels.

    For each teacher, you can set any field of FrozenEncoder. Scores are stored in OUTPUT.parts/ until OUTPUT is
    written. Under torchrun, each process scores its share of the pairs, and rank 0 writes OUTPUT. An interrupted job
    can resume with a different number of processes.

    Returns:
        {"output", "rows", "left_out": {reason: rows}, "mean", "by_label": {label: {"rows", "mean", "std"}},
        "teachers", "settings", "versions"}.
    """
    data = config.data
    require(data.input, "data.input", "the pairs to score")
    path = Path(require(config.output, "output", "the file to write"))
    encoders = resolve_teachers(config)
    table = PairsToScore(data, known_kind(path), ADDED)
    parts, texts = [], Texts({"": table.pairs} if rank_and_world()[0] == 0 else {})
    for number, encoder in enumerate(encoders, 1):
        folder = output.parts / f"score_{number}"
        parts.append(write_parts(folder, table.pairs, _scorer(encoder, texts), str(encoder.name)))
        gc.collect()  # keep only one teacher in memory at a time
    if rank_and_world()[0] > 0:
        return {}
    first, second = map(read_parts, parts)
    mean = (first + second) / 2
    columns = (dict(zip(ADDED, map(float, values), strict=True)) for values in zip(first, second, mean, strict=True))
    rows = ({**fields, **values} for fields, values in zip(table.rows(), columns, strict=True))
    output.begin()
    write_rows(output.path, [*table.columns, *ADDED], rows)
    by_label = _by_label(table.labels, mean)
    result = {
        "rows": len(mean),
        "left_out": table.left_out,
        "mean": float(mean.mean()),
        "by_label": {
            name: {"rows": len(values), "mean": float(values.mean()), "std": float(values.std())}
            for name, values in by_label.items()
        },
        "teachers": [encoder.name for encoder in encoders],
    }
    print(f"wrote {len(mean)} scored pairs (mean score: {result['mean']:.4f}) to {path}")
    return result


def resolve_teachers(config: ScoreConfig) -> list[FrozenEncoder]:
    """Return the two teachers with their settings; by default, the RAOE paper's teachers. Raise ValueError for unknown
    settings, and if the paper's teachers are used without trust_remote_code or have the same name as a local folder."""
    names, options, trust = config.teachers, config.teacher, config.trust_remote_code
    if not names and not trust and not any(each.get("trust_remote_code") for each in options.values()):
        raise ValueError(
            f"the paper's teachers ({', '.join(TEACHERS)}) run custom code from their repositories: "
            "allow this with --trust_remote_code true, or set two other encoders with --teachers"
        )
    for name in TEACHERS:
        if Path(name).exists() and name in (names or TEACHERS):
            raise ValueError(f"{name} is both a local folder and a name on the hub: to use the folder, write ./{name}")
    names = list(names) or list(TEACHERS)
    if len(names) != 2 or names[0] == names[1]:
        raise ValueError(f"teachers must name two different encoders, got {names}")
    if unknown := [name for name in options if name not in names]:
        advice = f"which is not one of the teachers {', '.join(names)}: correct the name, or add it to --teachers"
        raise ValueError(f"--teacher has options for {unknown[0]!r}, {advice}")
    common = {"batch_size": config.batch_size, "device": config.device, "trust_remote_code": trust}
    settings = ({**common, **TEACHERS.get(name, {}), **options.get(name, {}), "name": name} for name in names)
    return [merge(FrozenEncoder, [fields], "teacher.") for fields in settings]


def _scorer(teacher: FrozenEncoder, texts: Texts) -> Callable[[Any], np.ndarray]:
    embed = embedder(teacher, "teacher", texts)
    return lambda pairs: cosines(*np.split(embed([*pairs["sentence1"], *pairs["sentence2"]]), 2))


def _by_label(labels: np.ndarray, scores: np.ndarray) -> dict[str, np.ndarray]:
    """Return {label: scores}, with the key "no label" for rows without a label, or {} if no row has a label."""
    if (labels < 0).all():
        return {}
    names = {-1: "no label", **{number: name for name, number in NLI_LABELS.items()}}
    present = sorted(set(labels.tolist()), key=lambda label: (label < 0, label))
    return {names.get(label, str(label)): scores[labels == label] for label in present}

"""Similarity scores of sentence pairs from two teacher encoders: S = (S1 + S2) / 2, the RAOE paper's Eq. 4.

The work goes shard by shard, one teacher after the other. Each finished shard is a file in OUTPUT.parts/ that
appears in one step, so a killed job goes on after the last of them; OUTPUT is written in one step at the end.
Under torchrun or accelerate each process makes its share of the shards. Whichever ends last writes OUTPUT; none waits
for another, and a rerun may have more or fewer of them.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from raoe_train.artifacts import once
from raoe_train.artifacts.processes import LOCK, locked, rank_and_world
from raoe_train.artifacts.provenance import earlier_result, fingerprint, versions
from raoe_train.artifacts.writing import replacing, write_json
from raoe_train.data.columns import RowProblem, parse_label, parse_sentence, resolve_label_map
from raoe_train.data.files import KINDS, cell, data_kind, write_rows
from raoe_train.data.sources import open_source
from raoe_train.data.tables import runs
from raoe_train.encoders.embed import cosines, encode_sentences

if TYPE_CHECKING:
    from raoe_train.config import ScoreConfig

MANIFEST = "manifest.json"
ADDED = ("score_1", "score_2", "score")
TEACHERS: dict[str, dict[str, Any]] = {
    "Lajavaness/bilingual-embedding-large": {"trust_remote_code": True},
    "jinaai/jina-embeddings-v3": {"trust_remote_code": True, "task": "text-matching"},
}
"""The paper's teachers. It does not say which of jina-embeddings-v3's task adapters it used; this is the one
for similarity."""
LABEL_NAMES = ("entailment", "neutral", "contradiction")


def score(config: ScoreConfig) -> dict[str, Any]:
    """The job `score`: write data.input's rows with columns score_1, score_2 (the teachers' raw cosines) and
    score (their mean).

    Beside OUTPUT: OUTPUT.json, a summary (which is also returned), and, where the rows have NLI labels,
        OUTPUT.png, the
    distribution of the score by label (the paper's Figure 1). Run again with the same settings and input, it
    goes on where it stopped, or does nothing where it was done.

    Args:
        config: `teachers` are two encoders, by default TEACHERS; `teacher` holds the options of each by its
            name: prompt, task (further arguments of SentenceTransformer.encode), trust_remote_code, revision.
                data.columns, data.labels
            and data.on_error as for reading pairs; rows are kept as they are, those without a gold label too.

    Returns:
        {"rows", "left_out": {reason: rows}, "mean", "by_label": {label: {"rows", "mean", "std"}}, "teachers",
        "settings", "versions", "output"}; {"output", "waiting": True} where other processes have shards to finish.

    Raises:
        ValueError: not two teachers, options for an unknown one, columns score_1, score_2 or score already
            there, a malformed row, nothing to score, or another job's results in the output's place and
            overwrite is not set.
        FileNotFoundError: no such input.
    """
    output = _checked_output(config)
    teachers = resolve_teachers(config.teachers, config.teacher)
    table = _Table(config, data_kind(output) or "")
    settings = {
        "teachers": [{"name": name, **options, "files": fingerprint(name)} for name, options in teachers.items()],
        "input": table.digest,
        "rows": table.rows,
        "shard": once.SHARD,
    }
    summary, parts = _beside(output, ".json"), _beside(output, ".parts")

    def concluded() -> dict[str, Any] | None:
        return earlier_result(summary, output, settings, True)

    with locked(parts, concluded):
        ours = _claim(parts, settings, config.overwrite)
        # with our own parts beside it, the output is what we were about to replace, or did not come to sum up
        if done := earlier_result(summary, output, settings, config.overwrite or ours):
            print(f"{output} is there already, from the same input and teachers")
            return done
        write_json(parts / MANIFEST, settings)
    made = 0
    for number, (name, options) in enumerate(teachers.items(), 1):
        made += _score_with(name, options, table, _shards(parts, number, table), config)
    with locked(parts, concluded):
        if done := concluded():  # another process has ended since
            return done
        shards = [_shards(parts, number, table) for number in (1, 2)]
        if not all(path.exists() for path in itertools.chain(*shards)):
            print(f"{made} shards are done; other processes have some to finish")
            return {"output": str(output), "waiting": True}
        scores = [np.concatenate([np.load(path) for path in paths]) for paths in shards]
        return _conclude(output, summary, table, scores, settings)


def _conclude(
    output: Path, summary: Path, table: _Table, scores: list[np.ndarray], settings: dict[str, Any]
) -> dict[str, Any]:
    """Write the rows with their scores, the plot and the summary, which is returned."""
    mean = (scores[0] + scores[1]) / 2
    added = zip(scores[0].tolist(), scores[1].tolist(), mean.tolist(), strict=True)
    write_rows(
        output,
        [*table.columns, *ADDED],
        ({**fields, **dict(zip(ADDED, values, strict=True))} for fields, values in zip(table, added, strict=True)),
    )
    by_label = _by_label(table.labels, mean)
    result = {
        "output": str(output),
        "rows": table.rows,
        "left_out": table.left_out,
        "mean": float(mean.mean()),
        "by_label": {
            name: {"rows": len(values), "mean": float(values.mean()), "std": float(values.std())}
            for name, values in by_label.items()
        },
        "teachers": [teacher["name"] for teacher in settings["teachers"]],
        "settings": settings,
        "versions": versions(),
    }
    _plot(by_label, _beside(output, ".png"))
    write_json(summary, result)
    print(f"{table.rows} pairs scored, mean {result['mean']:.4f} -> {output}")
    return result


def resolve_teachers(names: list[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{teacher: its options}, two of them, the paper's by default; ValueError for unknown teachers or
    options."""
    names = list(names) or list(TEACHERS)
    if len(names) != 2 or names[0] == names[1]:
        raise ValueError(f"teachers must name two different encoders, got {names}")
    known = ("task", "prompt", "trust_remote_code", "revision")
    for name, given in options.items():
        if name not in names:
            raise ValueError(f"teacher has options for {name!r}, which is not among the teachers: {', '.join(names)}")
        if not isinstance(given, Mapping) or set(given) - set(known):
            raise ValueError(f"teacher options of {name} are {', '.join(known)}; got {given!r}")
    return {name: {**TEACHERS.get(name, {}), **options.get(name, {})} for name in names}


class _Table:
    """The input's rows, read anew for each pass, so that they need not fit in memory."""

    def __init__(self, config: ScoreConfig, output_kind: str) -> None:
        self.data, self.output_kind = config.data, output_kind
        self.label_map = resolve_label_map(config.data.labels)
        self.columns: list[str] = []
        self.labels: list[int] = []  # -1: none
        self.left_out: dict[str, int] = {}
        digest = hashlib.sha256()
        self.rows = 0
        self._label_column: str | None = None
        for fields in self:  # everything that can be wrong with the input shows now, not after hours of encoding
            self.columns.extend(name for name in fields if name not in self.columns)
            digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
            self.rows += 1
            self.labels.append(self._label(fields))
        if not self.rows:
            raise ValueError(f"{config.data.input}: there are no rows to score")
        if taken := [name for name in ADDED if name in self.columns]:
            raise ValueError(f"{config.data.input} has {', '.join(taken)} already; rename or remove the column first")
        self.digest = digest.hexdigest()
        self.shards = -(-self.rows // once.SHARD)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (fields for fields, _ in self._checked())

    def pairs(self) -> Iterator[list[tuple[str, str]]]:
        """The sentences, shard by shard."""
        return runs((pair for _, pair in self._checked()), once.SHARD)

    def _checked(self) -> Iterator[tuple[dict[str, Any], tuple[str, str]]]:
        source = open_source(str(self.data.input), self.data.columns)
        self.left_out.clear()
        for line, fields in source.rows:
            try:
                if isinstance(fields, str):
                    raise RowProblem(fields, reason="blank line" if fields == "blank line" else "malformed row")
                found = source.columns.find(fields)
                first, second = (parse_sentence(name, fields[found[name]]) for name in ("sentence1", "sentence2"))
                self._label_column = found.get("label")
                if source.columns.positions:  # no header line, so the names are ours
                    names = {column: name for name, column in found.items()}
                    fields = {names.get(column, f"column_{column}"): value for column, value in fields.items()}
                    self._label_column = "label" if "label" in found else None
                if self.output_kind in ("tsv", "csv"):
                    for value in fields.values():
                        cell(value, self.output_kind)
            except RowProblem as problem:
                if problem.malformed and self.data.on_error == "raise":
                    raise ValueError(f"{source.name}, {source.unit} {line}: {problem}") from None
                self.left_out[problem.reason] = self.left_out.get(problem.reason, 0) + 1
                continue
            except ValueError as error:
                raise ValueError(f"{source.name}, {source.unit} {line}: {error}") from None
            yield fields, (first, second)

    def _label(self, fields: dict[str, Any]) -> int:
        if self._label_column is None:
            return -1
        try:
            return parse_label(fields[self._label_column], self.label_map, self._label_column)
        except RowProblem:
            return -1  # no part in the scores; reading the output for training will say so


def _score_with(name: str, options: dict[str, Any], table: _Table, paths: list[Path], config: ScoreConfig) -> int:
    """Make what is missing of this process's share of a teacher's shards; how many these were."""
    rank, world = rank_and_world()
    missing = {number for number, path in enumerate(paths) if number % world == rank and not path.exists()}
    if not missing:
        return 0
    model = _load_teacher(name, options, config.device)
    encoding = {key: options[key] for key in ("task", "prompt") if options.get(key) is not None}
    with tqdm(total=table.rows, unit="pair", desc=name, disable=None, position=rank_and_world()[0] or None) as bar:
        for shard, pairs in enumerate(table.pairs()):
            if shard in missing:
                sentences = [first for first, _ in pairs] + [second for _, second in pairs]
                embeddings = encode_sentences(model, sentences, config.batch_size, **encoding)
                with replacing(paths[shard]) as temporary:
                    np.save(temporary, cosines(embeddings[: len(pairs)], embeddings[len(pairs) :]))
            bar.update(len(pairs))
    # one teacher in memory at a time
    del model
    gc.collect()
    return len(missing)


def _load_teacher(name: str, options: Mapping[str, Any], device: str | None) -> Any:
    # as its authors made it: pooling, prompts and remote code included
    from sentence_transformers import SentenceTransformer

    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"no such model folder: {name}")
    loading = {key: options[key] for key in ("trust_remote_code", "revision") if options.get(key) is not None}
    return SentenceTransformer(str(folder) if folder.is_dir() else name, device=device, **loading)


def _shards(parts: Path, teacher: int, table: _Table) -> list[Path]:
    return [parts / f"score_{teacher}-{shard:06d}.npy" for shard in range(table.shards)]


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(output.name + suffix)


def _checked_output(config: ScoreConfig) -> Path:
    if not config.data.input:
        raise ValueError("data.input is missing: the pairs to score")
    if not config.output:
        raise ValueError("output is missing: the file to write")
    output = Path(config.output).expanduser()
    if data_kind(output) is None:
        raise ValueError(f"output {output}: the suffix names no format; known are {', '.join(KINDS)}, also with .gz")
    if output.resolve() == Path(str(config.data.input).partition("#")[0]).expanduser().resolve():
        raise ValueError(f"output {output} is the input itself")
    return output


def _claim(parts: Path, settings: dict[str, Any], overwrite: bool) -> bool:
    """Whether `parts` holds work of this very job, and nothing else then; ValueError if another one's is there and may
    not be replaced. Under the lock."""
    manifest = parts / MANIFEST
    if manifest.exists():
        if json.loads(manifest.read_text(encoding="utf-8")) == settings:
            return True
        if not overwrite:
            raise ValueError(f"{parts} holds unfinished work of other teachers or another input; overwrite replaces it")
        manifest.unlink()
    # shards without a manifest are what a kill left of removing another job's
    for path in parts.iterdir():
        if path.name != LOCK:
            path.unlink()
    return False


def _by_label(labels: list[int], scores: np.ndarray) -> dict[str, np.ndarray]:
    """The scores of each label that is there; rows without one under "no label" where others have one."""
    found = np.asarray(labels)
    if (found < 0).all():
        return {}
    names = {label: LABEL_NAMES[label] if label < 3 else str(label) for label in sorted(set(labels)) if label >= 0}
    groups = {name: scores[found == label] for label, name in names.items()}
    return {**groups, "no label": scores[found < 0]} if (found < 0).any() else groups


def _plot(groups: dict[str, np.ndarray], path: Path) -> None:
    if not groups:
        return
    try:
        from raoe_train.jobs.score_plot import plot_scores_by_label

        plot_scores_by_label(groups, path)
    except ModuleNotFoundError as error:
        print(f"no {path}: {error}", file=sys.stderr)

"""How far lists of sentences drift from their first sentence: the ranking-sentences paper's Figure 1 and Table 5."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.jobs import cell, interval, load_encoder, read_lists, resample
from benchmarks.studies.markdown import table
from benchmarks.studies.plots import plot_drift
from benchmarks.studies.sweep_report import number

RESAMPLES = 10_000
PLACES = (1, 2, 4, 8, 16, 32)  # places that tables show, besides the last one
Lists = Mapping[str, Sequence[Sequence[str]]]  # {label of a file: its lists of sentences}


def drift(lists: Sequence[np.ndarray], length: int, seed: int = 0) -> dict[str, Any]:
    """Measure how far lists descend, and their mean similarities.

    Args:
        lists: unit embeddings [n, d] of each list's sentences, the source first.
        length: number of sentences of a list to use; 16 in Figure 1.
        seed: seed of the bootstrap over lists.

    Returns:
        - "chains": number of lists; "neighbours": pairs x_i, x_i+1, i >= 1; "repeated": the share of them whose
          embeddings are equal, as those of a repeated sentence.
        - "descending": the share of the other neighbours whose first sentence is more similar to the source, as in
          Table 5; 0.5 for sentences in random order. The source itself is in no pair. None without such neighbours.
        - "interval": [lowest, highest], 95 %, whole lists resampled.
        - "similarity": [length][length], the mean cosine of x_i and x_j over lists that have both (Figure 1), NaN for
          places that no list has.
        - "by_distance": [length], the mean cosine of all x_i and x_i+k.
        - "to_source": [length], the mean cosine of the source and x_i.
    """
    cosines = np.full((len(lists), length, length), np.nan)
    repeated = np.zeros((len(lists), max(length - 2, 0)), dtype=bool)
    for square, again, embeddings in zip(cosines, repeated, lists, strict=True):
        unit = embeddings[:length].astype(np.float64)
        square[: len(unit), : len(unit)] = unit @ unit.T
        equal = (unit[1:-1] == unit[2:]).all(axis=1)
        again[: len(equal)] = equal
    falls = np.diff(cosines[:, 0, 1:])
    neighbours = int(np.isfinite(falls).sum())
    falls[repeated] = np.nan
    right, pairs = (falls < 0).sum(axis=1), np.isfinite(falls).sum(axis=1)
    total, count = np.nansum(cosines, axis=0), np.isfinite(cosines).sum(axis=0)
    shares = resample([right, pairs], lambda r, p, axis: _ratio(r.sum(axis), p.sum(axis)), RESAMPLES, seed)
    return {
        "chains": len(lists),
        "neighbours": neighbours,
        "repeated": float(repeated.sum() / neighbours) if neighbours else None,
        "descending": float(right.sum() / pairs.sum()) if pairs.any() else None,
        "interval": [*interval(shares)] if pairs.any() else None,
        "similarity": _ratio(total, count).tolist(),
        "by_distance": [float(_ratio(np.trace(total, offset=k), np.trace(count, offset=k))) for k in range(length)],
        "to_source": _ratio(total[0], count[0]).tolist(),
    }


def unrelated(sources: np.ndarray) -> float | None:
    """The mean cosine of two distinct rows of [n, d] unit embeddings, which lists approach that forget their source;
    None for fewer than two rows."""
    rows = sources.astype(np.float64)
    if len(rows) < 2:
        return None
    together = rows.sum(axis=0)
    return float((together @ together - (rows * rows).sum()) / (len(rows) * (len(rows) - 1)))


def _ratio(total: Any, count: Any) -> Any:
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=np.asarray(count) > 0)


def report_drift(
    files: Mapping[str, str],
    output: Path,
    *,
    model: Mapping[str, Any],
    length: int,
    max_chains: int,
    examples: int,
    seed: int,
    on_error: str,
    batch_size: int,
) -> tuple[dict[str, Any], list[str]]:
    """Measure the drift of lists of sentences, {label: file}, by an encoder, and draw OUTPUT/similarity.png.

    Args:
        model: the encoder's name and settings, as of rt.load_encoder.
        length: number of sentences of a list to use, with its source.
        max_chains: maximum number of lists of a file, drawn with `seed`.
        examples: number of lists to show, of sources that all files have.
        on_error: "raise" or "skip" a malformed row.
        batch_size: number of sentences to encode at a time.

    Returns:
        ({"chains": {label: result of drift}, "unrelated": mean cosine of different sources, "sources",
        "given_up": {label: {reason: lists}}, "cases", "model"}, the lines of the report's page).
    """
    lists = {label: _drawn(read_lists(file, on_error), max_chains, seed) for label, file in files.items()}
    lists = {label: [sentences[:length] for sentences in some] for label, some in lists.items()}
    texts = list(dict.fromkeys(text for some in lists.values() for sentences in some for text in sentences))
    embeddings = load_encoder(**model).encode(texts, batch_size=batch_size, normalize_embeddings=True)
    if not np.isfinite(embeddings).all():
        raise ValueError(f"the encoder {model['name']} returns NaN or infinity")
    unit = dict(zip(texts, embeddings, strict=True))
    rows = {
        label: [np.stack([unit[text] for text in sentences]) for sentences in some] for label, some in lists.items()
    }
    sources = dict.fromkeys(sentences[0] for some in lists.values() for sentences in some)
    summaries = {label: Path(f"{file}.json") for label, file in files.items()}  # written by `generate`
    counts = {label: json.loads(path.read_text("utf-8")) for label, path in summaries.items() if path.is_file()}
    result: dict[str, Any] = {
        "chains": {label: drift(some, length, seed) for label, some in rows.items()},
        "unrelated": unrelated(np.stack([unit[source] for source in sources])),
        "sources": len(sources),
        "given_up": {label: of["failed_chains"] for label, of in counts.items() if "failed_chains" in of},
        "cases": _cases(lists, rows, examples),
        "model": model["name"],
    }
    plot_drift(result["chains"], output / "similarity.png")
    return result, _page(result)


def _drawn(lists: list[list[str]], most: int, seed: int) -> list[list[str]]:
    """Draw at most `most` lists; their order is kept."""
    if len(lists) <= most:
        return lists
    return [lists[place] for place in sorted(random.Random(seed).sample(range(len(lists)), most))]


def _cases(lists: Lists, rows: Mapping[str, Sequence[np.ndarray]], examples: int) -> list[dict[str, Any]]:
    """Each file's list for the first sources that all files have, or for the first file's sources if none is shared."""
    by_source = {
        label: {sentences[0]: (sentences, of) for sentences, of in zip(some, rows[label], strict=True)}
        for label, some in lists.items()
    }
    first, *rest = by_source.values()
    shared = [source for source in first if all(source in more for more in rest)] or list(first)
    cases = []
    for source in shared[:examples]:
        case: dict[str, Any] = {"source": source, "chains": {}}
        for label, lists_of in by_source.items():
            if source in lists_of:
                sentences, unit = lists_of[source]
                cosines = [round(float(value), 4) for value in unit @ unit[0]]
                case["chains"][label] = list(zip(sentences[1:], cosines[1:], strict=True))
        cases.append(case)
    return cases


def _page(result: dict[str, Any]) -> list[str]:
    files, given_up = result["chains"], result["given_up"]
    length = len(next(iter(files.values()))["to_source"])
    places = sorted({place for place in PLACES if place < length} | {length - 1})

    def cosines(of: Sequence[float | None]) -> list[str]:
        return [number(of[place], 3) for place in places]

    failures = {label: str(sum(reasons.values())) for label, reasons in given_up.items()}
    rows = [
        [
            *(cell(label), str(of["chains"]), failures.get(label, "-"), _share(of), _percent(of["repeated"])),
            *cosines(of["to_source"]),
        ]
        for label, of in files.items()
    ]
    lines = [
        "# Chains of sentences",
        "",
        f"Cosines by {cell(result['model'])}; the first {length} sentences of a chain, source included. Two different "
        f"sources have a mean cosine of {number(result['unrelated'], 3)}.",
        "",
        "Descending: the share of neighbours in a chain, without the source, of which the first is more similar to the "
        "source than the second (95 % interval, chains resampled); half means no order. Equal neighbours are left out: "
        "their share is the next column.",
        *table(
            ["file", "chains", "given up", "descending", "repeated", *(f"cosine at {place}" for place in places)],
            rows,
        ),
    ]
    for label, reasons in given_up.items():
        if reasons:
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            lines += ["", cell(f"Given up, {label}: {counts}")]
    by_distance = [[cell(label), *cosines(of["by_distance"])] for label, of in files.items()]
    lines += ["", "Mean cosine of two sentences of a chain, by the distance between them:"]
    lines += [*table(["file", *map(str, places)], by_distance), "", "![mean cosines within a chain](similarity.png)"]
    for case in result["cases"]:
        columns = [[_sentence(of, place) for place in range(len(of))] for of in case["chains"].values()]
        by_place = enumerate(itertools.zip_longest(*columns, fillvalue=""), 1)
        lines += ["", f"## {cell(case['source'])}", "", "Bold: no less similar to the source than the sentence before."]
        lines += table(["", *map(cell, case["chains"])], ([str(place), *cells] for place, cells in by_place))
    return lines


def _sentence(case: Sequence[tuple[str, float]], place: int) -> str:
    text, cosine = case[place]
    words = f"{cell(text)} [{cosine:.4f}]"
    return f"**{words}**" if place and cosine >= case[place - 1][1] else words


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _share(drift: dict[str, Any]) -> str:
    if drift["descending"] is None:
        return "-"
    low, high = drift["interval"]
    return f"{_percent(drift['descending'])} ({100 * low:.1f} to {100 * high:.1f})"

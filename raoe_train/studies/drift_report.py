"""Lists of sentences, method by method: how they drift from their source."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts.once import beside
from raoe_train.artifacts.once import found as found_already
from raoe_train.artifacts.provenance import digest, versions
from raoe_train.artifacts.writing import write_json, write_text
from raoe_train.data.ranking_lists import list_table
from raoe_train.data.tables import drawn
from raoe_train.encoders.named import Model, identity
from raoe_train.studies.drift import drift, unrelated
from raoe_train.studies.markdown import cell, made_with, number, table
from raoe_train.studies.plots import plot_drift

PLACES = (1, 2, 4, 8, 16, 32)  # that tables show, and the last


def report_drift(
    names: Sequence[str],
    model: Model,
    output: Path,
    length: int,
    max_lists: int,
    seed: int,
    examples: int,
    on_error: str,
    batch_size: int,
    overwrite: bool,
) -> dict[str, Any]:
    """OUTPUT/report.md, similarity.png and report.json, of the lists in files `names`: the ranking-sentences paper's
    Figure 1, with its 1,000 lists and 16 sentences. For the other arguments see report.

    Returns:
        {"chains": {label: what raoe_train.studies.drift.drift found}, "unrelated": mean cosine of different sources,
        "sources", "given_up": {label: {reason: lists}}, "cases", "settings", "versions"}; a label is a file's method,
        with the file's name where two have the same.
    """
    read = {label: drawn(of, max_lists, seed)["sentences"][:] for label, of in _labelled(names, on_error).items()}
    settings = {
        "model": identity(model),
        "chains": {label: digest(some) for label, some in read.items()},
        "length": length,
        "examples": examples,
        "seed": seed,
    }
    if done := found_already(output / "report.md", settings, overwrite, summary=output / "report.json"):
        print(f"{output / 'report.md'} is there already, from the same chains and encoder")
        return done

    from raoe_train.encoders.embed import encode_sentences, unit_rows
    from raoe_train.encoders.load import load_encoder

    lists = {label: [sentences[:length] for sentences in some] for label, some in read.items()}
    texts = list(dict.fromkeys(text for some in lists.values() for sentences in some for text in sentences))
    unit = unit_rows(encode_sentences(load_encoder(model), texts, batch_size))
    place = {text: row for row, text in enumerate(texts)}

    def rows(sentences: list[str]) -> np.ndarray:
        return unit[[place[text] for text in sentences]]

    found = {label: drift([*map(rows, some)], length, seed) for label, some in lists.items()}
    sources = list(dict.fromkeys(sentences[0] for some in lists.values() for sentences in some))
    result = {
        "chains": found,
        "unrelated": unrelated(rows(sources)),
        "sources": len(sources),
        "given_up": _given_up(dict(zip(read, names, strict=True))),
        "cases": _cases(lists, rows, examples),
        "model": model.name,
        "settings": settings,
        "versions": versions(),
    }
    output.mkdir(parents=True, exist_ok=True)
    plot_drift(found, output / "similarity.png")
    result = json.loads(json.dumps(result), parse_constant=lambda _: None)  # NaN: a place that no list has
    write_json(output / "report.json", result)
    write_text(output / "report.md", "\n".join(_page(result)) + "\n")
    for label, drifted in result["chains"].items():
        print(f"{label}: {drifted['chains']} chains, {_share(drifted)} of neighbours in descending order")
    print(f"-> {output / 'report.md'}")
    return result


def _labelled(names: Sequence[str], on_error: str) -> dict[str, Any]:
    """The lists of each file, by their method."""
    stems = [Path(name.partition("#")[0]).stem for name in names]
    read = [list_table(name, on_error=on_error)[0] for name in names]
    said = [set(of["method"][:]) for of in read]
    methods = [(len(of) == 1 and of.pop()) or stem for stem, of in zip(stems, said, strict=True)]
    labels = [
        method if methods.count(method) == 1 or method == stem else f"{method} ({stem})"
        for method, stem in zip(methods, stems, strict=True)
    ]
    if len(set(labels)) < len(labels):
        raise ValueError(f"results are of the same method and name: {', '.join(names)}")
    return dict(zip(labels, read, strict=True))


def _given_up(files: dict[str, str]) -> dict[str, dict[str, int]]:
    """Of files that `generate` wrote, {label: name}, how many lists it gave up, by reason."""
    given_up = {}
    for label, name in files.items():
        try:
            given_up[label] = json.loads(beside(Path(name), ".json").read_text(encoding="utf-8"))["failed_chains"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return given_up


def _cases(lists: dict[str, list[list[str]]], rows: Any, examples: int) -> list[dict[str, Any]]:
    """The first sources that all methods have a list of (or, where there is none, any), with each method's list."""
    by_source = {label: {sentences[0]: sentences for sentences in some} for label, some in lists.items()}
    first, *others = by_source.values()
    shared = [source for source in first if all(source in more for more in others)] or list(first)
    cases = []
    for source in shared[:examples]:
        case: dict[str, Any] = {"source": source, "chains": {}}
        for label, of in by_source.items():
            if source in of:
                unit = rows(of[source])
                cosines = [round(float(value), 4) for value in unit @ unit[0]]
                case["chains"][label] = list(zip(of[source][1:], cosines[1:], strict=True))
        cases.append(case)
    return cases


def _page(result: dict[str, Any]) -> list[str]:
    found, given_up = result["chains"], result["given_up"]
    length = len(next(iter(found.values()))["to_source"])
    places = sorted({place for place in PLACES if place < length} | {length - 1})

    def cosines(of: Sequence[float | None]) -> list[str]:
        return [number(of[place], 3) for place in places]

    lost = {label: str(sum(reasons.values())) for label, reasons in given_up.items()}
    measured = [
        [cell(label), str(of["chains"]), lost.get(label, "-"), _share(of), *cosines(of["to_source"])]
        for label, of in found.items()
    ]
    lines = [
        "# Chains of sentences",
        "",
        f"Cosines by {result['model']}; the first {length} sentences of a chain, source included. Two different "
        f"sources have a mean cosine of {number(result['unrelated'], 3)}.",
        "",
        "Descending: of neighbours in a chain, behind the source, how many have the first nearer to the source than "
        "the second (95 % interval, chains resampled). Half would be no order.",
        *table(["method", "chains", "given up", "descending", *(f"cosine at {place}" for place in places)], measured),
    ]
    for label, reasons in given_up.items():
        if reasons:
            lines += ["", f"Given up, {label}: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items())]
    apart = [[cell(label), *cosines(of["by_distance"])] for label, of in found.items()]
    lines += ["", "Mean cosine of two sentences of a chain, by the distance between them:"]
    lines += [*table(["method", *map(str, places)], apart), "", "![mean cosines within a chain](similarity.png)"]
    for case in result["cases"]:
        shown = [[_sentence(of, place) for place in range(len(of))] for of in case["chains"].values()]
        by_place = enumerate(itertools.zip_longest(*shown, fillvalue=""), 1)
        lines += ["", "## " + cell(case["source"]), "", "In bold what is no further from it than the one before."]
        lines += table(["", *map(cell, case["chains"])], ([str(place), *cells] for place, cells in by_place))
    return [*lines, "", f"Made with {made_with(result['versions'])}."]


def _sentence(case: list[list[Any]], place: int) -> str:
    text, cosine = case[place]
    shown = f"{cell(text)} [{cosine:.4f}]"
    return f"**{shown}**" if place and cosine >= case[place - 1][1] else shown


def _share(drifted: dict[str, Any]) -> str:
    if drifted["descending"] is None:
        return "-"
    low, high = drifted["interval"]
    return f"{100 * drifted['descending']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

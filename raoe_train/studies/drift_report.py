"""Chains of sentences, method by method: how they drift from their source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.artifacts.provenance import digest, earlier_result, identity, versions
from raoe_train.artifacts.writing import write_json, write_text
from raoe_train.data.ranking_lists import read_lists
from raoe_train.data.tables import drawn
from raoe_train.studies.markdown import cell, table_head, table_row

if TYPE_CHECKING:
    from datasets import Dataset

    from raoe_train.config import ReportConfig


def report_chains(config: ReportConfig, output: Path) -> dict[str, Any]:
    """How chains drift from their source: OUTPUT/report.md, similarity.png and report.json.

    Args:
        config: see ReportConfig; of each file at most max_chains chains, drawn with seed, in each of which the first
            `length` sentences are looked at (the ranking-sentences paper's Figure 1: 1,000 and 16).
        output: directory to write.

    Returns:
        {"chains": {label: what raoe_train.studies.drift.drift found}, "unrelated": mean cosine of different
        sources, "sources", "given_up": {label: {reason: chains}}, "cases", "settings", "versions"}; a label is a file's
        method, with the file's name where two have the same.

    Raises:
        ValueError: no encoder, a malformed chain, an encoder with NaN, or the report of other settings in the way and
            overwrite not set.
        FileNotFoundError: no such file.
    """
    read = {label: drawn(data, config.max_chains, config.seed) for label, data in _labelled(config).items()}
    settings = {
        "model": identity(config.model),
        "chains": {label: digest(data["sentences"][:]) for label, data in read.items()},
        "length": config.length,
        "examples": config.examples,
        "seed": config.seed,
    }
    if done := earlier_result(output / "report.json", output / "report.md", settings, config.overwrite):
        print(f"{output / 'report.md'} is there already, from the same chains and encoder")
        return done

    from raoe_train.encoders.embed import encode_sentences, unit_rows
    from raoe_train.encoders.load import load_encoder
    from raoe_train.studies.drift import drift, unrelated
    from raoe_train.studies.plots import plot_drift

    chains = {label: [sentences[: config.length] for sentences in data["sentences"][:]] for label, data in read.items()}
    texts = list(dict.fromkeys(text for some in chains.values() for sentences in some for text in sentences))
    unit = unit_rows(encode_sentences(load_encoder(config.model), texts, config.batch_size))
    place = {text: number for number, text in enumerate(texts)}

    def rows(sentences: list[str]) -> np.ndarray:
        return unit[[place[text] for text in sentences]]

    found = {label: drift([*map(rows, some)], config.length, config.seed) for label, some in chains.items()}
    sources = list(dict.fromkeys(sentences[0] for some in chains.values() for sentences in some))
    result = {
        "chains": found,
        "unrelated": unrelated(rows(sources)),
        "sources": len(sources),
        "given_up": _given_up(config, list(read)),
        "cases": _cases(chains, rows, config.examples),
        "model": config.model.name,
        "settings": settings,
        "versions": versions(),
    }
    output.mkdir(parents=True, exist_ok=True)
    plot_drift(found, output / "similarity.png")
    result = json.loads(json.dumps(result), parse_constant=lambda _: None)  # NaN: a place that no chain has
    write_json(output / "report.json", result)
    write_text(output / "report.md", _page(result))
    for label, drifted in result["chains"].items():
        print(f"{label}: {drifted['chains']} chains, {_share(drifted)} of neighbours in descending order")
    print(f"-> {output / 'report.md'}")
    return result


def _labelled(config: ReportConfig) -> dict[str, Dataset]:
    """The chains of each file, by their method."""
    stems = [Path(name.partition("#")[0]).stem for name in config.results]
    read = [
        (stem, read_lists(name, on_error=config.on_error)) for stem, name in zip(stems, config.results, strict=True)
    ]
    methods = [_method(data) or stem for stem, data in read]
    labels = [
        method if methods.count(method) == 1 or method == stem else f"{method} ({stem})"
        for method, (stem, _) in zip(methods, read, strict=True)
    ]
    if len(set(labels)) < len(labels):
        raise ValueError(f"results are of the same method and name: {', '.join(map(str, config.results))}")
    return {label: data for label, (_, data) in zip(labels, read, strict=True)}


def _method(lists: Dataset) -> str:
    """How all of the lists were written; "" where that is not said, or not all the same."""
    methods = set(lists["method"][:])
    return methods.pop() if len(methods) == 1 else ""


def _given_up(config: ReportConfig, labels: list[str]) -> dict[str, dict[str, int]]:
    """Of files that `generate` wrote, how many chains it gave up, by reason."""
    given_up = {}
    for label, name in zip(labels, config.results, strict=True):
        try:
            given_up[label] = json.loads(Path(f"{name}.json").read_text(encoding="utf-8"))["failed_chains"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return given_up


def _cases(read: dict[str, list[list[str]]], rows: Any, examples: int) -> list[dict[str, Any]]:
    """The first sources that all methods have a chain of (or, where there is none, any), with each method's chain."""
    chains = {label: {sentences[0]: sentences for sentences in some} for label, some in read.items()}
    first, *others = chains.values()
    shared = [source for source in first if all(source in more for more in others)] or list(first)
    cases = []
    for source in shared[:examples]:
        case: dict[str, Any] = {"source": source, "chains": {}}
        for label, by_source in chains.items():
            if source in by_source:
                unit = rows(by_source[source])
                cosines = [round(float(value), 4) for value in unit @ unit[0]]
                case["chains"][label] = list(zip(by_source[source][1:], cosines[1:], strict=True))
        cases.append(case)
    return cases


def _page(result: dict[str, Any]) -> str:
    found, given_up = result["chains"], result["given_up"]
    length = len(next(iter(found.values()))["to_source"])
    places = sorted({place for place in (1, 2, 4, 8, 16, 32) if place < length} | {length - 1})
    lines = [
        "# Chains of sentences",
        "",
        f"Cosines by {result['model']}; the first {length} sentences of a chain, source included. Two different "
        f"sources have a mean cosine of {_number(result['unrelated'])}.",
        "",
        "Descending: of neighbours in a chain, behind the source, how many have the first nearer to the source than "
        "the second (95 % interval, chains resampled). Half would be no order.",
        "",
        *table_head(["method", "chains", "given up", "descending", *(f"cosine at {place}" for place in places)]),
    ]
    for label, drifted in found.items():
        lost = "-" if label not in given_up else str(sum(given_up[label].values()))
        values = [_number(drifted["to_source"][place]) for place in places]
        lines.append(table_row([cell(label), str(drifted["chains"]), lost, _share(drifted), *values]))
    for label, reasons in given_up.items():
        if reasons:
            lines += ["", f"Given up, {label}: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items())]
    lines += ["", "Mean cosine of two sentences of a chain, by the distance between them:", ""]
    lines += table_head(["method", *map(str, places)])
    for label, drifted in found.items():
        lines.append(table_row([cell(label), *(_number(drifted["by_distance"][place]) for place in places)]))
    lines += ["", "![mean cosines within a chain](similarity.png)"]
    for case in result["cases"]:
        lines += ["", "## " + cell(case["source"]), "", "In bold what is no further from it than the one before.", ""]
        lines += table_head(["", *map(cell, case["chains"])])
        for place in range(max(map(len, case["chains"].values()))):
            cells = [_sentence(chain, place) for chain in case["chains"].values()]
            lines.append(table_row([str(place + 1), *cells]))
    made = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, "", f"Made with {made}.", ""])


def _sentence(chain: list[list[Any]], place: int) -> str:
    if place >= len(chain):
        return ""
    text, cosine = chain[place]
    shown = f"{cell(text)} [{cosine:.4f}]"
    return f"**{shown}**" if place and cosine >= chain[place - 1][1] else shown


def _share(drifted: dict[str, Any]) -> str:
    if drifted["descending"] is None:
        return "-"
    low, high = drifted["interval"]
    return f"{100 * drifted['descending']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

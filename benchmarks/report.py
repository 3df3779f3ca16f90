"""Tables (Markdown) and plots of what `python -m benchmarks --json` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HEAD = (
    "Made by `python -m benchmarks report`. Median wall time of a call, contenders timed in turn; in brackets how many",
    "times the first one's that is.",
)
WHERE = ("gpu", "cpu", "cores", "date", "commit", "torch", "triton", "sentence-transformers", "transformers", "python")


def read(files: Iterable[Path]) -> list[Row]:
    rows = []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{file}:{number}: not a line of benchmark JSON ({error})") from None
    return rows


def write(files: list[Path], folder: Path) -> Path:
    """README.md and one plot for each op and run; returns the page."""
    rows = [row for row in read(files) if "contender" in row]
    if not rows:
        raise SystemExit("nothing to report: name files that `python -m benchmarks --json FILE` wrote")
    folder.mkdir(parents=True, exist_ok=True)
    page = ["# Benchmarks", "", *HEAD, ""]
    for op in dict.fromkeys(row["op"] for row in rows):
        for number, where in enumerate(dict.fromkeys(_where(row) for row in rows if row["op"] == op)):
            chosen = [row for row in rows if row["op"] == op and _where(row) == where]
            plot = folder / f"{op}-{number}.png"
            page += [f"## {op}", "", where, "", *_table(chosen), "", f"![{op}]({plot.name})", ""]
            _plot(chosen, plot)
    result = folder / "README.md"
    result.write_text("\n".join(page))
    return result


def _where(row: Row) -> str:
    return ", ".join(f"{key} {row[key]}" for key in WHERE if row.get(key) is not None)


def _table(rows: list[Row]) -> list[str]:
    """Sizes down, contenders across: median wall time, and how often it is the first one's."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for size, title in dict.fromkeys((row["size"], row["title"]) for row in rows if "title" in row):
        found = {row["contender"]: row for row in rows if row.get("title", title) == title and row["size"] == size}
        lines.append(f"| {title} | " + " | ".join(_cell(found.get(name)) for name in names) + " |")
    return lines


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "missing" in row:
        return f"missing: {row['missing']}"
    seconds = row["median_s"]
    text = f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
    return f"{text} ({row['ratio_to_first']:.3g}x)" if row.get("tested", True) else text


def _plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {"median_s": "seconds (median)"}
    if any(row.get("peak_bytes") for row in rows):
        panels["peak_bytes"] = "bytes at the peak of a call, beyond those before it"
    figure, row_of_axes = pyplot.subplots(
        1, len(panels), figsize=(7 * len(panels), 4.5), layout="constrained", squeeze=False
    )
    for axes, (key, label) in zip(row_of_axes[0], panels.items(), strict=True):
        for name in dict.fromkeys(row["contender"] for row in rows):
            own = sorted((row["size"], row[key]) for row in rows if row["contender"] == name and row.get(key))
            if own:
                axes.plot(*zip(*own, strict=True), marker="o", markersize=3, label=name)
        axes.set(xscale="log", yscale="log", xlabel="size", ylabel=label, title=rows[0]["op"])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

"""The ledger in results/README.md: which tests and benchmarks have run on a GPU, according to the result files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.report import Row, read

RESULTS = Path(__file__).parent / "results"
START, END = "<!-- ledger: made by `make gpu` from the files beside this page -->", "<!-- end of ledger -->"


def table(ops: Iterable[str], rows: list[Row]) -> str:
    """Table with each op's last GPU run of tests and of benchmarks: GPU, date and commit, or "never"."""
    lines = ["| op | tests on a GPU | benchmark on a GPU |", "|---|---|---|"]
    for op in ops:
        on_gpu = [row for row in rows if row["op"] == op and row.get("gpu")]
        tests = [row for row in on_gpu if "tests" in row]
        speeds = [row for row in on_gpu if "median_s" in row]
        outcome = f"{tests[-1]['tests']}: " if tests else ""
        lines.append(f"| {op} | {outcome}{_last(tests)} | {_last(speeds)} |")
    return "\n".join(lines)


def _last(rows: list[Row]) -> str:
    return f"{rows[-1]['gpu']}, {rows[-1]['date']}, {rows[-1]['commit']}" if rows else "never"


def page(ops: Iterable[str], folder: Path = RESULTS) -> str:
    """Return README.md of a results folder with an updated ledger."""
    before, _, rest = (folder / "README.md").read_text().partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{folder / 'README.md'} has no lines {START!r} and {END!r}")
    rows = sorted(read(sorted(folder.glob("*.jsonl"))), key=lambda row: row["date"])
    return f"{before}{START}\n\n{table(ops, rows)}\n\n{END}{after}"


def update(ops: Iterable[str], folder: Path = RESULTS) -> None:
    (folder / "README.md").write_text(page(ops, folder))

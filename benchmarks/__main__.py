"""`python -m benchmarks [OP …]`: time all contenders of an op in turn, print the ratios and append JSON lines.

`python -m benchmarks report FILE …` makes tables and plots of these JSON lines.
"""

from __future__ import annotations

import argparse
import gc
import json
import traceback
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import base, gate, provenance, report, timing
from benchmarks.case import Case

KERNEL_OPS = ("pairwise", "cosine", "guided", "infonce", "sigmoid", "attention", "listwise", "matryoshka")
STEPS = ("train_step", "equal_lengths", "large_batch")
# what `make gpu` measures first, besides train_step
FIRST = ("profile", "trainer", "lora", "smoke")
OPS = (*KERNEL_OPS, "gist", "generation", "chains", *STEPS, *FIRST)
# Least bytes moved for which peak memory is measured; below, Python and the allocator would dominate it.
PEAK_FROM = 1 << 21
DETAILS = ("operations", "kernels", "busy_s", "most_pairs", "difference", "changed")  # of Case.details, printed


def declared(op: str) -> ModuleType:
    """Import the module that declares the cases of an op, a training step or a generation."""
    return import_module(f"benchmarks.ops.{op}" if op in KERNEL_OPS else f"benchmarks.{op}")


def run(
    op: str, device: str, sizes: list[int] | None, output: Path | None, tested: bool, words: list[str] | None = None
) -> list[str]:
    """Measure the contenders of one op whose names contain one of `words`, and return those that failed. The first
    contender, our best backend, is the baseline of the others."""
    failed: list[str] = []
    names: set[str] = set()
    module = declared(op)
    about = provenance.describe(device) | (timing.rates(device) if tested else {}) | {"tested": tested}
    print(f"\n{op} on {device}: " + ", ".join(f"{k} {_plain(v)}" for k, v in about.items() if v is not None))
    for size in sizes or module.SIZES[device]:
        for case in cases(module, size, device):
            names |= set(case.contenders)
            case = chosen(case, words) if words else case
            if not case.contenders:
                continue
            rows = measure(case, device)
            failed += [f"{row['contender']} ({case.title})" for row in rows if row.get("failed")]
            print(table(case, rows, tested), flush=True)
            if output:
                with output.open("a") as lines:
                    for row in rows:
                        lines.write(json.dumps({"op": op, "device": device, "size": size} | row | about) + "\n")
            del case
            gc.collect()
    if words and not any(word in name for word in words for name in names):
        raise SystemExit(f"no contender is called {' or '.join(words)}; there are {', '.join(sorted(names))}")
    return failed


def cases(module: ModuleType, size: int, device: str) -> Iterable[Case]:
    """Return the cases that an op's module declares for a size."""
    return module.cases(size, device) if hasattr(module, "cases") else [module.case(size, device)]


def chosen(case: Case, words: list[str]) -> Case:
    """Restrict a case to the contenders whose names contain one of `words`."""
    contenders = {name: call for name, call in case.contenders.items() if any(word in name for word in words)}
    return replace(case, contenders=contenders)


def measure(case: Case, device: str) -> list[dict[str, Any]]:
    """Return a row for each contender, with its measurements or the reason why it is missing."""
    single, missing = begun(case, device)
    if case.once:
        times = {name: [seconds] for name, (seconds, _) in single.items()}
    else:
        contenders = {name: case.contenders[name] for name in single}
        times = timing.measure(contenders, device, before=case.before, rounds=case.rounds)
        single = {}
        if case.bytes >= PEAK_FROM:
            single = {name: timing.single(call, device) for name, call in contenders.items()}
    first = next(iter(times))
    rows: list[dict[str, Any]] = []
    for name, seconds in times.items():
        wall, device_time, host = ([triple[k] for triple in seconds] for k in range(3))
        low, median, high = timing.quantiles(wall)
        row = {"title": case.title, "contender": name, "median_s": median, "p10_s": low, "p90_s": high}
        row |= {"min_s": min(wall), "device_s": timing.quantiles(device_time)[1], "rounds": len(wall)}
        row["host_s"] = timing.quantiles(host)[1]
        row["ratio_to_first"] = timing.ratio(wall, [triple[0] for triple in times[first]])
        row["peak_bytes"] = single[name][1] if single else None
        row |= case.details(name) if case.details else {}
        rows.append(row | {"least_bytes": case.bytes, "least_flops": case.flops})
    unavailable = [{"contender": name, "missing": why} for name, why in case.missing.items()]
    return rows + [{"title": case.title} | row for row in unavailable + missing]


def begun(case: Case, device: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run each contender's first call, which compiles. Return (its time and memory, rows of contenders without one). A
    peer without a package or enough memory is missing, any other error is a failure. An error of ours raises."""
    single: dict[str, Any] = {}
    missing: list[dict[str, Any]] = []
    for name, call in case.contenders.items():
        try:
            single[name] = timing.single(call, device)
            continue
        except Exception as error:
            if not single:
                raise
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            missing.append({"contender": name, "missing": why})
            if not isinstance(error, (ImportError, torch.OutOfMemoryError)):
                traceback.print_exc()
                missing[-1]["failed"] = True
        gc.collect()
        torch.cuda.empty_cache()
    return single, missing


def table(case: Case, rows: list[dict[str, Any]], tested: bool) -> str:
    measured = [row for row in rows if "missing" not in row]
    first = measured[0]["contender"]
    ratio = f"x {first}" if tested else "(no ratios: its tests did not pass or were not run)"
    lines = [f"\n{case.title:<40}    median      min   device     host    GB/s  GFLOP/s   peak MB   {ratio}"]
    for row in measured:
        seconds = row["device_s"]
        rate = f"{row['least_bytes'] / seconds / 1e9:7.1f}" if row["least_bytes"] else " " * 7
        flops = f"{row['least_flops'] / seconds / 1e9:8.1f}" if row["least_flops"] else " " * 8
        peak = " " * 9 if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:9.1f}"
        times = "".join(_show(each) for each in (row["median_s"], row["min_s"], seconds, row["host_s"]))
        line = f"  {row['contender']:<38}{times} {rate} {flops} {peak}"
        line += f"{row['ratio_to_first']:9.2f}" if tested else ""
        details = {key: _plain(row[key]) for key in row if key in DETAILS}
        lines.append(line + "".join(f"  {value} {key}" for key, value in details.items()))
    lines += [f"  {row['contender']:<38} missing: {row['missing']}" for row in rows if "missing" in row]
    return "\n".join(lines)


def _show(seconds: float) -> str:
    unit, scale = ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * scale:7.2f}{unit}"


def _plain(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("op", nargs="*", help=f"ops to time (default: all): {', '.join(OPS)}. Or: report FILE …")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="+", help="sizes to time, instead of the op's list")
    parser.add_argument("--contenders", nargs="+", metavar="WORD", help="time contenders with a WORD in their names")
    parser.add_argument("--base", metavar="GITREF", help="compare this tree with this commit")
    parser.add_argument("--json", type=Path, help="append one JSON line per contender and size to this file")
    parser.add_argument("--untested", action="store_true", help="skip the tests, and print times without ratios")
    parser.add_argument("--output", type=Path, default=Path("benchmark-report"), help="folder for the report")
    arguments = parser.parse_args()
    if arguments.op[:1] == ["report"]:
        print(report.write([Path(name) for name in arguments.op[1:]], arguments.output))
        return 0
    if unknown := [op for op in arguments.op if op not in (*OPS, "all")]:
        parser.error(f"unknown op {unknown[0]!r}; there are {', '.join(OPS)}")
    ops = list(OPS) if not arguments.op or "all" in arguments.op else arguments.op
    if arguments.base:
        base.compare(ops, arguments.device, arguments.sizes, arguments.base)
        return 0
    untested, failed = [], []
    for op in ops:
        tests = declared(op).TESTS
        if not arguments.untested and not gate.passes(op, tests, arguments.device):
            untested.append(op)
        tested = not arguments.untested and op not in untested
        failed += run(op, arguments.device, arguments.sizes, arguments.json, tested, arguments.contenders)
    if untested:
        print(f"\nno ratios for {', '.join(untested)}: the tests failed")
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if untested or failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

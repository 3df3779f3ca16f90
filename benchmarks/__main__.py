"""`python -m benchmarks OP`: time every contender of an op side by side, print the ratios, append JSON lines."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import provenance, timing

OPS = ("pairwise", "cosine")


def run(op: str, device: str, sizes: list[int] | None, output: Path | None) -> None:
    """Measure one op. The first contender, our best backend, is what the others are compared with."""
    module = import_module(f"benchmarks.{op}")
    about = provenance.describe(device)
    print(f"{op} on {device}: " + ", ".join(f"{k} {v}" for k, v in about.items() if v is not None))
    for size in sizes or module.SIZES[device]:
        contenders = module.contenders(size, device)
        times = timing.measure(contenders, device)
        first = next(iter(times))
        print(f"\n{size:,} pairs, forward + backward" + " " * 14 + f"median      min   x {first}   bytes/pair")
        for name, seconds in times.items():
            median, ratio = statistics.median(seconds), timing.ratio(seconds, times[first])
            peak = timing.peak_bytes(contenders[name], device) if size >= 1 << 17 else None
            row = {"op": op, "device": device, "size": size, "contender": name, "median_s": median}
            row |= {"min_s": min(seconds), "ratio_to_first": ratio, "peak_bytes": peak, "rounds": len(seconds)}
            memory = "" if peak is None else f"{peak / size:10.1f}"
            print(f"  {name:<38} {_show(median)} {_show(min(seconds))} {ratio:{len(first) + 4}.2f} {memory}")
            if output:
                with output.open("a") as lines:
                    lines.write(json.dumps(row | about) + "\n")
        del contenders, times
        gc.collect()


def _show(seconds: float) -> str:
    unit, scale = ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * scale:7.2f}{unit}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("op", choices=[*OPS, "all"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="+", help="pairs; default: the op's own list")
    parser.add_argument("--output", type=Path, help="append one JSON line a contender and size to this file")
    arguments = parser.parse_args()
    for op in OPS if arguments.op == "all" else [arguments.op]:
        run(op, arguments.device, arguments.sizes, arguments.output)


if __name__ == "__main__":
    main()

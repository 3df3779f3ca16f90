"""``python -m tests.sanitizers [--which asan ubsan tsan] [--cases N] [--seed S] [--parts driver module emulator]``

What gcc's sanitizers say of csrc: its CPU functions called with any arguments by 1 to 8 threads (driver.cpp), as they
ship and with blocks so small that every call has many; the module under the kernels' conformance suite; the CUDA
kernels, emulated, under the same, with tiles as they ship and small ones. ThreadSanitizer is for the driver alone: in
Python it would see torch's own threads. csrc/README.md has when each part ran, how long, and what came of it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SANITIZERS = {
    "asan": ["-fsanitize=address"],
    "ubsan": ["-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all"],
    "tsan": ["-fsanitize=thread"],
}
PARTS = ("driver", "module", "emulator")
SOURCES = ("pairwise/cpu/pairwise.cpp", "pairwise/cpu/scale.cpp", "cosine/cosine_cpu.cpp")
# Small chunks, so that a few hundred elements need many chunks and threads.
SMALL = {
    "pairwise/cpu/pairwise.cpp": {"pairs_a_thread = 1 << 15": "pairs_a_thread = 1 << 4"},
    "pairwise/cpu/order.h": {"chunk = 1 << 14": "chunk = 1 << 5"},
    "cosine/cosine_cpu.cpp": {"elements_a_task = 1 << 15": "elements_a_task = 1 << 6",
                              "elements_a_thread = 1 << 17": "elements_a_thread = 1 << 7"},
}  # fmt: skip
# Maximum array size, for small and for normal blocks.
MOST = {True: 1 << 11, False: 1 << 16}
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")  # libstdc++: ASan needs its throw at process start
# Python and torch do not free all memory at exit.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
# Of several widths only the CPU's module has all from one pass.
ONE_WIDTH = "cpu-native and not matryoshka and not widths"
# Of each part: the tiles, and which tests.
CONFORMING = {
    "module": [("large", "cpu-native")],
    "emulator": [("large", ONE_WIDTH), ("small", f"{ONE_WIDTH} and (reference or run_to_run or nan or gated)")],
}


def driver(folder: Path, flags: Sequence[str], small: bool, simd: bool = True) -> Path:
    """driver.cpp with csrc's CPU functions, compiled in the folder. simd: with the code of all instruction sets."""
    source = folder / "csrc"
    shutil.copytree(ROOT / "csrc", source)
    for name, changes in SMALL.items() if small else ():
        text = (source / name).read_text(encoding="utf-8")
        for old, new in changes.items():
            if text.count(old) != 1:
                raise AssertionError(f"{name} does not say {old}")
            text = text.replace(old, new)
        (source / name).write_text(text, encoding="utf-8")
    # -O0: nothing undefined is optimised away, and UBSan's code takes a quarter of the time to compile
    flags = ["-std=c++17", "-pthread", "-O0", "-g1", "-fno-math-errno", "-fno-trapping-math", f"-I{source}", *flags]
    flags += [] if simd else ["-DRAOE_SIMD_BASELINE"]

    def compiled(path: Path) -> str:
        made = folder / f"{path.stem}.o"
        subprocess.run(["g++", *flags, "-c", str(path), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(2) as pool:
        objects = [*pool.map(compiled, [*(source / name for name in SOURCES), HERE / "driver.cpp"])]
    subprocess.run(["g++", *flags, *objects, "-o", str(folder / "driver")], check=True)
    return folder / "driver"


def fuzzed(which: Sequence[str], cases: int, seed: int, sizes: Sequence[bool] = (True, False), **how: bool) -> bool:
    """Whether `cases` calls with each block size pass. Under the first two sanitizers, as many run again while another
    thread rewrites their values."""
    fine = True
    for names in filter(None, ([name for name in which if name != "tsan"], [name for name in which if name == "tsan"])):
        flags = [flag for name in names for flag in SANITIZERS[name]]
        for small in sizes:
            with tempfile.TemporaryDirectory() as folder:
                made = driver(Path(folder), flags, small, **how)
                for hostile in ([], ["hostile"]) if names != ["tsan"] else ([],):
                    words = [str(seed), str(cases), str(MOST[small]), *hostile]
                    result = subprocess.run([str(made), *words], env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"})
                    blocks = "small blocks" if small else "blocks as they ship"
                    said = "fine" if result.returncode == 0 else f"exit status {result.returncode}"
                    print(f"driver {'+'.join(names)}, {blocks}, {' '.join(words)}: {said}", flush=True)
                    fine &= result.returncode == 0
    return fine


def conforms(part: str, flags: Sequence[str], tiles: str, chosen: str) -> bool:
    """Whether the kernels' tests pass with a module built with these flags: part "module" or "emulator"."""
    found = [subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True) for name in RUNTIMES]
    plugin = "tests.sanitizers.plugin" if part == "module" else "tests.cuda_emulator.plugin"
    environ = {
        **os.environ, **OPTIONS, "RAOE_SANITIZE": " ".join(flags), "RAOE_EMULATED_TILES": tiles, "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": " ".join(each.stdout.strip() for each in found),
    }  # fmt: skip
    # -s: shows what a sanitizer prints when it ends the process
    pytest = [sys.executable, "-m", "pytest", "-q", "-s", "-x", "-n0", "-p", "no:cacheprovider", "-p", plugin]
    result = subprocess.run([*pytest, "--timeout", "1800", "tests/kernels", "-k", chosen], cwd=ROOT, env=environ)
    said = "fine" if result.returncode == 0 else f"exit status {result.returncode}"
    print(f"{part}, {tiles} tiles, under the tests of {chosen}: {said}", flush=True)
    return result.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--which", nargs="+", choices=SANITIZERS, default=[*SANITIZERS])
    parser.add_argument("--cases", type=int, default=10_000, help="of the driver, each time that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    given = parser.parse_args()
    fine = "driver" not in given.parts or fuzzed(given.which, given.cases, given.seed)
    flags = [flag for name in given.which if name != "tsan" for flag in SANITIZERS[name]]
    for part in given.parts if flags else ():
        for how in CONFORMING.get(part, ()):
            fine &= conforms(part, flags, *how)
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())

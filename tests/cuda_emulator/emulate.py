"""Builds csrc's CUDA module against the emulator in include/: the same kernels, run by a CPU. No CUDA toolkit needed.

This shows that the logic of the kernels is right. It cannot show what only a GPU does: rounding of its own exp and log,
memory ordering, occupancy, speed.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pybind11

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
LAUNCH = re.compile(r"([\w:]+(?:<[\w, ]+>)?)<<<(.*?)>>>\((.*?)\);")


def translate(source: str) -> str:
    """CUDA's own syntax as calls of the emulator."""
    source = LAUNCH.sub(r'emulator::Launch("\1", \2)([&] { \1(\3); });', source)
    source = re.sub(r"cudaLaunchCooperativeKernel\((\w+)", r'emulator::launch_together("\1", \1', source)
    return re.sub(r"extern __shared__ [^;]*?(\w+)\[\];", r"unsigned char* \1 = emulator::dynamic_shared();", source)


# Small enough that the conformance suite's inputs take many tiles, and many blocks.
SMALL_TILES = {"ONE_BLOCK_PAIRS = 4096": "ONE_BLOCK_PAIRS = 0", "BLOCK = 128, LOADS = 32": "BLOCK = 32, LOADS = 4"}


def build(
    folder: Path,
    changes: Mapping[str, str],
    counting: bool = False,
    compiler: str = "g++",
    sanitize: Sequence[str] = (),
) -> ModuleType:
    """The module, with a function `schedule(order, blocks)` besides: the order in which emulated threads run, and of
    how many blocks a cooperative launch may be.

    changes are replaced in the headers: the constants of another tile size. With counting, `watch((address, bytes,
    ...))` begins, and `operations()` is what has been put on the stream since, a line each: bytes read and written,
    blocks, threads, name. sanitize: gcc's flags; frames of fibers, which longjmp leaves, are not looked at.
    """
    sources = []
    for path in [*CSRC.rglob("*.cu"), CSRC / "bindings_cuda.cpp"]:
        copy = folder / path.relative_to(CSRC).with_suffix(".cpp")
        copy.parent.mkdir(exist_ok=True, parents=True)
        text = translate(path.read_text(encoding="utf-8"))
        if path.suffix == ".cpp":
            text = text.replace('#include "bindings.h"', '#include "bindings.h"\n#include "emulator_bindings.h"')
            text = text.replace("module) {", "module) {\n  emulator::define(module);")
        copy.write_text(text, encoding="utf-8")
        sources.append(copy)
    missing = set(changes)
    for header in CSRC.rglob("*.h"):
        copy = folder / header.relative_to(CSRC)
        copy.parent.mkdir(exist_ok=True, parents=True)
        text = translate(header.read_text(encoding="utf-8"))
        for old, new in changes.items():
            missing -= {old} if old in text else set()
            text = text.replace(old, new)
        copy.write_text(text, encoding="utf-8")
    if missing:
        raise AssertionError(f"no header says {missing}")
    includes = [HERE / "include", sysconfig.get_paths()["include"], pybind11.get_include()]
    flags = ["-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE", *(f"-I{path}" for path in includes)]
    # -O0: with UBSan's checks -O1 takes more than ten minutes a file, and nothing undefined is to be optimised away
    flags += [*sanitize, "-O0", "-g1", "--param", "asan-stack=0"] if sanitize else ["-O1"]
    kernels = sources[:-1]  # the binding moves no memory of a call's
    if counting:
        sources.append(HERE / "counters.cpp")

    def compiled(source: Path) -> str:
        made = folder / f"{source.stem}-{sources.index(source)}.o"
        seen = ["-fsanitize=thread", "-fno-threadsafe-statics"] if counting and source in kernels else []
        subprocess.run([compiler, *flags, *seen, "-c", str(source), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(2) as pool:
        objects = [*pool.map(compiled, sources)]
    library = folder / "_native_cuda.so"
    subprocess.run([compiler, "-shared", *sanitize, "-o", str(library), *objects], check=True)
    spec = importlib.util.spec_from_file_location("_native_cuda", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

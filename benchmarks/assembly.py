"""Parsers of compiled kernels: Triton's layouts (TTGIR), memory accesses (PTX) and machine instructions (SASS)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HALF = ("f16", "bf16")


class Dot(NamedTuple):
    """A matrix product of a kernel: rows x columns of its result, the dtype of the factors, the instruction ("wgmma",
    "mma": mma.sync, "fma": no tensor core, "tcgen05"), and how many warps compute the same products."""

    rows: int
    columns: int
    dtype: str
    by: str
    replicated: int


# An alias of a layout, "#mma = #ttg.nvidia_mma<{versionMajor = 2, …, warpsPerCTA = [4, 1], instrShape = [16, 8]}>".
LAYOUT = re.compile(r"^(#\w+) = #ttn?g\.(\w+)<\{(.*)\}>$", re.MULTILINE)
# "ttng.warp_group_dot %a, %b, %c : !ttg.memdesc<64x32xbf16, …> * !ttg.memdesc<32x64xbf16, …> -> tensor<64x64xf32, #m>"
DOT = re.compile(r"(tt\.dot|ttng\.warp_group_dot) .*<(\d+)x\d+x(\w+), .* \* .*<\d+x(\d+)x\w+, .*-> tensor<.*, (#\w+)>")
TCGEN05 = re.compile(r"ttng\.tc_gen5_mma %.* : !ttg\.memdesc<(\d+)x\d+x(\w+), .*!ttg\.memdesc<\d+x(\d+)x\w+,")


def dots(ttgir: str) -> list[Dot]:
    layouts = {name: (kind, _lists(text)) for name, kind, text in LAYOUT.findall(ttgir)}
    products = []
    for operation, rows, dtype, columns, layout in DOT.findall(ttgir):
        kind, lists = layouts[layout]
        shape, warps = (int(rows), int(columns)), lists["warpsPerCTA"]
        if kind == "nvidia_mma":
            by = "wgmma" if operation == "ttng.warp_group_dot" else "mma"
            unit = lists["instrShape"][:2]
        else:
            by = "fma"
            unit = [a * b for a, b in zip(lists["sizePerThread"], lists["threadsPerWarp"], strict=True)]
        replicated = 1
        for size, of_warp, count in zip(shape, unit, warps, strict=True):
            replicated *= max(1, of_warp * count // max(size, of_warp))
        products.append(Dot(*shape, dtype, by, replicated))
    return products + [Dot(int(m), int(n), dtype, "tcgen05", 1) for m, dtype, n in TCGEN05.findall(ttgir)]


def _lists(text: str) -> dict[str, list[int]]:
    """Return the lists of numbers in "a = [1, 2], b = 3, c = [4]" by name."""
    return {
        name: [int(x) for x in re.findall(r"\d+", values)] for name, values in re.findall(r"(\w+) = \[([^]]*)\]", text)
    }


class Access(NamedTuple):
    """A load or store of global memory: "ld" or "st", bytes per thread and instruction, and whether it is in a loop."""

    kind: str
    bytes: int
    looped: bool


LABEL = re.compile(r"^(\$\w+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")
GLOBAL = re.compile(r"\b(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bufs](\d+)\b")
COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b.*?\], (0x[0-9a-f]+|\d+)")


def accesses(ptx: str) -> list[Access]:
    lines = ptx.splitlines()
    inside = [False] * len(lines)
    for begin, end in loops(lines):
        inside[begin : end + 1] = [True] * (end + 1 - begin)
    result = []
    for line, looped in zip(lines, inside, strict=True):
        for kind, vector, bits in GLOBAL.findall(line):
            result.append(Access(kind, int(vector or 1) * int(bits) // 8, looped))
        result += [Access("ld", int(size, 0), looped) for size in COPY.findall(line)]
    return result


def loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each loop, which ends with a branch to a label above."""
    labels: dict[str, int] = {}
    for number, line in enumerate(lines):
        if label := LABEL.match(line):
            labels[label[1]] = number
        for target in BRANCH.findall(line):
            if target in labels:
                yield labels[target], number


class Instruction(NamedTuple):
    """A machine instruction: its address, its name up to the first dot, its jump target, and whether it is
    unconditional."""

    address: int
    name: str
    target: int | None
    always: bool


SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*)([\w.]*)\s*(.*?);", re.MULTILINE)


def sass(binary: Path, *options: str) -> dict[str, list[Instruction]]:
    """Disassemble a file and return its `functions`. `options` are passed to cuobjdump."""
    from triton import knobs  # Triton includes NVIDIA's tools

    command = [knobs.nvidia.cuobjdump.path, "-sass", *options, str(binary)]
    return functions(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def functions(text: str) -> dict[str, list[Instruction]]:
    """Parse the output of `cuobjdump -sass`. Returns each function's instructions that a warp reaches if it does not
    diverge, without called functions, which run rarely: __noinline__ code, and special cases of roots and quotients."""
    result = {}
    for part in re.split(r"\bFunction : ", text)[1:]:
        name, _, body = part.partition("\n")
        code = []
        for address, predicate, operation, more, operands in SASS.findall(body):
            jump = re.search(r"\b0x([0-9a-f]+)\s*$", operands) if operation == "BRA" and ".DIV" not in more else None
            target = int(jump[1], 16) if jump else None
            code.append(Instruction(int(address, 16), operation, target, not predicate))
        result[name.strip()] = _reached(code)
    return result


def _reached(code: list[Instruction]) -> list[Instruction]:
    places = {one.address: k for k, one in enumerate(code)}
    reached: set[int] = set()
    ahead = [0]
    while ahead:
        place = ahead.pop()
        while place < len(code) and place not in reached:
            reached.add(place)
            one = code[place]
            if one.target is not None:
                ahead.append(places.get(one.target, len(code)))
            if one.always and (one.target is not None or one.name in ("EXIT", "RET")):
                break
            place += 1
    return [code[place] for place in sorted(reached)]

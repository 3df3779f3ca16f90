"""Instructions a pair of the CUDA C++ pairwise losses where several blocks share the pairs, from their sm_90 code.

`hot` is what solve.h does for raoe_loss as it is asked for most (both objectives, three labels, average ranks, 32-bit
keys, one sum) once a block's labels and exponents have been found to allow it; `keys` is what comes before the sort.
Each is compiled by itself, so that all of a function is on its way: the rare ways of solve.h are other functions.

Counted is every instruction up to the last store, as if each thread took both sides of every branch; behind it are only
ways out of line that diverged warps take. What a thread does once (its scans and barriers) is divided by its
pairs; what only the first block does (joining tiles, the losses) is not a pair's and left out. Nor is CUB's sort.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks import assembly

CSRC = Path(__file__).parents[1] / "csrc"
SOURCE = """
#include "blocks.h"
namespace raoe {
struct Others : AllBlocks {  // any block but the first
  static __device__ unsigned index() { return 1; }
};
__global__ void __launch_bounds__(BLOCK, 2) hot(Work<float> work, float middle, float middle_angle) {
  extern __shared__ __align__(16) unsigned char memory[];
  work.crossing.wide = false, work.args.parts = PARTS;
  BlocksSolver<float, Others> solver{work.args, work.at, &work.crossing, memory, 0};
  solver.middle = middle, solver.middle_angle = middle_angle;
  BlocksSolver<float, Others>::Pairs my;
  solver.solve<Linear<RANK | ANGLE>>(my);
}
__global__ void __launch_bounds__(BLOCK) keys(Work<float> work) {
  work.args.score_type = Key::f32, work.args.similarity_type = Float::f32;
  work.converted = nullptr;
  __builtin_assume(work.args.labels != nullptr);
  work.extents[threadIdx.x] = write_keys<std::uint32_t>(work);
}
}  // namespace raoe
"""


class Counted(NamedTuple):
    """Instructions a pair, and of `hot` how many, a thread's, load or store what registers have no room for."""

    keys: float
    hot: float
    spills: int


def instructions(old: str = "", new: str = "", parts: bool = False) -> Counted:
    """FileNotFoundError without nvcc. `old` is replaced by `new` in solve.h first: what a regression would be. parts:
    two losses instead of their sum."""
    with tempfile.TemporaryDirectory() as folder:
        kernels, binary = shutil.copytree(CSRC, Path(folder, "csrc")) / "pairwise" / "cuda", Path(folder, "hot.cubin")
        solve, source = kernels / "solve.h", kernels / "hot.cu"
        if old:
            text = solve.read_text(encoding="utf-8")
            assert old in text, f"solve.h does not say {old}"
            solve.write_text(text.replace(old, new), encoding="utf-8")
        source.write_text(SOURCE.replace("PARTS", str(parts).lower()), encoding="utf-8")
        command = ["nvcc", "-std=c++17", "-O3", "-arch=sm_90", "-cubin", "-o", str(binary), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        found = assembly.sass(binary)
        blocks = (kernels / "blocks.h").read_text(encoding="utf-8")
    keys, hot = (next(code for name, code in found.items() if f"{len(one)}{one}E" in name) for one in ("keys", "hot"))
    stores = [place for place, one in enumerate(hot) if one.name == "STG"]
    held = int(re.search(r"LOADS = (\d+)", blocks)[1])  # type: ignore[index]
    fours = max(assembly.inner_loops(keys), key=lambda loop: sum(one.loads == 16 for one in loop))
    spills = sum(one.name in ("LDL", "STL") for one in hot)
    return Counted(len(fours) / 4, (stores[-1] + 1) / held, spills)

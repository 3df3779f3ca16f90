"""csrc's CUDA kernels under the conformance suite, run by a CPU: emulate.py says what this shows and what it cannot."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

CHECKS = """
#include <cuda_runtime.h>
#include <cstdio>
#include "cuda_check.h"

void kernel() {}

int main() {
  std::printf("%s;", raoe::unusable(kernel));
  emulator::foreign = true;
  std::printf("%s;%d;", raoe::unusable(kernel), cudaGetLastError());
  try {
    raoe::check_cuda(emulator::last_error = cudaErrorNoKernelImageForDevice, "a launch");
  } catch (const std::runtime_error& error) {
    std::printf("%s;%d;", error.what(), cudaGetLastError());
  }
  std::printf("%d", emulator::capture_mode == cudaStreamCaptureModeGlobal);
}
"""


def test_an_error_is_told_once_and_a_capture_goes_on(tmp_path):
    """cudart keeps an error until it is asked for, and forbids loading code while a graph is captured."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    (tmp_path / "checks.cpp").write_text(CHECKS)
    folders = [f"-I{ROOT / 'tests' / 'cuda_emulator' / 'include'}", f"-I{ROOT / 'csrc'}"]
    command = ["g++", "-std=c++17", *folders, str(tmp_path / "checks.cpp"), "-o", str(tmp_path / "checks")]
    subprocess.run(command, check=True)
    found = subprocess.run([str(tmp_path / "checks")], capture_output=True, text=True, check=True).stdout
    assert found.split(";") == ["", "no kernel image", "0", "a launch: no kernel image", "0", "1"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("tiles", "order"), [("large", 0), ("small", 1), pytest.param("small", 7, marks=pytest.mark.exhaustive)]
)
def test_kernels_conform(tiles, order):
    """Tiles as they ship and tiny ones; threads and blocks in ascending, descending and random order."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    # cosine has no CUDA kernels in C++; of several widths only the CPU's module has all from one pass
    chosen = "cpu-native and not matryoshka and not widths and not cosine"
    if tiles == "small" or order:
        chosen += " and (reference or run_to_run or nan)"  # the tests whose result depends on either
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.cuda_emulator.plugin"]
    command = [*pytest_command, "tests/kernels", "-k", chosen]
    environ = {**os.environ, "RAOE_EMULATED_TILES": tiles, "RAOE_EMULATED_ORDER": str(order)}
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]

"""Decisions of csrc/build_modules.py, with fake tools that only log their calls; nothing is compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Prints its version or architectures; otherwise lists the package and writes the output.
TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$TOOLS_LOG"
case "$*" in
  *--version*) echo "a tool 1.0"; exit ;;
  *--list-gpu-arch*) for arch in $TOOLS_ARCHS; do echo "compute_$arch"; done; exit ;;
esac
case "$*" in *"$TOOLS_FAIL"*) echo "error: this tool fails" >&2; exit 1 ;; esac
last=; out=
for word in "$@"; do [ "$last" = -o ] && out="$word"; last="$word"; done
ls "$TOOLS_PACKAGE" > "$TOOLS_LOG.seen"
echo "$1" > "$out"
"""


@pytest.fixture
def build():
    spec = importlib.util.spec_from_file_location("build_modules", ROOT / "csrc" / "build_modules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executable(path: Path, text: str = TOOL) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Environment variables with fake compilers, which log to tools["TOOLS_LOG"]."""
    for name in ("g++", "nvcc"):
        executable(tmp_path / "bin" / name)
    settings = {"TOOLS_LOG": str(tmp_path / "log"), "TOOLS_ARCHS": "75 80 90 100", "TOOLS_FAIL": "nothing fails"}
    settings["TOOLS_PACKAGE"] = str(tmp_path / "package")
    settings["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return {**settings, "RAOE_KERNELS_CACHE": str(tmp_path / "cache")}


def test_nvcc_is_found_where_the_installer_puts_it(build, tmp_path, monkeypatch):
    nowhere = {"PATH": str(tmp_path / "nowhere")}
    monkeypatch.setattr(build, "CUDA", tmp_path / "cuda")
    with pytest.raises(build.BuildError, match=r"CUDA_HOME is not set, nvcc is not on PATH and not in .*/cuda/bin"):
        build.nvcc(nowhere)
    there = executable(tmp_path / "cuda" / "bin" / "nvcc")
    assert build.nvcc(nowhere) == str(there)
    first = executable(tmp_path / "bin" / "nvcc")
    assert build.nvcc({"PATH": str(first.parent)}) == str(first)
    with pytest.raises(build.BuildError, match="CUDA_HOME=/nowhere has no bin/nvcc"):
        build.nvcc({"CUDA_HOME": "/nowhere", "PATH": str(first.parent)})


def test_old_module_stays_until_the_new_one_is_complete(build, tools, tmp_path, monkeypatch):
    package = tmp_path / "package"
    environ = {**tools, "RAOE_KERNELS_BUILD": "cpu"}
    build.build(package, environ)
    (module,) = package.glob("_native_cpu*")
    module.write_text("old")
    before = sorted(package.iterdir())

    monkeypatch.setenv("TOOLS_FAIL", "-shared")
    environ["LDFLAGS"] = "-Wl,-s"  # link anew
    with pytest.raises(build.BuildError, match=r"cannot build RAOE_KERNELS_BUILD=cpu: .*this tool fails"):
        build.build(package, environ)
    assert module.read_text() == "old" and sorted(package.iterdir()) == before

    monkeypatch.setenv("TOOLS_FAIL", "nothing fails")
    for earlier in ("_native_cpu.abi3.so", "_native_cpu.cpython-39-x86_64-linux-gnu.so"):
        (package / earlier).touch()
    build.build(package, environ)
    assert module.name in Path(tools["TOOLS_LOG"] + ".seen").read_text(), "gone while the new one was linked"
    assert module.read_text() != "old" and sorted(package.iterdir()) == before

    # With `auto` a failed build leaves no module of an earlier build.
    monkeypatch.setenv("TOOLS_FAIL", "-shared")
    build.build(package, {**tools, "RAOE_KERNELS_BUILD": "auto", "RAOE_KERNELS_WERROR": "1"})
    reason = json.loads((package / "_build_info.json").read_text())["modules"]["cpu"]["reason"]
    assert not module.exists() and "this tool fails" in reason

"""Decisions of csrc/build_modules.py, with fake tools that only log their calls; nothing is compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Prints its version or architectures; otherwise lists the output's parent folder and writes the output.
TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$TOOLS_LOG"
case "$*" in
  *--version*) echo "a tool 1.0"; exit ;;
  *--list-gpu-arch*) for arch in $TOOLS_ARCHS; do echo "compute_$arch"; done; exit ;;
esac
case "$*" in *"$TOOLS_FAIL"*) echo "error: this tool fails" >&2; exit 1 ;; esac
last=; out=
for word in "$@"; do [ "$last" = -o ] && out="$word"; last="$word"; done
ls "$(dirname "$out")/.." > "$TOOLS_LOG.seen"
echo "$1" > "$out"
"""
LAUNCHER = '#!/bin/sh\necho "ccache $*" >> "$TOOLS_LOG"\nexec "$@"\n'


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
    executable(tmp_path / "bin" / "ccache", LAUNCHER)
    settings = {"TOOLS_LOG": str(tmp_path / "log"), "TOOLS_ARCHS": "75 80 90 100", "TOOLS_FAIL": "nothing fails"}
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


def test_a_launcher_before_the_compiler(build, tools, tmp_path):
    environ = {**tools, "CXX": "ccache g++ -m64", "RAOE_KERNELS_BUILD": "cuda"}
    build.build(tmp_path / "package", environ)
    calls = Path(tools["TOOLS_LOG"]).read_text().splitlines()
    assert [call for call in calls if call.startswith("ccache g++ -m64 ") and "bindings_cpu.cpp" in call]
    cuda = [call for call in calls if call.startswith("nvcc ") and "-o" in call]
    assert cuda and all("-ccbin g++ -Xcompiler=-m64" in call for call in cuda), cuda
    for cxx, why in {
        "ccache": "CXX=ccache does not name one",
        "ccache nobody++": "CXX=ccache nobody[+][+] was not found",
        "sccache g++": "CXX=sccache g[+][+] was not found",
        "g++ '": "CXX=g[+][+] ' cannot be split into words: No closing quotation",
    }.items():
        with pytest.raises(build.BuildError, match=why):
            build.host_compiler({**tools, "CXX": cxx})


def test_the_gpus_of_this_machine_are_the_default(build, tools, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLS_ARCHS", "75 80 90 100 120")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '9.0\\n12.0\\n9.0\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert build._arch_flags("nvcc", {})[0] == [90, 120]
    assert build._arch_flags("nvcc", {"RAOE_KERNELS_CUDA_ARCHS": "80"})[0] == [80]
    assert build._arch_flags("nvcc", {"RAOE_KERNELS_CUDA_ARCHS": "all"})[0] == [75, 80, 90, 100]
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert build._arch_flags("nvcc", {})[0] == [75, 80, 90, 100]


def test_old_module_stays_until_the_new_one_is_complete(build, tools, tmp_path, monkeypatch):
    package = tmp_path / "package"
    environ = {**tools, "RAOE_KERNELS_BUILD": "cpu"}
    build.build(package, environ)
    (module,) = package.glob("_native_cpu*")
    module.write_text("old")
    before = sorted(package.iterdir())

    monkeypatch.setenv("TOOLS_FAIL", "-shared")
    with pytest.raises(build.BuildError, match=r"cannot build RAOE_KERNELS_BUILD=cpu: .*this tool fails"):
        build.build(package, environ)
    assert module.read_text() == "old" and sorted(package.iterdir()) == before

    monkeypatch.setenv("TOOLS_FAIL", "nothing fails")
    earlier = package / "_native_cpu.cpython-311-x86_64-linux-gnu.so"  # which Python 3.11 would load before ours
    earlier.touch()
    build.build(package, environ)
    assert module.name in Path(tools["TOOLS_LOG"] + ".seen").read_text(), "gone while the new one was linked"
    assert module.read_text() != "old" and sorted(package.iterdir()) == before

    # With `auto` a failed build leaves no module of an earlier build.
    monkeypatch.setenv("TOOLS_FAIL", "-shared")
    build.build(package, {**tools, "RAOE_KERNELS_BUILD": "auto"})
    reason = json.loads((package / "_build_info.json").read_text())["modules"]["cpu"]["reason"]
    assert not module.exists() and "this tool fails" in reason

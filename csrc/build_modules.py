"""Compile csrc into raoe_kernels._native_cpu and raoe_kernels._native_cuda, with ninja and pybind11.

Requires a C++ compiler, Python's headers, the packages ninja and pybind11, and for the CUDA module nvcc, but neither
torch nor a GPU. A module serves the version of CPython that built it, with every version of torch. setup.py calls this
script. Without setuptools, `python csrc/build_modules.py` builds in place. A module consists of <op>/cpu/*.cpp and
<op>/*_cpu.cpp (or <op>/cuda/*.cu and <op>/*_cuda.cu) plus bindings_cpu.cpp (bindings_cuda.cpp), so a new op only needs
new files.

Environment:
    RAOE_KERNELS_BUILD        auto (default): the modules that the installed tools can build; none; cpu; cuda: both
                              modules. With cpu and cuda, a module that cannot be built is an error.
    RAOE_KERNELS_CUDA_ARCHS   CUDA architectures, such as "80,90"; by default the architectures of this machine's GPUs.
                              "all", which is the default without a GPU: those of 75, 80, 90 and 100 that nvcc supports
    RAOE_KERNELS_WERROR       1: treat warnings as errors
    RAOE_KERNELS_CACHE        build folder, by default build/native in this checkout. build.ninja and the objects stay
                              there, so that the next build compiles only what has changed.
    MAX_JOBS, CXX, CXXFLAGS, LDFLAGS, CUDA_HOME as usual; without CUDA_HOME, nvcc on PATH or in /usr/local/cuda
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("cpu", "cuda")
# sm_80 code also runs on sm_86 and sm_89. GPUs newer than the last entry compile its PTX when they first load it.
CUDA_ARCHS = (75, 80, 90, 100)
CUDA = Path("/usr/local/cuda")  # NVIDIA's installer puts it here, without adding it to PATH
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")  # commands that may precede the compiler in CXX
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")  # of modules for this version of Python
# The code reads neither errno nor floating-point exceptions. No other assumption of -ffast-math is made.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-fno-math-errno", "-fno-trapping-math"]


class BuildError(Exception):
    """A module cannot be built; the message says what is missing or what failed."""


def obstacles(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return for each module why it cannot be built here, or None. This only looks for tools and compiles nothing."""
    request = environ.get("RAOE_KERNELS_BUILD") or "auto"
    if request not in ("auto", "none", *KINDS):
        raise BuildError(f"RAOE_KERNELS_BUILD must be one of auto, none, {', '.join(KINDS)}, got {request!r}")
    reasons: dict[str, str | None] = {}
    for kind in KINDS:
        reasons[kind] = None
        if request == "none" or (request == "cpu" and kind == "cuda"):
            reasons[kind] = f"the build used RAOE_KERNELS_BUILD={request}"
            continue
        try:
            packages()
            host_compiler(environ)
            if kind == "cuda":
                nvcc(environ)
        except BuildError as error:
            reasons[kind] = str(error)
    return reasons


def packages() -> tuple[str, list[str]]:
    """Return the path of ninja, and the flags with which a binding finds the headers of Python and pybind11."""
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise BuildError(f"Python's headers are not installed (no Python.h in {include})")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BuildError("this Python has no GIL, and the compiled modules were tested only with one")
    try:
        import ninja
        import pybind11
    except ImportError as error:
        raise BuildError(f"the package {error.name} is not installed: pip install ninja pybind11") from None
    program = shutil.which(os.path.join(ninja.BIN_DIR, "ninja"))
    if program is None:
        raise BuildError("the package ninja is installed, but its program ninja is not on PATH")
    return program, ["-isystem", include, "-isystem", pybind11.get_include()]


def host_compiler(environ: Mapping[str, str]) -> list[str]:
    """Return the command of the C++ compiler, which may begin with a launcher such as ccache and end with options."""
    if sys.platform not in ("linux", "darwin"):
        raise BuildError(f"the compiled modules need Linux or macOS, and this is {sys.platform}")
    if environ.get("CXX"):
        command = _words("CXX", environ)
        compiler = _without_launcher(command)
        if not compiler or shutil.which(compiler[0], path=environ.get("PATH")) is None:
            raise BuildError(f"there is no C++ compiler: CXX={environ['CXX']} was not found")
        return command
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name, path=environ.get("PATH"))
        if path:
            return [path]
    raise BuildError("there is no C++ compiler: none of g++, c++, clang++ is on PATH and CXX is not set")


def _without_launcher(command: list[str]) -> list[str]:
    return [word for word in command if Path(word).name not in LAUNCHERS]


def _words(name: str, environ: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(environ.get(name, ""))
    except ValueError as error:
        raise BuildError(f"{name}={environ[name]} cannot be split into words: {error}") from None


def nvcc(environ: Mapping[str, str]) -> str:
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home:
        path = shutil.which("nvcc", path=str(Path(home, "bin")))
        if path is None:
            raise BuildError(f"there is no CUDA compiler: CUDA_HOME={home} has no bin/nvcc")
        return path
    path = shutil.which("nvcc", path=environ.get("PATH")) or shutil.which("nvcc", path=str(CUDA / "bin"))
    if path is None:
        raise BuildError(f"there is no CUDA compiler: CUDA_HOME is not set, nvcc is not on PATH and not in {CUDA}/bin")
    return path


def _architectures(compiler: str, environ: Mapping[str, str]) -> list[int]:
    """Return the CUDA architectures to compile for, in increasing order: 90 for sm_90."""
    request = environ.get("RAOE_KERNELS_CUDA_ARCHS", "").strip()
    if request not in ("", "all"):
        try:
            return sorted(map(int, re.split(r"[\s,;]+", request)))
        except ValueError:
            raise BuildError(f'RAOE_KERNELS_CUDA_ARCHS must be numbers such as "80,90", got {request!r}') from None
    supported = {int(number) for number in re.findall(r"compute_(\d+)\b", _output([compiler, "--list-gpu-arch"]))}
    gpus: list[int] = []
    if not request:
        try:
            found = _output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
            gpus = sorted({int(major + minor) for major, minor in re.findall(r"^(\d+)\.(\d)$", found, re.MULTILINE)})
        except BuildError:  # there is no GPU
            pass
    return [arch for arch in gpus or CUDA_ARCHS if arch in supported] or [max(supported)]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{shlex.join(command)} failed: {error}") from None


def _jobs(environ: Mapping[str, str]) -> int:
    if environ.get("MAX_JOBS"):
        try:
            return max(1, int(environ["MAX_JOBS"]))
        except ValueError:
            raise BuildError(f"MAX_JOBS must be a number such as 4, got {environ['MAX_JOBS']!r}") from None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return cores
    return max(1, min(cores, pages >> 31))  # compiling CUB takes up to 2 GiB per process


def _write(file: TextIO, kind: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Write the rules and the files of a module into build.ninja, and return its compilers and flags."""
    from ninja import ninja_syntax

    compiler = host_compiler(environ)
    werror = environ.get("RAOE_KERNELS_WERROR", "0") not in ("", "0")
    warnings = ["-Wall", "-Wextra", *(["-Werror"] if werror else [])]
    flags = [*FLAGS, *warnings, *_words("CXXFLAGS", environ)]
    info: dict[str, Any] = {"compiler": _output([*compiler, "--version"]).splitlines()[0], "flags": flags}
    kernel = linker = [*compiler, *flags]
    if kind == "cuda":
        cuda = nvcc(environ)
        host = []
        if environ.get("CXX"):
            name, *options = _without_launcher(compiler)  # nvcc does not accept a launcher
            host = ["-ccbin", name, *(f"-Xcompiler={option}" for option in options)]
        archs = _architectures(cuda, environ)
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        codes.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")  # PTX, for newer GPUs
        cuda_flags = ["-std=c++17", "-O3", *codes, *(["-Werror=all-warnings"] if werror else []), *host]
        release = _output([cuda, "--version"])
        info |= {"nvcc": (re.findall(r"V[\d.]+", release) or [release])[-1], "archs": archs}
        info |= {"ptx": archs[-1], "cuda_flags": cuda_flags}
        kernel = [cuda, *cuda_flags, "-Xcompiler", ",".join(["-fPIC", "-fvisibility=hidden", *warnings])]
        # Link with nvcc, which finds the static CUDA runtime. Importing the module then needs no CUDA installation.
        linker = [cuda, "-cudart", "static", *host]
    extra = ["-Xlinker", "-undefined", "-Xlinker", "dynamic_lookup"] if sys.platform == "darwin" else []
    linker = [*linker, "-shared", *extra, *_words("LDFLAGS", environ)]
    writer = ninja_syntax.Writer(file)
    for name, command in (("kernel", kernel), ("binding", [*compiler, *flags, *packages()[1]])):
        # -MD and not -MMD, because the system's headers change with the versions of compiler, CUDA and pybind11.
        text = f"{_escaped(command)} -MD -MF $out.d -o $out -c $in"
        writer.rule(f"{kind}_{name}", text, depfile="$out.d", deps="gcc")
    writer.rule(f"{kind}_link", f"{_escaped(linker)} -o $out $in")

    folder, ending = ROOT / "csrc", "cpp" if kind == "cpu" else "cu"
    objects = [f"{kind}/bindings{SUFFIX}.o"]
    writer.build(objects, f"{kind}_binding", str(folder / f"bindings_{kind}.cpp"))
    for source in sorted([*folder.glob(f"*/{kind}/*.{ending}"), *folder.glob(f"*/*_{kind}.{ending}")]):
        objects += writer.build(f"{kind}/{source.stem}.o", f"{kind}_kernel", str(source))
    writer.build(f"{kind}/module{SUFFIX}", f"{kind}_link", objects)
    return info


def _escaped(command: list[str]) -> str:
    return shlex.join(command).replace("$", "$$")


def _compile(folder: Path, jobs: int) -> dict[str, str]:
    """Run ninja until everything is built that can be. Return the modules that failed, each with its first error."""
    command = [packages()[0], "-C", str(folder), "-v", "-k", "0", "-j", str(jobs)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(result.stdout, end="", flush=True)  # pip shows it only with -v, so the build info also has the first error
    reasons: dict[str, str] = {}
    for failure in re.split(r"^FAILED: ", result.stdout, flags=re.MULTILINE)[1:]:
        target, _, *lines = failure.splitlines()
        kind, name = re.findall(r"(cpu|cuda)/(\S+)", target)[0]
        errors = [line.strip() for line in lines if re.search("error|fatal", line, re.IGNORECASE)]
        reasons.setdefault(kind, f"building {kind}/{name} failed: {(errors or ['no error was printed'])[0]}")
    if result.returncode and not reasons:
        reasons = dict.fromkeys(KINDS, f"ninja failed: {result.stdout.strip()}")
    return reasons


def sources() -> str:
    """Return a digest of all sources of the modules."""
    digest = hashlib.sha256()
    for path in sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _commit() -> str | None:
    """Return the commit of this checkout, with "-dirty" if csrc has changes, or None outside a checkout."""
    try:
        if Path(_output(["git", "-C", str(ROOT), "rev-parse", "--show-toplevel"])).resolve() != ROOT:
            return None
        dirty = _output(["git", "-C", str(ROOT), "status", "--porcelain", "--", "csrc"])
        return _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]) + ("-dirty" if dirty else "")
    except BuildError:
        return None


def build(package: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Write the modules and _build_info.json into `package`, and remove modules that this build does not produce.
    Earlier modules stay in place until the build has finished."""
    reasons, jobs, started = obstacles(environ), _jobs(environ), time.monotonic()
    request = environ.get("RAOE_KERNELS_BUILD") or "auto"
    folder = Path(environ.get("RAOE_KERNELS_CACHE") or ROOT / "build" / "native").resolve()
    modules: dict[str, dict[str, Any]] = {}
    rules = io.StringIO()
    for kind in reversed(KINDS):  # nvcc first, which takes longest
        try:
            if reasons[kind] is None:
                modules[kind] = _write(rules, kind, environ)
        except BuildError as error:
            reasons[kind] = str(error)
    if modules:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(rules.getvalue(), encoding="utf-8")
        print(f"building {' and '.join(modules)} in {folder}: the first build takes minutes", flush=True)
        failures = _compile(folder, jobs)
        reasons |= {kind: failures.get(kind) for kind in modules}
    for kind in KINDS if request == "cuda" else KINDS[:1] if request == "cpu" else ():
        if reasons[kind]:
            raise BuildError(f"cannot build RAOE_KERNELS_BUILD={request}: {reasons[kind]}")
    seconds = round(time.monotonic() - started, 1)
    package.mkdir(parents=True, exist_ok=True)
    for kind, reason in reasons.items():
        target = package / f"_native_{kind}{SUFFIX}"
        if reason is None:
            copy = shutil.copy(folder / kind / f"module{SUFFIX}", package / f".{target.name}")
            Path(copy).replace(target)  # rename: a running process may use the old file
        for other in package.glob(f"_native_{kind}.*"):  # also of other Pythons: nothing says of which sources they are
            if reason or other != target:
                other.unlink()
        found = {"built": False, "reason": reason}
        modules[kind] = found if reason else {"built": True, **modules[kind], "seconds": seconds}
        print(f"raoe_kernels._native_{kind}:", reason or "built", flush=True)
    info = {
        "commit": _commit(),
        "sources": sources(),
        "python": platform.python_version(),
        "platform": sysconfig.get_platform(),
        "requested": request,
        "modules": {kind: modules[kind] for kind in KINDS},
    }
    (package / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    return info


if __name__ == "__main__":
    try:
        build(ROOT / "raoe_kernels", os.environ)
    except BuildError as error:
        sys.exit(f"error: {error}")

"""Compile csrc into raoe_kernels._native_cpu and raoe_kernels._native_cuda.

Requires a C++ compiler, Python's headers, and for the CUDA module nvcc, but neither torch nor a GPU. The modules use
Python's limited API, so one binary serves CPython 3.10 and all later versions. setup.py calls this script. Without
setuptools, `python csrc/build_modules.py` builds in place. A module consists of <op>/cpu/*.cpp and <op>/*_cpu.cpp (or
<op>/cuda/*.cu and <op>/*_cuda.cu) plus bindings_cpu.cpp (bindings_cuda.cpp), so a new op only needs new files.

Environment:
    RAOE_KERNELS_BUILD        auto (default): the modules that the installed tools can build; none; cpu; cuda: both
                              modules. With cpu and cuda, a module that cannot be built is an error.
    RAOE_KERNELS_CUDA_ARCHS   CUDA architectures, such as "80,90"; by default the architectures of this machine's GPUs.
                              "all", which is the default without a GPU: those of 75, 80, 90 and 100 that nvcc supports
    RAOE_KERNELS_WERROR       1: treat warnings as errors
    RAOE_KERNELS_CACHE        folder of compiled objects, by default ~/.cache/raoe_kernels
    MAX_JOBS, CXX, CXXFLAGS, LDFLAGS, CUDA_HOME as usual; without CUDA_HOME, nvcc on PATH or in /usr/local/cuda
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("cpu", "cuda")
MODES = ("auto", "none", *KINDS)
# sm_80 code also runs on sm_86 and sm_89. GPUs newer than the last entry compile its PTX when they first load it.
CUDA_ARCHS = (75, 80, 90, 100)
CUDA = Path("/usr/local/cuda")  # NVIDIA's installer puts it here, without adding it to PATH
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")  # commands that may precede the compiler in CXX
KEEP_OBJECTS = 30 * 24 * 3600.0  # seconds since the last use, after which an object is deleted
# The code reads neither errno nor floating-point exceptions. No other assumption of -ffast-math is made.
FLOATING = ["-fno-math-errno", "-fno-trapping-math"]
HOST_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", *FLOATING]
WARNINGS = ["-Wall", "-Wextra"]


class BuildError(Exception):
    """A module cannot be built; the message says what is missing or what failed."""


def mode(environ: Mapping[str, str]) -> str:
    request = environ.get("RAOE_KERNELS_BUILD") or "auto"
    if request not in MODES:
        raise BuildError(f"RAOE_KERNELS_BUILD must be one of {', '.join(MODES)}, got {request!r}")
    return request


def obstacles(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return for each module why it cannot be built here, or None. This only looks for tools and compiles nothing."""
    request = mode(environ)
    reasons: dict[str, str | None] = {}
    for kind in KINDS:
        reasons[kind] = None
        if request == "none" or (request == "cpu" and kind == "cuda"):
            reasons[kind] = f"the build used RAOE_KERNELS_BUILD={request}"
            continue
        try:
            _binding_includes()
            host_compiler(environ)
            if kind == "cuda":
                nvcc(environ)
        except BuildError as error:
            reasons[kind] = str(error)
    return reasons


def host_compiler(environ: Mapping[str, str]) -> list[str]:
    if sys.platform not in ("linux", "darwin"):
        raise BuildError(f"the compiled modules need Linux or macOS, and this is {sys.platform}")
    if environ.get("CXX"):
        command = _words("CXX", environ)
        launcher, compiler, _ = _parts(command)
        if not compiler:
            raise BuildError(f"there is no C++ compiler: CXX={environ['CXX']} does not name one")
        for word in (*launcher, compiler):
            if shutil.which(word, path=environ.get("PATH")) is None:
                raise BuildError(f"there is no C++ compiler: CXX={environ['CXX']} was not found")
        return command
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name, path=environ.get("PATH"))
        if path:
            return [path]
    raise BuildError("there is no C++ compiler: none of g++, c++, clang++ is on PATH and CXX is not set")


def _words(name: str, environ: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(environ.get(name, ""))
    except ValueError as error:
        raise BuildError(f"{name}={environ[name]} cannot be split into words: {error}") from None


def _parts(command: list[str]) -> tuple[list[str], str, list[str]]:
    """Split a command into a launcher such as ccache, the compiler and the compiler's options."""
    first = next((i for i, word in enumerate(command) if Path(word).name not in LAUNCHERS), len(command))
    return command[:first], "".join(command[first : first + 1]), command[first + 1 :]


def _host_of_nvcc(command: list[str]) -> list[str]:
    """Return nvcc's options for the host compiler. nvcc does not accept a launcher."""
    _, compiler, options = _parts(command)
    return ["-ccbin", compiler, *(f"-Xcompiler={option}" for option in options)]


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


def _binding_includes() -> list[str]:
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise BuildError(f"Python's headers are not installed (no Python.h in {include})")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BuildError("this Python has no GIL, so it lacks the limited API that the compiled modules need")
    return ["-isystem", include]


def _sources(kind: str) -> tuple[Path, list[Path]]:
    """Return the binding and the kernel sources. Those with the most included text come first: they compile longest."""
    folder, suffix = ROOT / "csrc", "cpp" if kind == "cpu" else "cu"
    sources = [*folder.glob(f"*/{kind}/*.{suffix}"), *folder.glob(f"*/*_{kind}.{suffix}")]
    size = {path: sum(x.stat().st_size for x in _with_includes(path, set())) for path in sources}
    return folder / f"bindings_{kind}.cpp", sorted(sources, key=lambda path: -size[path])


def _arch_flags(compiler: str, environ: Mapping[str, str]) -> tuple[list[int], list[str]]:
    """Return the architectures to build and nvcc's flags for them. PTX of the last architecture serves newer GPUs."""
    supported = {int(number) for number in re.findall(r"compute_(\d+)\b", _output([compiler, "--list-gpu-arch"]))}
    request = environ.get("RAOE_KERNELS_CUDA_ARCHS", "").strip()
    if request in ("", "all"):
        archs = ([] if request else _gpus()) or list(CUDA_ARCHS)
    else:
        try:
            archs = sorted(map(int, re.split(r"[\s,;]+", request)))
        except ValueError:
            raise BuildError(f'RAOE_KERNELS_CUDA_ARCHS must be numbers such as "80,90", got {request!r}') from None
        if unknown := [arch for arch in archs if arch not in supported]:
            raise BuildError(f"{compiler} does not support RAOE_KERNELS_CUDA_ARCHS {unknown}, only {sorted(supported)}")
    archs = [arch for arch in archs if arch in supported] or [max(supported)]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return archs, [*flags, f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]


def _gpus() -> list[int]:
    """Return the architectures of this machine's GPUs: 90 for sm_90."""
    try:
        output = _output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    except BuildError:
        return []
    return sorted({int(major + minor) for major, minor in re.findall(r"^(\d+)\.(\d)$", output, re.MULTILINE)})


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{shlex.join(command)} failed: {error}") from None


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    # pip shows this output only with -v, so the build info also keeps the first error.
    print(shlex.join(command), result.stdout, result.stderr, sep="\n", end="", flush=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        first = lines[0] if lines else f"exit status {result.returncode}"
        raise BuildError(f"{command[0]} … {Path(command[-1]).name} failed: {first.strip()}")


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


def _cache(environ: Mapping[str, str]) -> Path:
    """Return the folder that keeps objects between builds, outside pip's temporary build environments."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
    folder = Path(environ.get("RAOE_KERNELS_CACHE") or Path(base, "raoe_kernels"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return Path(tempfile.mkdtemp(prefix="raoe_kernels_"))
    for path in folder.glob("*.o"):
        if time.time() - path.stat().st_mtime > KEEP_OBJECTS:
            path.unlink(missing_ok=True)
    return folder


def _with_includes(path: Path, seen: set[Path]) -> set[Path]:
    """Return the file and all files of csrc that it includes, directly or indirectly."""
    seen.add(path)
    for name in re.findall(r'^\s*#\s*include\s*"(.+?)"', path.read_text(encoding="utf-8"), re.MULTILINE):
        included = (path.parent / name).resolve()
        if included not in seen and included.exists():
            _with_includes(included, seen)
    return seen


def _object(cache: Path, source: Path, command: list[str], identity: Iterable[str]) -> Path:
    """Compile a source, or take the object from the cache if none of its inputs has changed.

    identity: all inputs except the files: flags and versions, but no paths, because pip's paths vary.
    """
    digest = hashlib.sha256("\0".join(identity).encode())
    for path in sorted(_with_includes(source, set())):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    target = cache / f"{source.stem}-{digest.hexdigest()[:24]}.o"
    if target.exists():
        os.utime(target)
        return target
    partial = target.with_suffix(f".{os.getpid()}.part.o")
    _run([*command, "-o", str(partial), "-c", str(source)])
    partial.replace(target)
    return target


class _Module:
    """A module that is being built: compilations that run in the background, then a link."""

    def __init__(self, kind: str, environ: Mapping[str, str], cache: Path, pool: ThreadPoolExecutor) -> None:
        self.kind, self.environ = kind, environ
        self.started = time.monotonic()
        compiler = host_compiler(environ)
        werror = environ.get("RAOE_KERNELS_WERROR", "0") not in ("", "0")
        warnings = [*WARNINGS, *(["-Werror"] if werror else [])]
        flags = [*HOST_FLAGS, *warnings, *_words("CXXFLAGS", environ)]
        version = _output([*compiler, "--version"]).splitlines()[0]
        self.info: dict[str, object] = {"compiler": version, "flags": flags}
        identity = [*compiler, version, *flags, platform.machine()]
        self.linker = [*compiler, *flags]
        binding, sources = _sources(kind)
        kernel, kernel_identity = [*compiler, *flags], identity
        if kind == "cuda":
            cuda = nvcc(environ)
            archs, arch_flags = _arch_flags(cuda, environ)
            host = _host_of_nvcc(compiler) if environ.get("CXX") else []
            cuda_flags = ["-std=c++17", "-O3", *arch_flags, *(["-Werror=all-warnings"] if werror else []), *host]
            host_flags = ["-fPIC", "-fvisibility=hidden", *warnings]
            release = _output([cuda, "--version"])
            self.info |= {"nvcc": (re.findall(r"V[\d.]+", release) or [release])[-1], "archs": archs}
            self.info |= {"ptx": archs[-1], "cuda_flags": cuda_flags}
            kernel = [cuda, *cuda_flags, "-Xcompiler", ",".join(host_flags)]
            nvcc_flags = [environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")]
            kernel_identity = [*identity, release, *cuda_flags, *host_flags, *nvcc_flags]
            # Link with nvcc, which finds the static CUDA runtime. Importing the module then needs no CUDA installation.
            self.linker = [cuda, "-cudart", "static", *host]
            names = ", ".join(f"sm_{arch}" for arch in archs)
            print(f"compiling {len(sources)} CUDA files for {names}: minutes, unless they are cached", flush=True)
        self.objects: list[Future[Path]] = [
            pool.submit(_object, cache, source, kernel, kernel_identity) for source in sources
        ]
        bind = [*compiler, *flags, *_binding_includes()]
        self.objects.append(pool.submit(_object, cache, binding, bind, [*identity, platform.python_version()]))

    def link(self, module: Path) -> dict[str, object]:
        objects = [str(future.result()) for future in self.objects]
        extra = ["-Xlinker", "-undefined", "-Xlinker", "dynamic_lookup"] if sys.platform == "darwin" else []
        extra += _words("LDFLAGS", self.environ)
        _run([*self.linker, "-shared", *extra, "-o", str(module), *objects])
        return {"built": True, **self.info, "seconds": round(time.monotonic() - self.started, 1)}


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


def build(package: Path, environ: Mapping[str, str]) -> dict[str, object]:
    """Write the modules and _build_info.json into `package`, and remove modules that this build does not produce.
    Earlier modules stay in place until the build has finished."""
    request, missing, jobs = mode(environ), obstacles(environ), _jobs(environ)
    modules: dict[str, dict[str, object]] = {}
    running: dict[str, _Module] = {}
    cache = _cache(environ)
    package.mkdir(parents=True, exist_ok=True)
    targets = {kind: package / f"_native_{kind}.abi3.so" for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix=".build-", dir=package) as temporary, ThreadPoolExecutor(jobs) as pool:
        for kind in reversed(KINDS):  # start with nvcc, which takes longest
            try:
                if missing[kind] is not None:
                    raise BuildError(missing[kind])
                running[kind] = _Module(kind, environ, cache, pool)
            except BuildError as error:
                modules[kind] = {"built": False, "reason": str(error)}
        for kind, module in running.items():
            try:
                modules[kind] = module.link(Path(temporary, targets[kind].name))
            except BuildError as error:
                modules[kind] = {"built": False, "reason": str(error)}
        for kind in KINDS if request == "cuda" else KINDS[:1] if request == "cpu" else ():
            if not modules[kind]["built"]:
                raise BuildError(f"cannot build RAOE_KERNELS_BUILD={request}: {modules[kind]['reason']}")
        for kind, target in targets.items():
            if modules[kind]["built"]:
                Path(temporary, target.name).replace(target)  # rename: a running process may use the old file
            for other in package.glob(f"_native_{kind}.*"):  # Python prefers a module for its own version over abi3
                if other != target or not modules[kind]["built"]:
                    other.unlink()
    info = {
        "commit": _commit(),
        "sources": sources(),
        "python": platform.python_version(),
        "platform": sysconfig.get_platform(),
        "requested": request,
        "modules": {kind: modules[kind] for kind in KINDS},
    }
    (package / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    for kind in KINDS:
        print(f"raoe_kernels._native_{kind}:", modules[kind].get("reason") or "built", flush=True)
    return info


if __name__ == "__main__":
    try:
        build(ROOT / "raoe_kernels", os.environ)
    except BuildError as error:
        sys.exit(f"error: {error}")

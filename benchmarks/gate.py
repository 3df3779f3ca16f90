"""Run an op's tests before its benchmark, because the speed of incorrect code means nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.provenance import ROOT

# Folders on which the outcome of a test depends. A pass is remembered until one of these changes.
SOURCES = ("raoe_kernels", "tests/kernels", "csrc", "raoe_train/generation", "raoe_train/losses", "tests/generation",
           "tests/losses")  # fmt: skip


def passes(op: str, tests: list[str], device: str) -> bool:
    """Whether the op's fast tests pass on these sources. Prints the tests' output only if they fail."""
    if _key(op, device) in _remembered():
        return True
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    print(f"{op}: running its tests first ({' '.join(tests)})", flush=True)
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode != 0:
        print(process.stdout[-4000:] + process.stderr[-2000:])
        return False
    remember(op, device)
    return True


def remember(op: str, device: str) -> None:
    """Record that the op's tests have passed on these sources."""
    keys = [*_remembered(), _key(op, device)]
    _memory().parent.mkdir(parents=True, exist_ok=True)
    _memory().write_text(json.dumps(keys[-32:]))


def _remembered() -> list[str]:
    try:
        return json.loads(_memory().read_text())
    except (OSError, ValueError):
        return []


def _memory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raoe_kernels" / "tested.json"


def _key(op: str, device: str) -> str:
    return f"{op} {device} {state()}"


def state(compiled: bool = True) -> str:
    """Digest of SOURCES, with or without the compiled modules."""
    digest = hashlib.sha256(sys.version.encode())
    for path in _files():
        if not compiled and path.name.startswith(("_native_", "_build_info")):
            continue
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _files() -> Iterator[Path]:
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path

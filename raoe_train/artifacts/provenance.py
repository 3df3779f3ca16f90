"""What a result came from: versions, commit, the state of a model's folder."""

import hashlib
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from raoe_train.artifacts.writing import read_json

PICTURE = "run.png"  # of a training run
METADATA_FILES = ("README.md", "recipe.yaml", "made_from.json", "metrics.json", "log.jsonl", PICTURE)
EVENTS = "events.out.tfevents."  # of TensorBoard, the same


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that have a part in a result, by name."""
    found = {"python": platform.python_version()}
    for package in ("raoe", "torch", "transformers", "sentence-transformers", "numpy", "scipy", "scikit-learn", "mteb"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def fingerprint(model: str) -> str | None:
    """Of a model in a local folder: its files' names and contents, links followed, and the base of an adapter, so that
    one trained anew is not taken for the old, wherever it lies. None for a model that is no folder here, which its name
    has to stand for."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    found, seen = dict[str, str](), set[str]()
    for root, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(root)) in seen:
            folders.clear()  # a link to a folder that it lies in
        seen.add(real)
        for path in (Path(root, name) for name in names if name not in METADATA_FILES):
            if not path.name.startswith((".", EVENTS)) and path.is_file():
                found[path.relative_to(folder).as_posix()] = file_digest(path)
            if path.name in ("adapter_config.json", "config.json"):
                its = read_json(path)
                base = str(its.get("base_model_name_or_path") or its.get("base_model") or "")
                if base and Path(base).resolve() != folder.resolve():
                    found[f"base of {path.relative_to(folder).as_posix()}"] = fingerprint(base) or base
    return digest(sorted(found.items()))


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def commit() -> str | None:
    """The commit of our own source tree, with "+" where files differ from it; None outside git."""

    def git(*words: str) -> str:
        home = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=home, capture_output=True, text=True, check=True, timeout=20).stdout

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+").strip()
    except (OSError, subprocess.SubprocessError):
        return None


def digest(content: Any) -> str:
    """SHA-256 of plain values (as JSON), in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

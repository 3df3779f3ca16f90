"""Provenance of results: versions, commit, and fingerprints of models and data."""

import hashlib
import json
import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from raoe_train.artifacts.writing import read_json

PICTURE = "run.png"  # plot of a training run
METADATA_FILES = ("README.md", "recipe.yaml", "made_from.json", "metrics.json", "log.jsonl", PICTURE)
EVENTS = "events.out.tfevents."  # prefix of TensorBoard's files; `fingerprint` skips them and METADATA_FILES


def versions() -> dict[str, str]:
    """Return {name: version} of Python and of the installed packages that affect results."""
    packages = {"python": platform.python_version()}
    for package in ("raoe", "torch", "transformers", "sentence-transformers", "numpy", "scipy", "scikit-learn"):
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    return packages


def fingerprint(model: str) -> str | None:
    """Return a digest of a local model folder: its file names, file contents (links are followed) and, for an adapter,
    its base model. The digest changes when the model is trained again, but not when the folder moves. Return None for
    a name on a hub, where name and revision identify a model."""
    folder = Path(model).expanduser()
    if not model or not folder.is_dir():
        return None
    digests, seen = dict[str, str](), set[str]()
    for root, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(root)) in seen:
            folders.clear()  # skip a link back to a parent folder
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]  # such as .git and .cache
        for path in (Path(root, name) for name in names if name not in METADATA_FILES):
            if not path.name.startswith((".", EVENTS)) and path.is_file():
                digests[path.relative_to(folder).as_posix()] = file_digest(path)
            if path.name in ("adapter_config.json", "config.json"):
                config = read_json(path)
                base = str(config.get("base_model_name_or_path") or config.get("base_model") or "")
                if base and Path(base).resolve() != folder.resolve():
                    digests[f"base of {path.relative_to(folder).as_posix()}"] = fingerprint(base) or base
    return digest(sorted(digests.items()))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()


def commit() -> str | None:
    """Return the git commit of this source tree, with "+" if files have changed since the commit; None outside git."""

    def git(*words: str) -> str:
        home = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=home, capture_output=True, text=True, check=True, timeout=20).stdout

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+").strip()
    except (OSError, subprocess.SubprocessError):
        return None


def digest(content: Any) -> str:
    """Return the SHA-256 of plain values (written as JSON), in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

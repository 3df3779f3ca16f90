"""Read the build info (_build_info.json), and explain why a compiled module is missing."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

REBUILD = "build it with `pip install -e .` (or `python setup.py build_ext --inplace`)"


def info() -> dict[str, Any] | None:
    """Return the build info, or None if no compiled module was ever built, as in a plain checkout."""
    try:
        return json.loads(files(__package__).joinpath("_build_info.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def why_missing(kind: str, error: ImportError) -> str:
    """Return why the compiled module for `kind` ("cpu" or "cuda") cannot be imported, and what the user can do."""
    name = f"{__package__}._native_{kind}"
    record = info()
    if record is None:
        return f"{name} was never built (plain checkout): {REBUILD}"
    module = record["modules"][kind]
    if not module["built"]:
        return f"{name} was not built: {module['reason']}"
    if isinstance(error, ModuleNotFoundError):
        return f"{name} was built for Python {record['python']}, not for this Python: {REBUILD}"
    return f"{name} was built but cannot be loaded: {error}"

"""What the build wrote down about itself in _build_info.json, and what to tell where a compiled module is missing."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

REBUILD = "build it with `pip install -e .` (or `python setup.py build_ext --inplace`)"


def info() -> dict[str, Any] | None:
    """The build info, None where nothing was ever built: a checkout that is imported as it is."""
    try:
        return json.loads(files(__package__).joinpath("_build_info.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def why_missing(kind: str, error: ImportError) -> str:
    """Why the compiled module for "cpu" or "cuda" could not be imported, and what to do about it."""
    name = f"{__package__}._native_{kind}"
    built = info()
    if built is None:
        return f"{name} was never built, this seems to be a plain checkout: {REBUILD}"
    module = built["modules"][kind]
    if not module["built"]:
        return f"{name} was not built: {module['reason']}"
    if isinstance(error, ModuleNotFoundError):
        return f"{name} was built for Python {built['python']} and is not there for this one: {REBUILD}"
    return f"{name} was built but cannot be loaded: {error}"

"""A package's public names, each imported on its first use: torch and transformers take seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def exports(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose `modules`, by their names in it, have these names; one without names is a
    public name itself."""
    homes = {name: module for module, names in modules.items() for name in names or (module,)}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{homes[name]}")
        return getattr(module, name) if modules[homes[name]] else module

    return find

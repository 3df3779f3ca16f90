"""A pytest plugin that replaces the native CPU module by one built with the flags RAOE_SANITIZE."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from csrc import build_modules


def pytest_configure(config) -> None:
    os.environ.pop("LD_PRELOAD", None)  # do not check child processes
    folder = Path(tempfile.mkdtemp(prefix="raoe_sanitized_"))
    wish = {"RAOE_KERNELS_BUILD": "cpu", "RAOE_KERNELS_WERROR": "0", "RAOE_KERNELS_CACHE": str(folder / "build")}
    flags = f"{os.environ['RAOE_SANITIZE']} -O1 -g1"
    build_modules.build(folder, {**os.environ, **wish, "CXXFLAGS": flags})
    (path,) = folder.glob("_native_cpu*.so")
    spec = importlib.util.spec_from_file_location("raoe_kernels._native_cpu", path)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)

"""Everything about the package is in pyproject.toml; here only the compiled modules join setuptools' build.

csrc/build_modules.py does the compiling and lists the environment variables it reads.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))

import build_modules  # noqa: E402


class Build(build):
    # build_ext runs also where nothing is compiled: it writes down why.
    sub_commands = [(name, None if name == "build_ext" else when) for name, when in build.sub_commands]  # noqa: RUF012


class BuildNative(build_ext):
    def run(self) -> None:
        package = ROOT / "raoe_kernels" if self.inplace else Path(self.build_lib, "raoe_kernels")
        try:
            info = build_modules.build(package, os.environ)
        except build_modules.BuildError as error:
            raise SystemExit(f"error: {error}") from None
        self.extensions = [e for e in self.extensions if info["modules"][e.name.rpartition("_")[2]]["built"]]


def wanted() -> list[Extension]:
    """The modules that will be tried: only a build that has some makes a wheel for one platform."""
    try:
        found = build_modules.obstacles(os.environ)
    except build_modules.BuildError as error:
        raise SystemExit(f"error: {error}") from None
    kinds = [kind for kind, reason in found.items() if reason is None]
    return [Extension(f"raoe_kernels._native_{kind}", []) for kind in kinds]


setup(ext_modules=wanted(), cmdclass={"build": Build, "build_ext": BuildNative})

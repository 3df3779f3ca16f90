"""docs/python.md shows every public name of raoe_train, and these names have docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raoe_train
from tests.pages import ROOT, blocks


def test_the_page_shows_every_public_name():
    result = blocks((ROOT / "docs" / "python.md").read_text(encoding="utf-8"))
    code = [block.code for block in result if block.language == "python"]
    assert all(block.count("\n") <= 15 for block in code)  # short examples
    shown = {name for name in raoe_train.__all__ if re.search(rf"\brt\.{name}\b", "\n".join(code))}
    assert shown >= set(raoe_train.__all__) - {"ListCollator", "TextCollator", "register", "run"}


def test_type_checkers_see_every_public_name():
    source = Path(raoe_train.__file__).read_text(encoding="utf-8")
    declared = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.col_offset and str(node.module).startswith("raoe_train."):
            declared |= {alias.name: node.module for alias in node.names}
    assert declared == {name: home for name, home in raoe_train.HOMES.items() if home.startswith("raoe_train.")}
    assert set(raoe_train.__all__) == {*declared, "losses", "__version__"}


@pytest.mark.parametrize("name", sorted(raoe_train.__all__))
def test_public_names_have_docstrings(name):
    result = getattr(raoe_train, name)
    assert inspect.getdoc(result)
    if inspect.isfunction(result):
        assert "return" in inspect.get_annotations(result)


def test_importing_registers_nothing():
    known = "'raoe_bidirectional' in __import__('transformers').CONFIG_MAPPING"
    code = f"import raoe_train; assert not {known}; raoe_train.register(); assert {known}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr

"""docs/python.md shows every public name of raoe_train, and these names have docstrings."""

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
    branches = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    declared, jobs = {}, {"train"}
    for node in branches[0].body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("raoe_train."):
            declared |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign):  # all have the signature of `train`
            jobs |= {target.id for target in node.targets}
    homes = {name: home for name, home in raoe_train.HOMES.items() if home.startswith("raoe_train.")}
    assert jobs == {*raoe_train.JOBS} and declared == {name: homes[name] for name in {*homes} - jobs}
    assert set(raoe_train.__all__) == {*declared, *jobs, "losses", "__version__"}


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

"""Plots are drawn without a display, by a library that is loaded when something is drawn."""

import subprocess
import sys

import pytest

from raoe_train.artifacts.report import cell


@pytest.mark.slow
def test_matplotlib_is_not_needed_until_something_is_drawn():
    modules = ["artifacts.report", "training.measures", "jobs.score"]
    code = f"import sys, {', '.join(f'raoe_train.{name}' for name in modules)}; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_no_name_begins_a_block_of_a_page():
    names = ["# h", "- item", "> q", "---", "+ plus", "1. one", "2) two", "-0.5", "1.5", "a # b", "dev.tsv"]
    shown = [r"\# h", r"\- item", r"\> q", r"\---", r"\+ plus", r"1\. one", r"2\) two", *names[7:]]
    assert [cell(name) for name in names] == shown

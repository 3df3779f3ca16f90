"""Plots are drawn without a display, by a library that is loaded when something is drawn."""

import subprocess
import sys


def test_matplotlib_is_not_needed_until_something_is_drawn():
    modules = ["artifacts.report", "training.measures", "jobs.score"]
    code = f"import sys, {', '.join(f'raoe_train.{name}' for name in modules)}; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]

"""The loss that CONTRIBUTING.md shows, with the tests that the page shows for it."""

import os
import re

import pytest

from raoe_train import losses
from tests.forked import ROOT, python


@pytest.mark.slow
def test_the_loss_of_the_page(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
    loss, tests = (block for block in blocks if "HuberLoss" in block)
    assert not hasattr(losses, "HuberLoss")
    (tmp_path / "huber.py").write_text(loss)
    register = "import huber\nimport raoe_train.losses\n\nraoe_train.losses.HuberLoss = huber.HuberLoss\n"
    (tmp_path / "test_huber.py").write_text(register + tests)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout + done.stderr

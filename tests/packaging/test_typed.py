"""An editable install is seen by type checkers, and the package has types that they can use."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import raoe_train as rt

result: int = rt.train("adapt", output="out")
rt.mine("recipe", "another")
rt.load_encoder(1)
rt.no_such_name
loss: str = rt.losses.InfoNCELoss(rt.load_encoder("name"))
result = rt.encode(output="out")["sentences"]
"""


@pytest.mark.timeout(900)
def test_a_type_checker_sees_an_editable_install(tmp_path):
    build = "import setuptools.build_meta as b, sys; print(b.build_editable(sys.argv[1]))"
    environment = {"PATH": "/usr/bin:/bin", "RAOE_KERNELS_BUILD": "none"}
    options = {"cwd": ROOT, "env": environment, "check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], **options)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    assert not [*site.glob("__editable__*.py")]  # a finder, which checkers do not run
    (site / "base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["-m", "mypy", "--python-executable", str(tmp_path / "env" / "bin" / "python"), "script.py"]
    result = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    lines = [int(line.split(":")[1]) for line in result.stdout.splitlines() if ": error:" in line]
    assert lines == [4, 5, 6, 7, 8], result.stdout

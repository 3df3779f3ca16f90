"""A copy of raoe_kernels under another name and without an installed raoe, as kernel hubs load it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Hubs name a module by a hash, which may begin with a digit and have no dot.
NAME = "7f3a_kernels"
HERE = """
import importlib.machinery, importlib.util, sys
sys.path.insert(0, sys.argv[1])  # `-I` leaves out the folder, PYTHONPATH and the user's packages
# What an editable installation puts into a process is no part of a machine that has none.
sys.meta_path = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
sys.path = [p for p in sys.path if not importlib.machinery.PathFinder.find_spec("raoe_kernels", [p])]
assert importlib.util.find_spec("raoe_kernels") is None
copy = importlib.import_module(sys.argv[2])
"""
COPY_ALONE = """
import contextlib, io, json, pkgutil, runpy, torch
for module in pkgutil.walk_packages(copy.__path__, copy.__name__ + "."):
    if "triton" not in module.name and "_native_" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
torch.manual_seed(0)
a, b = torch.randn(2, 24, 8)
scores, labels = torch.rand(24), torch.arange(24) % 3
table = copy.backends("cpu")

def calls(backend):
    cosines = lambda x: copy.pairwise_cosine(x, b, backend=backend if backend in ("reference", "scan") else "auto")
    chosen = {f: backend if table[f][backend] is True else "auto" for f in table}
    return {
        "raoe_loss": lambda x: copy.raoe_loss(cosines(x), scores, labels, backend=chosen["raoe_loss"]),
        "info_nce_loss": lambda x: copy.info_nce_loss(x, b, backend=chosen["info_nce_loss"]),
        "sigmoid_loss": lambda x: copy.sigmoid_loss(x, b, backend=chosen["sigmoid_loss"]),
        "list_mle_loss": lambda x: copy.list_mle_loss(x, b, backend=chosen["list_mle_loss"]),
        "guided_log_probs": lambda x: copy.guided_log_probs(
            x, b, guidance=1.5, backend=chosen["guided_log_probs"]).sum(),
        "bidirectional_attention": lambda x: copy.bidirectional_attention(
            *[x.view(2, 3, 4, 8)] * 3, backend=chosen["bidirectional_attention"]).square().sum(),
    }

def results(call):
    x = a.clone().requires_grad_()
    loss = call(x)
    loss.backward()
    return loss.detach(), x.grad

expected = {name: results(call) for name, call in calls("reference").items()}
for backend in ("scan", "native"):
    for name, call in calls(backend).items():
        torch.testing.assert_close(results(call), expected[name])
compiled = {name: torch.compile(call, backend="aot_eager", fullgraph=True) for name, call in calls("scan").items()}
for name, call in compiled.items():
    torch.testing.assert_close(results(call), expected[name])
assert not [m for m in sys.modules if m.partition(".")[0].startswith("raoe")], "something of ours under its own name"
with contextlib.redirect_stdout(io.StringIO()) as printed:
    runpy.run_module(sys.argv[2], run_name="__main__")
assert "Backends on cpu" in printed.getvalue()
print(json.dumps(table["raoe_loss"]["native"]))
"""


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(ROOT / "raoe_kernels", tmp_path / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def python(folder: Path, code: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", code, str(folder), NAME, str(ROOT)]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout


def test_a_copy_under_another_name_works_alone(folder):
    native = python(folder, HERE + COPY_ALONE, "-I")
    if list((ROOT / "raoe_kernels").glob("_native_cpu*")):
        assert native == "true\n", "the compiled module beside it was not found"

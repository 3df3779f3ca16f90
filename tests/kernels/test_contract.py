"""The op that CONTRIBUTING.md shows, built from the page."""

import importlib
import re
from pathlib import Path

import torch

import raoe_kernels

PAGE = Path(raoe_kernels.__file__).parents[1] / "CONTRIBUTING.md"


def test_the_op_of_the_page(tmp_path, monkeypatch):
    (tmp_path / "distance").mkdir()
    files = re.findall(r"^`(\w+\.py)` .*?^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(files) == 5
    for name, code in files:
        (tmp_path / "distance" / name).write_text(code)
    monkeypatch.setattr(raoe_kernels, "__path__", [*raoe_kernels.__path__, str(tmp_path)])
    op = importlib.import_module("raoe_kernels.distance").pairwise_distance
    a, b = (torch.rand(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.testing.assert_close(op(a, b, scale=3.0), 3 * (a - b).square().sum(1))
    assert torch.autograd.gradcheck(op, (a, b)) and op(a[:0], b[:0]).shape == (0,)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(*(torch.autograd.grad(f(a, b).sum(), (a, b)) for f in (op, compiled)), strict=True):
        torch.testing.assert_close(traced, eager)
    torch.library.opcheck(torch.ops.raoe_kernels.distance.default, (a, b, 2.0, [1, 1], "auto", None))

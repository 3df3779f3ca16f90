"""Which backend takes a call: argument before block before environment before auto, and no silent fallback."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import raoe_kernels
from benchmarks.__main__ import KERNEL_OPS
from raoe_kernels import _dispatch, rank_margin_loss, use_backend
from raoe_kernels._dispatch import Backend, Op

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def environment_is_read_anew():
    _dispatch._environment.cache_clear()
    yield
    _dispatch._environment.cache_clear()


def op(missing: str | None = None) -> Op:
    """An op with a scan backend and a native one that is missing for a reason, if given."""
    backends = {
        "scan": Backend("raoe_kernels.pairwise.scan"),
        "native": Backend("raoe_kernels.pairwise.reference", lambda device: missing),
    }
    return Op("toy", ("toy_op",), backends)


def test_auto_takes_the_first_that_is_there():
    assert op().select(CPU).__name__.endswith("reference")
    assert op("no compiler").select(CPU).__name__.endswith("scan")
    assert op().select(torch.device("meta")).__name__.endswith("scan")


def test_a_named_backend_never_falls_back():
    with pytest.raises(RuntimeError, match="'native' cannot run toy on cpu: no compiler"):
        op("no compiler").select(CPU, "native")
    with pytest.raises(RuntimeError, match="toy has no triton backend"):
        op().select(CPU, "triton")
    with use_backend("native"), pytest.raises(RuntimeError, match="no compiler"):
        op("no compiler").select(CPU)


def test_precedence(monkeypatch):
    toy = op()
    monkeypatch.setenv(_dispatch.ENVIRONMENT, "scan")
    assert toy.select(CPU).__name__.endswith("scan")
    with use_backend("native"):
        assert toy.select(CPU).__name__.endswith("reference")
        assert toy.select(CPU, "scan").__name__.endswith("scan")
        with use_backend("scan"):
            assert toy.select(CPU).__name__.endswith("scan")
        assert toy.select(CPU).__name__.endswith("reference")
    assert toy.select(CPU).__name__.endswith("scan")


def test_a_block_exempts_ops_without_such_a_backend():
    with use_backend("triton"):
        assert op().select(CPU).__name__.endswith("reference")


def test_a_wrong_name_is_an_error_wherever_it_stands(monkeypatch):
    with pytest.raises(ValueError, match="backend must be one of"), use_backend("cuda"):
        pass
    monkeypatch.setenv(_dispatch.ENVIRONMENT, "fastest")
    with pytest.raises(ValueError, match="RAOE_KERNELS_BACKEND must be one of"):
        op().select(CPU)


def test_the_public_functions_obey():
    c, s = torch.rand(8), torch.rand(8)
    with use_backend("reference"):
        assert torch.equal(rank_margin_loss(c, s), rank_margin_loss(c, s, backend="reference"))
    with pytest.raises(RuntimeError, match="cannot run pairwise on meta"):
        rank_margin_loss(c.to("meta"), s.to("meta"), backend="native")


def test_backends_reports_every_public_op():
    table = raoe_kernels.backends("cpu")
    ops = set(raoe_kernels.__all__) - {"backends", "use_backend"}
    assert set(table) == ops
    for row in table.values():
        assert set(row) == set(_dispatch.NAMES) and row["scan"] is True
        assert all(v is True or (isinstance(v, str) and v) for v in row.values())


def test_an_op_has_one_name():
    """Its folder, its key in messages, its benchmark."""
    ops = {name: folder.OP for name, folder in vars(raoe_kernels).items() if name[0] != "_" and hasattr(folder, "OP")}
    assert {name: op.key for name, op in ops.items()} == {name: name for name in KERNEL_OPS}


def test_importing_loads_nothing():
    code = (
        "import sys, raoe_kernels, torch;"
        "heavy = [m for m in sys.modules if m == 'triton' or m.startswith(('triton.', 'raoe_kernels._native_'))];"
        "assert not heavy, heavy; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

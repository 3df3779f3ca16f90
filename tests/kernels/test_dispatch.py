"""Which backend takes a call: argument before block before environment before auto, and no silent fallback."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import raoe_kernels
from raoe_kernels import _dispatch, _native, rank_margin_loss, use_backend
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


def test_where_triton_cannot_run_it_says_why(monkeypatch):
    triton, gpu = pytest.importorskip("triton"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert _dispatch.triton_missing(gpu) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "need compute capability >= 8.0, but this GPU has 7.5" in _dispatch.triton_missing(gpu)
    monkeypatch.setattr(triton, "__version__", "3.3.1")
    assert "need Triton 3.4 or newer, but Triton 3.3.1" in _dispatch.triton_missing(gpu)


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


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, the second of which is not among those that the compiled module is for; and the module's calls."""
    asked, current = [], [0]

    class Chosen:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    def unusable():
        asked.append(current[0])
        return "no kernel image is available for execution on the device" if current[0] else ""

    names = {0: "New GPU", 1: "Old GPU"}
    faked = {"is_available": lambda: True, "device_count": lambda: 2, "current_device": lambda: current[0],
             "device": Chosen, "get_device_name": names.get, "get_device_capability": lambda _: (9, 0)}  # fmt: skip
    for name, value in faked.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(_native, "_load", lambda kind: SimpleNamespace(unusable=unusable))
    _native._unusable.cache_clear()
    yield asked
    _native._unusable.cache_clear()


def test_a_module_that_does_not_run_on_a_gpu_falls_through(gpus):
    native = Backend("raoe_kernels.pairwise.reference", _native.missing)
    toy = Op("toy", ("toy_op",), {**op().backends, "native": native})
    for _ in range(2):
        assert toy.select(torch.device("cuda:0")).__name__.endswith("reference")
        assert toy.select(torch.device("cuda:1")).__name__.endswith("scan")
    why = r"'native' cannot run toy on cuda:1: .* do not run on Old GPU: no kernel image"
    with pytest.raises(RuntimeError, match=why):
        toy.select(torch.device("cuda:1"), "native")
    assert gpus == [0, 1], "asked once for each GPU, with that GPU current"
    assert raoe_kernels.backends("cuda")["raoe_loss"]["native"] is True  # the current one


def test_without_a_gpu_the_cuda_module_is_no_backend(monkeypatch):
    monkeypatch.setattr(_native, "_load", lambda kind: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _native.missing(torch.device("cuda")) == "torch sees no CUDA device"


def test_backends_reports_every_public_op():
    table = raoe_kernels.backends("cpu")
    ops = set(raoe_kernels.__all__) - {"backends", "use_backend"}
    assert set(table) == ops
    for row in table.values():
        assert set(row) == set(_dispatch.NAMES) and row["scan"] is True
        assert all(v is True or (isinstance(v, str) and v) for v in row.values())

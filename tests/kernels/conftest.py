"""Where the kernels' tests run: every backend on every device there is, with fresh buffers poisoned."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from zlib import crc32

import pytest
import torch

import raoe_kernels
from raoe_kernels import _build
from raoe_kernels._dispatch import NAMES
from raoe_kernels.infonce import chunks

HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", "cuda"] if HAS_GPU else ["cpu"]
# Where tensors are that every backend is to take: Triton's interpreter and compiled Triton exclude each other in one
# process.
DEVICE = DEVICES[-1]
PLACES = [(d, b) for d in DEVICES for b in NAMES if not (HAS_GPU and d == "cpu" and b == "triton")]
if not HAS_GPU and find_spec("triton") is not None:
    from tests.kernels import interpreter

    interpreter.install()
WISH = os.environ.get("RAOE_KERNELS_BUILD")


@pytest.fixture(params=PLACES, ids=[f"{d}-{b}" for d, b in PLACES])
def place(request, monkeypatch):
    """(device, backend name) of one run of a test; a backend that was to be built and is not here fails the test."""
    device, backend = request.param
    reason = raoe_kernels.backends(device)["raoe_loss"][backend]
    if reason is not True:
        if backend == "native" and WISH != "none" and device == "cpu" and _build.info() is not None:
            pytest.fail(f"the native backend is missing: {reason}")
        pytest.skip(f"{backend} on {device}: {reason}")
    if request.param == ("cpu", "triton"):
        from raoe_kernels.pairwise import triton_kernels

        # The interpreter's time goes by the block, not by what is in it.
        monkeypatch.setattr(triton_kernels, "WARPS", {16: 1, 64: 1, **triton_kernels.WARPS})
    return request.param


def available(place: tuple[str, str], function: str) -> tuple[str, str]:
    """The (device, backend name), where the backend has the function; elsewhere the test is skipped."""
    device, backend = place
    reason = raoe_kernels.backends(device)[function][backend]
    if reason is not True:
        pytest.skip(f"{backend} on {device}: {reason}")
    return place


def must_run(item: pytest.Item) -> bool:
    """Whether a test is of compiled kernels on the GPU: with RAOE_KERNELS_BUILD=cuda, which asks for them, none of
    these may be skipped."""
    place = item.callspec.params.get("place") if hasattr(item, "callspec") else None
    compiled = isinstance(place, tuple) and place in (("cuda", "native"), ("cuda", "triton"))
    return WISH == "cuda" and HAS_GPU and (compiled or item.get_closest_marker("gpu") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and must_run(item):
        report.outcome, report.longrepr = "failed", f"skipped, and must run here: {call.excinfo.value}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What runs in Triton's interpreter is slow, and half precision of plain torch; two of three cases of attention in
    the interpreter, drawn by their names, are left to `make exhaustive`."""
    for item in items:
        if "kernels" in item.path.parts and getattr(item, "callspec", None):
            place, dtype = (item.callspec.params.get(name) for name in ("place", "dtype"))
            plain = place is not None and place[1] in ("reference", "scan")
            interpreted = "triton" in item.callspec.id
            if interpreted or (plain and dtype in (torch.float16, torch.bfloat16)):
                item.add_marker("slow")
            if interpreted and item.path.name == "test_attention.py" and crc32(item.name.encode()) % 3:
                item.add_marker("exhaustive")


@pytest.fixture
def poisoned():
    """Every buffer that torch makes without a value starts as NaN, or as the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.ones(2).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def small_buffers(monkeypatch):
    """Buffers of a few rows, so that small batches have whole chunks and a ragged one; and, where nothing is compiled
    for it, blocks of a few columns."""
    for key in ("infonce", "sigmoid"):
        monkeypatch.setattr(import_module(f"raoe_kernels.{key}.scan"), "BUFFER", 2400)
    monkeypatch.setattr("raoe_kernels.sigmoid.scan.BLOCK", 900)
    monkeypatch.setattr(chunks, "BUFFER", 2400)
    monkeypatch.setattr(chunks, "ROWS", 1)
    if not HAS_GPU and find_spec("triton"):
        from raoe_kernels.infonce import triton_kernels, triton_units
        from raoe_kernels.sigmoid import triton_kernels as of_sigmoid

        for table, block in ((triton_kernels.WEIGHTS, 32), (triton_kernels.SHORT, 32), (triton_units.ROWS, 64)):
            monkeypatch.setitem(table, "BLOCK", block)
        monkeypatch.setitem(of_sigmoid.WEIGHTS, "BLOCK", 32)

"""What the bindings of the compiled CPU module do besides the arithmetic: errors, the GIL, types of arguments."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import raoe_kernels
from raoe_kernels import _native

pytestmark = pytest.mark.skipif(
    _native.missing(torch.device("cpu")) is not None, reason="the native CPU module was not built here"
)


def pairwise_arguments(n: int, x: int, losses: int) -> tuple:
    """Arguments of `pairwise`: float32 similarities and scores at x, no labels, both objectives, no gradient."""
    options = (0, True, True, False, 20.0, 2, 1.0, 1.0)  # ties, rank, angle, parts, tau, threshold, weights
    return (x, x, 0, n, 2, 0, *options, losses, 0, 1, 1)


def test_errors_become_those_of_python():
    compiled, x, losses = _native.module("cpu"), torch.rand(4), torch.zeros(1)
    arguments = pairwise_arguments(4, x.data_ptr(), losses.data_ptr())
    compiled.pairwise(*arguments)
    assert losses.item() > 0
    with pytest.raises(ValueError, match=r"2\^28"):
        compiled.pairwise(*arguments[:3], 2**28 + 1, *arguments[4:])
    for wrong in (arguments[:-1], (*arguments, 1), (*arguments[:-1], "1"), (1.5, *arguments[1:]), (-1, *arguments[1:])):
        with pytest.raises(TypeError, match="pairwise"):
            compiled.pairwise(*wrong)
    with pytest.raises(TypeError, match="cosine"):
        compiled.cosine(0, 0, 1, 1, 1, 1, 2, 1e-8, 0, 0, 0, ("1",), 1)


def test_rows_of_different_strides():
    """The functions get a stride for each of the two matrices."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    narrow = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    found = []
    for backend in ("native", "reference"):
        cosine = raoe_kernels.pairwise_cosine(wide[:, :7], narrow, backend=backend)
        found.append((cosine, *torch.autograd.grad(cosine.pow(2).sum(), (wide, narrow))))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


ROWS, COLUMNS = 1 << 14, 1 << 11
LONG = {
    "pairwise": lambda x, y: pairwise_arguments(1 << 21, x, y),
    "scale": lambda x, y: (x, ROWS * COLUMNS, 2, 1, 1, x, x, y),
    "cosine": lambda x, y: (x, x, ROWS, COLUMNS, COLUMNS, COLUMNS, 2, 1e-8, y, y, y, (COLUMNS,), 1),
    "cosine_grad": lambda x, y: (x, x, x, ROWS, COLUMNS, COLUMNS, COLUMNS, 2, x, x, x, y, 0, (COLUMNS,), 1),
}


@pytest.mark.parametrize("name", LONG)
def test_other_threads_run_during_a_call(name):
    function = getattr(_native.module("cpu"), name)
    x, y = torch.rand(ROWS * COLUMNS), torch.empty(ROWS * COLUMNS)
    arguments, calls = LONG[name](x.data_ptr(), y.data_ptr()), []

    def call() -> None:
        start = time.perf_counter()
        function(*arguments)
        calls.append((start, time.perf_counter()))

    thread, ticks = threading.Thread(target=call), []
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(1e-4)
    ((start, end),) = calls
    quarter = (end - start) / 4
    assert [tick for tick in ticks if start + quarter < tick < end - quarter], f"{end - start:.3f} s without a tick"

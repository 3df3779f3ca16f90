"""Accuracy assertions for tests of this package's kernels and of your own kernels.

    err(kernel, truth) <= factor x err(plain, truth) + floor

In this bound, truth is the result of a float64 reference, and plain is the result of the same formula in plain PyTorch,
in the kernel's dtype. The error err is the largest absolute difference from truth, and floor is the size of a few
rounding errors. The bound follows from the dtype's precision, so no test has to choose a tolerance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._dtypes import wide

LOSS_FACTOR, GRADIENT_FACTOR, ULPS = 2.0, 3.0, 4.0


def error(actual: Tensor, truth: Tensor) -> float:
    """Return the largest absolute difference between two tensors, or inf if they differ in a non-finite element."""
    if actual.shape != truth.shape:
        raise AssertionError(f"shape {tuple(actual.shape)} differs from the reference's shape {tuple(truth.shape)}")
    if truth.numel() == 0:
        return 0.0
    a, t = actual.detach().double().cpu(), truth.detach().double().cpu()
    same = (a == t) | (a.isnan() & t.isnan())
    return torch.where(same, 0.0, (a - t).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)).max().item()


def _largest(truth: Tensor) -> float:
    """Return the largest finite absolute value, which sets the floor: an infinite floor would allow any error."""
    return max(truth[truth.isfinite()].abs().tolist(), default=0.0)


def assert_accurate(name: str, actual: Tensor, plain: Tensor, truth: Tensor, *, factor: float, floor: float) -> None:
    """Assert err(kernel, truth) <= factor x err(plain, truth) + floor. The error message shows the worst element."""
    kernel_error, plain_error = error(actual, truth), error(plain, truth)
    allowed = factor * plain_error + floor
    if kernel_error <= allowed:
        return
    worst = (actual.detach().double().cpu() - truth.double().cpu()).abs().nan_to_num(nan=torch.inf).argmax()
    values = [x.detach().double().flatten()[worst].item() for x in (actual, plain, truth)]
    raise AssertionError(
        f"{name}: error {kernel_error:.3g} exceeds {factor:g} x {plain_error:.3g} (plain torch's error) + {floor:.3g}; "
        f"at element {worst}: kernel {values[0]!r}, plain {values[1]!r}, float64 {values[2]!r}"
    )


def assert_loss_accurate(actual: Tensor, plain: Tensor, truth: Tensor, exponent_range: float = 0.0) -> None:
    """Assert that a loss's error is at most twice the error of `plain` plus a few rounding errors of the result.

    For a loss L = log(1 + sum of exp(scale (c_i - c_j))), exponent_range is scale (max c - min c). For other losses,
    exponent_range is 0. A kernel may compute an exponent as a sum x_i + y_j of two terms as large as exponent_range.
    The rounding errors of these terms are proportional to their size. An error e in the exponents changes L by (1 -
    exp(-L)) e.
    """
    largest = _largest(truth)
    floor = ULPS * torch.finfo(actual.dtype).eps * (largest + exponent_range * min(1.0, largest))
    assert_accurate("loss", actual, plain, truth, factor=LOSS_FACTOR, floor=floor)


def assert_gradient_accurate(actual: Tensor, plain: Tensor, truth: Tensor, exponent_range: float = 0.0) -> None:
    """Assert that a gradient's error is at most three times the error of `plain` plus a few rounding errors.

    exponent_range has the same meaning as in assert_loss_accurate. For ops without exponents, it is 0.
    """
    largest = _largest(truth)
    eps = max(torch.finfo(actual.dtype).eps if exponent_range == 0 else 0.0, torch.finfo(wide(actual.dtype)).eps)
    floor = ULPS * eps * (1 + exponent_range) * largest
    assert_accurate("gradient", actual, plain, truth, factor=GRADIENT_FACTOR, floor=floor)

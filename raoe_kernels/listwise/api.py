"""The public listwise functions: what a call means, and its argument errors."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate
from .autograd import list_mle, refine
from .problem import Problem

TIES = ("ordinal", "random")


def list_mle_loss(
    student: Tensor,
    teacher: Tensor,
    *,
    scale: float = 20.0,
    mask: Tensor | None = None,
    ties: str = "ordinal",
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """ListMLE: how unlikely the student finds the teacher's order of each list, if it draws items one after another.

    The mean over lists of - sum_k log(exp(scale s_k) / sum_{m >= k} exp(scale s_m)), items in descending order of
    teacher (Xia et al. 2008; ranking-sentences paper, Eq. 8-9). The last item of a list costs nothing, so a list of
    none or of one costs 0; it still counts in the mean, and no list at all gives 0.

    Args:
        student: (R, n) finite scores, one list a row; float16, bfloat16, float32 or float64.
        teacher: (R, n) numbers of any real dtype, on student's device, not requiring grad; +-inf sort as expected.
        scale: what the student's scores are multiplied by, > 0: the inverse of the paper's temperature (0.05 there).
        mask: (R, n) bool, True where there is an item; None for all. What is masked has no influence, NaN and all, and
            a gradient of exactly 0.
        ties: what the teacher's equals do: "ordinal" keeps their order of appearance, "random" shuffles them anew at
            every call, as the paper's code does.
        generator: for ties="random"; None for torch's default of the device.
        backend: "auto", "reference" or "scan" (plain torch).

    Returns:
        Scalar, float64 for float64 scores and float32 otherwise. The gradient has student's dtype. A NaN in student or
        teacher that is not masked makes the loss NaN, and the gradient of every item.

    Raises:
        TypeError, ValueError: naming the argument.
        RuntimeError: `backend` was named and cannot run here, or a second derivative was asked for.
    """
    _validate.float_tensor("student", student, 2)
    _validate.real_tensor("teacher", _validate.companion("teacher", teacher, student.shape, "student", student))
    _validate.target("teacher", teacher)
    if mask is not None:
        _validate.bool_tensor("mask", _validate.companion("mask", mask, student.shape, "student", student))
    scale = _validate.scale(scale)
    order = None
    if _validate.one_of("ties", ties, TIES) == "random":
        if generator is None:  # apart, as dynamo traces torch.rand with a symbolic shape only where none is named
            order = torch.rand(student.shape, device=student.device)
        else:
            order = torch.rand(student.shape, generator=generator, device=student.device)
    elif generator is not None:
        raise ValueError(f"generator is for ties='random' only, got {_validate.describe(generator)}")
    return list_mle(Problem(student, teacher, mask, order, scale), backend)


def refine_similarity(phi: Tensor, omega: float, *, mask: Tensor | None = None, backend: str = "auto") -> Tensor:
    """A teacher for ranking sentences: each similarity moved towards the one that stands at its true rank.

    Sentences j = 0 … n - 1 are a chain in the order of generation, each further from the first. Row j ranks the list
    k = j … n - 1, sentence j itself included: the true rank r(k) of k is k - j, and with the row's values sorted in
    descending order and d = sorted[r(k)] - phi[j, k],

        refined[j, k] = phi[j, k] + sign(d) log(omega |d| + 1)

    (ranking-sentences paper, Eq. 6-7 and Algorithm 1). The lower triangle is the upper one mirrored; phi's own is not
    read. Not differentiable.

    Args:
        phi: (..., n, n) similarity of sentences, float16, bfloat16, float32 or float64, not requiring grad.
        omega: weight of the ranks, finite, >= 0 (0.5 and 0.7 in the paper); 0 only mirrors.
        mask: (..., n) bool, True where there is a sentence, for chains of different lengths; None for all. What is
            masked has no influence and its rows and columns are 0.
        backend: "auto", "reference" or "scan" (plain torch).

    Returns:
        (..., n, n) float32, float64 for float64 similarity. A NaN in row j's list makes that list NaN.

    Raises:
        TypeError, ValueError: naming the argument.
        RuntimeError: `backend` was named and cannot run here.
    """
    _validate.float_tensor("phi", phi, max(2, getattr(phi, "ndim", 2)))
    if phi.shape[-1] != phi.shape[-2]:
        raise ValueError(f"phi must be square in its last two dimensions, got {_validate.describe(phi)}")
    _validate.target("phi", phi)
    omega = _validate.number("omega", omega, low=0)
    if mask is not None:
        _validate.bool_tensor("mask", _validate.companion("mask", mask, phi.shape[:-1], "phi", phi))
    return refine(phi, mask, omega, backend)

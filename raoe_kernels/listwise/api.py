"""Public listwise functions: documentation and argument checks."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate
from .problem import Problem, Refinement, list_mle, refine

TIES = ("ordinal", "random")


@_validate.public
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
    """ListMLE loss: negative log-likelihood of the teacher's order under the student's scores.

    The loss is the mean over lists of - sum_k log(exp(scale s_k) / sum_{m >= k} exp(scale s_m)), where s_k is the
    student's score of item k. The items of a list are sorted by descending teacher score (Xia et al. 2008;
    ranking-sentences paper, Eq. 8-9). A list with fewer than two items has loss 0 and still counts in the mean. If
    there are no lists, the loss is 0.

    Args:
        student: (R, n) finite scores, one list per row; float16, bfloat16, float32 or float64.
        teacher: (R, n) scores of any real dtype, on student's device. They must not require grad. +-inf is allowed.
        scale: number > 0 that multiplies the student's scores, the inverse of a temperature. The paper uses 1 / 0.05.
        mask: (R, n) bool, True where there is an item; None if every position has an item. A position without an item
            has no influence on the loss, even if it holds NaN, and its gradient is exactly 0.
        ties: order of items with equal teacher scores. "ordinal" keeps their order in the list. "random" shuffles them
            anew at every call, as the paper's code does.
        generator: random generator for ties="random"; None selects the device's default generator.
        backend: "auto", "reference" or "scan" (plain torch).

    Returns:
        Scalar loss, float64 for float64 scores, else float32. The gradient has student's dtype. If student or teacher
        is NaN for any item, the loss and the gradients of all items are NaN. The loss has an absolute error of about
        the dtype's eps for each item, so a loss that is much smaller than this error is rounded to 0.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        RuntimeError: the requested backend cannot run here, or a second derivative was requested.
    """
    _validate.float_tensor("student", student, 2)
    _validate.real_tensor("teacher", _validate.companion("teacher", teacher, student.shape, "student", student))
    _validate.target("teacher", teacher)
    if mask is not None:
        _validate.bool_tensor("mask", _validate.companion("mask", mask, student.shape, "student", student))
    scale = _validate.scale(scale)
    order = None
    if _validate.one_of("ties", ties, TIES) == "random":
        if generator is None:  # dynamo cannot trace the argument generator=None with a symbolic shape
            order = torch.rand(student.shape, device=student.device)
        else:
            order = torch.rand(student.shape, generator=generator, device=student.device)
    elif generator is not None:
        raise ValueError(f"generator requires ties='random', but ties is {ties!r}")
    return list_mle(Problem(student, teacher, mask, order, scale), backend)


@_validate.public
def refine_similarity(phi: Tensor, omega: float, *, mask: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Refine similarity matrices of ranking sentences: move each similarity towards the value at its true rank.

    Sentences 0 … n - 1 form a chain: they were generated in this order, each less similar to sentence 0 than its
    predecessor. Row j of phi ranks the list of sentences k = j … n - 1, which includes sentence j itself. In this list,
    the true rank of sentence k is r(k) = k - j. Let `sorted` hold the list's similarities in descending order, and let
    d = sorted[r(k)] - phi[j, k]. Then

        refined[j, k] = phi[j, k] + sign(d) log(omega |d| + 1)

    This is Eq. 6-7 and Algorithm 1 of the ranking-sentences paper. Only the upper triangle of phi is read, and the
    lower triangle of the result mirrors its upper triangle. The result is not differentiable.

    Args:
        phi: (..., n, n) similarities between sentences, float16, bfloat16, float32 or float64. Must not require grad.
        omega: weight of the true ranks, a finite number >= 0 (0.5 and 0.7 in the paper). If 0, phi is only mirrored.
        mask: (..., n) bool for chains of different lengths, True where there is a sentence; None if there is a sentence
            at every position. Positions without a sentence have no influence, and the result is 0 in their rows and
            columns.
        backend: "auto", "reference" or "scan" (plain torch).

    Returns:
        (..., n, n) refined similarities, float64 for float64 phi, otherwise float32. A NaN in row j's list makes all
        refined similarities in this list NaN.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        RuntimeError: the requested backend cannot run here.
    """
    _validate.float_tensor("phi", phi, max(2, getattr(phi, "ndim", 2)))
    if phi.shape[-1] != phi.shape[-2]:
        raise ValueError(f"phi must be square in its last two dimensions, got {_validate.describe(phi)}")
    _validate.target("phi", phi)
    omega = _validate.number("omega", omega, low=0)
    if mask is not None:
        _validate.bool_tensor("mask", _validate.companion("mask", mask, phi.shape[:-1], "phi", phi))
        mask = mask.flatten(0, -2) if mask.ndim > 1 else mask[None]
    matrices = phi.flatten(0, -3) if phi.ndim > 2 else phi[None]
    return refine(Refinement(matrices, mask, omega), backend).reshape(phi.shape)

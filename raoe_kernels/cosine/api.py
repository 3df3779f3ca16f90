"""The public pairwise cosine: what a call means, and its argument errors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _validate
from .autograd import cosine


def pairwise_cosine(
    a: Tensor, b: Tensor, *, eps: float = 1e-8, dims: Sequence[int] | None = None, backend: str = "auto"
) -> Tensor:
    """Cosine similarity of a[i] with b[i] for every row i.

    As torch.nn.functional.cosine_similarity(a, b, dim=1, eps=eps), except where a row's norm is at most eps: the
    similarity is 0 there and both rows' gradients are exactly 0 (torch's are of the order of 1 / eps).

    Args:
        a, b: (B, D) float16, bfloat16, float32 or float64, of one dtype, shape and device.
        eps: norm up to which a row counts as zero, >= 0.
        dims: K increasing widths, the last at most D: the similarity of the first dims[k] columns (Matryoshka's
            prefixes, Kusupati et al. 2022) for each, at the cost of one.
        backend: "auto", "reference", "scan" (plain torch), "triton" or "native". On a GPU several widths are scan's.

    Returns:
        (B,) similarity, (K, B) with dims, float64 for float64 rows and float32 otherwise: the ranking losses that read
        it need digits that half precision does not have. Gradients have the rows' dtype.

    Raises:
        TypeError, ValueError: naming the argument.
        RuntimeError: `backend` was named and cannot run here, or a second derivative was asked for.
    """
    _validate.float_tensor("a", a, 2)
    _validate.float_tensor("b", b, 2)
    _validate.alike("a and b", a, b)
    eps = _validate.number("eps", eps, low=0)
    return cosine(a, b, eps, () if dims is None else (_validate.widths("dims", dims, a.shape[1]),), backend)

"""Public pairwise cosine: documentation and argument checks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _validate
from .problem import Problem, cosine


@_validate.public
def pairwise_cosine(
    a: Tensor, b: Tensor, *, eps: float = 1e-8, dims: Sequence[int] | None = None, backend: str = "auto"
) -> Tensor:
    """Cosine similarity of a[i] and b[i] for every row i.

    Equal to torch.nn.functional.cosine_similarity(a, b, dim=1, eps=eps), except where the norm of a[i] or b[i] is at
    most eps: there the similarity and both rows' gradients are exactly 0 (torch's gradients are about 1 / eps).

    Args:
        a, b: (B, D) float16, bfloat16, float32 or float64, of the same dtype, shape and device.
        eps: norm up to which a row counts as zero, >= 0.
        dims: K increasing widths, at most D (Matryoshka prefixes, Kusupati et al. 2022). The result has one similarity
            per width, of the first dims[k] columns. All widths share one read of each column.
        backend: "auto", "reference", "scan" (plain torch), "triton" or "native" (on a CPU).

    Returns:
        (B,) similarity, or (K, B) with dims: float64 for float64 rows, otherwise float32, because half precision is
        too coarse for the ranking losses that read it. Gradients have the rows' dtype.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        RuntimeError: the requested backend cannot run here, or a second derivative was requested.
    """
    _validate.float_tensor("a", a, 2)
    _validate.float_tensor("b", b, 2)
    _validate.alike("a and b", a, b)
    eps = _validate.number("eps", eps, low=0)
    widths = None if dims is None else _validate.widths("dims", dims, a.shape[1])
    return cosine(Problem(a, b, eps, widths), backend)

"""The public function pairwise_cosine: documentation and argument checks."""

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

    The result equals torch.nn.functional.cosine_similarity(a, b, dim=1, eps=eps), except for rows where the norm of
    a[i] or b[i] is at most eps. For these rows, the similarity and the gradients are exactly 0, while torch's gradients
    are about 1 / eps. All norms must be below 1e18. If eps is below 1e-15, all norms must also be above 1e-15. For
    float64, these limits are 1e150 and 1e-150. The squares of norms beyond these limits are outside the dtype's range.
    For such norms, the result depends on the backend: it is correct with "native", but can be NaN or 0 with the other
    backends.

    Args:
        a, b: (B, D) float16, bfloat16, float32 or float64, of the same dtype, shape and device.
        eps: number >= 0. A row whose norm is at most eps counts as a zero row.
        dims: K strictly increasing prefix widths up to D (Matryoshka embeddings, Kusupati et al. 2022). Row k of the
            result holds the similarities of the first dims[k] columns. Each column is read only once for all widths.
        backend: "auto", "reference", "scan" (plain torch), "triton" or "native" (on a CPU).

    Returns:
        (B,) similarities, or (K, B) if dims is set. They are float64 for float64 a and b, otherwise float32, because
        half precision is too coarse for ranking losses. The gradients have the dtype of a and b.

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

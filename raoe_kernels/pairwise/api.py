"""The public pairwise losses: what a call means, and its argument errors.

Source of all but CoSENT: "Rank-Awareness and Angular Constraints: A New Perspective on Learning Sentence Embeddings
from NLI Data" (RAOE). Pairs i and j below are two *sentence pairs* of a batch of B. Similarity is (B,); or (K, B), K
similarities of each pair (by prefixes of its embeddings, for example), whose K losses share the sort of the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate
from . import params as _params
from .autograd import pairwise_loss

GATES = ("label+score", "score", "label")


def rank_margin_loss(
    similarity: Tensor,
    scores: Tensor,
    *,
    margin: float = 2,
    scale: float = 20.0,
    ties: str = "average",
    backend: str = "auto",
) -> Tensor:
    """RAOE's rank-margin objective (Eq. 2): log(1 + sum over r_j - r_i > margin of exp(scale (c_i - c_j))).

    Args:
        similarity: (B,) float16, bfloat16, float32 or float64; c, usually the cosine of each sentence pair, which
            `pairwise_cosine` makes of (B, D) embeddings. Any finite values are legal. Or (K, B): K losses of the same
            scores.
        scores: (B,) real numbers, any float or integer dtype (not uint64), compared exactly in that dtype; +-inf sort
            as expected. They are targets and must not require grad.
        margin: rank distance I >= 0 that two pairs must exceed to be compared; ranks are within the batch.
        scale: what similarities are multiplied by, > 0: the papers' tau, the inverse of a temperature. A value below
            1 looks like a temperature and warns.
        ties: how equal scores are ranked, in scipy.stats.rankdata's words: "average", "min", "max", "dense" or
            "ordinal". Equal scores are compared only under "ordinal" (order of appearance).
        backend: "auto", "reference", "scan", "triton" or "native".

    Returns:
        Scalar loss, (K,) of (K, B), float64 for float64 similarity and float32 otherwise; exactly 0 if no two pairs are
        compared. The gradient has similarity's dtype. A NaN in similarity (of K rows, in its own) or scores makes the
        loss and all of its gradient NaN.

    Raises:
        TypeError, ValueError: naming the argument.
        RuntimeError: `backend` was named and cannot run here, or a second derivative was asked for.
    """
    params = _params.make(True, False, scale, margin, ties)
    _check_similarity(similarity)
    return pairwise_loss(similarity, _scores(scores, similarity), None, params, backend)[0]


def cosent_loss(similarity: Tensor, scores: Tensor, *, scale: float = 20.0, backend: str = "auto") -> Tensor:
    """CoSENT (Su, 2022): log(1 + sum over s_i < s_j of exp(scale (c_i - c_j))), the rank-margin loss without a margin.

    Arguments, result and errors as in `rank_margin_loss`.
    """
    params = _params.make(True, False, scale)
    _check_similarity(similarity)
    return pairwise_loss(similarity, _scores(scores, similarity), None, params, backend)[0]


def gated_angular_loss(
    similarity: Tensor,
    scores: Tensor | None,
    labels: Tensor | None,
    *,
    scale: float = 20.0,
    gate: str = "label+score",
    backend: str = "auto",
) -> Tensor:
    """RAOE's gated angular objective (Eq. 3): log(1 + sum over the gate of exp(scale (theta_j - theta_i))).

    theta = arccos(clip(c, -1 + 1e-6, 1 - 1e-6)), with gradient 0 where the clip is active.

    Args:
        similarity: (B,) or (K, B) floats, the cosine of each sentence pair.
        scores: (B,) real numbers as in `rank_margin_loss`.
        labels: (B,) integers (not uint64), larger = less related (Hugging Face's NLI order: 0 entailment, 1 neutral,
            2 contradiction). Any values, any number of them.
        scale: what angles are multiplied by, > 0, as in `rank_margin_loss`.
        gate: which pairs (i, j) count: "label+score" (l_i > l_j and s_i < s_j, the paper's), "score" (s_i < s_j) or
            "label" (l_i > l_j). What a gate does not use is ignored and may be None.
        backend: as in `rank_margin_loss`, and so are the result and the errors.
    """
    params = _params.make(False, True, scale)
    _check_similarity(similarity)
    scores, labels = _gated(similarity, scores, labels, gate)
    return pairwise_loss(similarity, scores, labels, params, backend)[0]


def raoe_loss(
    similarity: Tensor,
    scores: Tensor,
    labels: Tensor | None,
    *,
    margin: float = 2,
    scale: float = 20.0,
    rank_weight: float = 1.0,
    angle_weight: float = 1.0,
    ties: str = "average",
    gate: str = "label+score",
    return_parts: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """RAOE's objective (Eq. 1): rank_weight x `rank_margin_loss` + angle_weight x `gated_angular_loss`, at one sort.

    Args as in those two. return_parts=True gives (rank part, angle part), weighted and both differentiable, instead
    of their sum.
    """
    params = _params.make(True, True, scale, margin, ties, rank_weight, angle_weight, bool(return_parts))
    _check_similarity(similarity)
    ranked = _scores(scores, similarity)
    gated, labels = _gated(similarity, scores, labels, gate)
    if gate == "label":  # the two objectives sort by different keys
        rank = pairwise_loss(similarity, ranked, None, params._replace(angle=False, parts=False), backend)[0]
        angle = pairwise_loss(similarity, gated, None, params._replace(rank=False, parts=False), backend)[0]
        return (rank, angle) if return_parts else rank + angle
    losses = pairwise_loss(similarity, ranked, labels, params, backend)
    return (losses[0], losses[1]) if return_parts else losses[0]


def _check_similarity(similarity: Tensor) -> None:
    rows = isinstance(similarity, Tensor) and similarity.ndim == 2
    _validate.float_tensor("similarity", similarity, 2 if rows else 1)
    if rows and not len(similarity):
        raise ValueError(f"similarity must have 1 or more rows, got {_validate.describe(similarity)}")


def _per_pair(name: str, value: object, similarity: Tensor) -> Tensor:
    by_row = similarity.ndim == 2 and isinstance(value, Tensor) and value.shape == similarity.shape[:1]
    if by_row and len(similarity) != similarity.shape[1]:
        got = f"{_validate.describe(similarity)} and {name} {_validate.describe(value)}"
        wanted = f"{name} must have shape {tuple(similarity.shape[1:])} and similarity's device"
        raise ValueError(f"{wanted}, got {got}; of embeddings take pairwise_cosine(a, b)")
    return _validate.target(name, _validate.companion(name, value, similarity.shape[-1:], "similarity", similarity))


def _scores(scores: Tensor | None, similarity: Tensor) -> Tensor:
    """Scores as float32, float64 or int64, whichever holds them exactly."""
    scores = _per_pair("scores", scores, similarity)
    _validate.real_tensor("scores", scores)
    if scores.dtype in (torch.float32, torch.float64, torch.int64):
        return scores
    return scores.to(torch.float32 if scores.is_floating_point() else torch.int64)


def _gated(
    similarity: Tensor, scores: Tensor | None, labels: Tensor | None, gate: str
) -> tuple[Tensor, Tensor | None]:
    """What the angular objective sorts by, and the labels that restrict it if any."""
    _validate.one_of("gate", gate, GATES)
    if gate == "score":
        return _scores(scores, similarity), None
    labels = _per_pair("labels", labels, similarity)
    _validate.integer_tensor("labels", labels)
    labels = labels if labels.dtype == torch.int64 else labels.to(torch.int64)
    if gate == "label":
        return ~labels, None  # l_i > l_j is ~l_i < ~l_j, and ~ cannot overflow
    return _scores(scores, similarity), labels

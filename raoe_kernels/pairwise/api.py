"""Public pairwise losses: documentation and argument checks.

All losses except CoSENT are from "Rank-Awareness and Angular Constraints: A New Perspective on Learning Sentence
Embeddings from NLI Data" (RAOE). In the formulas below, i and j are two *sentence pairs* in a batch of B pairs. A
similarity of shape (K, B) contains K similarities per pair, for example one for each prefix width of the embeddings,
and yields K losses. On a CPU, the native backend sorts the scores once for all K losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate
from .problem import Problem, constants, pairwise

GATES = ("label+score", "score", "label")


@_validate.public
def rank_margin_loss(
    similarity: Tensor,
    scores: Tensor,
    *,
    margin: float = 2,
    scale: float = 20.0,
    ties: str = "average",
    backend: str = "auto",
) -> Tensor:
    """RAOE's rank-margin objective (Eq. 2): log(1 + sum of exp(scale (c_i - c_j)) over i, j with r_j - r_i > margin).

    c_i is the similarity of sentence pair i, and r_i is the rank of its score in the batch. Higher scores rank higher.

    Args:
        similarity: (B,) float16, bfloat16, float32 or float64, any finite values. Usually the cosine similarity of the
            two sentences in each pair, which `pairwise_cosine` computes from (B, D) embeddings. To compute K losses at
            once, pass shape (K, B).
        scores: (B,) target scores, higher for more similar pairs, in any float or integer dtype except uint64. They are
            compared exactly, without rounding. +-inf is allowed. Scores must not require grad.
        margin: number >= 0 (I in the paper). Two pairs are compared only if their ranks differ by more than the margin.
        scale: number > 0 that multiplies the similarities: tau in the papers, the inverse of a temperature. A value
            below 1 causes a warning, because it looks like a temperature.
        ties: method for ranking equal scores, as in scipy.stats.rankdata: "average", "min", "max", "dense" or
            "ordinal". Only "ordinal" can compare pairs with equal scores, because it ranks them in batch order.
        backend: "auto", "reference", "scan", "triton" or "native".

    Returns:
        Scalar loss, or (K,) losses if similarity is (K, B). Losses are float64 for float64 similarity, else float32.
        A loss is exactly 0 if no two pairs are compared. The gradient has similarity's dtype. A NaN in scores makes all
        losses and gradients NaN. A NaN in a row of similarity makes the loss and the gradient of this row NaN.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        RuntimeError: the requested backend cannot run here, or a second derivative was requested.
    """
    fields = constants(True, False, scale, margin, ties)
    _check_similarity(similarity)
    return pairwise(Problem(similarity, _scores(scores, similarity), None, *fields), backend)


@_validate.public
def cosent_loss(similarity: Tensor, scores: Tensor, *, scale: float = 20.0, backend: str = "auto") -> Tensor:
    """CoSENT loss (Su, 2022): log(1 + sum of exp(scale (c_i - c_j)) over i, j with s_i < s_j).

    c_i is the similarity and s_i the score of sentence pair i. Any two pairs with different scores are compared,
    because unlike `rank_margin_loss`, this loss has no margin.

    The arguments, the results and the errors are the same as for `rank_margin_loss`.
    """
    fields = constants(True, False, scale)
    _check_similarity(similarity)
    return pairwise(Problem(similarity, _scores(scores, similarity), None, *fields), backend)


@_validate.public
def gated_angular_loss(
    similarity: Tensor,
    scores: Tensor | None,
    labels: Tensor | None,
    *,
    scale: float = 20.0,
    gate: str = "label+score",
    backend: str = "auto",
) -> Tensor:
    """RAOE's gated angular objective (Eq. 3): log(1 + sum of exp(scale (theta_j - theta_i)) over gated i, j).

    theta_i = arccos(clip(c_i, -1 + 1e-6, 1 - 1e-6)) is the angle of pair i. The gradient of a clipped c_i is 0.

    Args:
        similarity: (B,) or (K, B) floats, the cosine similarity of the two sentences in each pair.
        scores: (B,) real numbers as in `rank_margin_loss`.
        labels: (B,) integers in any dtype except uint64. A larger label means that the two sentences are less related,
            as in Hugging Face's NLI order: 0 entailment, 1 neutral, 2 contradiction. Labels may have any values. There
            is no ignore value: -100 is an ordinary label, smaller than 0. (raoe_train's losses reject negative labels.)
        scale: number > 0 that multiplies the angles. A value below 1 causes a warning.
        gate: condition under which i, j are gated (in the sum), with labels l and scores s: "label+score" (l_i > l_j
            and s_i < s_j, as in the paper), "score" (s_i < s_j) or "label" (l_i > l_j). An argument (scores or labels)
            that the condition does not use is ignored, and may be None.
        backend: as for `rank_margin_loss`.

    The results and the errors are the same as for `rank_margin_loss`.
    """
    fields = constants(False, True, scale)
    _check_similarity(similarity)
    scores, labels = _angle_keys(similarity, scores, labels, gate)
    return pairwise(Problem(similarity, scores, labels, *fields), backend)


@_validate.public
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
    """RAOE's objective (Eq. 1): rank_weight x `rank_margin_loss` + angle_weight x `gated_angular_loss`.

    The arguments and the errors are the same as for `rank_margin_loss` and `gated_angular_loss`. Unless gate="label",
    the rank part and the angle part share one sort.

    Returns:
        The weighted sum. With return_parts=True: (rank part, angle part), each weighted and differentiable.
    """
    if not isinstance(return_parts, bool):
        raise TypeError(f"return_parts must be True or False, got {_validate.describe(return_parts)}")
    fields = constants(True, True, scale, margin, ties, rank_weight, angle_weight, return_parts)
    _check_similarity(similarity)
    rank_keys = _scores(scores, similarity)
    angle_keys, labels = _angle_keys(similarity, scores, labels, gate)
    if gate == "label":  # the two objectives sort by different keys
        problem = Problem(similarity, rank_keys, None, *fields)._replace(parts=False)
        rank = pairwise(problem._replace(angle=False), backend)
        angle = pairwise(problem._replace(rank=False, scores=angle_keys), backend)
        return (rank, angle) if return_parts else rank + angle
    losses = pairwise(Problem(similarity, rank_keys, labels, *fields), backend)
    if not return_parts:
        return losses
    rank, angle = losses.unbind()
    return rank, angle


def _check_similarity(similarity: Tensor) -> None:
    rows = isinstance(similarity, Tensor) and similarity.ndim == 2
    _validate.float_tensor("similarity", similarity, 2 if rows else 1)
    if rows and not similarity.shape[0]:
        raise ValueError(f"similarity must have at least one row, got {_validate.describe(similarity)}")


def _per_pair(name: str, value: object, similarity: Tensor) -> Tensor:
    has_one_per_row = similarity.ndim == 2 and isinstance(value, Tensor) and value.shape == similarity.shape[:1]
    if has_one_per_row and similarity.shape[0] != similarity.shape[1]:
        got = f"similarity {_validate.describe(similarity)} and {name} {_validate.describe(value)}"
        rule = f"{name} must have shape {tuple(similarity.shape[1:])}, one value per pair"
        raise ValueError(f"{rule}, got {got}; if similarity contains embeddings, pass pairwise_cosine(a, b) instead")
    return _validate.target(name, _validate.companion(name, value, similarity.shape[-1:], "similarity", similarity))


def _scores(scores: Tensor | None, similarity: Tensor) -> Tensor:
    """Check the scores and return them as float32, float64 or int64, whichever represents them exactly."""
    scores = _per_pair("scores", scores, similarity)
    _validate.real_tensor("scores", scores)
    if scores.dtype in (torch.float32, torch.float64, torch.int64):
        return scores
    return scores.to(torch.float32 if scores.is_floating_point() else torch.int64)


def _angle_keys(
    similarity: Tensor, scores: Tensor | None, labels: Tensor | None, gate: str
) -> tuple[Tensor, Tensor | None]:
    """Return the angular objective's sort keys, and the labels that restrict its pairs (None without a restriction)."""
    _validate.one_of("gate", gate, GATES)
    if gate == "score":
        return _scores(scores, similarity), None
    labels = _per_pair("labels", labels, similarity)
    _validate.integer_tensor("labels", labels)
    labels = labels if labels.dtype == torch.int64 else labels.to(torch.int64)
    if gate == "label":
        return ~labels, None  # ~label = -label - 1 reverses the order and cannot overflow
    return _scores(scores, similarity), labels

"""Public InfoNCE loss: documentation and argument checks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _validate
from .._dtypes import as_products
from .arguments import check_alike, check_directions, check_guide, check_ignore, check_mask, check_range, check_rows
from .problem import HARDNESS, Problem, info_nce, info_nce_widths


@_validate.public
def info_nce_loss(
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    scale: float | Tensor = 20.0,
    targets: Tensor | None = None,
    ignore: Tensor | tuple[Tensor, Tensor] | None = None,
    symmetric: bool = False,
    directions: Sequence[str] = ("query_to_doc",),
    partition_mode: str = "joint",
    all_anchors: Tensor | None = None,
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
    guide: Sequence[Tensor] | None = None,
    guide_margin: float = 0.0,
    margin_strategy: str = "absolute",
    dims: Sequence[int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """InfoNCE loss with in-batch and hard negatives: mean over anchors of -log softmax(scale cos)[positive].

    The softmax of an anchor runs over the columns: all positives, then all negatives. The loss covers BeLLM (Li & Li
    2024) Eq. 6, SimCSE (Gao et al. 2021) Eq. 1 and 5, sentence-transformers' MultipleNegativesRankingLoss with cos_sim,
    and GISTEmbedLoss. Logits are computed in chunks: memory is O((N + P + M) D) plus a buffer of 64 MiB (at least one
    row of logits), on CUDA 256 MiB (at least 1,024 rows).

    Args:
        anchors: (N, D) float16, bfloat16, float32 or float64. The loss normalises the rows and differentiates through
            the normalisation. A row of norm <= 1e-8 has similarity 0 to every row, and gradient 0.
        positives: (P, D), of anchors' dtype and device.
        negatives: (M, D), or None. M need not be a multiple of N.
        scale: factor for the similarities, > 0 (the inverse of a temperature): a number, or a () tensor of any float
            dtype, which gets a gradient. On a GPU, a tensor that is not > 0 makes the loss NaN.
        targets: (N,) integers: the column that is the anchor's positive, for example in a gathered batch. Anchors may
            share a column. Default 0 … N-1, which needs P >= N. A value out of range raises ValueError on the CPU; on
            a GPU and under torch.compile it makes the loss NaN, because a check would have to wait for the device.
            Only positives are allowed with all_anchors, hardness_mode, or directions beyond query_to_doc and
            doc_to_query.
        ignore: columns that are not negatives of an anchor (false negatives): (N, P + M) bool, True to leave a column
            out; or a pair of integer tensors (anchor_ids (N,), column_ids (P + M,)), which leaves out columns with the
            anchor's id and, for all anchors, negatives of id -2**31. An anchor's own positive always counts. Ids apply
            to all directions; a bool mask allows only query_to_doc, and doc_to_query without all_anchors.
        symmetric: average both directions; in the second, anchor i is the target of its positive among all N anchors.
            Same as directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction". If `ignore`
            leaves out column targets[i] for anchor j, it also leaves out anchor j for the positive of anchor i.
        directions: "query_to_doc" plus any of these similarities: of anchor i's positive with all anchors
            ("doc_to_query"); of anchor i with all other anchors ("query_to_query"); of its positive with the positives
            and negatives of other anchors ("doc_to_doc"), or with their positives only ("positive_to_positive", as in
            GISTEmbed). If M is a multiple of P, negatives i, P + i, 2 P + i, … belong to positive i's anchor;
            otherwise negatives belong to no anchor.
        partition_mode: "joint" for one softmax over all directions, or "per_direction" for the mean of one loss per
            direction (query_to_doc and doc_to_query only).
        all_anchors: (P, D), the full set of anchors if `anchors` is a part of it; row j belongs to positive j. The
            anchor ids in `ignore` and the guide's anchors then refer to all_anchors and have P rows.
        hardness_mode, hardness_strength: add strength * cos, without a gradient, to an anchor's logits with
            "in_batch_negatives" (documents of other anchors), "hard_negatives" (its own negatives) or "all_negatives"
            (Lan et al. 2025, Eq. 5). The first two require M to be a multiple of P.
        guide: (anchors (N, G), positives (P, G)[, negatives (M, G)]), the rows of another encoder, of any float dtype.
            Pairs that the guide finds more similar than the positive pair are left out in every direction.
        guide_margin, margin_strategy: a pair is left out if its guide cosine exceeds pos - margin ("absolute") or
            pos - |pos| * margin ("relative"), where pos is the guide's cosine of the positive pair.
        dims: K increasing widths, at most D (Matryoshka prefixes, Kusupati et al. 2022): one loss per width, of the
            first dims[k] columns. Allowed with targets, ignore and symmetric only. On a CPU the widths share their
            matrix products, and backward is cheapest if the losses have equal weights.
        backend: "auto", "reference", "scan" (plain torch, a chunk of rows at a time) or "triton", which
            supports one direction; symmetric without hardness and guide; and other directions, if rows are bfloat16
            and scale is a number up to 40, without hardness, guide and all_anchors. Otherwise "auto" selects "scan".

    Returns:
        () loss, or (K,) with dims: float64 for float64 rows, otherwise float32; 0 if N = 0. Gradients have their
        input's dtype. If any row (even an ignored one) or its norm is not finite, the loss and all gradients are NaN;
        with dims this holds per width. Under torch.autocast, float32 rows are first cast to autocast's dtype, as for
        torch's matrix products; sums and the loss stay float32.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        RuntimeError: the requested backend cannot run here, or a second derivative was requested.
    """
    rows, columns = check_rows(anchors, positives, negatives, targets)
    count = rows
    if all_anchors is not None:
        check_alike("all_anchors", all_anchors, anchors)
        _validate.companion("all_anchors", all_anchors, positives.shape, "positives", positives)
        count = len(all_anchors)
    scale = _validate.learnable_scale(scale, anchors.device)
    names, joint = check_directions(directions, partition_mode, symmetric)
    if hardness_mode is not None:
        _validate.one_of("hardness_mode", hardness_mode, HARDNESS)
    strength = _validate.number("hardness_strength", hardness_strength, low=0)
    if hardness_mode in HARDNESS[:2] and columns % max(1, len(positives)):
        raise ValueError(
            f"the number of negatives must be a multiple of the {len(positives)} positives for hardness_mode "
            f"{hardness_mode!r}, got {columns - len(positives)}"
        )
    mask, anchor_ids, column_ids = check_ignore(ignore, rows if isinstance(ignore, Tensor) else count, columns, anchors)
    check_mask(mask, names, all_anchors)
    guides = check_guide(guide, count, positives, negatives)
    harder = hardness_mode is not None and strength > 0
    anchors, positives, negatives, all_anchors = as_products(anchors, positives, negatives, all_anchors)
    problem = Problem(
        anchors, positives, negatives, all_anchors, scale if isinstance(scale, Tensor) else None, None, mask,
        anchor_ids, column_ids, *guides, 1.0 if isinstance(scale, Tensor) else scale, " ".join(names), joint,
        hardness=str(hardness_mode) if harder else "", strength=strength if harder else 0.0,
        margin=_validate.number("guide_margin", guide_margin),
        relative=_validate.one_of("margin_strategy", margin_strategy, ("absolute", "relative")) == "relative",
    )  # fmt: skip
    if targets is not None:
        targets = _validate.integers("targets", targets, (rows,), "anchors", anchors).long()
        kind = "positives" if problem.target_count < columns else "positives and negatives"
        check_range(targets, problem.target_count, of=kind)
        problem = problem._replace(targets=targets)
    if dims is None:
        return info_nce(problem, backend)
    widths = _validate.widths("dims", dims, anchors.shape[1])
    if conflicts := problem.special() + ["a tensor for scale"] * (problem.learned_scale is not None):
        raise ValueError(f"dims cannot be combined with {', '.join(conflicts)}, got {_validate.describe(dims)}")
    return info_nce_widths(problem._replace(dims=widths), backend)

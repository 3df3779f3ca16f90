"""The public InfoNCE loss: what a call means."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _validate
from .._dtypes import as_products
from .arguments import check_mask, check_range, check_rows, directed, guiding, ignored, integers, like_anchors
from .autograd import info_nce
from .problem import HARDNESS, Problem
from .widths import info_nce_widths


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
    """Mean over the anchors of -log softmax(scale cos(anchor, column))[its positive]; columns are positives and
    negatives.

    BeLLM (Li & Li 2024) Eq. 6, SimCSE (Gao et al. 2021) Eq. 1 and 5, all forms of sentence-transformers'
    MultipleNegativesRankingLoss with cos_sim, and GISTEmbedLoss. Logits are made in chunks: memory is O((N + P + M) D)
    plus a buffer of 64 MiB (at least one row of logits), on CUDA 256 MiB (at least 1,024 rows).

    Args:
        anchors: (N, D) float16, bfloat16, float32 or float64. Rows are normalised here, and the gradient goes through
            it. A row of norm <= 1e-8 has similarity 0 to everything and gradient 0.
        positives: (P, D), of anchors' dtype and device.
        negatives: (M, D), or None. M need not be a multiple of N.
        scale: what similarities are multiplied by, > 0 (the inverse of a temperature). A number, or a () tensor of any
            float dtype, which is given its gradient; one that is not > 0 is a NaN loss on a GPU.
        targets: (N,) integers: which of the P + M columns (positives, then negatives) is the anchor's positive, for a
            gathered batch for example; several anchors may share one. Default 0 … N-1, which needs P >= N. Out of
            range is a ValueError on the CPU and a NaN loss on a GPU (and under torch.compile), which is not waited for.
            With all_anchors, hardness_mode or other directions than query_to_doc and doc_to_query they are positives.
        ignore: columns that are no negatives of an anchor (false negatives): (N, P + M) bool, True where the column is
            left out; or a pair of integer tensors (anchor_ids (N,), column_ids (P + M,)): left out where the ids are
            equal. An anchor's own positive always counts, whatever `ignore` says of it. Ids hold in all directions, for
            two anchors and for two columns too; a bool needs query_to_doc, alone or with doc_to_query of `anchors`.
        symmetric: the mean of both directions; in the second the positive of anchor i finds anchor i among all N. Short
            for directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction". If `ignore` leaves column
            targets[i] out for anchor j, it leaves anchor j out for the positive of anchor i.
        directions: "query_to_doc" and what else is in the softmax: similarities of anchor i's positive with all anchors
            ("doc_to_query"); of anchor i with all other anchors ("query_to_query"); of its positive with the positives
            and negatives of other anchors ("doc_to_doc"), or with their positives alone ("positive_to_positive",
            GISTEmbed's). If M is a multiple of P, negatives i, P + i, 2 P + i, … belong to positive i's anchor;
            otherwise negatives belong to no anchor.
        partition_mode: "joint", one softmax over all directions, or "per_direction", one each and their mean, for
            query_to_doc and doc_to_query alone.
        all_anchors: (P, D) anchors to be found, row j that of positive j, where `anchors` are a part of them. The ids
            of anchors in `ignore`, and the guide's anchors, are then of all_anchors, P of them.
        hardness_mode, hardness_strength: strength * cos, which no gradient goes through, is added to the logits of an
            anchor with "in_batch_negatives" (documents of other anchors), "hard_negatives" (negatives of its own) or
            "all_negatives" (Lan et al. 2025, Eq. 5). The first two need M to be a multiple of P.
        guide: (anchors (N, G), positives (P, G)[, negatives (M, G)]), the rows of another encoder, of any float dtype.
            What it finds more similar than the own pair is left out, in every direction; no gradient goes there.
        guide_margin, margin_strategy: left out is what the guide's cosine is above pos - margin ("absolute") or
            pos - |pos| * margin ("relative"), pos being that of the own pair.
        dims: K increasing widths, the last at most D: the losses of the first dims[k] columns (Matryoshka's prefixes,
            Kusupati et al. 2022), from the products of one. With targets, ignore and symmetric alone. Gradients are
            cheapest where the losses weigh the same in what is differentiated. On a GPU a loss a width.
        backend: "auto", "reference", "scan" (plain torch, a chunk of rows at a time) or "triton", which has `targets`,
            `ignore` and `symmetric` only: auto takes scan for the rest.

    Returns:
        (), or (K,) with dims, float64 for float64 rows and float32 otherwise, 0 where N = 0. Gradients have their
        input's dtype. The loss and all gradients are NaN if any row, also an ignored one, is not finite or has no
        finite norm; with dims this holds for the columns of each width. Under torch.autocast float32 rows are first
        cast to autocast's dtype, as torch's matrix products cast theirs; sums and the loss stay float32.

    Raises:
        TypeError, ValueError: naming the argument.
        RuntimeError: `backend` was named and cannot run here, or a second derivative was asked for.
    """
    rows, columns = check_rows(anchors, positives, negatives, targets)
    found = rows
    if all_anchors is not None:
        like_anchors("all_anchors", all_anchors, anchors)
        _validate.companion("all_anchors", all_anchors, positives.shape, "positives", positives)
        found = len(all_anchors)
    scale = _validate.learnable_scale(scale, anchors.device)
    names, joint = directed(directions, partition_mode, symmetric)
    if hardness_mode is not None:
        _validate.one_of("hardness_mode", hardness_mode, HARDNESS)
    strength = _validate.number("hardness_strength", hardness_strength, low=0)
    if hardness_mode in HARDNESS[:2] and columns % max(1, len(positives)):
        raise ValueError(
            f"negatives must be as many for each of the {len(positives)} positives with hardness_mode "
            f"{hardness_mode!r}, got {columns - len(positives)}"
        )
    mask, anchor_ids, column_ids = ignored(ignore, rows if isinstance(ignore, Tensor) else found, columns, anchors)
    check_mask(mask, names, all_anchors)
    guides = guiding(guide, found, positives, negatives)
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
        targets = integers("targets", targets, (rows,), anchors)
        of = "positives" if problem.target_count < columns else "positives and negatives"
        check_range(targets, problem.target_count, of=of)
        problem = problem._replace(targets=targets)
    if dims is None:
        return info_nce(problem, backend)
    widths = _validate.widths("dims", dims, anchors.shape[1])
    if more := problem.beyond_triton() or ("a tensor for scale" if problem.learnt_scale is not None else ""):
        raise ValueError(f"dims must be left out with {more}, got {_validate.describe(dims)}")
    return info_nce_widths(problem, widths, backend)

"""The public function info_nce_loss: documentation and argument checks."""

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

    The logits have a column for each positive, followed by a column for each negative, and the softmax of an anchor
    runs over all columns. The loss covers BeLLM (Li & Li 2024) Eq. 6, SimCSE (Gao et al. 2021) Eq. 1 and 5, and
    sentence-transformers' MultipleNegativesRankingLoss (with cos_sim) and GISTEmbedLoss. Logits are computed in chunks
    of rows, so the loss needs O((N + P + M) D) memory plus one buffer. The buffer takes 64 MiB or the size of one row
    of logits, whichever is larger. On CUDA, the buffer takes 256 MiB or the size of 1,024 rows, whichever is larger.

    Args:
        anchors: (N, D) float16, bfloat16, float32 or float64. The loss normalises the rows and differentiates through
            the normalisation. A row with a norm of at most 1e-8 has similarity 0 to every row, and gradient 0.
        positives: (P, D), with the dtype and device of anchors.
        negatives: (M, D) hard negatives, or None. M need not be a multiple of N.
        scale: number > 0 that multiplies the similarities (the inverse of a temperature), or a scalar float tensor,
            which gets a gradient. On a GPU and under torch.compile, a tensor that is not > 0 makes the loss NaN.
        targets: (N,) integers: for each anchor, the index of the column that is its positive, for example in a batch
            gathered from several GPUs. Anchors may share a target. The default is 0 … N-1, which requires P >= N. A
            target out of range raises ValueError on a CPU. On a GPU and under torch.compile, it makes the loss NaN,
            because a check would wait for the device. With all_anchors, hardness_mode, or a direction other than
            query_to_doc and doc_to_query, a target must be the index of a positive.
        ignore: false negatives to leave out of an anchor's negatives: an (N, P + M) bool mask, True for a column to
            leave out, or a pair of integer tensors (anchor_ids (N,), column_ids (P + M,)). With ids, every column that
            has the anchor's id is left out. In directions from documents, every column that has the id of the anchor's
            positive is left out. Columns with id -2**31 are left out for all anchors. An anchor's own positive is never
            left out. Ids work in all directions. With ids (N, K) and (P + M, K), a column is left out if any of its K
            ids equals the anchor's id at the same position. A mask works only for query_to_doc and, without
            all_anchors, for doc_to_query. doc_to_query mirrors query_to_doc: for the positive of anchor i, `ignore`
            leaves out anchor j if and only if, in query_to_doc, it leaves out column targets[i] for anchor j (because
            of a mask, equal ids or the column's id -2**31).
        symmetric: if True, average this loss with the loss in the opposite direction, in which the positive of anchor i
            is compared with all N anchors, and anchor i is its target. This is the same as directions=("query_to_doc",
            "doc_to_query") with partition_mode="per_direction".
        directions: pairs whose similarities the loss uses. "query_to_doc" (an anchor with all positives and negatives)
            is required. Optional: "doc_to_query" (an anchor's positive with all anchors), "query_to_query" (an anchor
            with all other anchors), and either "doc_to_doc" (an anchor's positive with the positives and negatives of
            other anchors) or "positive_to_positive" (an anchor's positive with only the positives of other anchors, as
            in GISTEmbed). If M is a multiple of P, negatives i, P + i, 2 P + i, … belong to the anchor of positive i.
            Otherwise, no negative belongs to any anchor.
        partition_mode: "joint" for one softmax over all directions, or "per_direction" for the mean of one loss per
            direction (query_to_doc and doc_to_query only).
        all_anchors: (P, D), all anchors in the batch, if `anchors` is only a part of them. Row j belongs to positive j.
            The anchor ids in `ignore` and the guide's anchors must then have P rows, one per row of all_anchors.
        hardness_mode, hardness_strength: add hardness_strength x cosine, as a constant without gradient, to an anchor's
            logits for "in_batch_negatives" (the documents of other anchors), "hard_negatives" (the anchor's own
            negatives) or "all_negatives" (Lan et al. 2025, Eq. 5). The first two modes require M to be a multiple of P.
        guide: (anchors (N, G), positives (P, G)[, negatives (M, G)]): embeddings of the same texts from another encoder
            (the guide), in any float dtype. In every direction, a pair is left out if its cosine under the guide is
            above the threshold that guide_margin sets.
        guide_margin, margin_strategy: set the threshold to pos - guide_margin ("absolute") or to pos - |pos| x
            guide_margin ("relative"), where pos is the cosine of the anchor and its positive under the guide.
        dims: K strictly increasing prefix widths up to D (Matryoshka embeddings, Kusupati et al. 2022). Loss k uses the
            first dims[k] dimensions of the embeddings. Of the options above, only targets, ignore and symmetric can be
            combined with dims. On a CPU, all widths share their matrix products, and backward is cheapest if you weight
            the K losses equally.
        backend: "auto", "reference", "scan" (plain torch, a chunk of rows at a time) or "triton". "triton" supports
            neither all_anchors nor several ids per row, and it supports hardness_mode and guide only for query_to_doc.
            For several directions in one softmax, "triton" requires bfloat16 rows and a scale <= 40 that is a number,
            not a tensor. On CUDA, "auto" selects "scan" for calls that "triton" does not support.

    Returns:
        Scalar loss, or (K,) losses if dims is set: float64 for float64 rows, otherwise float32. The loss is 0 if N = 0.
        Gradients have the dtype of their inputs. If any row (even an ignored one) or its norm is not finite, the loss
        and all gradients are NaN; with dims, this applies to each width separately. Under torch.autocast, float32 rows
        are first cast to autocast's dtype, as in torch's matrix products; sums and the loss stay float32.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        RuntimeError: the requested backend cannot run here, or a second derivative was requested.
    """
    rows, columns = check_rows(anchors, positives, negatives, targets)
    count = rows
    if all_anchors is not None:
        check_alike("all_anchors", all_anchors, anchors)
        _validate.companion("all_anchors", all_anchors, positives.shape, "positives", positives)
        count = all_anchors.shape[0]
    scale = _validate.learnable_scale(scale, anchors.device)
    names, joint = check_directions(directions, partition_mode, symmetric)
    if hardness_mode is not None:
        _validate.one_of("hardness_mode", hardness_mode, HARDNESS)
    strength = _validate.number("hardness_strength", hardness_strength, low=0)
    if hardness_mode in HARDNESS[:2] and columns % max(1, positives.shape[0]):
        raise ValueError(
            f"hardness_mode {hardness_mode!r} requires the number of negatives to be a multiple of the number of "
            f"positives ({positives.shape[0]}), got {columns - positives.shape[0]} negatives"
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
    conflicts = [option for option in problem.special() if option != "several ids per row"]
    if conflicts := conflicts + ["a tensor for scale"] * (problem.learned_scale is not None):
        advice = "remove dims or the conflicting options"
        raise ValueError(f"dims cannot be combined with {' or '.join(conflicts)}: {advice}")
    return info_nce_widths(problem._replace(dims=widths), backend)

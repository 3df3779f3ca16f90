"""info_nce_loss written down once more, row by row and term by term, for autograd; and calls that use its options."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.contrast_cases import mapped


def documents_of(query: int, positives: int, columns: int) -> set[int]:
    """The columns that belong to a query: its positive, and negatives where there are as many for each."""
    return set(range(query, columns, positives)) if columns % positives == 0 else {query}


def formula(
    a: Tensor, p: Tensor, n: Tensor | None = None, *, all_anchors=None, scale=20.0, targets=None, ignore=None,
    directions=("query_to_doc",), partition_mode="joint", symmetric=False, hardness_mode=None, hardness_strength=0.0,
    guide=None, guide_margin=0.0, margin_strategy="absolute",
) -> Tensor:  # fmt: skip
    """The loss by loops over Python's integers; every cosine is a dot product of its own."""

    def units(*parts):
        rows = torch.cat([x for x in parts if x is not None])
        return [row / row.norm() for row in rows]

    if symmetric:
        directions, partition_mode = ("query_to_doc", "doc_to_query"), "per_direction"
    queries, k, q = units(a), units(p, n), units(a if all_anchors is None else all_anchors)
    guided = None if guide is None else (units(guide[0]), units(*guide[1:]))
    total = a.new_zeros(())
    pools = [directions] if partition_mode == "joint" else [(name,) for name in directions]
    for i, query in enumerate(queries):
        t = i if targets is None else int(targets[i])
        o = i if all_anchors is None else t
        own_guide = None if guided is None else guided[0][o] @ guided[1][t]
        for pool in pools:
            negative = []
            for name in pool:
                side, other = name.split("_to_")
                from_document, to_document = side != "query", other != "query"
                own = t if to_document else o
                columns = k[: len(p)] if other == "positive" else k if to_document else q
                siblings = documents_of(t, len(p), len(columns)) if to_document else {o}
                for j, column in enumerate(columns):
                    cosine = (k[t] if from_document else query) @ column
                    found = j == own and from_document != to_document
                    if found and (name == "query_to_doc" or partition_mode == "per_direction"):
                        of_own = (scale * cosine).exp()
                        continue
                    if from_document == to_document and j in siblings:
                        continue
                    if not found and isinstance(ignore, tuple):
                        mine, theirs = ignore[from_document][t if from_document else o], ignore[to_document][j]
                        # doc_to_query is query_to_doc's mirror: the document's id is the one that may be -2**31
                        if mine == theirs or (mine if from_document > to_document else theirs) == -(2**31):
                            continue
                    if not found and isinstance(ignore, Tensor) and (ignore[j, t] if from_document else ignore[i, j]):
                        continue
                    if not found and guided is not None:
                        mine = guided[from_document][t if from_document else o] @ guided[to_document][j]
                        margin = guide_margin * (own_guide.abs() if margin_strategy == "relative" else 1)
                        if mine > own_guide - margin:
                            continue
                    logit = scale * cosine
                    if name == "query_to_doc" and hardness_mode is not None:
                        theirs = documents_of(t, len(p), len(k))
                        chosen = {"in_batch_negatives": j not in theirs, "all_negatives": j != t}
                        if chosen.get(hardness_mode, j in theirs and j != t):
                            logit = logit + hardness_strength * cosine.detach()
                    negative.append(logit)
            others = torch.stack(negative).exp().sum() if negative else 0 * of_own
            total = total + torch.log(1 + others / of_own)
    return total / (len(queries) * len(pools))


def cases(seed: int = 1, device: str = "cpu") -> dict[str, dict]:
    """Options by name, for 6 anchors, 7 positives, 14 negatives. Some anchors share a positive, an id."""
    seeded = torch.Generator().manual_seed(seed)
    targets = torch.tensor([3, 0, 5, 5, 6, 2])
    mask = torch.rand(6, 21, generator=seeded) < 0.3
    mask[torch.arange(6), targets] = True
    few, many = (torch.randint(4, (size,), generator=seeded) for size in (6, 21))
    every = torch.randint(4, (7,), generator=seeded)
    absent = many.clone()
    absent[7:][torch.rand(14, generator=seeded) < 0.5] = -(2**31)
    absent[5] = few[4] = every[2] = -(2**31)
    guide = [torch.randn(size, 4, generator=seeded) for size in (6, 7, 14)]
    guide_all = [torch.randn(7, 4, generator=seeded), *guide[1:]]
    all_four = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    both = ("query_to_doc", "doc_to_query")
    gist = ("query_to_doc", "query_to_query", "positive_to_positive")
    table = {
        "plain": {},
        "symmetric": {"symmetric": True, "scale": 60.0, "targets": targets, "ignore": (few, absent)},
        "mask": {"ignore": mask, "targets": targets},
        "joint-four": {"directions": all_four},
        "joint-four-targets-ids": {"directions": all_four, "targets": targets, "ignore": (few, absent), "scale": 5.0},
        "joint-queries": {"directions": ("query_to_doc", "query_to_query"), "scale": 60.0},
        "joint-both-mask": {"directions": both, "targets": targets, "ignore": mask},
        "joint-documents": {"directions": ("doc_to_doc", "query_to_doc"), "targets": targets},
        "joint-positives": {"directions": gist, "targets": targets, "scale": 5.0},
        "each-all-anchors": {"directions": both, "partition_mode": "per_direction", "all_anchors": True,
                             "targets": targets, "ignore": (every, many)},
        "joint-all-anchors": {"directions": all_four, "all_anchors": True, "targets": targets, "scale": 4.0},
        "in-batch": {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0, "targets": targets},
        "hard": {"hardness_mode": "hard_negatives", "hardness_strength": 9.0, "ignore": mask},
        "all-hard": {"hardness_mode": "all_negatives", "hardness_strength": 30.0, "ignore": (few, absent)},
        "all-hard-joint": {"hardness_mode": "all_negatives", "hardness_strength": 30.0, "directions": all_four},
        "hard-each": {"hardness_mode": "hard_negatives", "hardness_strength": 5.0, "directions": both,
                      "partition_mode": "per_direction", "ignore": (few, absent)},
        "guided": {"guide": guide, "guide_margin": 0.1},
        "guided-mask-hard": {"guide": guide, "targets": targets, "ignore": mask, "guide_margin": 0.3,
                             "hardness_mode": "hard_negatives", "hardness_strength": 4.0},
        "guided-gist": {"guide": guide, "guide_margin": 0.2, "margin_strategy": "relative", "directions": gist},
        "guided-four": {"guide": guide_all, "directions": all_four, "all_anchors": True, "targets": targets},
        "guided-each": {"guide": guide, "symmetric": True, "ignore": mask, "guide_margin": -0.2, "targets": targets},
        "guided-hard": {"guide": guide, "scale": 5.0, "directions": gist, "hardness_mode": "all_negatives",
                        "hardness_strength": 2.0, "ignore": (few, many)},
    }  # fmt: skip
    return mapped(table, lambda x: x.to(device))


def loss_of(call, leaves, given, learned=True, **more):
    """call's loss, of leaves in leaves_of's order."""
    given = dict(given)
    if learned:
        *leaves, given["scale"] = leaves
    if "all_anchors" in given:
        given["all_anchors"] = leaves[3]
    return call(*leaves[:3], **given, **more)

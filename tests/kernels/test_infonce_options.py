"""The options of info_nce_loss's forms: sentence-transformers' give what theirs give, wrong ones are errors."""

from __future__ import annotations

import math

import pytest
import torch

from raoe_kernels import info_nce_loss
from tests.kernels.test_infonce_forms import FOUR

A, P, N = torch.rand(3, 4), torch.rand(3, 4), torch.rand(2, 4)
I3 = torch.arange(3)
BOTH = ("query_to_doc", "doc_to_query")
WRONG = [
    ({"scale": torch.tensor(-1.0)}, ValueError, r"scale must be a finite number > 0, got -1.0"),
    ({"scale": torch.ones(1)}, ValueError, r"scale must be a number or a \(\) float tensor on cpu.*\(1,\)"),
    ({"scale": torch.tensor(3)}, ValueError, "scale must be a number or a .* float tensor .*int64"),
    ({"scale": torch.tensor(3.0, device="meta")}, ValueError, "scale must be a number or .* on cpu.*meta"),
    ({"directions": "query_to_doc"}, TypeError, "directions must be a tuple of names, got 'query_to_doc'"),
    ({"directions": ("query_to_doc", "up")}, ValueError, "directions must be one of 'query_to_doc'.*got 'up'"),
    ({"directions": ("doc_to_doc",)}, ValueError, r"directions must include query_to_doc .*got \('doc_to_doc',\)"),
    ({"directions": ("query_to_doc",) * 2}, ValueError, "directions must include query_to_doc"),
    ({"directions": (*FOUR, "positive_to_positive")}, ValueError, "must not hold both doc_to_doc and positive"),
    ({"partition_mode": "each"}, ValueError, "partition_mode must be one of 'joint', 'per_direction', got 'each'"),
    ({"partition_mode": "per_direction", "directions": FOUR}, ValueError, "partition_mode 'per_direction' allows only"),
    ({"symmetric": True, "directions": BOTH}, ValueError, "symmetric sets directions and partition_mode"),
    ({"symmetric": True, "partition_mode": "per_direction"}, ValueError, "symmetric sets .* 'per_direction'"),
    ({"all_anchors": A[:2]}, ValueError, r"all_anchors must have shape \(3, 4\).*\(2, 4\)"),
    ({"all_anchors": A.double()}, ValueError, "all_anchors must have the same number of columns, dtype.*float64"),
    ({"all_anchors": A, "targets": I3 + 2}, ValueError, "targets must be columns 0 … 2 of positives, got 2 … 4"),
    ({"directions": FOUR, "targets": I3 + 2}, ValueError, "targets must be columns 0 … 2 of positives, got 2 … 4"),
    ({"hardness_mode": "hardest"}, ValueError, "hardness_mode must be one of 'in_batch_negatives'.*got 'hardest'"),
    ({"hardness_mode": "all_negatives", "hardness_strength": -1}, ValueError, "hardness_strength must .* >= 0, got -1"),
    ({"hardness_mode": "hard_negatives"}, ValueError, "negatives must be a multiple of the 3 positives .* got 2"),
    ({"hardness_mode": "in_batch_negatives"}, ValueError, "negatives must be a multiple .*'in_batch_negatives', got 2"),
    ({"guide": (A, P)}, TypeError, r"guide must be .*\(anchors, positives, negatives\), got 2 elements"),
    ({"guide": A}, TypeError, "guide must be a tuple of tensors .*got float32 tensor"),
    ({"guide": (A, P[:2], N)}, ValueError, r"guide\[1\] must have shape \(3, 4\).*\(2, 4\)"),
    ({"guide": (A, P, N[:, :3])}, ValueError, r"guide\[2\] must have shape \(2, 4\).*\(2, 3\)"),
    ({"guide": (A, P, N.half())}, ValueError, r"guide\[2\] must have guide\[0\]'s dtype .*float16"),
    ({"guide": (A.long(), P, N)}, TypeError, r"guide\[0\] must be float16.*int64"),
    ({"guide": (A, P, N), "guide_margin": math.inf}, ValueError, "guide_margin must be a finite number, got inf"),
    ({"margin_strategy": "none"}, ValueError, "margin_strategy must be one of 'absolute', 'relative', got 'none'"),
    ({"ignore": torch.ones(3, 5) > 0, "directions": FOUR}, ValueError, "ignore must be a pair of id tensors, not a"),
    ({"ignore": torch.ones(3, 5) > 0, "directions": BOTH, "all_anchors": A}, ValueError, "ignore .* of all_anchors"),
]


@pytest.mark.parametrize("given, kind, message", WRONG, ids=range(len(WRONG)))
def test_wrong(given, kind, message):
    with pytest.raises(kind, match=message):
        info_nce_loss(A, P, N, **given)

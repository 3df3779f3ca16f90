"""Wrong options of info_nce_loss's forms. Their values: test_infonce_forms.py and tests/losses."""

import math

import pytest
import torch

from raoe_kernels import info_nce_loss, sigmoid_loss
from tests.kernels.test_infonce_forms import FOUR

A, P, N = torch.rand(3, 4), torch.rand(3, 4), torch.rand(2, 4)
I3 = torch.arange(3)
BOTH = ("query_to_doc", "doc_to_query")
WRONG = [
    ({"scale": torch.tensor(-1.0)}, ValueError, "scale"),
    ({"scale": torch.ones(1)}, ValueError, "scale"),
    ({"scale": torch.tensor(3)}, ValueError, "scale"),
    ({"scale": torch.tensor(3.0, device="meta")}, ValueError, "scale"),
    ({"directions": "query_to_doc"}, TypeError, "directions"),
    ({"directions": ("query_to_doc", "up")}, ValueError, "directions must be one of"),
    ({"directions": ("doc_to_doc",)}, ValueError, "directions must include query_to_doc"),
    ({"directions": ("query_to_doc",) * 2}, ValueError, "directions"),
    ({"directions": (*FOUR, "positive_to_positive")}, ValueError, "must not contain both doc_to_doc and positive"),
    ({"partition_mode": "each"}, ValueError, "partition_mode"),
    ({"partition_mode": "per_direction", "directions": FOUR}, ValueError, "partition_mode"),
    ({"symmetric": True, "directions": BOTH}, ValueError, "symmetric"),
    ({"symmetric": True, "partition_mode": "per_direction"}, ValueError, "symmetric"),
    ({"all_anchors": A[:2]}, ValueError, "all_anchors"),
    ({"all_anchors": A.double()}, ValueError, "all_anchors"),
    ({"all_anchors": A, "targets": I3 + 2}, ValueError, "column indices 0 … 2 .* of positives"),
    ({"directions": FOUR, "targets": I3 + 2}, ValueError, "column indices 0 … 2 .* of positives"),
    ({"hardness_mode": "hardest"}, ValueError, "hardness_mode"),
    ({"hardness_mode": "all_negatives", "hardness_strength": -1}, ValueError, "hardness_strength"),
    ({"hardness_mode": "hard_negatives"}, ValueError, r"multiple of the number of positives \(3\), got"),
    ({"guide": (A, P)}, TypeError, "guide"),
    ({"guide": A}, TypeError, "guide"),
    ({"guide": (A, P[:2], N)}, ValueError, r"guide\[1\]"),
    ({"guide": (A, P, N.half())}, ValueError, r"guide\[2\]"),
    ({"guide": (A.long(), P, N)}, TypeError, r"guide\[0\]"),
    ({"guide": (A, P, N), "guide_margin": math.inf}, ValueError, "guide_margin"),
    ({"margin_strategy": "none"}, ValueError, "margin_strategy"),
    ({"ignore": torch.ones(3, 5) > 0, "directions": FOUR}, ValueError, "ignore"),
    ({"ignore": torch.ones(3, 5) > 0, "directions": BOTH, "all_anchors": A}, ValueError, "ignore"),
    ({"dims": (4, 2)}, ValueError, "dims must be strictly increasing"),
    ({"dims": (2,), "directions": ("query_to_doc", "query_to_query")}, ValueError, "dims"),
    ({"dims": (2,), "scale": torch.tensor(20.0)}, ValueError, "dims"),
    ({"dims": (2,), "guide": (A, P, N)}, ValueError, "dims"),
    ({"dims": (2,), "hardness_mode": "all_negatives", "hardness_strength": 1.0}, ValueError, "dims"),
]


@pytest.mark.parametrize("given, kind, key", WRONG, ids=range(len(WRONG)))
def test_wrong(given, kind, key):
    with pytest.raises(kind, match=key):
        info_nce_loss(A, P, N, **given)


@pytest.mark.parametrize("form", [{}, {"symmetric": True}, {"dims": (5, 16)}, "sigmoid"])
def test_several_ids_of_a_row_equal_the_mask_of_their_pairs(form, place):
    """A column is left out if one of its ids equals the anchor's id in the same place."""
    device, backend = place
    generator = torch.Generator().manual_seed(0)
    rows, loss = torch.randn(3, 6, 16, generator=generator, dtype=torch.float64).to(device), info_nce_loss
    ids = [torch.randint(3, (count, 2), generator=generator).to(device) for count in (6, 12)]
    ids[1][7] = -(2**31)
    mask = (ids[0][:, None] == ids[1]).any(-1) | (ids[1][:, 0] == -(2**31))
    assert 6 < mask.sum() < 60
    if form == "sigmoid":
        loss, form = sigmoid_loss, {}
    values = []
    for ignore in (mask, tuple(ids)):
        leaves = [each.clone().requires_grad_() for each in rows]
        if backend == "triton" and ignore is not mask:
            with pytest.raises(RuntimeError, match="several ids per row"):
                loss(*leaves, ignore=ignore, backend=backend, **form)
            return
        if backend != "native":
            value = loss(*leaves, ignore=ignore, backend=backend, **form).sum()
            gradients = torch.autograd.grad(value, leaves)
            values += [torch.cat([value.detach()[None], *(each.flatten() for each in gradients)])]
    assert not values or torch.equal(*values)

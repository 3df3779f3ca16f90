"""Tiny cases whose active pairs were written down by hand from the papers' definitions, on every backend."""

import math

import pytest
import torch

from raoe_kernels import gated_angular_loss, rank_margin_loss

C = [0.5, 0.2, 0.9, -0.3]
INF = math.inf

# scores, ties, margin, the pairs (i, j) with r_j - r_i > margin
RANK = [
    ([1, 2, 3, 4], "average", 0, [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
    ([1, 2, 3, 4], "average", 1, [(0, 2), (0, 3), (1, 3)]),
    ([1, 2, 3, 4], "average", 0.99, [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
    ([1, 2, 3, 4], "average", 2, [(0, 3)]),
    ([7, 7, 7, 7], "average", 0, []),
    ([7, 7, 7, 7], "ordinal", 0, [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
    # 1 1 2 3: average ranks 0.5 0.5 2 3, min 0 0 2 3, max 1 1 2 3, dense 0 0 1 2, ordinal 0 1 2 3
    ([1, 1, 2, 3], "average", 1, [(0, 2), (0, 3), (1, 2), (1, 3)]),
    ([1, 1, 2, 3], "average", 1.5, [(0, 3), (1, 3)]),
    ([1, 1, 2, 3], "min", 2, [(0, 3), (1, 3)]),
    ([1, 1, 2, 3], "max", 1, [(0, 3), (1, 3)]),
    ([1, 1, 2, 3], "dense", 1, [(0, 3), (1, 3)]),
    ([1, 1, 2, 3], "ordinal", 1, [(0, 2), (0, 3), (1, 3)]),
    # 1 3 3 3: average ranks 0 2 2 2, max 0 3 3 3, min 0 1 1 1
    ([1, 3, 3, 3], "average", 1.5, [(0, 1), (0, 2), (0, 3)]),
    ([1, 3, 3, 3], "max", 2.5, [(0, 1), (0, 2), (0, 3)]),
    ([-INF, 0.0, -0.0, INF], "average", 0, [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]),
    ([1, 2, 3, 4], "average", 1e300, []),
]

# scores, labels, gate, the pairs (i, j) with l_i > l_j and/or s_i < s_j
GATED = [
    ([1, 2, 3, 4], [2, 1, 0, 0], "label+score", [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]),
    ([4, 3, 2, 1], [2, 1, 0, 0], "label+score", []),
    ([1, 2, 2, 4], [1, 0, 1, 0], "label+score", [(0, 1), (0, 3), (2, 3)]),
    ([3, 1, 2, 2], [0, 2, -7, 1], "label+score", [(1, 2), (1, 3), (1, 0), (3, 0)]),
    ([1, 2, 3, 4], [2**63 - 1, 0, -(2**63), 5], "label+score", [(0, 1), (0, 2), (0, 3), (1, 2)]),
    ([1, 2, 2, 4], [9, 9, 9, 9], "score", [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]),
    ([1, 2, 2, 4], [0, 1, 1, 2], "label", [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)]),
    ([1, 1, 1, 1], [2**62, -(2**63), 0, 2**63 - 1], "label", [(0, 1), (0, 2), (2, 1), (3, 0), (3, 1), (3, 2)]),
]


def tensors(device, *values):
    types = [torch.float64, torch.float64, torch.int64]
    return [torch.tensor(v, dtype=t, device=device) for v, t in zip(values, types, strict=False)]


def expected(values, pairs, scale):
    """log(1 + sum exp(scale (v_i - v_j))) and its gradient by v, over the pairs as listed."""
    weights = {(i, j): math.exp(scale * (values[i] - values[j])) for i, j in pairs}
    z = 1 + sum(weights.values())
    gradient = [0.0] * len(values)
    for (i, j), w in weights.items():
        gradient[i] += scale * w / z
        gradient[j] -= scale * w / z
    return math.log(z), gradient


@pytest.mark.parametrize("scores,ties,margin,pairs", RANK)
def test_rank_margin(scores, ties, margin, pairs, place):
    device, backend = place
    c, s = tensors(device, C, scores)
    c.requires_grad_()
    loss = rank_margin_loss(c, s, margin=margin, scale=3.0, ties=ties, backend=backend)
    loss.backward()
    value, gradient = expected(C, pairs, 3.0)
    assert loss.item() == pytest.approx(value, rel=1e-12, abs=0)
    assert c.grad.tolist() == pytest.approx(gradient, rel=1e-11, abs=1e-13)
    if not pairs:
        assert loss.item() == 0 and c.grad.eq(0).all()


@pytest.mark.parametrize("scores,labels,gate,pairs", GATED)
def test_gated_angular(scores, labels, gate, pairs, place):
    device, backend = place
    c, s, l = tensors(device, C, scores, labels)
    c.requires_grad_()
    loss = gated_angular_loss(c, s, l, scale=3.0, gate=gate, backend=backend)
    loss.backward()
    value, gradient = expected([-math.acos(x) for x in C], pairs, 3.0)  # scale (theta_j - theta_i)
    gradient = [g / math.sqrt(1 - x * x) for g, x in zip(gradient, C, strict=True)]
    assert loss.item() == pytest.approx(value, rel=1e-12, abs=0)
    assert c.grad.tolist() == pytest.approx(gradient, rel=1e-11, abs=1e-13)

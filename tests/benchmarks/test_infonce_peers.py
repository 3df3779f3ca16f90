"""Fused cross entropies of other libraries used as InfoNCE, with stand-ins of the same signature."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from benchmarks.ops import infonce
from raoe_kernels import info_nce_loss


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    def forward(self, lin_weight, _input, target, bias=None):
        return F.cross_entropy(_input @ lin_weight.T, target)


def chunked_linear_cross_entropy(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True):
    return F.cross_entropy(x @ weight.T, target, reduction=reduction)


def linear_cross_entropy(e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False,
                         filter_eps="high", impl="cce"):  # fmt: skip
    assert filter_eps is None and impl == "cce"
    return F.cross_entropy(e @ c.T, targets, reduction=reduction)


STAND_INS = {
    "Liger fused linear cross entropy": ("liger_kernel.transformers", LigerFusedLinearCrossEntropyLoss),
    "QuACK chunked linear cross entropy": ("quack.linear_cross_entropy", chunked_linear_cross_entropy),
    "ml-cross-entropy, exact": ("cut_cross_entropy", linear_cross_entropy),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_a_fused_linear_cross_entropy_is_info_nce(name, monkeypatch):
    path, thing = STAND_INS[name]
    for i in range(1, path.count(".") + 2):
        part = ".".join(path.split(".")[:i])
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    setattr(sys.modules[path], thing.__name__, thing)
    a, p, n = (torch.randn(5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    loss, expected = infonce.GPU_PEERS[name]()(a, p, n), info_nce_loss(a, p, n, scale=infonce.SCALE)
    torch.testing.assert_close(loss, expected)
    for x, y in zip(torch.autograd.grad(loss, (a, p, n)), torch.autograd.grad(expected, (a, p, n)), strict=True):
        torch.testing.assert_close(x, y)


def test_missing_peers_are_named(monkeypatch):
    assert set(infonce.GPU_PEERS) <= set(infonce.case(4, "cpu").missing)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, dtype=None: self)  # not a real GPU
    case = infonce.case(4, "cuda")
    for name in STAND_INS:
        assert "No module named" in case.missing[name] and name not in case.contenders

"""raoe_loss, both objectives with their gradient, against sentence-transformers' CoSENTLoss (one objective) and others.

All contenders get the same similarities and scores and run forward + backward. "floor" is an autograd.Function that
computes nothing; "sort" is torch.sort of the scores alone, without any loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.timing import Call
from raoe_kernels import backends, raoe_loss
from raoe_kernels.pairwise import params, scan

SIZES = {"cpu": [512, 8192, 131072, 1 << 20], "cuda": [64, 512, 4096, 8192, 131072, 1 << 20]}
HUGE = 1 << 24
REFERENCE_UP_TO = 8192  # B x B float32 matrices beyond it do not fit
OURS = ("native", "triton", "scan", "reference")


class _Floor(torch.autograd.Function):
    """What autograd and Python cost around a loss that is free."""

    @staticmethod
    def forward(ctx, similarity):
        ctx.save_for_backward(similarity)
        return similarity.new_zeros(())

    @staticmethod
    def backward(ctx, upstream):
        return ctx.saved_tensors[0]


def inputs(pairs: int, device: str) -> tuple[torch.Tensor, ...]:
    """Similarities and scores that agree about as well as in training, three labels that follow the scores loosely."""
    seeded = torch.Generator().manual_seed(pairs)
    scores = torch.rand(pairs, generator=seeded)
    similarity = (scores + 0.3 * torch.randn(pairs, generator=seeded)).clamp(-1, 1)
    labels = (2.999 * (1 - scores + 0.3 * torch.randn(pairs, generator=seeded)).clamp(0, 1)).long()
    return similarity.to(device).requires_grad_(), scores.to(device), labels.to(device)


def step(loss: Callable[[torch.Tensor], torch.Tensor], similarity: torch.Tensor) -> Call:
    def call() -> None:
        similarity.grad = None
        loss(similarity).backward()

    return call


def _compiled_scan(scores: torch.Tensor, labels: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """torch.compile of our scan, told the number of labels so that it need not assume any."""
    constants = params.make(True, True, 20.0, margin=2)

    @torch.compile(fullgraph=True, dynamic=False)
    def both(similarity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses, grads = scan.forward(similarity, scores, labels, constants, True, classes=3)
        return losses, grads

    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, similarity):
            loss, grad = both(similarity.detach())
            ctx.save_for_backward(grad)
            return loss

        @staticmethod
        def backward(ctx, upstream):
            return ctx.saved_tensors[0] * upstream

    return Scan.apply


def contenders(pairs: int, device: str) -> dict[str, Call]:
    similarity, scores, labels = inputs(pairs, device)
    available = backends(device)["raoe_loss"]
    result: dict[str, Call] = {}
    for name in OURS:
        if available[name] is not True or (name == "triton" and device == "cpu"):
            continue
        if name == "reference" and pairs > REFERENCE_UP_TO:
            continue
        result[f"raoe_loss {name}"] = step(lambda c, name=name: raoe_loss(c, scores, labels, backend=name), similarity)
    if pairs < HUGE:
        result["compiled scan"] = step(_compiled_scan(scores, labels), similarity)
        result["CoSENTLoss"] = step(_cosent(scores), similarity)
        result["floor"] = step(_Floor.apply, similarity)
        result["sort"] = lambda: torch.sort(scores)
    return result


def _cosent(scores: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """sentence-transformers' own class, handed ready similarities."""
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss

    loss = CoSENTLoss(model=torch.nn.Identity(), similarity_fct=lambda a, b: a)
    return lambda similarity: loss.compute_loss_from_embeddings([similarity, similarity], scores)

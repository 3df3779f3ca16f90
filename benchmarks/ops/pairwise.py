"""raoe_loss, both objectives with their gradient, against sentence-transformers' CoSENTLoss (one objective) and others.

All contenders get the same similarities and scores and run forward + backward. "floor" is an autograd.Function that
computes nothing; "sort" is only torch.sort of the scores. On a CPU some sizes are also timed "in a step": each call
follows matrix products, which fill the caches with other data and leave torch's threads spinning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.case import COPIES, Call, Case, ours
from raoe_kernels import raoe_loss
from raoe_kernels.pairwise import scan
from raoe_kernels.pairwise.problem import Problem, constants

SIZES = {"cpu": [512, 8192, 131072, 1 << 20], "cuda": [64, 512, 4096, 8192, 131072, 1 << 20]}
HUGE = 1 << 24
IN_STEP_UP_TO = 8192
REFERENCE_UP_TO = 8192  # most pairs whose B x B float32 matrices fit into memory
TESTS = ["tests/kernels/test_pairwise_by_hand.py", "tests/kernels/test_pairwise_conformance.py"]


class _Floor(torch.autograd.Function):
    """A loss without computation: the cost of autograd and Python alone."""

    @staticmethod
    def forward(ctx, similarity):
        ctx.save_for_backward(similarity)
        return similarity.new_zeros(())

    @staticmethod
    def backward(ctx, upstream):
        return ctx.saved_tensors[0]


def inputs(pairs: int, device: str, copy: int = 0) -> tuple[torch.Tensor, ...]:
    """Return similarities and scores that agree about as well as in training, and three labels that roughly follow."""
    seeded = torch.Generator().manual_seed(pairs + copy)
    scores = torch.rand(pairs, generator=seeded)
    similarity = (scores + 0.3 * torch.randn(pairs, generator=seeded)).clamp(-1, 1)
    labels = (2.999 * (1 - scores + 0.3 * torch.randn(pairs, generator=seeded)).clamp(0, 1)).long()
    return similarity.to(device).requires_grad_(), scores.to(device), labels.to(device)


def least(pairs: int, device: str) -> tuple[int, int]:
    """Return bytes: similarity, score and label are read, the gradient is written and scaled by another pass."""
    return pairs * (4 + 4 + 8 + 4 + 8), 0


def case(pairs: int, device: str) -> Case:
    copies = [inputs(pairs, device, copy) for copy in range(COPIES)]

    def step(loss: Callable[..., torch.Tensor]) -> Call:
        def call(i: int) -> None:
            similarity, scores, labels = copies[i % COPIES]
            similarity.grad = None
            loss(similarity, scores, labels).backward()

        return call

    result: dict[str, Call] = {}
    for name in ours("raoe_loss", device) + ["reference"] * (pairs <= REFERENCE_UP_TO):
        result[f"raoe_loss {name}"] = step(lambda c, s, l, name=name: raoe_loss(c, s, l, backend=name))
    missing = {}
    if pairs < HUGE:
        result["compiled scan"] = step(_compiled_scan())
        try:
            result["CoSENTLoss"] = step(_cosent(pairs))
        except (ImportError, MemoryError) as error:
            missing["CoSENTLoss"] = str(error)
        result["floor"] = step(lambda c, s, l: _Floor.apply(c))
        result["sort"] = lambda i: torch.sort(copies[i % COPIES][1])
    return Case(f"{pairs:,} pairs, forward + backward", result, *least(pairs, device), missing)


def cases(pairs: int, device: str) -> list[Case]:
    """Return the case in a tight loop, and on a CPU also the case in a training step."""
    alone = case(pairs, device)
    if device != "cpu" or pairs > IN_STEP_UP_TO:
        return [alone]
    x, w = torch.randn(512, 768), torch.randn(768, 3072)

    def products(i: int) -> None:
        for _ in range(2):
            x.copy_(x @ w @ w.T).div_(x.abs().max())

    peers = [name for name in alone.contenders if name.split()[-1] in ("native", "CoSENTLoss", "floor")]
    contenders = {f"{name} in a step": alone.contenders[name] for name in peers}
    return [alone, replace(alone, title=f"{alone.title}, in a step", contenders=contenders, before=products)]


def _compiled_scan() -> Callable[..., torch.Tensor]:
    """torch.compile of our scan, with the number of labels, so that it need not assume the worst case."""
    fields = constants(True, True, 20.0, margin=2)

    @torch.compile(fullgraph=True, dynamic=False)
    def both(similarity, scores, labels) -> tuple[torch.Tensor, torch.Tensor]:
        loss, (grad,) = scan.forward(Problem(similarity, scores, labels, *fields), (True,), classes=3)
        return loss, grad

    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, similarity, scores, labels):
            loss, grad = both(similarity.detach(), scores, labels)
            ctx.save_for_backward(grad)
            return loss

        @staticmethod
        def backward(ctx, upstream):
            return ctx.saved_tensors[0] * upstream, None, None

    return Scan.apply


def _cosent(pairs: int) -> Callable[..., torch.Tensor]:
    """sentence-transformers' own class with precomputed similarities."""
    import sentence_transformers
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss

    version = sentence_transformers.__version__
    if pairs > REFERENCE_UP_TO and tuple(map(int, version.split(".")[:2])) < (6, 2):
        raise MemoryError(f"sentence-transformers {version} makes B x B matrices, several of {4e-9 * pairs**2:.0f} GB")
    loss = CoSENTLoss(model=torch.nn.Identity(), similarity_fct=lambda a, b: a)
    return lambda c, s, l: loss.compute_loss_from_embeddings([c, c], s)

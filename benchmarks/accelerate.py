"""sentence-transformers' losses and the same ones given to raoe_train.accelerate, on ready embeddings: are they equal,
what do they hold at their peak, how long do they take.

Each case's title says how far losses and gradients of theirs and of ours are from theirs in float64, as shares of the
largest number; where ours is further than theirs and than rounding, nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sentence_transformers.sentence_transformer import losses

from benchmarks.case import Call, Case
from raoe_train import accelerate

SIZES = {"cpu": [64, 512, 4096], "cuda": [64, 512, 4096, 16384]}
COLUMNS = 384
TESTS = ["tests/losses/test_accelerated.py"]
GTE = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
# name: (loss, columns of texts, whether it reads scores)
LOSSES: dict[str, tuple[Any, int, bool]] = {
    "CoSENTLoss": (losses.CoSENTLoss, 2, True),
    "AnglELoss": (losses.AnglELoss, 2, True),
    "MultipleNegativesRankingLoss": (losses.MultipleNegativesRankingLoss, 3, False),
    "MultipleNegativesRankingLoss, four directions": (
        lambda model: losses.MultipleNegativesRankingLoss(model, directions=GTE), 3, False
    ),
    "CachedMultipleNegativesRankingLoss": (
        lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=64), 3, False
    ),
}  # fmt: skip


def embeddings(rows: int, columns: int, device: str) -> list[torch.Tensor]:
    """Columns of unit rows that resemble their anchors."""
    seeded = torch.Generator().manual_seed(rows)
    first = torch.randn(rows, COLUMNS, generator=seeded)
    noisy = [first + n * torch.randn(rows, COLUMNS, generator=seeded) for n in range(columns)]
    return [torch.nn.functional.normalize(x).to(device).requires_grad_() for x in noisy]


def differentiated(loss: Any, columns: list[torch.Tensor], scores: torch.Tensor | None) -> torch.Tensor:
    """The loss, whose gradients are in the columns."""
    for x in columns:
        x.grad = None
    if hasattr(loss, "calculate_loss"):
        return loss.calculate_loss([[x] for x in columns], with_backward=True)
    value = loss.compute_loss_from_embeddings(columns, scores)
    value.backward()
    return value.detach()


def away(loss: Any, columns: list[torch.Tensor], scores: torch.Tensor | None, truth: list[torch.Tensor]) -> float:
    """How far the loss and its gradients are from the truth, the largest share of a tensor's largest number."""
    found = [differentiated(loss, columns, scores), *(x.grad for x in columns)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True))


def cases(rows: int, device: str) -> Iterator[Case]:
    scores = torch.rand(rows, generator=torch.Generator().manual_seed(1)).to(device)
    for name, (made, number, scored) in LOSSES.items():
        theirs = made(torch.nn.ModuleList([torch.nn.Identity()]))  # an encoder that nobody asks
        ours = accelerate(theirs)
        columns, given = embeddings(rows, number, device), scores if scored else None
        exact = [x.detach().double().requires_grad_() for x in columns]
        truth = [differentiated(theirs, exact, given), *(x.grad for x in exact)]
        of_theirs, of_ours = (away(loss, columns, given, truth) for loss in (theirs, ours))
        if of_ours > max(2 * of_theirs, 1e-6):
            raise AssertionError(f"{name} of {rows} rows: ours is {of_ours:.1e} from float64, theirs {of_theirs:.1e}")
        del truth, exact

        def call(loss: Any, columns: list[torch.Tensor] = columns, given: Any = given) -> Call:
            return lambda i: differentiated(loss, columns, given)

        yield Case(
            f"{name}, {rows:,} rows; from float64: accelerated {of_ours:.0e}, theirs {of_theirs:.0e}",
            {"accelerated": call(ours), "sentence-transformers": call(theirs)},
            bytes=2 * sum(x.nbytes for x in columns),
            once=device == "cpu" and rows > 2048 and not scored,
        )

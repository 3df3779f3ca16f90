"""RAOELoss of 64 pairs and M remembered ones, on ready embeddings, with gradients, against the same without a memory
and against sentence-transformers' CoSENTLoss of a batch of 64 + M: its cosines and loss alone, without its encoder.
"""

from __future__ import annotations

import torch
from sentence_transformers.sentence_transformer.losses import CoSENTLoss

from benchmarks.case import Call, Case
from raoe_train.losses import RAOELoss

SIZES = {"cpu": [512, 4096, 65536], "cuda": [512, 4096, 65536]}
BATCH, COLUMNS = 64, 384
TESTS = ["tests/losses/test_pair_memory.py"]


def case(size: int, device: str) -> Case:
    """`size` is M; the memory is full before anything is timed."""
    seeded = torch.Generator().manual_seed(size)
    scores = torch.rand(BATCH + size, generator=seeded).to(device)
    labels = (2.999 * (1 - scores)).long()
    a = torch.randn(BATCH + size, COLUMNS, generator=seeded)
    b = a + torch.randn(BATCH + size, COLUMNS, generator=seeded)
    whole = [x.to(device).requires_grad_() for x in (a, b)]
    small = [x.detach()[:BATCH].clone().requires_grad_() for x in whole]
    targets = {"score": scores[:BATCH], "label": labels[:BATCH]}
    remembering, alone, theirs = RAOELoss(None, memory_size=size), RAOELoss(None), CoSENTLoss(None)
    for start in range(0, size, BATCH):
        rows = slice(start, start + BATCH)
        remembering.compute_loss_from_embeddings(
            [x[rows] for x in whole], {"score": scores[rows], "label": labels[rows]}
        )

    def step(loss: RAOELoss) -> Call:
        def call(i: int) -> None:
            for x in small:
                x.grad = None
            torch.stack([*loss.compute_loss_from_embeddings(small, targets).values()]).sum().backward()

        return call

    def large(i: int) -> None:
        for x in whole:
            x.grad = None
        theirs.compute_loss_from_embeddings(whole, scores).backward()

    contenders = {
        f"RAOELoss, memory of {size:,}": step(remembering),
        "RAOELoss of the batch": step(alone),
        f"CoSENTLoss of {BATCH + size:,} pairs": large,
    }
    return Case(f"{BATCH} pairs and {size:,} of earlier steps, forward + backward", contenders, 12 * size)

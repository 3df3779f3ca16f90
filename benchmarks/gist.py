"""info_nce_loss with a guide (GISTEmbed), one hard negative per anchor and gradients of all three matrices, against
sentence-transformers' CachedGISTEmbedLoss on precomputed embeddings.

CachedGISTEmbedLoss multiplies every pair of rows elementwise, which takes a tensor of rows x columns x width for each
mini-batch, so it runs with its default mini-batches of 32 rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Call, Case
from raoe_kernels import info_nce_loss

SIZES = {"cpu": [512, 4096], "cuda": [512, 4096, 16384]}
COLUMNS = {"cpu": 384, "cuda": 768}
TESTS = ["tests/kernels/test_infonce_forms.py", "tests/kernels/test_infonce_options.py"]
SCALE, MARGIN, MINI_BATCH = 20.0, 0.05, 32
ONCE_FROM = 4096  # rows from which calls are timed once on a CPU, where CachedGISTEmbedLoss takes minutes
THEIRS_UP_TO = {"cpu": 4096, "cuda": 4096}


def case(rows: int, device: str) -> Case:
    """Compare anchors also with other anchors, and positives with positives, as GISTEmbed does. The guide's rows have
    another width and similar distances."""
    seeded, width = torch.Generator().manual_seed(rows), COLUMNS[device]
    sizes = [width] * 3 + [width // 2] * 3
    bases = {columns: torch.randn(rows, columns, generator=seeded) for columns in sizes}
    matrices = [
        (bases[columns] + noise * torch.randn(rows, columns, generator=seeded)).to(device)
        for columns, noise in zip(sizes, (0, 0.5, 1) * 2, strict=True)
    ]
    leaves, guide = [x.requires_grad_() for x in matrices[:3]], matrices[3:]

    def ours(i: int) -> None:
        for x in leaves:
            x.grad = None
        directions = ("query_to_doc", "query_to_query", "positive_to_positive")
        info_nce_loss(*leaves, scale=SCALE, directions=directions, guide=guide, guide_margin=MARGIN).backward()

    contenders, missing = {"info_nce_loss": ours}, {}
    if rows > THEIRS_UP_TO[device]:
        missing["CachedGISTEmbedLoss"] = f"not timed beyond {THEIRS_UP_TO[device]:,} anchors"
    else:
        try:
            contenders["CachedGISTEmbedLoss"] = _theirs(leaves, guide)
        except ImportError as error:
            missing["CachedGISTEmbedLoss"] = str(error)
    return Case(
        f"guided, {rows:,} anchors, 4 x {rows:,} columns of {width}, guide's {width // 2}, forward + backward",
        contenders,
        sum(x.nbytes for x in (*leaves, *leaves, *guide)),
        2 * 4 * rows * rows * (3 * width + width // 2),
        missing,
        device == "cpu" and rows >= ONCE_FROM,
    )


def _theirs(leaves: list[Tensor], guide: list[Tensor]) -> Call:
    """CachedGISTEmbedLoss without encoding: the loss and its gradients for precomputed mini-batches."""
    from sentence_transformers.sentence_transformer.losses import CachedGISTEmbedLoss

    loss: Any = CachedGISTEmbedLoss(
        _stub(), _stub(), 1 / SCALE, mini_batch_size=MINI_BATCH, margin=MARGIN, margin_strategy="absolute"
    )

    def call(i: int) -> None:
        for x in leaves:
            x.grad = None
        loss.calculate_loss([[x] for x in leaves], [[x] for x in guide], with_backward=True)

    return call


def _stub() -> torch.nn.Module:
    """A model with the attributes that the constructor of CachedGISTEmbedLoss reads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model: Any = torch.nn.Sequential(torch.nn.Identity())
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    model.max_seq_length = 8
    return model

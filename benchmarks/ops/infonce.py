"""info_nce_loss with one hard negative per anchor and gradients of all three matrices, against the whole logit matrix.

"eager" is cross entropy of normalised rows, the usual code without a kernel. sentence-transformers' classes get
precomputed embeddings, and the cached one processes as many rows at a time as our scan. "compiled scan" is
torch.compile of our chunked form. On unit rows, InfoNCE equals a language model's cross entropy with scale times the
columns as its head, so fused linear cross entropies are also contenders; torch normalises and rounds their rows.

FORMS are further cases, against sentence-transformers' classes: all four directions in one softmax, which has three
times the logits, and hardness. A last case has what training adds to a call: ids if the batch has duplicates
(mask_duplicates), targets if it is gathered from several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import Call, Case, ours
from raoe_kernels import info_nce_loss
from raoe_kernels.infonce import scan
from raoe_kernels.infonce.problem import Problem

SIZES = {"cpu": [512, 4096], "cuda": [512, 4096, 16384, 65536]}
COLUMNS = {"cpu": 384, "cuda": 768}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TESTS = [f"tests/kernels/test_{name}.py" for name in ("infonce", "contrast", "infonce_forms", "infonce_options")]
SCALE = 20.0
LOGITS_UP_TO = 16384  # most anchors for eager, which stores three matrices of logits: 6.4 GB in float32
ALL_UP_TO = {"cpu": 8192, "cuda": 65536}  # most anchors for all contenders; beyond, a call takes most of a minute
CHUNK = 512  # rows of logits that the cached peer stores
ONCE_FROM = 16384  # anchors from which a form is called only once on a CPU
FORMS: dict[str, dict[str, Any]] = {
    "four directions": {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
    "hardness": {"hardness_mode": "all_negatives", "hardness_strength": 5.0},
}

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def eager(anchors: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
    columns = F.normalize(torch.cat((positives, negatives)), dim=1)
    logits = SCALE * F.normalize(anchors, dim=1) @ columns.T
    return F.cross_entropy(logits.float(), torch.arange(len(anchors), device=anchors.device))


def least(rows: int, device: str) -> tuple[int, int]:
    """Return bytes and FLOPs: each matrix is read, each gradient written; three products of the logits' size."""
    columns = COLUMNS[device]
    return 2 * 3 * rows * columns * DTYPES[device].itemsize, 3 * 2 * rows * 2 * rows * columns


def steps(rows: int, device: str) -> Callable[[Loss], Call]:
    """Return a function that makes a call with gradients from a loss."""
    seeded = torch.Generator().manual_seed(rows)
    columns, dtype = COLUMNS[device], DTYPES[device]
    base = torch.randn(rows, columns, generator=seeded)
    matrices = [
        (base + noise * torch.randn(rows, columns, generator=seeded)).to(device, dtype).requires_grad_()
        for noise in (0, 0.5, 1)
    ]

    def step(loss: Loss) -> Call:
        def call(i: int) -> None:
            for matrix in matrices:
                matrix.grad = None
            loss(*matrices).backward()

        return call

    return step


def cases(rows: int, device: str) -> Iterator[Case]:
    yield case(rows, device)
    for name in FORMS:
        yield form(name, rows, device)
    yield training(rows, device)


def training(rows: int, device: str) -> Case:
    step, anchors = steps(rows, device), torch.arange(rows, device=device, dtype=torch.int32)
    ids = {"ignore": (anchors // 2, torch.cat((anchors // 2, anchors + rows)))}  # each text has a duplicate
    targets = {"targets": torch.arange(rows, device=device)}
    options: dict[str, Any] = {"ids": ids, "targets": targets, "ids and targets": ids | targets}
    result = {
        " with ".join(filter(None, ("info_nce_loss", name))): step(
            lambda a, p, n, given=given: info_nce_loss(a, p, n, scale=SCALE, **given)
        )
        for name, given in ({"": {}} | options).items()
    }
    title = f"ids and targets, {rows:,} anchors, 2 x {rows:,} columns of {COLUMNS[device]}, forward + backward"
    return Case(title, result, *least(rows, device), once=device == "cpu" and rows >= ONCE_FROM)


def form(name: str, rows: int, device: str) -> Case:
    options, step, missing = FORMS[name], steps(rows, device), {}
    logits = rows * rows * (6 if "directions" in options else 2)
    result = {"info_nce_loss": step(lambda a, p, n: info_nce_loss(a, p, n, scale=SCALE, **options))}
    peers = {"MultipleNegativesRankingLoss": _stock, "CachedMultipleNegativesRankingLoss": _cached}
    for peer, make in peers.items():
        if make is _stock and logits > LOGITS_UP_TO**2:
            missing[peer] = "stores all logits, some of them more than once"
            continue
        try:
            result[peer] = step(make(**options))
        except ImportError as error:
            missing[peer] = str(error)
    title = f"{name}, {rows:,} anchors, 2 x {rows:,} columns of {COLUMNS[device]}, forward + backward"
    flops = 3 * 2 * logits * COLUMNS[device]
    return Case(title, result, least(rows, device)[0], flops, missing, device == "cpu" and rows >= ONCE_FROM)


def case(rows: int, device: str) -> Case:
    step, columns = steps(rows, device), COLUMNS[device]
    result: dict[str, Call] = {}
    for name in ours("info_nce_loss", device):
        result[f"info_nce_loss {name}"] = step(
            lambda a, p, n, name=name: info_nce_loss(a, p, n, scale=SCALE, backend=name)
        )
    if rows <= LOGITS_UP_TO:
        result["eager"] = step(eager)
    missing = dict.fromkeys(GPU_PEERS, "needs a GPU") if device == "cpu" else {}
    peers: dict[str, Callable[[], Loss]] = {"compiled scan": _compiled_scan} if rows <= LOGITS_UP_TO else {}
    if rows <= LOGITS_UP_TO:
        peers |= {"compiled eager": lambda: torch.compile(eager, dynamic=False), "MultipleNegativesRankingLoss": _stock}
    peers["CachedMultipleNegativesRankingLoss"] = _cached
    if device == "cuda":
        peers |= GPU_PEERS
    for name, make in peers.items():
        if rows > ALL_UP_TO[device]:
            missing[name] = f"not timed beyond {ALL_UP_TO[device]:,} anchors on a {device}"
            continue
        try:
            result[name] = step(make())
        except ImportError as error:
            missing[name] = str(error)
    return Case(
        f"{rows:,} anchors, 2 x {rows:,} columns of {columns}, forward + backward",
        result,
        *least(rows, device),
        missing,
    )


def _compiled_scan() -> Loss:
    @torch.compile(fullgraph=True, dynamic=False)
    def chunked(a, p, n, targets) -> tuple[torch.Tensor, tuple]:
        return scan.forward(Problem(a, p, n, targets=targets, scale=SCALE), (True, True, True, False, False))

    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, p, n):
            targets = torch.arange(len(a), device=a.device)
            loss, grads = chunked(a.detach(), p.detach(), n.detach(), targets)
            ctx.save_for_backward(*grads[:3])
            return loss

        @staticmethod
        def backward(ctx, upstream):
            dtype = DTYPES[upstream.device.type]
            return tuple((grad * upstream).to(dtype) for grad in ctx.saved_tensors)

    return Scan.apply


def _stock(**options: Any) -> Loss:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(torch.nn.Identity(), scale=SCALE, **options)
    return lambda a, p, n: loss.compute_loss_from_embeddings([a, p, n], torch.empty(0))


def _cached(**options: Any) -> Loss:
    """The cached class without encoding: only its loss, which keeps the rows of every finished chunk."""
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    model = torch.nn.Sequential(torch.nn.Identity())
    loss = CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=CHUNK, **options)

    class Cached(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *matrices):
            leaves = [x.detach().requires_grad_() for x in matrices]
            with torch.enable_grad():
                value = loss.calculate_loss([[x] for x in leaves], with_backward=True)
            ctx.save_for_backward(*(x.grad for x in leaves))
            return value

        @staticmethod
        def backward(ctx, upstream):
            return tuple(grad * upstream for grad in ctx.saved_tensors)

    return Cached.apply


def _flash() -> Loss:
    """inf-cl from PyPI, fused over one matrix of keys; columns must be a multiple of 256, and products are float32."""
    from inf_cl import cal_flash_loss

    def flash(a: torch.Tensor, p: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        keys = F.normalize(torch.cat((p, n)), dim=1)
        return cal_flash_loss(F.normalize(a, dim=1), keys, torch.arange(len(a), device=a.device), SCALE).mean()

    return flash


def _linear(cross_entropy: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Loss:
    """InfoNCE by a cross entropy that takes (rows, weight of the head, targets)."""

    def loss(a: torch.Tensor, p: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        head = SCALE * F.normalize(torch.cat((p, n)), dim=1)
        return cross_entropy(F.normalize(a, dim=1), head, torch.arange(len(a), device=a.device))

    return loss


def _liger() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return _linear(lambda rows, head, targets: loss(head, rows, targets))


def _quack() -> Loss:
    """quack-kernels from PyPI, in chunks of 4,096 rows."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return _linear(chunked_linear_cross_entropy)


def _cut() -> Loss:
    """cut-cross-entropy from PyPI with exact settings, because its default drops small weights."""
    from cut_cross_entropy import linear_cross_entropy

    return _linear(lambda rows, head, targets: linear_cross_entropy(rows, head, targets, filter_eps=None))


GPU_PEERS: dict[str, Callable[[], Loss]] = {
    "Inf-CL flash loss": _flash,
    "Liger fused linear cross entropy": _liger,
    "QuACK chunked linear cross entropy": _quack,
    "ml-cross-entropy, exact": _cut,
}

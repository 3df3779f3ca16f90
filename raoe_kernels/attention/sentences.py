"""Attention on a CPU in runs of sentences of like length, by the kernels behind torch's scaled_dot_product_attention.

Lengths can be read there, so that most of the padding need not be computed. What a run still has of it gets weights of
exactly 0: as keys by a mask, as queries, in backward, by a logsumexp of inf. Only a product of 0 and something that is
not finite would spread; where padding might hold such, it is zeroed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import refuse_second_derivative
from .padding import Padding, real_tokens

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Multiplications with padding that a run may hold before another run costs less.
WASTE = 1 << 17
TAME = 1e15  # no product of two such numbers overflows


class _Run(NamedTuple):
    """Sentences that go together.

    of      their rows, of a packed batch their tokens [sentences * length] (for padding: some token of the sentence); a
            slice of the sentence that is alone, or of all rows of a padded batch
    first   where their tokens begin in a padded row
    length  of the longest
    padding [sentences, length] bool, None where all are as long
    """

    of: slice | Tensor
    first: int
    length: int
    padding: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Their part of x, [sentences, heads, length, d]."""
        if x.ndim == 4:
            x = x[:, :, self.first : self.first + self.length]
        x = x[self.of] if isinstance(self.of, slice) else x.index_select(0, self.of)
        return x if x.ndim == 4 else x.unflatten(0, (-1, self.length)).transpose(1, 2)

    def put(self, x: Tensor, part: Tensor) -> None:
        """Write their part of x."""
        of = self.of
        if x.ndim == 4:
            x = x[:, :, self.first : self.first + self.length]
        else:
            part = part.transpose(1, 2).flatten(0, 1)
            if self.padding is not None:
                real = (~self.padding).flatten()
                part, of = part[real], of[real]  # type: ignore[index]
        if isinstance(of, slice):
            x[of].copy_(part)
        else:
            x.index_copy_(0, of, part)

    def ways(self, like: Tensor, count: int) -> list[tuple[bool, Tensor | None]]:
        """(is_causal, attn_mask) of each result, causal first. Padding is on the right: keys up to a real query are
        real."""
        hidden = None
        if self.padding is not None:
            hidden = like.new_zeros(self.padding.shape).masked_fill_(self.padding, -torch.inf)[:, None, None, :]
        return [(True, None), (False, hidden)][-count:]


def _runs(padding: Padding, batch: int, width: int) -> list[_Run]:
    """All sentences with tokens, the longest first; width: heads * d."""
    if padding.cu_seqlens is not None:
        ends = padding.cu_seqlens.tolist()
        spans = [(0, end - start, start) for start, end in pairwise(ends)]
    else:
        lengths, firsts = [padding.longest] * batch, [0] * batch
        if padding.lengths is not None:
            lengths = padding.lengths.tolist()
        elif padding.mask is not None:
            lengths, firsts = padding.mask.sum(1).tolist(), padding.mask.byte().argmax(1).tolist()
        spans = list(zip(firsts, lengths, range(batch), strict=True))
    spans = sorted((span for span in spans if span[1]), key=lambda span: (span[0], -span[1]))
    runs, at = [], 0
    while at < len(spans):
        (first, longest, _), end, waste = spans[at], at, 0
        while end < len(spans) and spans[end][0] == first and waste <= WASTE:
            waste += width * (longest**2 - spans[end][1] ** 2)
            end += 1
        whole = end - at == batch and longest == padding.longest and padding.cu_seqlens is None
        runs.append(_run(first, longest, sorted(spans, key=lambda s: s[2]) if whole else spans[at:end], padding, whole))
        at = end
    return runs


def _run(first: int, longest: int, spans: list[tuple[int, int, int]], padding: Padding, whole: bool) -> _Run:
    packed = padding.cu_seqlens is not None
    if len(spans) == 1:
        start = spans[0][2]
        return _Run(slice(start, start + (longest if packed else 1)), first, longest, None)
    index, beyond = torch.tensor([start for _, _, start in spans]), None
    place, lengths = torch.arange(longest), torch.tensor([length for _, length, _ in spans])[:, None]
    if (lengths < longest).any():
        beyond = place >= lengths
    if packed:
        return _Run((index[:, None] + (place if beyond is None else place * ~beyond)).flatten(), first, longest, beyond)
    return _Run(slice(None) if whole else index, first, longest, beyond)


def takes(padding: Padding) -> bool:
    """Whether there is padding, and none of it between the tokens of a sentence."""
    if padding.mask is None:
        return padding.lengths is not None or padding.cu_seqlens is not None
    begins = padding.mask[:, 1:] & ~padding.mask[:, :-1]
    return not bool((begins.sum(1) + padding.mask[:, 0] > 1).any())


def _clean(inputs: Sequence[Tensor], padding: Padding) -> list[Tensor]:
    """Inputs as the kernels take them, with padding that is finite and of moderate size."""
    found = []
    for x in inputs:
        x = x if x.stride(-1) == 1 else x.contiguous()
        if padding.cu_seqlens is None:
            if not torch.linalg.vector_norm(x) < TAME:
                real = real_tokens(padding, x.device)
                x = x if real is None else x.masked_fill(~real[:, None, :, None], 0)
        found.append(x)
    return found


def _blank(x: Tensor, padding: Tensor) -> None:
    """Zero the padding of [sentences, heads, length, d] by its bits: masked_fill_ takes ten times as long."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    x.view(kind).bitwise_and_(padding.to(kind).sub_(1)[:, None, :, None])


class Sentences(torch.autograd.Function):
    """(bidirectional,), or (causal, bidirectional) if dual; no row has padding between its tokens, heads are alike."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool):
        q, k, v = _clean((q, k, v), padding)
        runs = _runs(padding, q.shape[0], q.shape[1] * q.shape[-1])
        whole = len(runs) == 1 and runs[0].of == slice(None)
        results = [] if whole else [q.new_zeros(q.shape) for _ in range(1 + dual)]
        kept: list[Tensor] = []
        for run in runs:
            inputs = [run.take(x) for x in (q, k, v)]
            for i, (causal, mask) in enumerate(run.ways(q, 1 + dual)):
                out, lse = _attend(*inputs, 0.0, causal, attn_mask=mask, scale=scale)
                if run.padding is not None:
                    _blank(out, run.padding)
                    lse.masked_fill_(run.padding[:, None, :], torch.inf)
                if whole:
                    results.append(out)
                else:
                    run.put(results[i], out)
                kept += [out, lse]
        ctx.save_for_backward(q, k, v, *kept)
        ctx.runs, ctx.padding, ctx.scale, ctx.whole = runs, padding, scale, whole
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        refuse_second_derivative("attention")
        saved = ctx.saved_tensors  # asked for once: torch's checkpointing allows no more
        inputs, kept = saved[:3], iter(saved[3:])
        above = _clean(grads, ctx.padding)
        found = [] if ctx.whole else [x.new_zeros(x.shape) for x in inputs]
        for run in ctx.runs:
            mine = [run.take(x) for x in inputs]
            total: list[Tensor] = []
            for grad, (causal, mask) in zip(above, run.ways(above[0], len(above)), strict=True):
                out, lse = next(kept), next(kept)
                parts = _differentiate(run.take(grad), *mine, out, lse, 0.0, causal, attn_mask=mask, scale=ctx.scale)
                total = [x.add_(part) for x, part in zip(total, parts, strict=True)] if total else list(parts)
            if ctx.whole:
                found = total
            else:
                for x, part in zip(found, total, strict=True):
                    run.put(x, part)
        return *found, None, None, None

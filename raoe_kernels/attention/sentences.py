"""Attention on a CPU in runs of sentences of similar length, with the kernels behind torch's
scaled_dot_product_attention, or with matrix products if the sentences are short and need a gradient.

On a CPU the lengths can be read, so most of the padding is never computed. The rest of a run's padding gets weights of
exactly 0: a mask hides padding keys, and in backward a logsumexp of inf or zeroed weights hide padding queries. Padding
that might not be finite is zeroed first, because 0 times inf or NaN would spread.
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

# Multiplications with padding that a run may contain; beyond this, starting another run is cheaper.
WASTE = 1 << 17
# Run lengths are multiples of this many tokens: in forward, the kernels take 1.6 times as long for 31 tokens as for 32.
STEP = 16
# Up to this many tokens, all attention weights of a sentence are computed and kept; they are no larger than the result.
# Products over all heads are faster than a kernel that goes head by head, and both softmaxes share the scores.
SHORT = 32
TAME = 1e15  # products of two numbers of at most this size do not overflow


class _Run(NamedTuple):
    """Sentences that are computed together.

    of      their rows, or in a packed batch their tokens [sentences * length] (padding repeats a token of its
            sentence); a slice for a single sentence, or for all rows of a padded batch
    first   position of their first token in a padded row
    length  length of the longest sentence, or a few tokens more
    padding [sentences, length] bool, None if all have the same length
    hidden  [sentences, 1, 1, length], added to the scores: -inf for padding, else 0
    real    in a packed batch with padding: the positions of real tokens among sentences * length
    """

    of: slice | Tensor
    first: int
    length: int
    padding: Tensor | None = None
    hidden: Tensor | None = None
    real: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """Return the run's part of x, [sentences, heads, length, d]."""
        if x.ndim == 4:
            x = x[:, :, self.first : self.first + self.length]
        x = x[self.of] if isinstance(self.of, slice) else x.index_select(0, self.of)
        return x if x.ndim == 4 else x.unflatten(0, (-1, self.length)).transpose(1, 2)

    def put(self, x: Tensor, part: Tensor) -> None:
        """Write the run's part of x."""
        of = self.of
        if x.ndim == 4:
            x = x[:, :, self.first : self.first + self.length]
        else:
            part = part.transpose(1, 2).flatten(0, 1)
            if self.real is not None:
                part, of = part.index_select(0, self.real), of.index_select(0, self.real)  # type: ignore[union-attr]
        if isinstance(of, slice):
            x[of].copy_(part)
        else:
            x.index_copy_(0, of, part)

    def ways(self, count: int) -> list[tuple[bool, Tensor | None]]:
        """Return (is_causal, attn_mask) for each result, causal first. A run has padding only on the right, so all keys
        up to a real query are real, and the causal result needs no mask."""
        return [(True, None), (False, self.hidden)][-count:]


def _runs(padding: Padding, q: Tensor) -> list[_Run]:
    """Split all sentences that have tokens into runs, the longest sentences first."""
    batch, width = q.shape[0], q.shape[1] * q.shape[-1]
    packed = padding.cu_seqlens is not None
    if padding.lengths is not None and padding.longest <= SHORT:  # one run of all rows, including empty ones
        return [_Run(slice(None), 0, padding.longest, *_hide(padding.longest, padding.lengths, q.dtype))]
    if padding.cu_seqlens is not None:
        ends = padding.cu_seqlens.tolist()
        spans = [(0, start - end, start) for start, end in pairwise(ends)]
    else:
        lengths, firsts = [padding.longest] * batch, [0] * batch
        if padding.lengths is not None:
            lengths = padding.lengths.tolist()
        elif padding.mask is not None:
            lengths, firsts = padding.mask.sum(1).tolist(), padding.mask.byte().argmax(1).tolist()
        spans = [(firsts[i], -length, i) for i, length in enumerate(lengths)]
    spans = sorted(span for span in spans if span[1])
    least = 0 if packed else SHORT
    runs, at = [], 0
    while at < len(spans):
        first, length, _ = spans[at]
        room, end, waste = padding.longest - first, at + 1, 0
        computed = _computed(-length, room, least)
        while end < len(spans) and spans[end][0] == first:
            waste += width * (computed**2 - _computed(-spans[end][1], room, least) ** 2)
            if waste > WASTE:
                break
            end += 1
        of = sorted([(place, -length) for _, length, place in spans[at:end]])
        runs.append(_run(first, of, computed, packed, end - at == batch, q.dtype))
        at = end
    return runs


def _computed(length: int, room: int, least: int) -> int:
    """Number of tokens to compute for a sentence of `length` tokens."""
    full = length if length <= STEP // 2 else -(-length // STEP) * STEP
    return min(max(full, least), room)


def _run(
    first: int, spans: list[tuple[int, int]], computed: int, packed: bool, whole: bool, dtype: torch.dtype
) -> _Run:
    of, lengths = zip(*spans, strict=True)
    length = max(lengths)
    if len(spans) == 1:
        return _Run(slice(of[0], of[0] + (length if packed else 1)), first, length)
    index, padding, hidden = torch.tensor(of), None, None
    if min(lengths) < length:
        length = computed
        padding, hidden = _hide(length, torch.tensor(lengths), dtype)
    if not packed:
        return _Run(slice(None) if whole else index, first, length, padding, hidden)
    place = torch.arange(length)
    if padding is None:
        return _Run((index[:, None] + place).flatten(), first, length)
    tokens, real = index[:, None] + place * ~padding, (~padding).flatten().nonzero()[:, 0]
    return _Run(tokens.flatten(), first, length, padding, hidden, real)


def _hide(longest: int, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a run's `padding` and `hidden`."""
    padding = torch.arange(longest) >= lengths[:, None]
    return padding, torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, -torch.inf)[:, None, None, :]


def takes(padding: Padding) -> bool:
    """Whether the batch has padding, and none of it lies between the tokens of a sentence."""
    if padding.mask is None:
        return padding.lengths is not None or padding.cu_seqlens is not None
    begins = padding.mask[:, 1:] & ~padding.mask[:, :-1]
    return not bool((begins.sum(1) + padding.mask[:, 0] > 1).any())


def _clean(inputs: Sequence[Tensor], padding: Padding, first: int = 0) -> list[Tensor]:
    """Make the inputs contiguous in their last dimension, and from input `first` on zero padding that may overflow."""
    found = []
    for i, x in enumerate(inputs):
        x = x if x.stride(-1) == 1 else x.contiguous()
        if padding.cu_seqlens is None and i >= first:
            if not torch.linalg.vector_norm(x) < TAME:
                real = real_tokens(padding, x.device)
                x = x if real is None else x.masked_fill(~real[:, None, :, None], 0)
        found.append(x)
    return found


def _blank(padding: Tensor, *of: Tensor) -> None:
    """Zero the padding of [sentences, heads, length, d] with bitwise and: masked_fill_ takes ten times as long."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[of[0].itemsize]
    bits = padding.to(kind).sub_(1)[:, None, :, None]
    for x in of:
        x.view(kind).bitwise_and_(bits)


def _multiply(inputs: list[Tensor], run: _Run, scale: float, dual: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and weights, causal first, of a run of short sentences; 0 for padding queries."""
    q, k, v = (x.contiguous() for x in inputs)
    scores = (q @ k.mT).mul_(scale)
    if run.hidden is not None:
        scores += run.hidden
    weights = [scores.softmax(-1)]
    if dual:
        later = torch.full((run.length, run.length), -torch.inf, dtype=q.dtype).triu_(1)
        weights.insert(0, scores.add_(later).softmax(-1))
    if run.padding is not None:
        _blank(run.padding, *weights)
    return [weight @ v for weight in weights], weights


def _multiply_back(above: list[Tensor], weights: list[Tensor], inputs: list[Tensor], scale: float) -> list[Tensor]:
    """Return the gradients of q, k and v."""
    q, k, v = (x.contiguous() for x in inputs)
    above = [grad.contiguous() for grad in above]
    ways = list(zip(above, weights, strict=True))
    of_scores, *rest = [torch._softmax_backward_data(grad @ v.mT, weight, -1, v.dtype) for grad, weight in ways]
    of_v, *more = [weight.mT @ grad for grad, weight in ways]
    for one, other in zip(rest, more, strict=True):  # of a dual call
        of_scores += one
        of_v += other
    of_scores.mul_(scale)
    return [of_scores @ k, of_scores.mT @ q, of_v]


class Sentences(torch.autograd.Function):
    """Return (bidirectional,), or (causal, bidirectional) if dual. q, k and v have equally many heads, and no row has
    padding between its tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool, last: bool):
        """last: True if no gradient is needed."""
        q, k, v = _clean((q, k, v), padding, 1 if last else 0)  # padding queries matter only to gradients
        # The kernels are as fast without a gradient. Products would round half precision, and copy packed batches more.
        short = not last and padding.cu_seqlens is None and q.dtype in (torch.float32, torch.float64)
        runs = _runs(padding, q)
        whole = len(runs) == 1 and runs[0].of == slice(None) and runs[0].length == padding.longest
        results = [] if whole else [q.new_zeros(q.shape) for _ in range(1 + dual)]
        kept: list[Tensor] = []
        for run in runs:
            inputs = [run.take(x) for x in (q, k, v)]
            if short and run.length <= SHORT:
                outs, keep = _multiply(inputs, run, scale, dual)
            else:
                found = [_attend(*inputs, 0.0, way, attn_mask=mask, scale=scale) for way, mask in run.ways(1 + dual)]
                outs, keep = [out for out, _ in found], [x for pair in found for x in pair]
                if run.padding is not None:
                    _blank(run.padding, *outs)
                    for lse in () if last else keep[1::2]:
                        lse.masked_fill_(run.padding[:, None, :], torch.inf)
            if whole:
                results = outs
            else:
                for result, out in zip(results, outs, strict=True):
                    run.put(result, out)
            kept += keep
        if not last:
            ctx.save_for_backward(q, k, v, *kept)
            ctx.runs, ctx.padding, ctx.scale, ctx.whole, ctx.short = runs, padding, scale, whole, short
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        refuse_second_derivative("attention")
        saved = ctx.saved_tensors  # read only once: torch's checkpointing does not allow a second read
        inputs, kept = saved[:3], iter(saved[3:])
        above = _clean(grads, ctx.padding)
        found = [] if ctx.whole else [x.new_zeros(x.shape) for x in inputs]
        for run in ctx.runs:
            mine = [run.take(x) for x in inputs]
            total: list[Tensor] = []
            if ctx.short and run.length <= SHORT:
                weights = [next(kept) for _ in above]
                total = _multiply_back([run.take(grad) for grad in above], weights, mine, ctx.scale)
            else:
                for grad, (way, mask) in zip(above, run.ways(len(above)), strict=True):
                    out, lse = next(kept), next(kept)
                    parts = _differentiate(run.take(grad), *mine, out, lse, 0.0, way, attn_mask=mask, scale=ctx.scale)
                    total = [x.add_(part) for x, part in zip(total, parts, strict=True)] if total else list(parts)
            if ctx.whole:
                found = total
            else:
                for x, part in zip(found, total, strict=True):
                    run.put(x, part)
        return *found, None, None, None, None

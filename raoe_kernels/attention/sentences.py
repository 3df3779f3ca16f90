"""Attention on a CPU, computed in runs. A run is a group of sentences of similar length that are computed together. A
run uses the kernels behind torch's scaled_dot_product_attention. If a gradient is needed, a run of short padded
sentences in float32 or float64 uses matrix products instead.

On a CPU, the lengths can be read without a sync, so most computations on padding can be skipped. Padding that remains
in a run gets attention weights of exactly 0. A mask excludes padding keys. In the backward pass, padding queries are
excluded by a logsumexp of inf (in torch's kernels) or by weights of 0 (in matrix products). Padding that can contain
inf or NaN is first set to 0, because 0 times inf is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import refuse_second_derivative
from .padding import Padding, real_tokens

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Largest number of multiplications with padding in a run. Beyond this number, starting another run is cheaper.
WASTE = 1 << 17
# Run lengths are multiples of STEP tokens: the forward kernels take 1.6 times as long for 31 tokens as for 32.
STEP = 16
# For sentences of up to SHORT tokens, all attention weights are stored, because they are no larger than the result.
# Matrix products over all heads are faster than a kernel that processes one head after another, and they compute the
# scores of a dual call only once.
SHORT = 32
SAFE_NORM = 1e15  # products of two numbers of at most this size do not overflow


class _Run(NamedTuple):
    """Sentences of similar length that are computed together.

    Attributes:
        rows: indices of the sentences' rows or, in a packed batch, indices [sentences * length] of their tokens, where
            a repeated token of the sentence serves as padding. A slice for one sentence, or for all rows of a padded
            batch
        first: position of each sentence's first real token in its padded row
        length: number of tokens that are computed for each sentence, at least the length of the longest sentence
        padding: [sentences, length] bool, True for padding; None only if all sentences have the same length
        bias: [sentences, 1, 1, length], added to the scores: -inf for padding, else 0
        real: positions of the real tokens in `rows`, if `rows` repeats tokens as padding
    """

    rows: slice | Tensor
    first: int
    length: int
    padding: Tensor | None = None
    bias: Tensor | None = None
    real: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """Return the part of x that belongs to this run's sentences, as [sentences, heads, length, d]."""
        if x.ndim == 4:
            x = x[:, :, self.first : self.first + self.length]
        x = x[self.rows] if isinstance(self.rows, slice) else x.index_select(0, self.rows)
        return x if x.ndim == 4 else x.unflatten(0, (-1, self.length)).transpose(1, 2)

    def put(self, x: Tensor, part: Tensor) -> None:
        """Write `part`, the values for this run's sentences, into x."""
        index = self.rows
        if x.ndim == 4:
            x = x[:, :, self.first : self.first + self.length]
        else:
            part = part.transpose(1, 2).flatten(0, 1)
            if self.real is not None:
                part, index = part.index_select(0, self.real), index.index_select(0, self.real)  # type: ignore[union-attr]
        if isinstance(index, slice):
            x[index].copy_(part)
        else:
            x.index_copy_(0, index, part)

    def modes(self, causal: tuple[bool, ...]) -> list[tuple[bool, Tensor | None]]:
        """Return, for each result, the arguments (is_causal, attn_mask) of torch's attention kernels. In a run, padding
        is only on the right, so all keys up to a real query are real, and a causal result needs no mask."""
        return [(is_causal, None if is_causal else self.bias) for is_causal in causal]


def _runs(padding: Padding, q: Tensor) -> list[_Run]:
    """Split all sentences that contain tokens into runs, after sorting them by the position of their first real token,
    then by length (longest first)."""
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
    min_length = 0 if packed else SHORT
    runs, at = [], 0
    while at < len(spans):
        first, length, _ = spans[at]
        room, end, waste = padding.longest - first, at + 1, 0
        padded_length = _padded_length(-length, room, min_length)
        while end < len(spans) and spans[end][0] == first:
            waste += width * (padded_length**2 - _padded_length(-spans[end][1], room, min_length) ** 2)
            if waste > WASTE:
                break
            end += 1
        sentences = sorted([(place, -length) for _, length, place in spans[at:end]])
        runs.append(_run(first, sentences, padded_length, packed, end - at == batch, q.dtype))
        at = end
    return runs


def _padded_length(length: int, room: int, min_length: int) -> int:
    """Return the number of tokens, including padding, that are computed for a sentence of `length` tokens."""
    rounded = length if length <= STEP // 2 else -(-length // STEP) * STEP
    return min(max(rounded, min_length), room)


def _run(
    first: int, spans: list[tuple[int, int]], padded_length: int, packed: bool, all_rows: bool, dtype: torch.dtype
) -> _Run:
    indices, lengths = zip(*spans, strict=True)
    length = max(lengths)
    if len(spans) == 1:
        return _Run(slice(indices[0], indices[0] + (length if packed else 1)), first, length)
    index, padding, bias = torch.tensor(indices, device="cpu"), None, None
    if min(lengths) < length:
        length = padded_length
        padding, bias = _hide(length, torch.tensor(lengths, device="cpu"), dtype)
    if not packed:
        return _Run(slice(None) if all_rows else index, first, length, padding, bias)
    place = torch.arange(length, device="cpu")
    if padding is None:
        return _Run((index[:, None] + place).flatten(), first, length)
    tokens, real = index[:, None] + place * ~padding, (~padding).flatten().nonzero()[:, 0]
    return _Run(tokens.flatten(), first, length, padding, bias, real)


def _hide(longest: int, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the masks of a run: its fields `padding` and `bias`."""
    padding = torch.arange(longest, device="cpu") >= lengths[:, None]
    return padding, lengths.new_zeros(padding.shape, dtype=dtype).masked_fill_(padding, -torch.inf)[:, None, None, :]


def supports(padding: Padding) -> bool:
    """Return whether `Sentences` can run a batch. The batch must be packed, or its rows must contain padding only
    before and after the real tokens."""
    if padding.mask is None:
        return padding.lengths is not None or padding.cu_seqlens is not None
    begins = padding.mask[:, 1:] & ~padding.mask[:, :-1]
    return not bool((begins.sum(1) + padding.mask[:, 0] > 1).any())


def _prepare(inputs: Sequence[Tensor], padding: Padding, first: int = 0) -> list[Tensor]:
    """Make the inputs' last dimension contiguous. In inputs[first:], also set padding to 0 if its products could
    overflow."""
    results = []
    for i, x in enumerate(inputs):
        x = x if x.stride(-1) == 1 else x.contiguous()
        if padding.cu_seqlens is None and i >= first:
            if not torch.linalg.vector_norm(x) < SAFE_NORM:
                real = real_tokens(padding, x.device)
                x = x if real is None else x.masked_fill(~real[:, None, :, None], 0)
        results.append(x)
    return results


def _zero_padding(padding: Tensor, *tensors: Tensor) -> None:
    """Set padding in tensors [sentences, heads, length, d] to 0 by a bitwise AND (10 times as fast as masked_fill_)."""
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensors[0].itemsize]
    bits = padding.to(dtype).sub_(1)[:, None, :, None]
    for x in tensors:
        x.view(dtype).bitwise_and_(bits)


def _multiply(
    inputs: list[Tensor], run: _Run, scale: float, causal: tuple[bool, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results and the attention weights of a run of short sentences. Both are 0 for padding queries."""
    q, k, v = (x.contiguous() for x in inputs)
    scores = (q @ k.mT).mul_(scale)
    if run.bias is not None:
        scores += run.bias
    weights = [] if causal == (True,) else [scores.softmax(-1)]
    if causal[0]:
        causal_bias = q.new_full((run.length, run.length), -torch.inf).triu_(1)
        weights.insert(0, scores.add_(causal_bias).softmax(-1))
    if run.padding is not None:
        _zero_padding(run.padding, *weights)
    return [weight @ v for weight in weights], weights


def _multiply_back(upstream: list[Tensor], weights: list[Tensor], inputs: list[Tensor], scale: float) -> list[Tensor]:
    """Return the gradients of q, k and v for a run that _multiply has computed."""
    q, k, v = (x.contiguous() for x in inputs)
    upstream = [grad.contiguous() for grad in upstream]
    pairs = list(zip(upstream, weights, strict=True))
    grad_scores, *more_scores = [torch._softmax_backward_data(g @ v.mT, weight, -1, v.dtype) for g, weight in pairs]
    grad_v, *more_v = [weight.mT @ grad for grad, weight in pairs]
    for score_part, v_part in zip(more_scores, more_v, strict=True):  # the second result of a dual call
        grad_scores += score_part
        grad_v += v_part
    grad_scores.mul_(scale)
    return [grad_scores @ k, grad_scores.mT @ q, grad_v]


class Sentences(torch.autograd.Function):
    """Compute attention run by run, with one result per entry of `causal`. The tensors q, k and v must have the same
    number of heads. No row may have padding between real tokens."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, causal: tuple, no_grad: bool
    ):
        """Compute the results. `no_grad` is True if no gradient is needed."""
        q, k, v = _prepare((q, k, v), padding, 1 if no_grad else 0)  # padding queries affect only gradients
        # Matrix products are faster than kernels only if a gradient is needed. They would add rounding errors
        # in half precision, and copy packed batches more often.
        short = not no_grad and padding.cu_seqlens is None and q.dtype in (torch.float32, torch.float64)
        runs = _runs(padding, q)
        one_run = len(runs) == 1 and runs[0].rows == slice(None) and runs[0].length == padding.longest
        results = [] if one_run else [q.new_zeros(q.shape) for _ in causal]
        tensors: list[Tensor] = []
        for run in runs:
            inputs = [run.take(x) for x in (q, k, v)]
            if short and run.length <= SHORT:
                outs, run_tensors = _multiply(inputs, run, scale, causal)
            else:
                modes = run.modes(causal)
                pairs = [_flash_forward(*inputs, 0.0, is_causal, attn_mask=m, scale=scale) for is_causal, m in modes]
                outs, run_tensors = [out for out, _ in pairs], [x for pair in pairs for x in pair]
                if run.padding is not None:
                    _zero_padding(run.padding, *outs)
                    for lse in () if no_grad else run_tensors[1::2]:
                        lse.masked_fill_(run.padding[:, None, :], torch.inf)
            if one_run:
                results = outs
            else:
                for result, out in zip(results, outs, strict=True):
                    run.put(result, out)
            tensors += run_tensors
        if not no_grad:
            ctx.save_for_backward(q, k, v, *tensors)
            ctx.runs, ctx.padding, ctx.scale, ctx.causal = runs, padding, scale, causal
            ctx.one_run, ctx.short = one_run, short
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        refuse_second_derivative("attention")
        saved = ctx.saved_tensors  # read once: torch's checkpointing does not allow a second read
        inputs, tensors = saved[:3], iter(saved[3:])
        upstream = _prepare(grads, ctx.padding)
        results = [] if ctx.one_run else [x.new_zeros(x.shape) for x in inputs]
        for run in ctx.runs:
            run_inputs = [run.take(x) for x in inputs]
            total: list[Tensor] = []
            if ctx.short and run.length <= SHORT:
                weights = [next(tensors) for _ in upstream]
                total = _multiply_back([run.take(grad) for grad in upstream], weights, run_inputs, ctx.scale)
            else:
                for grad, (is_causal, mask) in zip(upstream, run.modes(ctx.causal), strict=True):
                    saved = run.take(grad), *run_inputs, next(tensors), next(tensors)  # the last two: result, logsumexp
                    parts = _flash_backward(*saved, 0.0, is_causal, attn_mask=mask, scale=ctx.scale)
                    total = [x.add_(part) for x, part in zip(total, parts, strict=True)] if total else list(parts)
            if ctx.one_run:
                results = total
            else:
                for x, part in zip(results, total, strict=True):
                    run.put(x, part)
        return *results, None, None, None, None

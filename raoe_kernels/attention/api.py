"""Public attention functions: documentation and argument checks."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate
from .._dtypes import autocast_dtype
from .autograd import attention
from .padding import Options, Padding

MAX_HEAD_DIM = 256


@_validate.public
def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    causal: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Bidirectional attention over padded or packed sentences: softmax(scale q k^T) v (BeLLM, Eq. 3 and 4).

    Every real token attends to all real tokens of its sentence. Padding does not affect real tokens, even if it
    contains NaN or inf. Padding rows are 0 in the result and in the gradients, regardless of their upstream gradient.
    Up to rounding, the result for a sentence does not depend on the other sentences in the batch. The README in
    raoe_kernels/attention explains when results are bit-identical.

    Args:
        q: (b, h, L, d), or packed (tokens, h, d): float16, bfloat16, float32 or float64.
        k, v: (b, hk, L, d), or packed (tokens, hk, d), with q's dtype and device. h must be a multiple of hk, and query
            head i uses key head i // (h / hk). The head dimension d is 1 to 256.
        lengths: (b,) integers from 0 to L: number of real tokens in each row of a right-padded batch. The range is
            checked only on a CPU, because reading lengths on a GPU would make the host wait.
        padding_mask: (b, L) bool or integers, True or nonzero where a token is real (Hugging Face's attention_mask).
            Any pattern is allowed. Pass either lengths or padding_mask, not both.
        cu_seqlens: (b + 1,) non-decreasing int32, required for packed input: sequence i holds the tokens from
            cu_seqlens[i] to cu_seqlens[i + 1] - 1. Tokens outside every sequence are padding.
        max_seqlen: upper bound on the number of tokens in a sequence, required with cu_seqlens. A longer sequence
            raises ValueError on a CPU; on other devices, the result for this sequence is undefined.
        scale: finite number that multiplies the attention scores; 1 / sqrt(d) if None.
        dropout_p: probability, at least 0 and less than 1, that an attention weight is dropped. The remaining weights
            are divided by 1 - dropout_p, as in torch's scaled_dot_product_attention. For evaluation, pass 0: the
            function does not know whether the model is in training mode. Random numbers come from torch's default
            generator (torch.manual_seed).
        causal: True for causal attention: a token attends only to the real tokens up to its own position.
        backend: "auto", "reference", "scan" (torch's own attention) or "triton".

    Returns:
        Tensor with q's shape and dtype. Sums are float64 for float64 inputs, otherwise float32. On a GPU, products of
        float32 matrices use TF32 if torch's setting for matrix products (torch.backends.cuda.matmul) allows it. Under
        autocast, inputs other than float64 are first cast to autocast's dtype, as in torch's
        scaled_dot_product_attention.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        RuntimeError: the requested backend cannot run here, or a second derivative was requested and the backend does
            not support it: "triton" supports no second derivatives, and "scan" supports none for padding on a CPU or
            with FlashAttention.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {_validate.describe(causal)}")
    dropout_p = _validate.number("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and less than 1, got {dropout_p!r}")
    return _call(q, k, v, lengths, padding_mask, cu_seqlens, max_seqlen, scale, (causal,), dropout_p, backend)[0]


@_validate.public
def dual_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal and bidirectional attention for the same queries, keys and values: the two terms in BeLLM's Eq. 5.

    The function takes the arguments of bidirectional_attention except dropout_p and causal, and raises the same errors.
    The backend "triton" computes both results in one pass over the keys.

    Returns:
        (causal result, bidirectional result): what bidirectional_attention returns with causal=True and with
        causal=False.
    """
    where = lengths, padding_mask, cu_seqlens, max_seqlen
    causal, full = _call(q, k, v, *where, scale, (True, False), 0.0, backend)
    return causal, full


def _call(q, k, v, lengths, padding_mask, cu_seqlens, max_seqlen, scale, causal, dropout_p, backend: str):
    packed = cu_seqlens is not None
    _tensors(q, k, v, 3 if packed else 4)
    if sum(x is not None for x in (lengths, padding_mask, cu_seqlens)) > 1:
        got = {"lengths": lengths, "padding_mask": padding_mask, "cu_seqlens": cu_seqlens}
        shown = "; ".join(f"{name} {_validate.describe(x)}" for name, x in got.items() if x is not None)
        raise ValueError(f"lengths, padding_mask and cu_seqlens are mutually exclusive: pass only one, got {shown}")
    if packed:
        padding = Padding(None, None, *_packed(q, cu_seqlens, max_seqlen))
    else:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen requires cu_seqlens and packed input, got {max_seqlen!r} without cu_seqlens")
        padding = Padding(_lengths(q, lengths), _mask(q, padding_mask), None, q.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else _validate.number("scale", scale)
    if q.dtype != torch.float64 and (dtype := autocast_dtype(q)) is not None:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    if scale <= 0:  # on a CPU, torch's causal mask is -inf times the scale
        q, scale = q * scale, 1.0
    return attention(q, k, v, padding, Options(scale, causal, dropout_p), backend)


def _tensors(q: Tensor, k: Tensor, v: Tensor, ndim: int) -> None:
    if isinstance(q, Tensor) and q.ndim == 3 and ndim == 4:
        raise ValueError(f"q must have 4 dimensions, or 3 with cu_seqlens, got {_validate.describe(q)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _validate.float_tensor(name, x, ndim)
    # Under autocast the dtypes may differ: rotary embeddings leave q and k in float32 while v is in half precision.
    alike = autocast_dtype(q) is not None and torch.float64 not in (q.dtype, k.dtype, v.dtype)
    if not (q.device == k.device == v.device and (alike or q.dtype == k.dtype == v.dtype)):
        got = ", ".join(_validate.describe(x) for x in (q, k, v))
        raise ValueError(f"q, k and v must have the same dtype and device, got {got}")
    heads, key_heads = q.shape[-3 if ndim == 4 else -2], k.shape[-3 if ndim == 4 else -2]
    rest = [(x.shape[0], *x.shape[2:]) if ndim == 4 else (x.shape[0], x.shape[2]) for x in (q, k)]
    if k.shape != v.shape or rest[0] != rest[1]:
        got = ", ".join(_validate.describe(x) for x in (q, k, v))
        raise ValueError(f"k and v must have the same shape, equal to q's except for the number of heads, got {got}")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"q's number of heads must be a multiple of k's number of heads, got {heads} and {key_heads}")
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"q's head dimension must be from 1 to {MAX_HEAD_DIM}, got {_validate.describe(q)}")


def _readable(value: Tensor) -> bool:
    """Return whether the host can read a tensor's values without waiting for a device or breaking a compiled graph."""
    return value.device.type == "cpu" and not torch.compiler.is_compiling()


def _lengths(q: Tensor, lengths: Tensor | None) -> Tensor | None:
    if lengths is None:
        return None
    _validate.integers("lengths", lengths, q.shape[:1], "q", q)
    if _readable(lengths) and ((lengths < 0) | (lengths > q.shape[2])).any():
        raise ValueError(f"lengths must be from 0 to {q.shape[2]} (q's sequence length), got {lengths.tolist()}")
    return lengths


def _mask(q: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    # Reject floats: a float mask could be an additive mask, in which 0 marks a real token.
    mask = _validate.companion("padding_mask", mask, (q.shape[0], q.shape[2]), "q", q)
    _validate.integer_tensor("padding_mask", mask)
    return mask if mask.dtype == torch.bool else mask != 0


def _packed(q: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> tuple[Tensor, int]:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor, got {_validate.describe(cu_seqlens)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens must have shape (sequences + 1,), got {_validate.describe(cu_seqlens)}")
    _validate.companion("cu_seqlens", cu_seqlens, cu_seqlens.shape, "q", q)
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, got {_validate.describe(cu_seqlens)}")
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
        raise TypeError(f"max_seqlen must be an integer, got {_validate.describe(max_seqlen)}")
    if max_seqlen < 0:
        raise ValueError(f"max_seqlen must be >= 0, got {max_seqlen}")
    if _readable(cu_seqlens):
        if cu_seqlens[0] < 0 or cu_seqlens[-1] > q.shape[0] or (cu_seqlens.diff() < 0).any():
            rule = f"must not decrease, and must be from 0 to {q.shape[0]}, the number of tokens"
            raise ValueError(f"values of cu_seqlens {rule}, got {cu_seqlens.tolist()}")
        if (cu_seqlens.diff() > max_seqlen).any():
            raise ValueError(f"max_seqlen must be at least the longest sequence's length, got {max_seqlen} for "
                             f"cu_seqlens {cu_seqlens.tolist()}")  # fmt: skip
    return cu_seqlens, max_seqlen

"""The attention ops' argument errors, and both under torch.compile and as registered operators."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch._subclasses import FakeTensorMode

from raoe_kernels import bidirectional_attention, dual_attention
from raoe_kernels._dispatch import Backend
from raoe_kernels.attention import OP
from raoe_kernels.attention.autograd import Problem, by_case
from raoe_kernels.attention.padding import Options, Padding
from tests.kernels.attention_cases import Batch
from tests.kernels.conftest import DEVICE

Q = torch.rand(2, 4, 3, 8)
K = torch.rand(2, 2, 3, 8)
P = torch.rand(6, 4, 8)
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)
LENGTHS, MASK = torch.tensor([3, 1]), torch.ones(2, 3, dtype=torch.bool)

WRONG = [
    ((Q.tolist(), K, K), {}, TypeError, "q must be a tensor.*list"),
    ((Q, K.long(), K), {}, TypeError, "k must be float16.*int64"),
    ((Q[0], K[0], K[0]), {}, ValueError, r"q must have 4 dimensions, or 3 with cu_seqlens.*\(4, 3, 8\)"),
    ((Q, K.double(), K), {}, ValueError, "q, k and v must have the same dtype and device.*float64"),
    ((Q, K, K[:, :, :2]), {}, ValueError, r"k and v must have the same shape.*\(2, 2, 2, 8\)"),
    ((Q, K[:1], K[:1]), {}, ValueError, r"q's except for the number of heads.*\(1, 2, 3, 8\)"),
    ((Q[:, :3], K, K), {}, ValueError, "q's number of heads must be a multiple of k's, got 3 and 2"),
    ((Q, K[:, :0], K[:, :0]), {}, ValueError, "multiple of k's, got 4 and 0"),
    ((Q[..., :0], K[..., :0], K[..., :0]), {}, ValueError, "head dimension must be from 1 to 256"),
    ((torch.rand(1, 1, 2, 257),) * 3, {}, ValueError, "head dimension must be from 1 to 256.*257"),
    ((Q, K, K), {"lengths": LENGTHS, "padding_mask": MASK}, ValueError, "exclude each other: pass only one"),
    ((Q, K, K), {"lengths": [3, 1]}, TypeError, "lengths must be a tensor.*list"),
    ((Q, K, K), {"lengths": LENGTHS.float()}, TypeError, "lengths.*float32"),
    ((Q, K, K), {"lengths": LENGTHS[:1]}, ValueError, r"lengths must have shape \(2,\).*\(1,\)"),
    ((Q, K, K), {"lengths": LENGTHS.bool()}, TypeError, "lengths must be integers"),
    ((Q, K, K), {"lengths": LENGTHS + 1}, ValueError, r"lengths must be from 0 to 3, got \[4, 2\]"),
    ((Q, K, K), {"lengths": -LENGTHS}, ValueError, r"lengths must be from 0 to 3, got \[-3, -1\]"),
    ((Q, K, K), {"padding_mask": MASK.float()}, TypeError, "padding_mask.*float32"),
    ((Q, K, K), {"padding_mask": MASK[:, :2]}, ValueError, r"padding_mask must have shape \(2, 3\).*\(2, 2\)"),
    ((Q, K, K), {"padding_mask": MASK.to("meta")}, ValueError, "padding_mask must have .* and be on q's device cpu"),
    ((Q, K, K), {"max_seqlen": 3}, ValueError, "max_seqlen requires cu_seqlens.*3"),
    ((Q, K, K), {"cu_seqlens": ENDS, "max_seqlen": 4}, ValueError, r"q must have 3 dimensions.*\(2, 4, 3, 8\)"),
    ((P, P, P), {"cu_seqlens": ENDS}, TypeError, "max_seqlen must be an integer, got None"),
    ((P, P, P), {"cu_seqlens": ENDS, "max_seqlen": 3}, ValueError, "max_seqlen must be at least the longest.*3"),
    ((P, P, P), {"cu_seqlens": ENDS, "max_seqlen": -1}, ValueError, "max_seqlen must be >= 0, got -1"),
    ((P, P, P), {"cu_seqlens": ENDS.long(), "max_seqlen": 4}, TypeError, "cu_seqlens must be int32.*int64"),
    ((P, P, P), {"cu_seqlens": ENDS[None], "max_seqlen": 4}, ValueError, r"cu_seqlens must have shape \(sequences"),
    ((P, P, P), {"cu_seqlens": ENDS.flip(0), "max_seqlen": 4}, ValueError, r"must not decrease.*\[6, 2, 0\]"),
    ((P, P, P), {"cu_seqlens": ENDS + 1, "max_seqlen": 4}, ValueError, "must stay within 0 to 6"),
    ((Q, K, K), {"scale": float("nan")}, ValueError, "scale"),
    ((Q, K, K), {"scale": torch.ones(())}, TypeError, "scale must be a Python number.*tensor"),
    ((Q, K, K), {"dropout_p": 1}, ValueError, "dropout_p must be at least 0 and less than 1, got 1"),
    ((Q, K, K), {"dropout_p": -0.1}, ValueError, "dropout_p must be at least 0 and less than 1, got -0.1"),
    ((Q, K, K), {"dropout_p": float("nan")}, ValueError, "dropout_p must be a finite number"),
    ((Q, K, K), {"dropout_p": "0.1"}, TypeError, "dropout_p must be a number, got '0.1'"),
    ((Q, K, K), {"dropout_p": torch.tensor(0.1)}, TypeError, "dropout_p must be a Python number.*tensor"),
    ((Q, K, K), {"causal": 1}, TypeError, r"causal must be a bool, got 1 \(int\)"),
    ((Q, K, K), {"backend": "flash"}, ValueError, "backend must be one of 'auto'.*'flash'"),
]  # fmt: skip


@pytest.mark.parametrize("op", [bidirectional_attention, dual_attention])
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong(number, op):
    inputs, options, kind, message = WRONG[number]
    if op is dual_attention and {"dropout_p", "causal"} & set(options):
        kind, message = TypeError, "unexpected keyword argument"
    with pytest.raises(kind, match=message):
        op(*inputs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lengths", "left", "packed"])
def test_backward_takes_what_forward_found_of_the_padding(form, monkeypatch):
    from raoe_kernels.attention import triton_kernels

    made = []
    spans = triton_kernels.spans
    monkeypatch.setattr(triton_kernels, "spans", lambda q, padding: made.append(padding.spans) or spans(q, padding))
    Batch(form, [3, 1], 4, dtype=torch.float32, device=DEVICE).run(True, "triton")
    assert [x is None for x in made] == [True, False, False]


SCAN, TRITON = "raoe_kernels.attention.scan", "raoe_kernels.attention.triton_kernels"
CAUSAL, DROPOUT, DUAL = ((True,), 0.0), ((True,), 0.1), ((True, False), 0.0)
CASES = [
    ("packed", torch.bfloat16, 64, 512, DROPOUT, False, TRITON),
    ("packed", torch.bfloat16, 64, 513, CAUSAL, False, SCAN),  # FlashAttention of packed sentences
    ("packed", torch.bfloat16, 64, 513, DROPOUT, False, SCAN),
    ("packed", torch.bfloat16, 64, 2048, DUAL, False, TRITON),
    ("packed", torch.bfloat16, 64, 513, CAUSAL, True, TRITON),
    ("packed", torch.bfloat16, 20, 513, CAUSAL, False, TRITON),
    ("packed", torch.bfloat16, 256, 64, DUAL, False, SCAN),
    ("packed", torch.bfloat16, 256, 64, DROPOUT, True, TRITON),
    ("packed", torch.float32, 64, 513, CAUSAL, False, TRITON),
    ("full", torch.float16, 64, 513, DUAL, False, SCAN),  # cuDNN or FlashAttention through SDPA
    ("full", torch.float16, 64, 513, CAUSAL, True, SCAN),
    ("full", torch.float16, 64, 513, DROPOUT, True, TRITON),
    ("full", torch.float16, 64, 512, DUAL, False, TRITON),
    ("full", torch.float32, 64, 513, DUAL, False, TRITON),
    ("lengths", torch.float16, 64, 513, CAUSAL, False, TRITON),
    ("left", torch.bfloat16, 129, 8, DUAL, False, SCAN),
    ("left", torch.float64, 128, 513, DUAL, False, TRITON),
]


@pytest.mark.parametrize("form, dtype, d, longest, what, operator, expected", CASES)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_auto_on_cuda_goes_by_case(form, dtype, d, longest, what, operator, expected, monkeypatch):
    from raoe_kernels.attention import scan

    monkeypatch.setitem(OP.backends, "triton", Backend(TRITON))
    monkeypatch.setattr(scan, "_has_flash", lambda device: True)
    with FakeTensorMode():
        where = {"lengths": [torch.ones(1), None, None], "left": [None, torch.ones(1, longest), None]}
        where |= {"packed": [None, None, torch.ones(2)], "full": [None, None, None]}
        shape = (longest, 2, d) if form == "packed" else (1, 2, longest, d)
        q = torch.empty(shape, dtype=dtype, device="cuda")
        options = Options(1.0, *what)
        problem = Problem(q, Padding(*where[form], longest), options, operator)
        assert OP.backends[by_case(problem)].module == expected


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_named_backend_is_not_asked_for_the_case(monkeypatch):
    monkeypatch.setattr(OP, "_chosen", {})
    monkeypatch.setitem(OP.backends, "triton", Backend(TRITON))
    monkeypatch.setattr(OP, "by_case", lambda problem: "scan")
    names = {name: OP.select(torch.device("cuda"), name).__name__ for name in ("auto", "triton", "scan")}
    assert names == {"auto": SCAN, "triton": TRITON, "scan": SCAN}

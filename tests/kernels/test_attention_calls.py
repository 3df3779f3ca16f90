"""The attention ops' argument errors, and which backend a GPU takes by the case."""

from importlib.util import find_spec

import pytest
import torch
from torch._subclasses import FakeTensorMode

from raoe_kernels import bidirectional_attention, dual_attention
from raoe_kernels._dispatch import Backend
from raoe_kernels.attention import OP
from raoe_kernels.attention.autograd import Problem, by_case
from raoe_kernels.attention.padding import Options, Padding

Q = torch.rand(2, 4, 3, 8)
K = torch.rand(2, 2, 3, 8)
P = torch.rand(6, 4, 8)
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)
LENGTHS, MASK = torch.tensor([3, 1]), torch.ones(2, 3, dtype=torch.bool)

WRONG = [
    ((Q, K.long(), K), {}, TypeError, "k"),
    ((Q[0], K[0], K[0]), {}, ValueError, "q must have 4 dimensions, or 3 with cu_seqlens"),
    ((Q, K.double(), K), {}, ValueError, "q, k and v"),
    ((Q, K, K[:, :, :2]), {}, ValueError, "k and v"),
    ((Q, K[:1], K[:1]), {}, ValueError, "q's except for the number of heads"),
    ((Q[:, :3], K, K), {}, ValueError, "q's number of heads"),
    ((Q, K[:, :0], K[:, :0]), {}, ValueError, "q's number of heads"),
    ((torch.rand(1, 1, 2, 257),) * 3, {}, ValueError, "q's head dimension"),
    ((Q, K, K), {"lengths": LENGTHS, "padding_mask": MASK}, ValueError, "are mutually exclusive"),
    ((Q, K, K), {"lengths": LENGTHS.float()}, TypeError, "lengths"),
    ((Q, K, K), {"lengths": LENGTHS[:1]}, ValueError, "lengths"),
    ((Q, K, K), {"lengths": LENGTHS + 1}, ValueError, r"from 0 to 3 \(q's sequence length\), got \[4, 2\]"),
    ((Q, K, K), {"lengths": -LENGTHS}, ValueError, "lengths"),
    ((Q, K, K), {"padding_mask": MASK.float()}, TypeError, "padding_mask"),
    ((Q, K, K), {"padding_mask": MASK[:, :2]}, ValueError, "padding_mask"),
    ((Q, K, K), {"max_seqlen": 3}, ValueError, "max_seqlen requires cu_seqlens"),
    ((Q, K, K), {"cu_seqlens": ENDS, "max_seqlen": 4}, ValueError, "q must have 3 dimensions"),
    ((P, P, P), {"cu_seqlens": ENDS}, TypeError, "max_seqlen"),
    ((P, P, P), {"cu_seqlens": ENDS, "max_seqlen": 3}, ValueError, "max_seqlen must be at least the longest"),
    ((P, P, P), {"cu_seqlens": ENDS, "max_seqlen": -1}, ValueError, "max_seqlen"),
    ((P, P, P), {"cu_seqlens": ENDS.long(), "max_seqlen": 4}, TypeError, "cu_seqlens"),
    ((P, P, P), {"cu_seqlens": ENDS[None], "max_seqlen": 4}, ValueError, "cu_seqlens"),
    ((P, P, P), {"cu_seqlens": ENDS.flip(0), "max_seqlen": 4}, ValueError, "values of cu_seqlens must not decrease"),
    ((P, P, P), {"cu_seqlens": ENDS + 1, "max_seqlen": 4}, ValueError, "from 0 to 6"),
    ((Q, K, K), {"scale": float("nan")}, ValueError, "scale"),
    ((Q, K, K), {"dropout_p": 1}, ValueError, "dropout_p"),
    ((Q, K, K), {"dropout_p": -0.1}, ValueError, "dropout_p"),
    ((Q, K, K), {"dropout_p": torch.tensor(0.1)}, TypeError, "dropout_p"),
    ((Q, K, K), {"causal": 1}, TypeError, "causal"),
]


@pytest.mark.parametrize("inputs, options, kind, key", WRONG)
@pytest.mark.parametrize("op", [bidirectional_attention, dual_attention])
def test_wrong(inputs, options, kind, key, op):
    if op is dual_attention and {"dropout_p", "causal"} & set(options):
        kind, key = TypeError, "has no argument"
    with pytest.raises(kind, match=key):
        op(*inputs, **options)


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

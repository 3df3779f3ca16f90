"""Wrong arguments raise errors that name the argument and show what came: the messages of every kind of error."""

import warnings

import numpy as np
import pytest
import torch

from raoe_kernels import (
    cosent_loss,
    dual_attention,
    gated_angular_loss,
    info_nce_loss,
    list_mle_loss,
    pairwise_cosine,
    rank_margin_loss,
    raoe_loss,
    refine_similarity,
    sigmoid_loss,
)

C, S, L = torch.rand(4), torch.rand(4), torch.tensor([0, 1, 2, 0])
Q, Z, M = torch.rand(1, 1, 2, 4), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
A, P, T = torch.rand(3, 4), torch.zeros(2, 3, 3), torch.tensor([0, 1, 2])

WRONG = [
    (lambda: rank_margin_loss(C, S[:3]), ValueError, r"scores must have shape \(4,\) and .*, got .*\(3,\)"),
    (lambda: rank_margin_loss(C[None, None], S), ValueError, r"similarity must have 1 dimension.*\(1, 1, 4\)"),
    (lambda: rank_margin_loss(C.long(), S), TypeError, "similarity must be float16.*int64"),
    (lambda: rank_margin_loss([0.1], S), TypeError, "similarity must be a tensor.*list"),
    (lambda: rank_margin_loss(C, None), TypeError, "scores must be a tensor, got None"),
    (lambda: rank_margin_loss(C, S.clone().requires_grad_()), ValueError, "scores must not require grad"),
    (lambda: rank_margin_loss(C, S.to(torch.complex64)), TypeError, "scores must contain real numbers"),
    (lambda: rank_margin_loss(C, L.to(torch.uint64)), TypeError, "scores must contain real numbers.*uint64"),
    (lambda: rank_margin_loss(C, S, margin=-1), ValueError, "margin must be a finite number >= 0, got -1"),
    (lambda: rank_margin_loss(C, S, margin="2"), TypeError, "margin must be a number.*'2'"),
    (lambda: rank_margin_loss(C, S, scale=0), ValueError, "scale must be a finite number > 0, got 0"),
    (lambda: rank_margin_loss(C, S, scale=torch.tensor(20.0)), TypeError, "scale must be a Python number.*tensor"),
    (lambda: rank_margin_loss(C, S, ties="first"), ValueError, "ties must be one of 'average'.*'first'"),
    (lambda: rank_margin_loss(C, S, backend="cuda"), ValueError, "backend must be one of 'auto'.*'cuda'"),
    (lambda: gated_angular_loss(C, S, L.float()), TypeError, "labels must be a tensor with an integer dtype.*float32"),
    (lambda: gated_angular_loss(C, S, L[:2]), ValueError, r"labels must have shape \(4,\)"),
    (lambda: gated_angular_loss(C, S, L, gate="both"), ValueError, "gate must be one of 'label.score'"),
    (lambda: gated_angular_loss(C, None, L), TypeError, "scores must be a tensor, got None"),
    (lambda: raoe_loss(C, S, L, rank_weight=float("inf")), ValueError, "rank_weight must be a finite number"),
    (lambda: raoe_loss(C, S, L, angle_weight=torch.ones(())), TypeError, "angle_weight must be a Python number"),
    (lambda: raoe_loss(C, None, L, gate="label"), TypeError, "scores must be a tensor, got None"),
    (lambda: raoe_loss(C.to("meta"), S, L), ValueError, "scores must have .* and be on similarity's device .meta"),
    (lambda: pairwise_cosine(C, C), ValueError, r"a must have 2 dimensions.*\(4,\)"),
    (lambda: pairwise_cosine(C[None], C[None, :2]), ValueError, "a and b must have the same shape"),
    (lambda: pairwise_cosine(C[None], C[None].double()), ValueError, "same shape, dtype and device"),
    (lambda: pairwise_cosine(L[None], L[None]), TypeError, "a must be float16"),
    (lambda: pairwise_cosine(C[None], C[None], eps=-1), ValueError, "eps"),
    (lambda: info_nce_loss(C[None], C[None], L), TypeError, "negatives must be a float tensor.*pass .* as targets="),
    (lambda: info_nce_loss(C[None], C[None], C[None, None]), ValueError, r"pass negatives\.flatten\(0, 1\)"),
    (lambda: info_nce_loss(C[None], C[None], labels=L[:1]), TypeError, "no argument 'labels': use targets"),
    (lambda: info_nce_loss(C[None], C[None], temperature=1), TypeError, "'temperature': use scale, the inverse of a"),
    (lambda: sigmoid_loss(C[None], C[None], tau=1), TypeError, "no argument 'tau': use scale, the inverse of"),
    (lambda: cosent_loss(C, labels=S), TypeError, "cosent_loss has no argument 'labels': use scores"),
    (lambda: rank_margin_loss(C, S, marign=1), TypeError, "no argument 'marign': use margin"),
    (lambda: pairwise_cosine(C[None], C[None], x=1), TypeError, "'x': use one of a, b, backend, dims, eps"),
    (lambda: dual_attention(Q, Q, Q, attn_mask=L), TypeError, "'attn_mask': use padding_mask"),
    (lambda: info_nce_loss(A.to_sparse(), A), TypeError, "anchors must be a dense tensor, got torch.sparse_coo"),
    (lambda: raoe_loss(C, S, L, return_parts=1), TypeError, "return_parts must be True or False, got 1"),
    (lambda: list_mle_loss(Z.long(), Z), TypeError, "student"),
    (lambda: list_mle_loss(Z, None), TypeError, "teacher"),
    (lambda: list_mle_loss(Z, Z.clone().requires_grad_()), ValueError, "teacher must not require grad"),
    (lambda: list_mle_loss(Z, Z.to(torch.complex64)), TypeError, "teacher"),
    (lambda: list_mle_loss(Z, Z, mask=Z), TypeError, "mask"),
    (lambda: list_mle_loss(Z, Z, mask=M[0]), ValueError, "mask"),
    (lambda: list_mle_loss(Z, Z, scale=float("inf")), ValueError, "scale"),
    (lambda: list_mle_loss(Z, Z, ties="average"), ValueError, "ties"),
    (lambda: list_mle_loss(Z, Z, generator=torch.Generator()), ValueError, "generator requires ties='random'"),
    (lambda: list_mle_loss(Z, Z, backend="triton"), RuntimeError, "listwise has no triton backend"),
    (lambda: refine_similarity(P.long(), 0.5), TypeError, "phi"),
    (lambda: refine_similarity(P[0, 0], 0.5), ValueError, "phi"),
    (lambda: refine_similarity(Z, 0.5), ValueError, "phi must be square"),
    (lambda: refine_similarity(P.clone().requires_grad_(), 0.5), ValueError, "phi must not require grad"),
    (lambda: refine_similarity(P, -1), ValueError, "omega"),
    (lambda: refine_similarity(P, 0.5, mask=Z), TypeError, "mask"),
    (lambda: refine_similarity(P, 0.5, mask=M[0]), ValueError, "mask"),
    (lambda: refine_similarity(P, 0.5, backend="native"), RuntimeError, "listwise has no native backend"),
    (lambda: sigmoid_loss(A, A, scale=torch.tensor(-1.0)), ValueError, "scale"),
    (lambda: sigmoid_loss(A, A, bias=torch.tensor(1)), ValueError, "bias"),
    (lambda: sigmoid_loss(A, A, bias=float("inf")), ValueError, "bias"),
    (lambda: sigmoid_loss(A, A, targets=T + 1), ValueError, "targets must be column indices -1 … 2"),
    (lambda: sigmoid_loss(A, A, positive_ids=T), TypeError, "positive_ids"),
    (lambda: sigmoid_loss(A, A, positive_ids=(T, T[:2])), ValueError, r"positive_ids\[1\]"),
    (lambda: sigmoid_loss(A, A, backend="native"), RuntimeError, "sigmoid has no native backend"),
    (lambda: torch.func.grad(lambda x: rank_margin_loss(x, S))(C), RuntimeError, "rank_margin_loss.*torch.func"),
    (
        lambda: torch.autograd.functional.jacobian(
            lambda x: rank_margin_loss(x, S, backend="native"), C, vectorize=True
        ),
        RuntimeError,
        "is_grads_batched.*backend='scan'|cannot run",
    ),
    (lambda: torch.func.vjp(lambda x: info_nce_loss(x, x), C[None]), RuntimeError, "info_nce_loss.*torch.func.grad"),
]


@pytest.mark.parametrize("call, kind, message", WRONG)
def test_wrong(call, kind, message):
    """Other ops' files look at the type and the argument alone."""
    with pytest.raises(kind, match=message):
        call()


LOSSES = {
    "rank_margin_loss": lambda **scale: rank_margin_loss(C, S, **scale),
    "gated_angular_loss": lambda **scale: gated_angular_loss(C, S, L, **scale),
    "raoe_loss": lambda **scale: raoe_loss(C, S, L, **scale),
    "cosent_loss": lambda **scale: cosent_loss(C, S, **scale),
    "info_nce_loss": lambda **scale: info_nce_loss(C[:, None], C[:, None], **scale),
    "sigmoid_loss": lambda **scale: sigmoid_loss(C[:, None], C[:, None], **scale),
    "list_mle_loss": lambda **scale: list_mle_loss(C[None], S[None], **scale),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_scale_that_looks_like_a_temperature_warns_once_per_call_site(loss):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            LOSSES[loss](scale=0.05)
        LOSSES[loss](scale=1)
        LOSSES[loss]()
        if loss in ("info_nce_loss", "sigmoid_loss"):
            LOSSES[loss](scale=torch.tensor(0.05, requires_grad=True))
    assert [(x.category, x.filename) for x in seen] == [(UserWarning, __file__)]
    text = "scale=0.05 looks like a temperature, but it multiplies similarities: pass 1/0.05 = 20"
    assert str(seen[0].message) == text


def test_true_is_no_margin_where_1_was_one_before():
    rank_margin_loss(C, S, margin=1)
    with pytest.raises(TypeError, match="margin must be a number, got True"):
        rank_margin_loss(C, S, margin=True)


def test_numbers_of_other_libraries_are_numbers():
    plain = rank_margin_loss(C, S, margin=1, scale=20.0)
    assert torch.equal(rank_margin_loss(C, S, margin=np.int64(1), scale=np.float32(20)), plain)

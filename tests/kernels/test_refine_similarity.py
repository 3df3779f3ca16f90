"""refine_similarity against Algorithm 1, its edges, argument errors."""

import math

import pytest
import torch

from raoe_kernels import refine_similarity
from raoe_kernels.testing import ULPS, assert_accurate
from tests.kernels.pairwise_cases import EVERY_DTYPE
from tests.kernels.test_listwise import NAN, place

__all__ = ["place"]  # a fixture


def algorithm_1(phi, omega):
    """The paper's Algorithm 1 on lists of numbers, with j' of its line 6-7 put right: what stands in the sorted
    subarray at the position where the generation order has sentence j."""
    n = len(phi)
    moved = [row[:] for row in phi]
    for i in range(n):
        ordered = sorted(phi[i][i:], reverse=True)
        for j in range(i, n):
            delta = ordered[j - i] - phi[i][j]
            step = math.log(omega * abs(delta) + 1)
            moved[i][j] = phi[i][j] + (step if delta > 0 else -step)
            moved[j][i] = moved[i][j]
    return moved


@pytest.mark.parametrize("omega", [0, 0.5, 3])
@pytest.mark.parametrize("n", [1, 2, 6, 17])
def test_refine_is_the_corrected_algorithm_1(n, omega, place):
    device, backend = place
    phi = torch.rand(2, 2, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    refined = refine_similarity(phi.to(device), omega, backend=backend)
    for x, y in zip(phi.reshape(4, n, n), refined.reshape(4, n, n), strict=True):
        expected = torch.tensor(algorithm_1(x.tolist(), omega), dtype=torch.float64)
        torch.testing.assert_close(y.cpu(), expected, rtol=1e-14, atol=1e-14)
    assert refined.equal(refined.transpose(-1, -2))
    if omega == 0:
        assert refined.cpu().triu().equal(phi.triu())


@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [0, 2, 3, 6], [5], []])
def test_a_refined_chain_does_not_see_its_padding(kept, place, poisoned):
    device, backend = place
    phi = torch.rand(2, 7, 7, generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.zeros(2, 7, dtype=torch.bool, device=device)
    mask[0, kept] = True
    mask[1] = True
    real = mask[:, None] & mask[:, :, None]
    refined = refine_similarity(phi.masked_fill(~real, NAN), 0.5, mask=mask, backend=backend)
    expected = refine_similarity(phi[0][kept][:, kept], 0.5, backend=backend)
    assert refined[0][kept][:, kept].equal(expected) and refined[~real].eq(0).all()
    assert refined[1].equal(refine_similarity(phi[1], 0.5, backend=backend))


@EVERY_DTYPE
def test_refine_against_the_reference(dtype, place):
    device, backend = place
    phi = (2 * torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(4)) - 1).to(dtype)
    ours = refine_similarity(phi.to(device), 0.5, backend=backend)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    plain, truth = (refine_similarity(x, 0.5, backend="reference") for x in (phi, phi.double()))
    assert_accurate("refined", ours, plain, truth, factor=2, floor=ULPS * torch.finfo(ours.dtype).eps)


def test_nan_makes_its_list_nan(place):
    device, backend = place
    phi = torch.rand(5, 5, generator=torch.Generator().manual_seed(2)).to(device)
    whole = refine_similarity(phi, 0.5, backend=backend)
    phi[3, 1] = NAN  # below the diagonal: not read
    assert refine_similarity(phi, 0.5, backend=backend).equal(whole)
    phi[2, 3] = NAN
    refined = refine_similarity(phi, 0.5, backend=backend)
    nan = torch.zeros(5, 5, dtype=torch.bool, device=device)
    nan[2, 2:] = nan[2:, 2] = True
    assert refined.isnan().equal(nan) and refined[~nan].equal(whole[~nan])


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 4, 4)])
def test_refine_nothing(shape, place):
    device, backend = place
    assert refine_similarity(torch.zeros(shape, device=device), 0.5, backend=backend).shape == shape
    mask = torch.zeros(shape[:-1], dtype=torch.bool, device=device)
    assert refine_similarity(torch.zeros(shape, device=device), 0.5, mask=mask, backend=backend).shape == shape

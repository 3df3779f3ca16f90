"""Calls with what is no plain memory: traced, fake, functional, batched, with tangents; and memory that changes."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from raoe_kernels import cosent_loss, pairwise_cosine, raoe_loss
from tests.kernels.conftest import available

SEEDED = torch.Generator().manual_seed(7)
SCORES, LABELS = torch.rand(6, generator=SEEDED), torch.tensor([0, 2, 1, 1, 0, 2])
SIMILARITY = torch.rand(3, 6, generator=SEEDED)
ROWS = tuple(torch.randn(6, 8, generator=SEEDED) for _ in range(2))

# Every op and form that has compiled kernels: the call, and what it is of.
CALLS = {
    "pairs": (lambda c, s: raoe_loss(c, s, torch.ones_like(s).long().cumsum(0) % 3), (SIMILARITY[0], SCORES)),
    "rows of pairs": (lambda c, s: cosent_loss(c, s), (SIMILARITY, SCORES)),
    "cosine": (lambda a, b: pairwise_cosine(a, b), ROWS),
    "cosine's widths": (lambda a, b: pairwise_cosine(a, b, dims=(2, 8)), ROWS),
}
every = pytest.mark.parametrize("which", CALLS)


@every
@pytest.mark.filterwarnings("ignore")  # jit's, of itself and of shapes that it takes for constants
@pytest.mark.parametrize("jit", [True, False])
def test_a_trace_computes(which, jit):
    call, given = CALLS[which]
    traced = torch.jit.trace(call, given, check_trace=False) if jit else make_fx(call)(*given)
    other = tuple(x.flip(0) * 0.5 for x in given)
    torch.testing.assert_close(traced(*other), call(*other))


@every
@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_have_shapes(which, inside):
    call, given = CALLS[which]
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in given]
    if inside:
        with mode:
            found = call(*fakes)
    else:
        found = call(*fakes)
    assert (found.shape, found.dtype) == ((real := call(*given)).shape, real.dtype)


@every
def test_functional_and_batched(which):
    call, given = CALLS[which]
    torch.testing.assert_close(torch.func.functionalize(call)(*given), call(*given))
    both = torch.func.vmap(call)(*(torch.stack([x, x.flip(0)]) for x in given))
    torch.testing.assert_close(both[1], call(*(x.flip(0) for x in given)))


@every
def test_zeros_and_signs_that_are_not_written(which):
    call, given = CALLS[which]
    torch.testing.assert_close(
        call(*(torch._efficientzerotensor(x.shape) for x in given)), call(*(torch.zeros_like(x) for x in given))
    )
    torch.testing.assert_close(call(*(torch._neg_view(x) for x in given)), call(*(-x for x in given)))


@every
def test_freed_storage_is_an_error(which):
    available(("cpu", "native"), "pairwise_cosine")  # torch's own functions read memory that was freed
    call, given = CALLS[which]
    freed = given[0].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"has no memory: its storage was freed|out of bounds for storage of size"):
        call(freed, given[1])


@pytest.mark.parametrize("which", CALLS)
def test_forward_mode_gives_the_number(which):
    """By hand from backward's gradient."""
    call, given = CALLS[which]
    x = given[0].double()
    other, tangent, weight = given[1].double(), x.cos(), torch.rand(call(*given).shape, generator=SEEDED).double()
    leaf = x.clone().requires_grad_()
    (call(leaf, other) * weight).sum().backward()
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent), other)).tangent
        assert forward_ad.unpack_dual(call(x, other)).tangent is None
    torch.testing.assert_close((found * weight).sum(), (leaf.grad * tangent).sum())
    torch.testing.assert_close(torch.func.jvp(lambda x: call(x, other), (x,), (tangent,))[1], found)


def test_forward_mode_of_a_named_kernel_is_an_error():
    available(("cpu", "native"), "pairwise_cosine")
    wrong = pytest.raises(RuntimeError, match="'native' does not support forward-mode derivatives of cosine: use")
    with forward_ad.dual_level(), wrong:
        pairwise_cosine(forward_ad.make_dual(ROWS[0], ROWS[1]), ROWS[1], backend="native")


RACE = """
import threading, time, torch
from raoe_kernels import raoe_loss
torch.set_num_threads(2)
for count, classes, scale, changing in (
    (100_000, 3, 20.0, "scores"),  # keys of all digits, by two threads
    (4_000, 1_000, 20.0, "labels"),  # sorted labels
    (4_000, 3, 1e5, "labels"),  # labels by number, logarithms
    (4_000, 1_000, 1e5, "both"),
):
    seeded = torch.Generator().manual_seed(0)
    c, s = (torch.rand(count, generator=seeded) for _ in range(2))
    l = torch.randint(0, classes, (count,), generator=seeded)
    c.requires_grad_()
    changes = [(s, x) for x in (s.clone(), s.flip(0) * 1e30, -s) if changing != "labels"]
    changes += [(l, x) for x in (l.clone(), l * 1_000_000_007, l - (1 << 62)) if changing != "scores"]
    over = threading.Event()
    def rewrite():
        while not over.is_set():
            for x, values in changes:
                x.copy_(values)
    other = threading.Thread(target=rewrite)
    other.start()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        raoe_loss(c, s, l, scale=scale).backward()
    over.set()
    other.join()
"""


@pytest.mark.slow
def test_values_that_change_during_a_call_corrupt_nothing():
    """In a process of its own: what is written out of bounds may kill any test after it."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

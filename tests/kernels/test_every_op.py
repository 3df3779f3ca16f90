"""What every op must do in every form and backend: derivatives, strides, equal bits, autocast, torch.compile, and its
registration as an operator. Values against the float64 reference are in each op's own files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import raoe_kernels
from raoe_kernels import (
    bidirectional_attention,
    dual_attention,
    guided_argmax,
    guided_log_probs,
    info_nce_loss,
    list_mle_loss,
    pairwise_cosine,
    refine_similarity,
    use_backend,
)
from tests.kernels.attention_cases import Batch
from tests.kernels.conftest import DEVICE, HAS_GPU, PLACES, available
from tests.kernels.contrast_cases import INFONCE, SIGMOID, Contrast, mapped, rows
from tests.kernels.gpu_checks import NoLaunch, operations
from tests.kernels.infonce_forms import cases, loss_of
from tests.kernels.pairwise_cases import Case
from tests.kernels.test_guided import logits
from tests.kernels.test_listwise import lists

Make = Callable[[int], tuple[list[Tensor], dict[str, Any]]]
Call = Callable[..., Tensor]
ALL = ("reference", "scan", "triton", "native")
pytestmark = pytest.mark.usefixtures("small_buffers")


@dataclass(frozen=True)
class Form:
    """A way to call an op.

    make       function of a size: the tensors that are differentiated, in float64, and the other arguments
    call       function of both and `backend`: the result as one tensor. NUMBERS may be among the other arguments
    multiplies whether it multiplies matrices, so that autocast and a second derivative are as of torch's products
    """

    name: str
    op: str
    make: Make
    call: Call
    backends: tuple[str, ...] = ALL
    multiplies: bool = False

    def __str__(self) -> str:
        return self.name


def of_pairs(name: str, op: str, widths: int = 0, **options: Any) -> Form:
    def make(n: int) -> tuple[list[Tensor], dict[str, Any]]:
        similarity, scores, labels = Case(name, op, n + 6, levels=n).inputs(torch.float64)
        similarity = 0.9 * similarity
        if widths:
            similarity = torch.stack([similarity, similarity.flip(0) / 2])
        return [similarity], {"scores": scores, "labels": labels}

    def call(leaves: list[Tensor], given: dict[str, Tensor], backend: str) -> Tensor:
        numbers = dict(given)
        of = numbers.pop("scores"), numbers.pop("labels")
        of = of[: 1 if op in ("rank_margin_loss", "cosent_loss") else 2]
        result = getattr(raoe_kernels, op)(*leaves, *of, backend=backend, **{"scale": 3.0, **options, **numbers})
        return torch.stack(result) if isinstance(result, tuple) else result

    return Form(name, op, make, call)


def of_cosines(name: str, dims: tuple[int, ...] | None) -> Form:
    def call(leaves: list[Tensor], given: dict[str, Any], backend: str) -> Tensor:
        return pairwise_cosine(*leaves, dims=dims, backend=backend, **given)

    backends = ALL if not HAS_GPU else ALL[:3]  # the compiled kernels of the cosine run on a CPU only
    return Form(name, "pairwise_cosine", lambda n: (rows((n, n), 32, torch.float64), {}), call, backends)


def of_contrast(name: str, contrast: Contrast, which: str, **more: Any) -> Form:
    def make(n: int) -> tuple[list[Tensor], dict[str, Any]]:
        given = contrast.options(which, n, n + 3) | more
        learned = {name: given.pop(name) for name in contrast.learned if name in given}
        return contrast.leaves(rows((n, n, 3), 8, torch.float64), **learned), given

    def call(leaves: list[Tensor], given: dict[str, Any], backend: str) -> Tensor:
        return contrast(leaves, backend=backend, **given)

    return Form(name, contrast.loss.__name__, make, call, ALL[: 2 if "dims" in more else 3], multiplies=True)


def of_infonce(which: str) -> Form:
    def make(n: int) -> tuple[list[Tensor], dict[str, Any]]:
        given = cases()[which]
        sizes = (6, 7, 14, 7) if "all_anchors" in given else (6, 7, 14)
        scale = torch.tensor(given.pop("scale", 20.0), dtype=torch.float64)
        return [*rows(sizes, 5, torch.float64), scale], given

    def call(leaves: list[Tensor], given: dict[str, Any], backend: str) -> Tensor:
        return loss_of(info_nce_loss, leaves, given, backend=backend)

    return Form(which, "info_nce_loss", make, call, ALL[:2], multiplies=True)


def of_logits(name: str, argmax: bool) -> Form:
    def make(n: int) -> tuple[list[Tensor], dict[str, Any]]:
        both = list(logits((2, n, 9)))
        return ([], {"logits": both}) if argmax else (both, {})

    def call(leaves: list[Tensor], given: dict[str, Any], backend: str) -> Tensor:
        function = guided_argmax if argmax else guided_log_probs
        return function(*leaves, *given.get("logits", ()), guidance=given.get("guidance", 1.5), backend=backend)

    return Form(name, "guided_argmax" if argmax else "guided_log_probs", make, call, ALL[:3])


def of_lists(name: str, refine: bool) -> Form:
    def make(n: int) -> tuple[list[Tensor], dict[str, Any]]:
        student, teacher, mask = lists((n, 5), ragged=True)
        if refine:
            return [], {"phi": torch.rand(n, 5, 5, generator=torch.Generator().manual_seed(n)).double(), "mask": mask}
        return [student], {"teacher": teacher, "mask": mask}

    def call(leaves: list[Tensor], given: dict[str, Any], backend: str) -> Tensor:
        if refine:
            return refine_similarity(given["phi"], given.get("omega", 0.5), mask=given["mask"], backend=backend)
        return list_mle_loss(*leaves, **{"scale": 3, **given}, backend=backend)

    return Form(name, "refine_similarity" if refine else "list_mle_loss", make, call, ALL[:2])


def of_attention(name: str, padding: str, dual: bool = False, backends: tuple[str, ...] = ALL[:3], **more: Any) -> Form:
    def make(n: int) -> tuple[list[Tensor], dict[str, Any]]:
        batch = Batch(padding, [n, 1, 0], n + 1, heads=(4, 2), d=3, rubbish=0.5)
        return [batch.q, batch.k, batch.v], batch.where

    def call(leaves: list[Tensor], given: dict[str, Any], backend: str) -> Tensor:
        if dual:
            return torch.stack(dual_attention(*leaves, **given, backend=backend))
        return bidirectional_attention(*leaves, **more | given, backend=backend)

    op = "dual_attention" if dual else "bidirectional_attention"
    return Form(name, op, make, call, backends, multiplies=True)


FORMS = [
    of_pairs("rank", "rank_margin_loss", margin=1),
    of_pairs("cosent-widths", "cosent_loss", widths=2),
    of_pairs("gated", "gated_angular_loss"),
    of_pairs("raoe", "raoe_loss", margin=1),
    of_pairs("raoe-parts", "raoe_loss", margin=1, return_parts=True),
    of_pairs("raoe-widths", "raoe_loss", widths=2, gate="label", return_parts=True),
    of_cosines("cosine", None),
    of_cosines("cosine-widths", (3, 16, 30)),
    of_contrast("infonce", INFONCE, "mask-targets-symmetric"),
    of_contrast("infonce-ids", replace(INFONCE, learned={"scale": 20.0}), "ids-targets-symmetric", scale=3.0),
    of_contrast("infonce-widths", INFONCE, "mask-targets-symmetric", dims=(2, 3, 7)),
    *(of_infonce(which) for which in ("joint-four-targets-ids", "guided-gist", "guided-four", "joint-all-anchors")),
    of_contrast("sigmoid", SIGMOID, "mask-targets-groups", scale=3.0),
    of_contrast("sigmoid-ids", SIGMOID, "ids-targets-groups", scale=3.0),
    of_contrast("sigmoid-numbers", replace(SIGMOID, learned={}), "soft"),
    of_logits("guided", argmax=False),
    of_logits("argmax", argmax=True),
    of_lists("listmle", refine=False),
    of_lists("refine", refine=True),
    of_attention("attention", "lengths"),
    of_attention("attention-full", "full", causal=True),
    of_attention("attention-dual", "left", dual=True),
    of_attention("attention-holes", "holes", dual=True),
    # scan's dropout draws other numbers where it runs twice
    of_attention("attention-packed", "packed", backends=("reference", "triton"), causal=True, dropout_p=0.3),
    of_attention("attention-packed-dual", "packed", dual=True),
]


def every(forms: list[Form], quick: dict[str, str] | None = None) -> Any:
    """Each of the forms in each place that has it; with `quick`, all but these forms and backends are slow tests."""
    cases = []
    for form in forms:
        for device, backend in PLACES:
            if backend in form.backends:
                marks = [] if quick is None or quick.get(form.name) == backend else [pytest.mark.slow]
                cases.append(pytest.param(form, (device, backend), id=f"{form}-{device}-{backend}", marks=marks))
    return pytest.mark.parametrize("form, place", cases, indirect=["place"])


# Python numbers by form, three values each.
SCALES, WEIGHTS = (3.0, 0.5, 20.0), (1.0, -2.0, 0.0)
NUMBERS: dict[str, dict[str, tuple[float, ...]]] = {
    "rank": {"scale": (3, 20, 7), "margin": (1, 0, 2)},
    "cosent-widths": {"scale": SCALES},
    "raoe-parts": {"scale": SCALES, "margin": (1.0, 0.0, 2.5), "rank_weight": WEIGHTS, "angle_weight": WEIGHTS},
    "cosine": {"eps": (1e-8, 0.0, 2.0)},
    "infonce": {"scale": SCALES},
    "infonce-widths": {"scale": SCALES},
    "guided-gist": {"guide_margin": (0.2, -0.1, 0.0)},
    "all-hard": {"hardness_strength": (30.0, 9.0, 0.5)},
    "sigmoid-numbers": {"scale": SCALES, "bias": (-10.0, 0.0, 0.5)},
    "guided": {"guidance": (1.5, 1.0, 0.5)},
    "argmax": {"guidance": (1.5, 1.0, 0.5)},
    "listmle": {"scale": SCALES},
    "refine": {"omega": (0.5, 0.0, 2.0)},
    "attention": {"scale": SCALES},
    "attention-dual": {"scale": SCALES},
    "attention-packed": {"scale": SCALES, "dropout_p": (0.3, 0.2, 0.5)},
}

# One of each op, where torch.compile is slow.
QUICK = {"raoe-parts": "native", "cosine": "native", "infonce-ids": "scan", "infonce-widths": "native",
         "sigmoid-ids": "scan", "sigmoid-numbers": "scan", "guided": "scan", "listmle": "scan", "refine": "scan",
         "attention-dual": "scan"}  # fmt: skip
DIFFERENTIABLE = [form for form in FORMS if form.make(3)[0]]


def made(form: Form, device: str, dtype: torch.dtype, n: int = 4) -> tuple[list[Tensor], dict[str, Any]]:
    """Leaves of a dtype and the other arguments, on a device."""
    leaves, given = form.make(n)
    given = mapped(given, lambda x: x.to(device))
    return [x.to(dtype).to(device).requires_grad_() for x in leaves], given


def upstream(result: Tensor) -> Tensor:
    return torch.linspace(-2, 3, result.numel(), dtype=result.dtype, device=result.device).view(result.shape)


def differentiated(form: Form, leaves: list[Tensor], given: dict[str, Any], backend: str) -> list[Tensor]:
    """The result and the gradients of all leaves."""
    torch.manual_seed(11)  # of dropout
    result = form.call(leaves, given, backend)
    return [result.detach(), *(torch.autograd.grad(result, leaves, upstream(result)) if leaves else ())]


def assert_close(found: list[Tensor], expected: list[Tensor], rtol: float, atol: float) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


@every(DIFFERENTIABLE)
def test_gradcheck(form, place):
    device, backend = place
    leaves, given = made(form, device, torch.float64)

    def call(*leaves: Tensor) -> Tensor:
        torch.manual_seed(11)
        return form.call(list(leaves), given, backend)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@every(DIFFERENTIABLE)
def test_each_gradient_alone_and_none(form, place, poisoned):
    """It is what it is beside the others, and without any no graph is made."""
    device, backend = place
    leaves, given = made(form, device, torch.float64)
    result, *grads = differentiated(form, leaves, given, backend)
    for alone, expected in enumerate(grads):
        some = [x.detach().requires_grad_(place == alone) for place, x in enumerate(leaves)]
        torch.manual_seed(11)
        again = form.call(some, given, backend)
        (gradient,) = torch.autograd.grad(again, some[alone], upstream(again))
        assert_close([again.detach(), gradient], [result, expected], 1e-11, 1e-13)
    with torch.no_grad():
        torch.manual_seed(11)
        again = form.call(leaves, given, backend)
    assert not again.requires_grad
    torch.manual_seed(11)
    again = form.call([x.detach() for x in leaves], given, backend)
    assert not again.requires_grad
    torch.testing.assert_close(again, result, rtol=1e-11, atol=1e-13)


def spread(x: Tensor) -> Tensor:
    """The same values, every second element of rows that are not one behind the other."""
    if x.ndim == 0:
        return x
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 3)
    if x.ndim > 1:
        wide = wide.transpose(0, 1).contiguous().transpose(0, 1)
    wide = wide.fill_(torch.nan if x.is_floating_point() else 0)[..., 1 : 1 + 2 * x.shape[-1] : 2]
    return wide.copy_(x)


def sliced(x: Tensor) -> Tensor:
    """The same values, rows that start at a multiple of 16 in wider ones."""
    if x.ndim == 0:
        return x
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 48).fill_(torch.nan if x.is_floating_point() else 0)
    return wide[..., 16 : 16 + x.shape[-1]].copy_(x)


@every(FORMS)
@pytest.mark.parametrize("way", [spread, sliced])
def test_strides_do_not_matter_and_inputs_stay(way, form, place, poisoned):
    device, backend = place
    leaves, given = made(form, device, torch.float32)
    expected = differentiated(form, leaves, given, backend)
    leaves, given = [way(x.detach()).requires_grad_() for x in leaves], mapped(given, way)
    before = [x.detach().clone() for x in leaves]
    torch.manual_seed(11)
    result = form.call(leaves, given, backend)
    grads = torch.autograd.grad(result, leaves, way(upstream(result))) if leaves else ()
    assert_close([result.detach(), *grads], expected, 1e-5, 1e-6)
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True))


@every(FORMS)
def test_equal_calls_give_equal_bits(form, place):
    device, backend = place
    first, second = (differentiated(form, *made(form, device, torch.float32), backend) for _ in range(2))
    # what the specification scatters on a GPU is added in any order
    same = torch.allclose if (device, backend) == ("cuda", "reference") else torch.equal
    assert all(same(x, y) for x, y in zip(first, second, strict=True))


@every(DIFFERENTIABLE)
def test_backward_twice_and_no_second_derivative(form, place):
    device, backend = place
    leaves, given = made(form, device, torch.float32)
    result = form.call(leaves, given, backend)
    grads = [torch.autograd.grad(result, leaves, upstream(result), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(x, y) and x.ne(0).any() for x, y in zip(*grads, strict=True))
    if "attention" not in form.op or backend == "triton":  # torch's own has one
        with pytest.raises(RuntimeError, match="does not support second derivatives"):
            torch.autograd.grad(result.sum(), leaves[0], create_graph=True)


@every(DIFFERENTIABLE)
def test_inputs_without_gradient_may_come_from_inference_mode(form, place):
    """As those of torch's cosine_similarity, for example embeddings from model.encode(convert_to_tensor=True)."""
    device, backend = place
    leaves, given = made(form, device, torch.float32)
    _, *grads = differentiated(form, leaves, given, backend)
    for alone, expected in enumerate(grads):
        with torch.inference_mode():
            some, frozen = [x.detach().clone() for x in leaves], mapped(given, torch.clone)
        some[alone] = leaves[alone]
        torch.manual_seed(11)
        result = form.call(some, frozen, backend)
        assert_close([*torch.autograd.grad(result, some[alone], upstream(result))], [expected], 1e-4, 1e-5)


@every(FORMS)
@pytest.mark.parametrize("default", ["meta", "cuda"])
def test_the_default_device_changes_nothing(default, form, place):
    device, backend = place
    leaves, given = made(form, device, torch.float32)
    outside = differentiated(form, leaves, given, backend)
    with torch.device(default):
        inside = differentiated(form, leaves, given, backend)
        with torch.no_grad():
            torch.manual_seed(11)
            result = form.call(leaves, given, backend)
    assert_close([result, *inside], [outside[0], *outside], 1e-5, 1e-6)


@every([form for form in FORMS if not form.multiplies])
def test_autocast_changes_nothing(form, place):
    device, backend = place
    outside = differentiated(form, *made(form, device, torch.bfloat16), backend)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = differentiated(form, *made(form, device, torch.bfloat16), backend)
    for x, y in zip(inside, outside, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@every(FORMS, QUICK)
def test_compiled_gives_the_same(form, place):
    """In one graph, for two sizes."""
    device, backend = place
    torch._dynamo.reset()
    # a product as torch.compile's own operation
    step = torch.compile(
        lambda leaves, given: form.call([x * 1.0 for x in leaves], given, backend), fullgraph=True, backend="aot_eager"
    )
    for n in (4, 6):
        leaves, given = made(form, device, torch.float32, n)
        expected = differentiated(form, leaves, given, backend)
        torch.manual_seed(11)
        result = step(leaves, given)
        grads = torch.autograd.grad(result, leaves, upstream(result)) if leaves else ()
        assert_close([result.detach(), *grads], expected, 1e-4, 1e-5)


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("form", [pytest.param(form, id=form.name, marks=[pytest.mark.slow] * (form.name not in QUICK))
                                  for form in [*FORMS, of_infonce("all-hard")]])  # fmt: skip
def test_one_graph_for_all_sizes_and_numbers(form, dynamic):
    """One with dynamic=True. By default, the first graph has constants, and the second is for all other calls."""
    backend = "auto" if "scan" in form.backends else "reference"
    torch._dynamo.reset()
    step = torch.compile(
        lambda leaves, given: form.call([x * 1.0 for x in leaves], given, backend),
        fullgraph=True, dynamic=dynamic, backend="aot_eager",
    )  # fmt: skip
    for call, n in enumerate((4, 6, 9)):
        leaves, given = made(form, DEVICE, torch.float32, n)
        given |= {name: values[call] for name, values in NUMBERS.get(form.name, {}).items()}
        expected = differentiated(form, leaves, given, backend)
        torch.manual_seed(11)
        with torch._dynamo.config.patch(error_on_recompile=call >= (1 if dynamic else 2)):
            result = step(leaves, given)
        grads = torch.autograd.grad(result, leaves, upstream(result)) if leaves else ()
        assert_close([result.detach(), *grads], expected, 1e-4, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "scan", "auto"])
def test_inductor_and_a_block_around_the_call(backend):
    """The backend is looked up when the call runs, not when it was traced."""
    (form,) = [form for form in FORMS if form.name == "raoe"]
    compiled = torch.compile(lambda leaves, given: form.call([x * 1.0 for x in leaves], given, "auto"), fullgraph=True)
    leaves, given = made(form, "cpu", torch.float32)
    with use_backend(backend):
        found = compiled(leaves, given)
    expected = form.call(leaves, given, backend)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


class Caught(torch.fx.Interpreter):
    """Runs a graph and keeps the calls of this package's operators."""

    calls: list[tuple[Any, tuple[Any, ...]]]

    def call_function(self, target, args, kwargs):
        if "raoe_kernels" in str(target):
            self.calls.append((target, args))
        return super().call_function(target, args, kwargs)


def operators(form: Form, leaves: list[Tensor], given: dict[str, Any], backend: str) -> Iterator[tuple[Any, Any]]:
    """The operators that a call runs, and their arguments."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def interpreted(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        caught = Caught(graph)
        caught.calls = calls
        return caught.run

    torch._dynamo.reset()
    torch.compile(lambda leaves: form.call(leaves, given, backend), fullgraph=True, backend=interpreted)(leaves)
    for target, arguments in calls:
        yield getattr(target, "default", target), arguments


@pytest.mark.slow
@every(FORMS)
def test_operators_are_registered_as_torch_wants(form, place):
    device, backend = place
    leaves, given = made(form, device, torch.float32)
    found = list(operators(form, leaves, given, backend))
    assert found
    for target, arguments in found:
        torch.library.opcheck(target, arguments)


# Torch's operations in a call and its backward, microseconds of the host each: memory of results, and the clone of one
# that the caller may change in place.
ALLOCATES = {
    "raoe-native": ["empty"] * 3,
    "raoe-triton": ["empty"] * 2 + ["mul"],
    "cosine-native": ["empty", "unbind", "clone", "empty", "empty"],
    "cosine-triton": ["new_empty", "unbind", "clone", "new_empty", "new_empty", "new_empty"],
    "guided-triton": ["new_empty"] * 7,
}


@pytest.mark.parametrize("which", ALLOCATES)
def test_a_call_allocates_and_nothing_else(which, monkeypatch):
    """Triton's kernels are left out: its interpreter runs operations of its own."""
    name, _, backend = which.rpartition("-")
    (form,) = [form for form in FORMS if form.name == name]
    if backend == "native":
        available(("cpu", backend), form.op)
    if backend == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        package = {"raoe": "pairwise"}.get(name, name)
        kernels = import_module(f"raoe_kernels.{package}.triton_kernels")
        for kernel in [kernel for kernel in vars(kernels) if kernel.startswith((f"{package}_", "one_block"))]:
            monkeypatch.setattr(kernels, kernel, NoLaunch())
    leaves, given = made(form, "cpu", torch.float32)
    above = torch.ones_like(form.call(leaves, given, "reference"))
    found = operations(lambda: torch.autograd.grad(form.call(leaves, given, backend), leaves, above))
    found = [name.removeprefix("aten.") for name in found]
    assert [name for name in found if name not in ("detach", "view")] == ALLOCATES[which]

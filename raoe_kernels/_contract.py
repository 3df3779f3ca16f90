"""Interface between an op and its backends, for all ops except attention, in eager mode and under torch.compile.

A problem is a NamedTuple that holds the arguments of a call, with the tensors first. A backend is a module with two
functions:

    forward(problem, needs) -> (result, saved)
    backward(problem, saved, upstream, needs, dtype) -> gradients

Arguments and results:
    needs: tuple of bools, one for each differentiable field of the problem: True if the gradient of this field is
        needed
    result: tensor whose shape and dtype are set by the argument `result` of `register`
    saved: tuple of the tensors (or None) that `backward` reads
    upstream: gradient with respect to the result
    dtype: dtype of the gradients, except that gradients of 0-dimensional tensors are float32 or float64 (_dtypes.wide)
    gradients: tuple with the gradient of each differentiable field, or None for a gradient that is not needed or is 0

A backend that computes the gradients in the forward pass has no function `backward`. Such a backend saves the gradients
for an upstream gradient of 1 (None for a gradient that is not needed). The backward pass then multiplies the saved
gradients by the upstream gradient. If the backend has a function `scaled`, this function does the multiplication.
Otherwise, the function `scale` that was passed to `register` does it. `scaled` and `scale` take the same arguments as
`backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._dispatch import Op, refuse_func_grad, refuse_second_derivative
from ._dtypes import wide, without_autocast
from ._operator import eager, like, operator, savable

Needs = tuple[bool, ...]
Gradients = tuple[Tensor | None, ...]
Shape = Callable[[Any], Tensor]

# {type annotation of a problem's field: its spelling in torch's operator schemas, where the two differ}
SCHEMA = {"Tensor | None": "Tensor?", "tuple[int, ...] | None": "int[]?"}


def scalar(problem: Any) -> Tensor:
    """Return the loss for an empty batch: a scalar tensor with the value 0."""
    return problem[0].new_zeros((), dtype=wide(problem[0].dtype))


def scaled(problem: Any, saved: Gradients, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    """Return the saved gradients of a scalar loss, multiplied by the upstream gradient."""
    return tuple(None if g is None else (g * upstream).to(dtype if g.ndim else g.dtype) for g in saved)


def register(
    op: Op,
    make: Any,
    gradients: int,
    *,
    result: Shape = scalar,
    saved: Sequence[Shape] | None = None,
    scale: Callable[..., Gradients] | None = scaled,
    is_empty: Callable[[Any], bool] = lambda problem: problem[0].numel() == 0,
    name: str = "",
    forward: str = "forward",
) -> Callable[[Any, str], Tensor]:
    """Register an op with torch, and return a function call(problem, backend) that returns the op's result.

    Args:
        make: the problem's NamedTuple class. The problem's first field determines the device and the dtype.
        gradients: number of differentiable fields, which are the problem's first fields.
        result: function(problem) that returns zeros with the result's shape and dtype, which are the result of an empty
            problem.
        saved: a function like `result` for each tensor that backward reads; by default, one function per gradient.
        scale: function that is called instead of `backward` for backends without `backward`. In the problem that
            `scale` receives, all tensors are None. Unless `scale` is None, compiled calls compute all gradients in the
            forward pass. Pass None if every backend has a function `backward`.
        is_empty: function that returns True for an empty problem, for which no backend is called.
        name: name of the operator; by default the key of the op.
        forward: name of the backends' forward function, for backend modules that implement several functions.
    """
    function = " or ".join(op.functions)
    kinds = [kind.__forward_arg__ for kind in make.__annotations__.values()]  # as strings
    fields = [f"{SCHEMA.get(kind, kind)} {field}" for field, kind in zip(make._fields, kinds, strict=True)]
    tensors = sum(field.startswith("Tensor") for field in fields)
    no_tensors, no_needs = (None,) * tensors, (False,) * gradients
    if saved is None:
        saved = [lambda problem, i=i: like_field(problem, i) for i in range(gradients)]  # type: ignore[misc]

    def call(problem: Any, backend: str) -> Tensor:
        module, needs = eager(op, backend, problem[:tensors], problem), no_needs
        if torch.is_grad_enabled():
            needs = tuple([x is not None and x.requires_grad for x in problem[:gradients]])
            if True in needs:
                refuse_func_grad(function)
        if module is None:
            output = run_operator(*problem, [int(need) for need in needs], backend)
            return output[0] if saved else output
        if True in needs:
            return Call.apply(problem, module, *problem[:gradients])  # type: ignore[no-any-return]
        return run(problem, needs, module)[0]

    def run(problem: Any, needs: Needs, module: ModuleType) -> tuple[Tensor, Gradients]:
        if is_empty(problem):
            return result(problem), () if has_backward(module) else zeros(problem, needs)
        with without_autocast(problem[0]):
            return getattr(module, forward)(problem, needs)  # type: ignore[no-any-return]

    def differentiate(
        problem: Any, kept: Gradients, upstream: Tensor, needs: Needs, dtype: torch.dtype, module: Any
    ) -> Gradients:
        """Run a backend's own `backward`, and return zeros where it returns None for a gradient that is needed."""
        grads: Gradients = (None,) * gradients
        if any(needs) and not is_empty(problem):
            with without_autocast(problem[0]):
                grads = module.backward(problem, kept, upstream, needs, dtype)
        inputs = zip(problem[:gradients], grads, needs, strict=True)
        return tuple([x.new_zeros(x.shape, dtype=dtype) if need and g is None else g for x, g, need in inputs])

    def zeros(problem: Any, needs: Needs) -> Gradients:
        """Return zeros with the shapes of the tensors that a backend saves for `backward`."""
        wanted = needs if scale else (True,) * len(saved)
        return tuple([shape(problem) if want else None for shape, want in zip(saved, wanted, strict=True)])

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, problem: Any, module: ModuleType, *inputs: Tensor | None) -> Tensor:
            output, kept = run(problem, ctx.needs_input_grad[2:], module)
            ctx.module, ctx.options, ctx.dtype = module, problem[tensors:], problem[0].dtype
            if not has_backward(module):
                ctx.save_for_backward(*kept)
                return output
            ctx.save_for_backward(*savable(problem[:tensors]), *kept)
            # The caller may change the result in place. If backward also reads this tensor, return a copy.
            return output.clone() if kept and kept[0] is output else output

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
            refuse_second_derivative(function)
            stored, needs, module = ctx.saved_tensors, ctx.needs_input_grad[2:], ctx.module
            # Do not read saved_tensors again: torch's checkpointing allows only one read.
            if has_backward(module):
                problem, kept = make(*stored[:tensors], *ctx.options), stored[tensors:]
                return None, None, *differentiate(problem, kept, upstream, needs, ctx.dtype, module)
            scaling: Any = module.scaled if hasattr(module, "scaled") else scale
            return None, None, *scaling(make(*no_tensors, *ctx.options), stored, upstream, needs, ctx.dtype)

    def operator_forward(*inputs: Any) -> tuple[Tensor | None, ...]:
        *values, needs, backend = inputs
        problem, needs = make(*values), tuple(map(bool, needs)) if scale else no_needs
        module = op.select(problem[0].device, backend, problem)
        output, kept = run(problem, needs, module)
        if scale is None:
            kept = tuple([shape(problem) if x is None else x for x, shape in zip(kept or nothing, saved, strict=True)])
        elif not any(needs):
            kept = nothing
        elif has_backward(module):
            kept = differentiate(problem, kept, torch.ones_like(output), needs, output.dtype, module)
        return output, *kept

    def operator_shapes(*inputs: Any) -> tuple[Tensor | None, ...]:
        *values, needs = inputs
        problem = make(*values)
        return result(problem), *zeros(problem, needs)

    def operator_backward(upstream: Tensor, *inputs: Any) -> Gradients:
        *values, needs, backend = inputs
        problem, kept = make(*values[: len(fields)]), tuple(values[len(fields) :])
        module = op.select(problem[0].device, backend, problem)
        return differentiate(problem, kept, upstream, tuple(map(bool, needs)), problem[0].dtype, module)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(() if scale else (inputs[-1], *inputs[:tensors])), *(output[1:] if saved else ()))
        ctx.options, ctx.dtype, ctx.backend = inputs[tensors : len(fields)], inputs[0].dtype, inputs[-2]

    def operator_gradients(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        stored, needs = ctx.saved_tensors, ctx.needs_input_grad[:gradients]
        if scale:
            grads = scale(make(*no_tensors, *ctx.options), stored, upstream, needs, ctx.dtype)
        else:
            (numbers, *stored), flags = stored, [int(need) for need in needs]
            problem, kept = (*stored[:tensors], *ctx.options), stored[tensors:]
            grads = run_backward(upstream, *problem, *kept, flags, ctx.backend, numbers=numbers)
        rest = len(fields) + 3 - gradients
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), *[None] * rest

    nothing = (None,) * len(saved)
    name, needs_argument = name or op.key, "int[] needs"  # ints, because torch.jit.trace cannot record lists of bools
    if scale is None:
        stored_arguments = [f"Tensor saved{i}" for i in range(len(saved))]
        run_backward = operator(
            f"{name}_backward", ", ".join(["Tensor upstream", *fields, *stored_arguments, needs_argument]), gradients,
            operator_backward, lambda upstream, *inputs: like(inputs[:gradients], inputs[-1]),
        )  # fmt: skip
    run_operator = operator(
        name, ", ".join([*fields, needs_argument]), 1 + len(saved), operator_forward, operator_shapes,
        (save, operator_gradients) if gradients else None,
    )  # fmt: skip
    return call


def has_backward(module: ModuleType) -> bool:
    return "backward" in module.__dict__


def like_field(problem: Any, i: int = 0) -> Tensor:
    """Return zeros with the shape of the problem's field i, in the dtype of the arithmetic (float32 or float64)."""
    return problem[i].new_zeros(problem[i].shape, dtype=wide(problem[0].dtype))

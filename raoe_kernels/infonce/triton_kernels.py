"""info_nce_loss in Triton: matrix products through cuBLAS, and what is launched on what between them. The gradient is
made in forward, of scaled rows; backward takes it back through the rows' norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
import triton
from torch import Tensor

from .._problems import Gradients
from ..triton_compile import Variant, signature_of
from . import triton_fused
from .chunks import sweep
from .problem import Problem, add_rows, own_columns
from .scan import UNSHIFTED_SCALE
from .triton_passes import (
    IDS,
    MASK,
    NONE,
    POINTERS,
    UNIT,
    info_nce_gradients,
    info_nce_rows,
    info_nce_weights,
)
from .triton_units import (
    HALF,
    INTERPRETED,
    ROWS,
    Units,
    add_to_columns,
    empty_weights,
    half,
    integers_or,
    through_norms,
    units_of,
)

# Two sweeps over a row of logits a program. Eight elements a thread are two loads of 16 bytes in flight; with 16 warps
# few rows are open at a time, so that the second sweep finds them in a cache of 50 MB up to some 32,768 columns.
WEIGHTS = {"BLOCK": 4096, "num_warps": 16}
SHORT = {"BLOCK": 2048, "num_warps": 16}  # where a mask's address for each element, or a double, takes registers


def _stretch(problem: Problem) -> float:
    """What weights are multiplied by, so that float16's use its range. They are below 4 a direction, the norms' part
    included; those of the way back of all anchors that share a target may come together."""
    if problem.anchors.dtype != torch.float16:
        return 1.0
    largest = 1 if not problem.symmetric else 2 if problem.targets is None else 1 + len(problem.anchors)
    return HALF / 4 / 2.0 ** (largest - 1).bit_length()


def _pass(
    problem: Problem,
    units: Units,
    stats: Tensor,
    own_weights: Tensor | None = None,
    by_column: Tensor | None = None,
    *,
    back: bool = False,
) -> Callable[[int, Tensor], Tensor | None]:
    """What `sweep` calls for a chunk. There are weights where there are own_weights to be filled; `back`, anchors'
    targets look for them."""
    n, c, anchors = len(problem.anchors), problem.column_count, len(units.columns)
    ids = (problem.anchor_ids, problem.column_ids)
    strides = (0, 0) if problem.ignored is None else problem.ignored.stride()
    column_count, places = (n, (0, anchors // UNIT.value)) if back else (c, (anchors, 0))
    if back:
        ids, strides = ids[::-1], strides[::-1]
    targets, row_ids, column_ids = integers_or(stats, problem.targets, *ids)
    learnt = None if problem.learnt_scale is None else problem.learnt_scale.to(stats.dtype)
    mask = triton.reinterpret(stats if problem.ignored is None else problem.ignored, torch.uint8)
    gradient = own_weights is not None
    short = problem.ignored is not None or problem.anchors.dtype == torch.float64
    constants = (SHORT if short else WEIGHTS) | {
        "IGNORE": MASK if problem.ignored is not None else NONE if ids[0] is None else IDS,
        "SHIFTED": learnt is not None or problem.scale > UNSHIFTED_SCALE, "LEARNT": learnt is not None,
        "GRADIENT": gradient, "SYMMETRIC": gradient and by_column is not None, "INTERPRETED": INTERPRETED,
    }  # fmt: skip

    def weigh(first: int, logits: Tensor) -> Tensor | None:
        weights = empty_weights(logits, units, gradient)
        info_nce_weights[(len(logits),)](
            logits, weights, stats if own_weights is None else own_weights, units.inverse,
            stats if learnt is None else learnt, targets, mask, row_ids, column_ids,
            stats if by_column is None else by_column, stats, first, n, column_count, logits.shape[1] // UNIT.value,
            *places, c, 0 if by_column is None else len(by_column), int(problem.targets is not None), int(back),
            *strides, problem.scale / half(units.rows.dtype) ** 2, problem.scale, _stretch(problem), **constants,
        )  # fmt: skip
        return weights if gradient else None

    return weigh


def _by_column(problem: Problem, logsums: Tensor) -> Tensor:
    """Of each column the logarithm of its anchor's sum; where several have it for their target, such that
    exp(x - that) is the sum of theirs. As long as there are targets."""
    if problem.targets is None:
        return logsums
    targets = own_columns(problem)
    lowest = logsums.new_full((problem.column_count,), torch.inf).scatter_reduce_(0, targets, logsums, "amin")
    sums = torch.zeros_like(lowest)
    add_rows(sums, targets, (lowest[targets] - logsums).exp())
    return lowest - sums.log()


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss; and for backward the products that make the gradients, the weight of each anchor's own positive, the
    loss again, and the derivative by a learnt scale."""
    beyond = problem.beyond_triton()
    if beyond:
        raise RuntimeError(f"backend 'triton' cannot run info_nce_loss with {beyond}; use scan")
    n = len(problem.anchors)
    by_column = own_weights = wanted = by_scale = None
    with torch.cuda.device_of(problem.anchors):
        fused = triton_fused.serves(problem)
        units = units_of(problem.rows, problem.symmetric, triton_fused.TILE["BLOCK_K"] if fused else UNIT.value)
        rows = units.rows[:n] if problem.symmetric else units.rows
        losses = 2 if problem.symmetric else 1
        kept = (4 if problem.symmetric else 1) + (problem.learnt_scale is not None)
        stats = units.inverse.new_empty(kept, n)
        if problem.symmetric:
            own = units.columns[:n] if problem.targets is None else units.columns[own_columns(problem)]
            sweep(own, units.rows, _pass(problem, units, stats, back=True))
            by_column = _by_column(problem, stats[2])
        if any(needs):
            own_weights = units.inverse.new_empty(n)
        start = 0 if needs[1] else len(problem.positives)
        if needs[1] or needs[2]:
            wanted = slice(start, None if needs[2] or problem.negatives is None else len(problem.positives))
        if fused:
            by_rows, by_columns = triton_fused.sweep(problem, units, stats, own_weights, needs[0], wanted)
        else:
            weigh = _pass(problem, units, stats, own_weights, by_column)
            by_rows, by_columns = sweep(rows, units.columns, weigh, needs[0], wanted)
    if problem.targets is not None:
        # Several may be one column's; where all have their own, backward adds them.
        add_to_columns(by_columns, own_columns(problem) - start, rows, own_weights)
    loss = (stats[:losses] if kept > losses else stats).mean()
    if problem.learnt_scale is not None:
        loss = loss.masked_fill(~(problem.learnt_scale > 0), torch.nan)
        if needs[4]:
            by_scale = stats[-1].mean() / (losses * problem.learnt_scale) + loss * 0  # NaN where the loss is
    return loss, (by_rows, by_columns, own_weights, loss, by_scale)


def backward(
    problem: Problem, saved: tuple, upstream: Tensor, needs: tuple[bool, ...], dtype: torch.dtype
) -> Gradients:
    products, by_scale = saved[:4], saved[4]
    learnt, count = problem.learnt_scale, len(problem.anchors) * (2 if problem.symmetric else 1)
    factor = problem.scale / (count * _stretch(problem) * half(problem.anchors.dtype))
    steep = upstream if learnt is None else upstream * learnt.to(upstream.dtype)
    rows = through_norms(problem.rows, problem.targets, products, steep, needs[:3], dtype, factor)
    return *rows, None, None if by_scale is None else by_scale * upstream


def variants() -> Iterator[Variant]:
    """Every compilation that calls can cause, for triton_compile."""
    for name in ("fp16", "bf16", "fp32", "fp64"):
        exact = "fp64" if name == "fp64" else "fp32"
        pointers = dict.fromkeys(POINTERS, f"*{name}")
        pointers |= dict.fromkeys(("inverse", "logits", "by_column", "stats", "by_rows", "by_columns"), f"*{exact}")
        pointers |= dict.fromkeys(("own_weights", "loss", "upstream", "learnt"), f"*{exact}") | {"mask": "*u8"}
        pointers |= dict.fromkeys(("targets", "row_ids", "column_ids"), "*i64")
        for unit, which in ((16, "aligned"), (1, "any")):
            constants = {"BLOCK": ROWS["BLOCK"], "GIVEN": unit}
            yield Variant(f"info_nce_rows {name} {which}", info_nce_rows, signature_of(info_nce_rows, **pointers),
                          constants, ROWS["num_warps"])  # fmt: skip
            for grad in sorted({name, exact}):  # wide where torch.compile asks
                grads = dict.fromkeys(("grad_anchors", "grad_positives", "grad_negatives"), f"*{grad}")
                signature = signature_of(info_nce_gradients, **(pointers | grads))
                yield Variant(f"info_nce_gradients {name} to {grad} {which}", info_nce_gradients, signature,
                              constants | {"INTERPRETED": False}, ROWS["num_warps"])  # fmt: skip
        signature = signature_of(info_nce_weights, **pointers)
        kinds = ["gradient", "symmetric"] + ["loss"] * (name == exact)  # weights of a loss alone are the logits
        for ignore, kind, way in product((NONE, MASK, IDS), kinds, ("small", "shifted", "learnt")):
            table = SHORT if ignore == MASK or name == "fp64" else WEIGHTS
            which = f"{('all', 'mask', 'ids')[ignore]} {kind} {way}"
            constants = {"BLOCK": table["BLOCK"], "IGNORE": ignore, "SHIFTED": way != "small"}
            constants |= {"LEARNT": way == "learnt", "GRADIENT": kind != "loss", "SYMMETRIC": kind == "symmetric"}
            constants |= {"INTERPRETED": False}
            yield Variant(f"info_nce_weights {name} {which}", info_nce_weights, signature, constants,
                          table["num_warps"])  # fmt: skip
    yield from triton_fused.variants()

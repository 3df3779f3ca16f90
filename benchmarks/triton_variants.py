"""Every compilation that calls of raoe_kernels can request from Triton's compiler: for attention one representative of
each shape class. The launches of an op's triton_kernels.py and this table must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

DTYPES = ("fp16", "bf16", "fp32", "fp64")
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


class Variant(NamedTuple):
    """One compilation, as Triton's launcher requests it on the first call with such arguments.

    name        the variant's name in reports
    kernel      the jitted function
    signature   argument name: Triton type ("*fp32", "i64", "constexpr", …)
    constants   values of the constexpr arguments
    warps       number of warps per program
    stages      number of pipeline stages; the launcher's default is 3
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3


def signature_of(kernel: Any, **pointers: str) -> dict[str, str]:
    """Return a kernel's signature: types from `pointers`, else the kernel's annotations, else 32-bit integers."""
    if not hasattr(kernel, "params"):
        raise RuntimeError("Triton was imported with TRITON_INTERPRET set, so it cannot compile: unset the variable")
    annotated = {p.name: "constexpr" if p.is_constexpr else p.annotation_type for p in kernel.params}
    return {name: pointers.get(name) or kind or "i32" for name, kind in annotated.items()}


def pointers(**names: str) -> dict[str, str]:
    """Return {argument: pointer type} from {type: names of arguments}, such as fp32="a b c"."""
    return {name: f"*{kind}" for kind, group in names.items() for name in group.split()}


def exact(dtype: str) -> str:
    """Type of the arithmetic."""
    return "fp64" if dtype == "fp64" else "fp32"


def pairwise() -> Iterator[Variant]:
    """A training run needs one or two of these."""
    from raoe_kernels.pairwise.problem import ONE_BLOCK_DOUBLE
    from raoe_kernels.pairwise.triton_kernels import WARPS, one_block

    kinds = [("fp16", "fp32"), ("bf16", "fp32"), ("fp32", "fp32"), ("fp32", "i64"), ("fp64", "fp32"), ("fp64", "i64")]
    for (dtype, key), (block, warps) in product(kinds, WARPS.items()):
        if block <= ONE_BLOCK_DOUBLE or "64" not in dtype + key:
            types = {"similarity": f"*{dtype}", "scores": f"*{key}", "labels": "*i64"}
            types |= pointers(**{exact(dtype): "losses grads"})
            name = f"pairwise.one_block {dtype} {key} {block}"
            yield Variant(name, one_block, signature_of(one_block, **types), {"BLOCK": block}, warps)


def cosine() -> Iterator[Variant]:
    from raoe_kernels.cosine import triton_kernels as host

    shapes = {"few aligned": (host.FEW_ROWS, 16), "many aligned": (host.MANY_ROWS, 16), "any": (host.MANY_ROWS, 1)}
    for dtype, (shape, ((rows, columns), unit)) in product(DTYPES, shapes.items()):
        types = pointers(**{exact(dtype): "c inverse_a inverse_b sums grad"}) | pointers(**{dtype: "a b grad_a grad_b"})
        constants = {"ROWS": rows, "COLUMNS": columns, "UNIT": unit}
        for kernel in (host.cosine_forward, host.cosine_backward):
            name = f"{kernel.__name__} {dtype} {shape}"
            yield Variant(name, kernel, signature_of(kernel, **types), constants, host.WARPS)


# Head dimensions of attention to compile: those of TILES, 32, and 80, which is not a power of two.
WIDTHS = ("bf16", "fp32", "fp64")
HEAD_DIMS = {64: (*DTYPES, "tf32"), 128: WIDTHS, 256: WIDTHS, 32: ("bf16", "fp32", "tf32"), 80: ("bf16",)}
SHORT = (16, 32, 64)  # rows of the tiles for short texts to compile
# (MODE, DROPOUT) by name: for all of these, and for some
WAYS = {"": (0, 0), " dual": (1, 0)}
MORE = {" causal": (2, 0), " dropout": (0, 1), " causal dropout": (2, 1)}


def attention() -> Iterator[Variant]:
    from raoe_kernels.attention import triton_kernels as host

    signature = signature_of(host.attention_spans, mask="*u8", spans="*i32")
    yield Variant("attention_spans", host.attention_spans, signature, {"BLOCK": host.SPANS_BLOCK}, host.SPANS_WARPS)
    shapes = [(head_dim, dtype) for head_dim, dtypes in HEAD_DIMS.items() for dtype in dtypes]
    for (which, kernel), (head_dim, name) in product(enumerate(host.KERNELS), shapes):
        dtype, precision = ("fp32", "tf32") if name == "tf32" else (name, "ieee")
        inputs = "q k v causal full mask grad_causal grad_full grad_mixed grad_q grad_k grad_v"
        types = pointers(**{dtype: inputs}) | pointers(**{exact(dtype): "lse_causal lse_full delta_mixed delta_full"})
        types |= {"spans": "*i32", "valid": "*i32" if dtype == "fp64" else "*u8"}
        more = MORE if name in ("bf16", "fp32", "tf32") and head_dim in (64, 128) else {}
        for (way, (mode, dropout)), longest in product((WAYS | more).items(), (*SHORT, None)):
            with short_tiles(host, *([longest] if longest else [])):
                if kernel is host.attention_backward_short:
                    wanted = host._in_one_kernel(BYTES[dtype], head_dim, longest or 512)
                else:  # of the other kernels' tiles for short texts, a sample
                    sample = kernel is host.attention_forward and not way and head_dim <= host.SHORT_WIDTHS[0]
                    wanted = not longest or sample
                constants, warps = host._shape_class(BYTES[dtype], precision, head_dim, longest or 512, which)
            if not wanted:
                continue
            constants |= {"MODE": mode, "DROPOUT": dropout}
            signature = signature_of(kernel, **types, seed="*i64" if dropout else "*i32")
            label = f"{kernel.__name__} {name} {head_dim}{way}" + (f" of {longest}" if longest else "")
            yield Variant(label, kernel, signature, constants, warps)


@contextmanager
def short_tiles(host: Any, *tile_rows: int) -> Iterator[None]:
    """Set the rows of attention's tiles for short texts, which are off by default."""
    before, host.SHORT_TILES = host.SHORT_TILES, tile_rows
    try:
        yield
    finally:
        host.SHORT_TILES = before


def infonce() -> Iterator[Variant]:
    from raoe_kernels.infonce import triton_kernels as host
    from raoe_kernels.infonce.triton_passes import MASK, info_nce_gradients, info_nce_rows, info_nce_weights
    from raoe_kernels.infonce.triton_units import ROWS

    for dtype in DTYPES:
        sums = "inverse logits by_column stats by_rows by_columns own_weights loss upstream learned"
        types = pointers(**{dtype: "anchors positives negatives rows columns weights"})
        types |= pointers(**{exact(dtype): sums}) | pointers(i64="targets row_ids column_ids", u8="mask")
        for unit, label in ((16, "aligned"), (1, "any")):
            constants = {"BLOCK": ROWS["BLOCK"], "IN_UNIT": unit}
            signature = signature_of(info_nce_rows, **types)
            yield Variant(f"info_nce_rows {dtype} {label}", info_nce_rows, signature, constants, ROWS["num_warps"])
            for grad in sorted({dtype, exact(dtype)}):  # torch.compile requests wide gradients
                grads = pointers(**{grad: "grad_anchors grad_positives grad_negatives"})
                name = f"info_nce_gradients {dtype} to {grad} {label}"
                yield Variant(name, info_nce_gradients, signature_of(info_nce_gradients, **types, **grads),
                              constants | {"INTERPRETED": False}, ROWS["num_warps"])  # fmt: skip
        signature, kernel = signature_of(info_nce_weights, **types), info_nce_weights
        for ignore, kind, shift in product(range(3), kinds(dtype, "symmetric"), ("small", "shifted", "learned")):
            launch = host.SHORT if ignore == MASK or dtype == "fp64" else host.WEIGHTS
            constants = {"BLOCK": launch["BLOCK"], "IGNORE": ignore, "SHIFTED": shift != "small"}
            constants |= {"LEARNED": shift == "learned", "GRADIENT": kind != "loss", "SYMMETRIC": kind == "symmetric"}
            name = f"info_nce_weights {dtype} {IGNORE[ignore]} {kind} {shift}"
            yield Variant(name, kernel, signature, constants | {"INTERPRETED": False}, launch["num_warps"])
    yield from fused()


IGNORE = ("all", "mask", "ids")  # names of triton_passes' NONE, MASK and IDS


def kinds(dtype: str, *more: str) -> list[str]:
    """Without a gradient, `weights` is the logits, so its type is that of the arithmetic."""
    return ["gradient", *more, *["loss"] * (dtype == exact(dtype))]


def fused() -> Iterator[Variant]:
    from raoe_kernels.infonce import triton_fused as host

    types = pointers(bf16="rows columns weights scaled", u8="mask", i64="targets row_ids column_ids")
    types |= pointers(fp32="sums row_inverse inverse stats own_weights shares")
    tile = {name: value for name, value in host.TILE.items() if name.isupper()}
    forms = [("all", host.NONE, "*i64"), ("mask", host.MASK, "*i64")]
    forms += [("ids", host.IDS, "*i32"), ("ids64", host.IDS, "*i64")]
    products, shares = host.info_nce_products, host.info_nce_shares
    for (form, ignore, ids), gradient in product(forms, (False, True)):
        signature = signature_of(products, **types | {"row_ids": ids, "column_ids": ids})
        constants = tile | {"IGNORE": ignore, "GRADIENT": gradient, "INTERPRETED": False}
        name = f"info_nce_products bf16 {form} {'gradient' if gradient else 'loss'}"
        yield Variant(name, products, signature, constants, host.TILE["num_warps"], host.TILE["num_stages"])
    for gradient in (False, True):
        constants = {"BLOCK": host.SUMS["BLOCK"], "GRADIENT": gradient, "INTERPRETED": False}
        name = f"info_nce_shares bf16 {'gradient' if gradient else 'loss'}"
        yield Variant(name, shares, signature_of(shares, **types), constants, host.SUMS["num_warps"])


def sigmoid() -> Iterator[Variant]:
    """Sigmoid also launches kernels of InfoNCE."""
    from raoe_kernels.sigmoid.triton_kernels import WEIGHTS, sigmoid_weights

    for dtype in DTYPES:
        types = pointers(**{exact(dtype): "logits own_weights inverse scale bias stats"}) | {"weights": f"*{dtype}"}
        types |= pointers(i64="targets row_ids column_ids row_groups column_groups", u8="mask")
        signature = signature_of(sigmoid_weights, **types)
        for ignore, groups, kind in product(range(3), (False, True), kinds(dtype)):
            constants = {"BLOCK": WEIGHTS["BLOCK"], "IGNORE": ignore, "GROUPED": groups, "GRADIENT": kind != "loss"}
            name = f"sigmoid_weights {dtype} {IGNORE[ignore]} {'groups' if groups else 'own'} {kind}"
            constants |= {"INTERPRETED": False}
            yield Variant(name, sigmoid_weights, signature, constants, WEIGHTS["num_warps"])


def guided() -> Iterator[Variant]:
    from raoe_kernels.guided import triton_kernels as host

    mix = (host.guided_forward_mix, host.guided_backward_mix)
    kernels = (host.guided_forward_sums, host.guided_backward_sums, host.guided_argmax_slices, *mix)
    for dtype, (unit, rows), kernel in product(DTYPES, ((16, "aligned"), (1, "any")), kernels):
        types = pointers(**{exact(dtype): "result of_current of_previous grad sums scores"}) | {"best": "*i64"}
        types |= pointers(**{dtype: "current previous by_current by_previous"})
        constants = {"COLUMNS": host.COLUMNS[BYTES[dtype]], "UNIT": unit}
        constants |= {"JOINED": host.JOINED} if kernel in mix else {}
        signature = signature_of(kernel, **types)
        yield Variant(f"{kernel.__name__} {dtype} {rows}", kernel, signature, constants, host.WARPS)
    for dtype in ("fp32", "fp64"):
        kernel = host.guided_argmax_join
        signature = signature_of(kernel, scores=f"*{dtype}", best="*i64", result="*i64")
        yield Variant(f"guided_argmax_join {dtype}", kernel, signature, {"JOINED": host.JOINED}, 1)


OPS: tuple[Callable[[], Iterator[Variant]], ...] = (pairwise, cosine, attention, infonce, sigmoid, guided)


def variants() -> Iterator[Variant]:
    for op in OPS:
        yield from op()

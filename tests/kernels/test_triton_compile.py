"""Every Triton kernel compiled for GPUs that are not there, and what its code must show before it runs on one.

A variant is compiled once, in a process whose Triton is no interpreter; every gate reads that code. planted.py holds
kernels that fail the gates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from benchmarks import assembly
from benchmarks.triton_compile import SHARED_LIMIT, Compiled, compile_variant, report
from benchmarks.triton_variants import variants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(1800),  # compilers on a busy machine
]

GUIDED = ("forward_sums", "forward_mix", "backward_sums", "backward_mix", "argmax_slices", "argmax_join")
SM_90_GROUPS = {
    **{f"one_block-{d}": f"pairwise.one_block {d}" for d in ("fp16", "bf16", "fp32 fp32", "fp32 i64", "fp64")},
    "cosine_forward": "cosine_forward",
    "cosine_backward": "cosine_backward",
    **{f"guided_{kernel}": f"guided_{kernel}" for kernel in GUIDED},
    "info_nce_rows": "info_nce_rows",
    "info_nce_gradients": "info_nce_gradients",
    "info_nce_products": "info_nce_products",
    "info_nce_shares": "info_nce_shares",
    **{f"info_nce_weights-{d}": f"info_nce_weights {d}" for d in ("fp16", "bf16", "fp32", "fp64")},
    **{f"sigmoid_weights-{d}": f"sigmoid_weights {d}" for d in ("fp16", "bf16", "fp32", "fp64")},
    "attention_spans": "attention_spans",
    **{
        f"{kernel}-{d}": f"{kernel} {d}"
        for kernel in ("attention_forward", "attention_backward_q", "attention_backward_kv")
        for d in ("fp16", "bf16", "fp32", "tf32", "fp64")
    },
    **{f"attention_backward_short-{d}": f"attention_backward_short {d}" for d in ("fp16", "bf16", "fp32", "tf32")},
}

BOTH = "bf16 64 causal dropout"
# Of each kernel the variants that are compiled for sm_80 and sm_100 too.
REPRESENTATIVES = {
    "pairwise.one_block": ["pairwise.one_block fp32 fp32 512"],
    "cosine_forward": ["cosine_forward bf16 few aligned", "cosine_forward bf16 many aligned"],
    "cosine_backward": ["cosine_backward bf16 few aligned", "cosine_backward bf16 many aligned"],
    "info_nce_rows": ["info_nce_rows bf16 aligned"],
    "info_nce_weights": ["info_nce_weights bf16 all gradient small", "info_nce_weights bf16 ids symmetric shifted"],
    "info_nce_gradients": ["info_nce_gradients bf16 to bf16 aligned"],
    "info_nce_products": ["info_nce_products bf16 ids gradient"],
    "info_nce_shares": ["info_nce_shares bf16 gradient"],
    "sigmoid_weights": ["sigmoid_weights bf16 all own gradient", "sigmoid_weights bf16 ids groups gradient"],
    "attention_spans": ["attention_spans"],
    **{
        kernel: [f"{kernel} {which}" for which in ("bf16 128 dual", "bf16 64 dual", "fp32 64 dual", "tf32 64", BOTH)]
        for kernel in ("attention_forward", "attention_backward_q", "attention_backward_kv")
    },
    "attention_backward_short": [f"attention_backward_short {of}" for of in ("bf16 64 of 32", "tf32 32 of 32")],
    **{f"guided_{kernel}": [f"guided_{kernel} bf16 aligned"] for kernel in GUIDED[:-1]},
    "guided_argmax_join": ["guided_argmax_join fp32"],
}

# The variants whose blocks take most shared memory. They are also compiled for sm_86, sm_89 and sm_120, where a block
# may take 99 KiB and attention's kernels get head dimensions up to 128.
MOST_SHARED = ["info_nce_products bf16 ids gradient"]
MOST_SHARED += [f"attention_backward_{kernel} {of} dual" for kernel in ("q", "kv") for of in ("bf16 128", "tf32 64")]
MOST_SHARED += ["attention_backward_short fp32 32 dual of 32"]

# Bytes a thread that the variants of a kernel, or single ones, may spill on any of these GPUs, in Triton 3.6 or 3.9;
# all others may not.
# Threads of one block have 128 registers for four pairs: what one objective leaves behind waits while the other runs.
# Attention in float64 is for checks, and a warp's 16 rows of doubles do not fit; nor do 256 columns. For dual attention
# the kernel of keys waits on the diagonal with what its other loops need. A mask's addresses take registers.
SPILL = {"attention_forward": 72, "attention_backward_q": 88, "attention_backward_kv": 56, "info_nce_weights": 32,
         "attention_backward_short": 152}  # fmt: skip
CAUSAL_OR_DROPOUT = (" causal", " dropout", " causal dropout")
SPILLS = {
    f"pairwise.one_block {types} {block}": 128
    for types in ("fp16 fp32", "bf16 fp32", "fp32 fp32", "fp32 i64", "fp64 fp32", "fp64 i64")
    for block in (128, 512)
}
SPILLS |= {f"pairwise.one_block {dtype} fp32 2048": 128 for dtype in ("fp16", "bf16", "fp32")}
SPILLS |= {
    f"attention_{kernel} {of}{dual}": allowed
    for kernel, of, allowed in (
        ("backward_q", "fp32 128", 256),
        ("backward_q", "fp32 256", 256),
        ("backward_kv", "fp32 256", 288),
        ("forward", "bf16 256", 640),
        ("backward_q", "bf16 256", 896),
        ("backward_kv", "bf16 256", 2048),
        *((kernel, f"fp64 {d}", 16384) for kernel in ("forward", "backward_q", "backward_kv") for d in (64, 128, 256)),
    )
    for dual in ("", " dual")
}
SPILLS |= {"attention_forward bf16 128 dual": 384}
SPILLS |= {f"attention_backward_q fp32 128 {way}": 256 for way in ("causal", "dropout", "causal dropout")}
# TF32's tiles of 64 rows: 4 bytes a number, where half precision has 2.
SPILLS |= {
    f"attention_{kernel} tf32 64{way}": allowed
    for kernel, allowed in (("forward", 192), ("backward_kv", 408))
    for way in ("", " dual", *CAUSAL_OR_DROPOUT)
}  # fmt: skip
# The kernel for short texts holds three gradients at once; it was never run on a GPU, and no call has it by default.
SPILLS |= {f"attention_backward_short tf32 64{dual} of 16": 640 for dual in ("", " dual")}
SPILLS |= {"attention_backward_short tf32 32 dual of 32": 336}
SPILLS |= {"attention_backward_kv bf16 80": 128}
SPILLS |= {f"attention_backward_kv bf16 {d} dual": 656 for d in (80, 128)}
SPILLS |= {"attention_backward_q bf16 128 dual": 96, "attention_backward_q bf16 256 dual": 1152}
SPILLS |= {f"info_nce_products bf16 {ids} loss": 32 for ids in ("ids", "ids64")}
SPILLS |= {"info_nce_products bf16 ids gradient": 264}
SPILLS |= {"sigmoid_weights fp32 ids groups loss": 8}
SPILLS |= {"info_nce_products bf16 mask loss": 88, "info_nce_products bf16 mask gradient": 160}


# Of each kernel whose rows are long, the 16-byte loads and stores, at least: one for each matrix that it goes over. In
# its loops nothing narrower may move, but for sums that are joined. Rows of "any" alignment start anywhere.
WIDE = {
    "guided_forward_sums": (2, 0),
    "guided_forward_mix": (2, 1),
    "guided_backward_sums": (3, 0),
    "guided_backward_mix": (3, 2),
    "guided_argmax_slices": (2, 0),
    "cosine_forward": (2, 0),
    "cosine_backward": (2, 2),
}
JOINS = ("guided_forward_mix", "guided_backward_mix")
# Of each kernel one in float64 that compiles soon; attention's has no constant but log2(e).
DOUBLE = ("pairwise.one_block fp64 i64 128", "info_nce_rows fp64 any", "info_nce_weights fp64 all loss small",
          "sigmoid_weights fp64 all own loss", "cosine_forward fp64 any", "guided_forward_sums fp64 any")  # fmt: skip
# Kernels with matrix products.
PRODUCTS = ("attention_forward", "attention_backward_q", "attention_backward_kv", "attention_backward_short",
            "info_nce_products")  # fmt: skip


def compiled(arches: list[int], chosen: str) -> list[Compiled]:
    return list(report(arches, chosen))


def complaints(rows: list[Compiled], shared_limit: dict[int, int] = SHARED_LIMIT) -> list[str]:
    """What is wrong with compiled kernels: spills above the table, shared memory above the chip's, no registers."""
    found = []
    for row in rows:
        if row.spilled > SPILLS.get(row.name, SPILL.get(row.name.split()[0], 0)):
            found.append(f"{row.name} spills {row.spilled} bytes on sm_{row.arch}")
        if row.shared > shared_limit[row.arch]:
            found.append(f"{row.name} uses {row.shared} bytes of shared memory on sm_{row.arch}")
        if not 0 < row.registers <= 255:
            found.append(f"{row.name} claims {row.registers} registers")
    return found


def replicated(row: Compiled) -> list[assembly.Dot]:
    """Products whose warps do the same work: more of them along the rows than rows / 16."""
    return [dot for dot in assembly.dots(row.code["ttgir"]) if dot.replicated > 1]


def without_wgmma(row: Compiled) -> list[assembly.Dot]:
    """Products of half precision on sm_90 that have tiles for Hopper's instruction and do not use it."""
    dots = assembly.dots(row.code["ttgir"])
    return [dot for dot in dots if dot.dtype in assembly.HALF and min(dot[:2]) >= 64 and dot.by != "wgmma"]


def rounded(row: Compiled) -> list[float]:
    """Constants of float64 that have been float32: these digits and no more, and more digits than people write."""
    found = re.findall(r"arith\.constant (?:dense<)?([-.\dEe+]+)>? : (?:tensor<[\dx]+x)?f64", row.code["ttgir"])
    return [x for x in map(float, found) if abs(x) < 1e30 and float(np.float32(x)) == x and abs(x) * 4096 % 1]


def narrow(row: Compiled) -> list[assembly.Access]:
    """Loads and stores in loops of less than 16 bytes a thread."""
    return [access for access in assembly.accesses(row.code["ptx"]) if access.looped and access.bytes < 16]


def wide(row: Compiled) -> tuple[int, int]:
    """How many loads and stores of 16 bytes there are."""
    found = [access.kind for access in assembly.accesses(row.code["ptx"]) if access.bytes == 16]
    return found.count("ld"), found.count("st")


def groups(*kernels: str) -> list[str]:
    return [group for group, prefix in SM_90_GROUPS.items() if prefix.split()[0] in kernels]


def in_ci(names: Iterable[str]) -> list[Any]:
    """Parameters of a test. Exhaustive are, of kernels that take long to compile, float64, which is for checks, scores
    as 64-bit integers, and one of two dtypes whose code differs in how it is loaded."""
    slow = groups("pairwise.one_block", "info_nce_weights", "sigmoid_weights", *PRODUCTS)
    left = [name for name in slow if name.endswith(("fp16", "fp64", "i64"))]
    left += ["one_block-bf16", "attention_backward_q-fp32", "attention_backward_kv-fp32"]
    return [pytest.param(name, marks=[pytest.mark.exhaustive] if name in left else []) for name in names]


def test_quick_ones_compile_for_every_architecture(elsewhere):
    for name in ("info_nce_shares bf16 loss", "cosine_forward fp32 many aligned"):
        rows = elsewhere(compiled, [80, 90, 100], name)
        assert [(row.name, row.arch) for row in rows] == [(name, arch) for arch in (80, 90, 100)]
        assert complaints(rows) == []
        assert len(complaints(rows, dict.fromkeys(SHARED_LIMIT, 8))) == 3  # 16 bytes and 64: too much for that


@pytest.mark.parametrize("name", MOST_SHARED)
def test_blocks_fit_into_99_kib_of_shared_memory(name, elsewhere):
    rows = elsewhere(compiled, [86, 89, 120], name)
    assert len(rows) == 3 and complaints(rows) == []


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(kernel, name, marks=[pytest.mark.exhaustive] if kernel in PRODUCTS and number else [])
        for kernel, names in REPRESENTATIVES.items()
        for number, name in enumerate(names)
    ],
)
def test_every_kernel_compiles_for_other_architectures(kernel, name, elsewhere):
    rows = elsewhere(compiled, [80, 100], name)
    assert name in {row.name for row in rows} and complaints(rows) == []


@pytest.mark.parametrize("group", in_ci(SM_90_GROUPS))
def test_every_variant_compiles_for_sm_90(group, elsewhere):
    """And what matrix products must show: no warp repeats another's, and in half precision tiles of 64 use wgmma."""
    rows = elsewhere(compiled, [90], SM_90_GROUPS[group])
    assert rows and complaints(rows) == []
    assert {bool(assembly.dots(row.code["ttgir"])) for row in rows} == {group in groups(*PRODUCTS)}
    assert {row.name: replicated(row) for row in rows if replicated(row)} == {}
    assert {row.name: without_wgmma(row) for row in rows if without_wgmma(row)} == {}


@pytest.mark.parametrize("name", DOUBLE)
def test_constants_of_float64_keep_their_digits(name, elsewhere):
    """tl.minimum(x, 0.999999), or a comparison, takes a Python number for a float32: seen on a GPU, in Triton 3.6."""
    rows = elsewhere(compiled, [90], name)
    assert rows and {row.name: rounded(row) for row in rows if rounded(row)} == {}


@pytest.mark.parametrize("group", groups(*WIDE))
def test_long_rows_move_16_bytes_at_once(group, elsewhere):
    for row in elsewhere(compiled, [90], SM_90_GROUPS[group]):
        if row.name.endswith(" any"):
            assert wide(row) == (0, 0), row.name
        else:
            assert group in JOINS or narrow(row) == [], row.name
            assert all(map(int.__ge__, wide(row), WIDE[group])), row.name


@pytest.mark.parametrize("group", in_ci(groups("info_nce_weights")))
def test_logits_and_weights_move_16_bytes_at_once(group, elsewhere):
    """And what the columns' norms are; ids, masks and the other direction's sums come as they are."""
    for row in elsewhere(compiled, [90], SM_90_GROUPS[group]):
        _, dtype, ignore, kind, _ = row.name.split()
        size = 8 if dtype == "fp64" else 4
        elements = 4 if ignore == "mask" or size == 8 else 8
        sweeps, written = (1, 0) if kind == "loss" else (2, elements * (2 if dtype in ("fp16", "bf16") else size))
        assert all(map(int.__ge__, wide(row), (sweeps * 2 * elements * size // 16, written // 16))), row.name
        assert ignore != "all" or kind == "symmetric" or narrow(row) == [], row.name


@pytest.mark.parametrize("group", in_ci(groups("sigmoid_weights")))
def test_questions_move_16_bytes_at_once(group, elsewhere):
    """Logits, what the columns' norms are, and weights; ids, groups and masks come as they are."""
    for row in elsewhere(compiled, [90], SM_90_GROUPS[group]):
        _, dtype, ignore, grouped, kind = row.name.split()
        size = 8 if dtype == "fp64" else 4
        written = 0 if kind == "loss" else 8 * (2 if dtype in ("fp16", "bf16") else size)
        assert all(map(int.__ge__, wide(row), (2 * 8 * size // 16, written // 16))), row.name
        assert (ignore, grouped) != ("all", "own") or narrow(row) == [], row.name


def names_of_variants() -> list[str]:
    return [variant.name for variant in variants()]


def test_no_variant_is_left_out(elsewhere):
    names = elsewhere(names_of_variants)
    assert len(names) == len(set(names)) >= 13
    for name in names:
        assert sum(name.startswith(prefix) for prefix in SM_90_GROUPS.values()) == 1, name
    assert set(SPILLS) <= set(names)
    assert {name.split()[0] for name in names} == set(REPRESENTATIVES)
    assert {name for chosen in REPRESENTATIVES.values() for name in chosen} <= set(names)
    assert {*WIDE, *PRODUCTS} <= set(REPRESENTATIVES)


def planted(name: str) -> Compiled:
    return compile_variant(import_module("tests.kernels.planted").variants()[name], 90)


@pytest.mark.parametrize(
    ("gate", "good", "bad"),
    [
        (lambda row: complaints([row]), "greedy 64", "greedy 4096"),
        (replicated, "products 64 by 4 warps", "products 64 by 8 warps"),
        (replicated, "products 32 by 2 warps", "products 32 by 8 warps"),
        (without_wgmma, "products 64 by 4 warps", "products 64 by 2 warps"),
        (narrow, "copy", "copy strided"),
        (rounded, "clipped", "clipped by a number"),
    ],
    ids=["spills", "replicated wgmma", "replicated mma", "without wgmma", "narrow", "rounded"],
)
def test_gates_see_what_is_wrong(gate, good, bad, elsewhere):
    """Each gate on a kernel that it passes, and on the same one launched so that it must not."""
    assert gate(elsewhere(planted, good)) == [] and len(gate(elsewhere(planted, bad))) > 0
    if gate is narrow:
        assert wide(elsewhere(planted, good)) == (2, 2)

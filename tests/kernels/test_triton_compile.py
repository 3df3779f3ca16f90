"""Every Triton kernel compiled for GPUs that are not there, and what its code must show before it runs on one.

A variant is compiled once, in a process whose Triton is no interpreter; every gate reads that code. planted.py holds
kernels that fail the gates.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import pytest

from benchmarks import assembly
from raoe_kernels.triton_compile import SHARED_LIMIT, Compiled, compile_variant, report, variants

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(1800),  # compilers on a busy machine
]

SM_90_GROUPS = {
    "one_block-fp32": "pairwise.one_block fp32",
    "one_block-fp16": "pairwise.one_block fp16",
    "one_block-bf16": "pairwise.one_block bf16",
    "one_block-fp64": "pairwise.one_block fp64",
    "distinct_labels": "pairwise.distinct_labels",
    "label_table": "pairwise.label_table",
    "tile_sums": "pairwise.tile_sums",
    "scan_tiles": "pairwise.scan_tiles",
    "rank_partners": "pairwise.rank_partners",
    "label_partners": "pairwise.label_partners",
    "finish": "pairwise.finish",
    "cosine_forward": "cosine_forward",
    "cosine_backward": "cosine_backward",
    "guided_forward": "guided_forward",
    "guided_backward": "guided_backward",
    "guided_argmax": "guided_argmax",
    "info_nce_forward": "info_nce_forward",
    **{f"info_nce_gradient-{d}": f"info_nce_gradient {d}" for d in ("fp16", "bf16", "fp32", "tf32", "fp64")},
    **{
        f"{kernel}-{d}": f"{kernel} {d}"
        for kernel in ("attention_forward", "attention_backward_q", "attention_backward_kv")
        for d in ("fp16", "bf16", "fp32", "fp64")
    },
}

# Of each kernel the variants that are compiled for sm_80 and sm_100 too.
REPRESENTATIVES = {
    "pairwise.one_block": ["pairwise.one_block fp32 512"],
    "pairwise.distinct_labels": ["pairwise.distinct_labels"],
    "pairwise.label_table": ["pairwise.label_table"],
    "pairwise.tile_sums": ["pairwise.tile_sums fp32 fp32 fp32"],
    "pairwise.scan_tiles": ["pairwise.scan_tiles fp32 fp32 fp32"],
    "pairwise.rank_partners": ["pairwise.rank_partners fp32 fp32"],
    "pairwise.label_partners": ["pairwise.label_partners fp32 fp32 fp32"],
    "pairwise.finish": ["pairwise.finish fp32"],
    "cosine_forward": ["cosine_forward bf16"],
    "cosine_backward": ["cosine_backward bf16"],
    "info_nce_forward": ["info_nce_forward bf16 all"],
    "info_nce_gradient": ["info_nce_gradient bf16 ids columns to bf16"],
    **{
        kernel: [f"{kernel} {which} dual" for which in ("bf16 128", "fp16 128", "fp32 64", "fp64 128")]
        for kernel in ("attention_forward", "attention_backward_q", "attention_backward_kv")
    },
    "guided_forward": ["guided_forward bf16 aligned"],
    "guided_backward": ["guided_backward bf16 aligned"],
    "guided_argmax": ["guided_argmax bf16 aligned"],
}

# Variants that may spill, bytes a thread of local memory; every other one may not. At 4,096 pairs a thread of the
# 512 has eight pairs and 128 registers: what one objective leaves behind waits in local memory while the other runs.
# At 128 and 1,024 it is Triton 3.6 that spills, 32 and 48 bytes.
# Attention in float64 is for checks; at 256 columns two tiles of doubles do not fit, however small.
# In float64 the pass for many labels and the one for few share a kernel; both keep pairs of doubles.
SPILLS = {
    f"pairwise.one_block {dtype} {block}": allowed
    for dtype in ("fp16", "bf16", "fp32")
    for block, allowed in ((128, 64), (1024, 64), (4096, 1024))
} | {"pairwise.label_partners fp64 fp64 fp64": 160, "pairwise.scan_tiles fp32 fp64 fp32": 32}
SPILLS |= dict.fromkeys(("attention_backward_kv fp64 256", "attention_backward_kv fp64 256 dual"), 768)


# Of each kernel whose rows are long, the 16-byte loads and stores: two sweeps over two contexts, and over the gradient
# from above; one sweep. In its loops nothing narrower may move. Rows of "any" alignment may start anywhere.
WIDE = {
    "guided_forward": (4, 1),
    "guided_backward": (6, 2),
    "guided_argmax": (2, 0),
    "cosine_forward": (2, 0),
    "cosine_backward": (2, 2),
}
# Kernels with matrix products.
PRODUCTS = (
    "attention_forward",
    "attention_backward_q",
    "attention_backward_kv",
    "info_nce_forward",
    "info_nce_gradient",
)


def compiled(arches: list[int], chosen: str) -> list[Compiled]:
    return list(report(arches, chosen))


def complaints(rows: list[Compiled], shared_limit: dict[int, int] = SHARED_LIMIT) -> list[str]:
    """What is wrong with compiled kernels: spills above the table, shared memory above the chip's, no registers."""
    found = []
    for row in rows:
        if row.spilled > SPILLS.get(row.name, 0):
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


def narrow(row: Compiled) -> list[assembly.Access]:
    """Loads and stores in loops of less than 16 bytes a thread."""
    return [access for access in assembly.accesses(row.code["ptx"]) if access.looped and access.bytes < 16]


def wide(row: Compiled) -> tuple[int, int]:
    """How many loads and stores of 16 bytes there are."""
    found = [access.kind for access in assembly.accesses(row.code["ptx"]) if access.bytes == 16]
    return found.count("ld"), found.count("st")


def groups(*kernels: str) -> list[str]:
    return [group for group, prefix in SM_90_GROUPS.items() if prefix.split()[0] in kernels]


def open_until(redesigned: dict[str, str], chosen: list[str]) -> list[Any]:
    """Groups as parameters; those of a kernel that is being redesigned may fail the gate until that is here."""
    found = []
    for group in chosen:
        why = [reason for kernel, reason in redesigned.items() if group.startswith(kernel)]
        marks = [pytest.mark.xfail(reason=why[0], strict=False)] if why else []
        found.append(pytest.param(group, marks=marks))
    return found


def test_quick_ones_compile_for_every_architecture(elsewhere):
    for name in ("pairwise.rank_partners fp32 fp32", "cosine_forward fp32"):
        rows = elsewhere(compiled, [80, 90, 100], name)
        assert [(row.name, row.arch) for row in rows] == [(name, arch) for arch in (80, 90, 100)]
        assert complaints(rows) == []
        assert len(complaints(rows, dict.fromkeys(SHARED_LIMIT, 16))) == 3  # 32 bytes and 64: too much for that


@pytest.mark.slow
@pytest.mark.parametrize("kernel", REPRESENTATIVES)
def test_every_kernel_compiles_for_other_architectures(kernel, elsewhere):
    for name in REPRESENTATIVES[kernel]:
        rows = elsewhere(compiled, [80, 100], name)
        assert name in {row.name for row in rows} and complaints(rows) == []


@pytest.mark.slow
@pytest.mark.parametrize("group", SM_90_GROUPS)
def test_every_variant_compiles_for_sm_90(group, elsewhere):
    rows = elsewhere(compiled, [90], SM_90_GROUPS[group])
    assert rows and complaints(rows) == []
    assert {bool(assembly.dots(row.code["ttgir"])) for row in rows} == {group in groups(*PRODUCTS)}


@pytest.mark.slow
@pytest.mark.parametrize("group", open_until({"attention": "attention: tile table"}, groups(*PRODUCTS)))
def test_no_warp_repeats_anothers_products(group, elsewhere):
    assert {
        row.name: replicated(row) for row in elsewhere(compiled, [90], SM_90_GROUPS[group]) if replicated(row)
    } == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    open_until(
        {"attention": "attention: tile table", "info_nce": "infonce: products by cuBLAS"},
        [group for group in groups(*PRODUCTS) if group.endswith(("fp16", "bf16"))],
    ),
)
def test_tiles_of_64_use_wgmma(group, elsewhere):
    rows = elsewhere(compiled, [90], SM_90_GROUPS[group])
    assert {row.name: without_wgmma(row) for row in rows if without_wgmma(row)} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", open_until({"cosine": "cosine: wide loads", "guided": "guided: rows x slices"}, groups(*WIDE))
)
def test_long_rows_move_16_bytes_at_once(group, elsewhere):
    for row in elsewhere(compiled, [90], SM_90_GROUPS[group]):
        if row.name.endswith(" any"):
            assert wide(row) == (0, 0), row.name
        else:
            assert narrow(row) == [] and all(map(int.__ge__, wide(row), WIDE[row.name.split()[0]])), row.name


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
    ],
    ids=["spills", "replicated wgmma", "replicated mma", "without wgmma", "narrow"],
)
def test_gates_see_what_is_wrong(gate, good, bad, elsewhere):
    """Each gate on a kernel that it passes, and on the same one launched so that it must not."""
    assert gate(elsewhere(planted, good)) == [] and len(gate(elsewhere(planted, bad))) > 0
    if gate is narrow:
        assert wide(elsewhere(planted, good)) == (2, 2)


def refusal() -> str:
    """What the interpreter's process says when it is asked to compile."""
    os.environ["TRITON_INTERPRET"] = "1"
    with pytest.raises(RuntimeError) as caught:
        list(report([90], "cosine_forward fp32"))
    return str(caught.value)


def test_the_interpreter_is_refused():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert "TRITON_INTERPRET" in pool.submit(refusal).result()

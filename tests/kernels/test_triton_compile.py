"""Every Triton kernel compiled for GPUs that are not there, in processes whose Triton is no interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

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
    "info_nce_rows": "info_nce_rows",
    "info_nce_gradients": "info_nce_gradients",
    **{f"info_nce_weights-{d}": f"info_nce_weights {d}" for d in ("fp16", "bf16", "fp32", "fp64")},
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
    "info_nce_rows": ["info_nce_rows bf16"],
    "info_nce_weights": ["info_nce_weights bf16 all gradient", "info_nce_weights bf16 ids symmetric"],
    "info_nce_gradients": ["info_nce_gradients bf16 to bf16"],
    **{
        kernel: [f"{kernel} {which} dual" for which in ("bf16 128", "fp16 128", "fp32 64", "fp64 128")]
        for kernel in ("attention_forward", "attention_backward_q", "attention_backward_kv")
    },
    "guided_forward": ["guided_forward bf16 aligned"],
    "guided_backward": ["guided_backward bf16 aligned"],
    "guided_argmax": ["guided_argmax bf16 aligned"],
}

# Variants that may spill, bytes a thread (stores + loads); every other one may not. At 4,096 pairs a thread of the
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

SCRIPT = """
import json, sys
from raoe_kernels import triton_compile as t
for chosen in sys.argv[2:]:
    for row in t.report(json.loads(sys.argv[1]), chosen):
        print(json.dumps(row._asdict()))
"""


def in_compiling_process(script: str, *arguments: str) -> list:
    """Run a script whose every line of output is JSON; what the lines say."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def complaints(rows: list[dict], shared_limit: dict[str, int]) -> list[str]:
    """What is wrong with compiled kernels: spills above the table, shared memory above the chip's, no registers."""
    found = []
    for row in rows:
        if row["spilled"] > SPILLS.get(row["name"], 0):
            found.append(f"{row['name']} spills {row['spilled']} bytes on sm_{row['arch']}")
        if row["shared"] > shared_limit[str(row["arch"])]:
            found.append(f"{row['name']} uses {row['shared']} bytes of shared memory on sm_{row['arch']}")
        if not 0 < row["registers"] <= 255:
            found.append(f"{row['name']} claims {row['registers']} registers")
    return found


def limits() -> dict[str, int]:
    from raoe_kernels.triton_compile import SHARED_LIMIT

    return {str(arch): limit for arch, limit in SHARED_LIMIT.items()}


def test_quick_ones_compile_for_every_architecture():
    names = ["pairwise.rank_partners fp32 fp32", "cosine_forward fp32"]
    rows = in_compiling_process(SCRIPT, "[80, 90, 100]", *names)
    assert [(row["name"], row["arch"]) for row in rows] == [(name, arch) for name in names for arch in (80, 90, 100)]
    assert complaints(rows, limits()) == []
    assert len(complaints(rows, dict.fromkeys(limits(), 16))) == len(rows)  # 32 bytes and 64: too much for that


@pytest.mark.slow
@pytest.mark.parametrize("kernel", REPRESENTATIVES)
def test_every_kernel_compiles_for_other_architectures(kernel):
    names = REPRESENTATIVES[kernel]
    rows = in_compiling_process(SCRIPT, "[80, 100]", *names)
    assert {row["name"] for row in rows} >= set(names) and complaints(rows, limits()) == []


@pytest.mark.slow
@pytest.mark.parametrize("group", SM_90_GROUPS)
def test_every_variant_compiles_for_sm_90(group):
    rows = in_compiling_process(SCRIPT, "[90]", SM_90_GROUPS[group])
    assert rows and complaints(rows, limits()) == []


def test_no_variant_is_left_out():
    names = in_compiling_process("import json; from raoe_kernels import triton_compile as t\n"
                                 "for v in t.variants(): print(json.dumps(v.name))")  # fmt: skip
    assert len(names) == len(set(names)) >= 13
    for name in names:
        assert sum(name.startswith(prefix) for prefix in SM_90_GROUPS.values()) == 1, name
    assert set(SPILLS) <= set(names)
    assert {name.split()[0] for name in names} == set(REPRESENTATIVES)
    assert {name for chosen in REPRESENTATIVES.values() for name in chosen} <= set(names)


ACCESSES = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from raoe_kernels.triton_compile import variants

found = {v.name: v for v in variants() if v.name in sys.argv}
for name in sys.argv[1:]:
    v = found[name]
    source = ASTSource(v.kernel, v.signature, constexprs=v.constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": v.warps}).asm["ptx"]
    print(json.dumps([len(re.findall(kind + r"[.]global\\S*[.](v4[.]b32|v2[.]b64) ", ptx)) for kind in ("ld", "st")]))
"""

# 16-byte loads and stores: two sweeps over two contexts, and over the gradient from above; one sweep.
WIDE = {"guided_forward": (4, 1), "guided_backward": (6, 2), "guided_argmax": (2, 0)}


@pytest.mark.slow
def test_aligned_guided_rows_move_16_bytes_at_once():
    names = [f"{kernel} {dtype} aligned" for dtype in ("bf16", "fp32", "fp64") for kernel in WIDE]
    for name, (loads, stores) in zip(names, wide_accesses(names), strict=True):
        least = WIDE[name.split()[0]]
        assert loads >= least[0] and stores >= least[1], (name, loads, stores)
    assert wide_accesses(["guided_forward bf16 any"]) == [[0, 0]]  # they may start anywhere


@pytest.mark.slow
def test_info_nce_moves_logits_and_weights_16_bytes_at_once():
    """Two sweeps of float32 logits and of what the columns' norms are, one of weights: eight a thread."""
    names = [f"info_nce_weights {dtype} {which} gradient" for dtype in ("bf16", "fp32") for which in ("all", "ids")]
    for name, (loads, stores) in zip(names, wide_accesses(names), strict=True):
        assert loads >= 8 and stores >= (1 if "bf16" in name else 2), (name, loads, stores)


def wide_accesses(names: list[str]) -> list[list[int]]:
    """Loads and stores of 16 bytes in the PTX of each of these variants."""
    return in_compiling_process(ACCESSES, *names)


GREEDY = """
import json, sys
import triton, triton.language as tl
from raoe_kernels.triton_compile import Variant, compile_variant, signature_of

@triton.jit
def greedy(x, n, BLOCK: tl.constexpr):
    a = tl.load(x + tl.arange(0, BLOCK))
    b = tl.load(x + BLOCK + tl.arange(0, BLOCK))
    for _ in range(n):
        a, b = a * b + 1, a ^ (b >> 1)
    tl.store(x + tl.arange(0, BLOCK), a + b)

for block in (64, 4096):
    variant = Variant("greedy", greedy, signature_of(greedy, x="*i32"), {"BLOCK": block}, 1)
    print(json.dumps(compile_variant(variant, 90)._asdict()))
"""


def test_the_check_sees_spills(tmp_path):
    """Two arrays of 128 numbers a thread do not fit its 255 registers; two of two numbers do."""
    script = tmp_path / "greedy.py"  # Triton reads a kernel's source from its file
    script.write_text(GREEDY)
    modest, greedy = in_compiling_process(f"import runpy; runpy.run_path({str(script)!r})")
    assert complaints([modest], limits()) == []
    (found,) = complaints([greedy], limits())
    assert "spills" in found


def test_the_interpreter_is_refused():
    script = (
        "import os, json; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from raoe_kernels import triton_compile as t\n"
        "try: list(t.report([90], 'cosine_forward fp32'))\n"
        "except RuntimeError as error: print(json.dumps(str(error)))\n"
    )
    (message,) = in_compiling_process(script)
    assert "TRITON_INTERPRET" in message

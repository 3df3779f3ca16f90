"""`python -m benchmarks model --gpu h200`: what each op should take on a GPU that is not here, and why (HEADER)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import assembly, dry_run, hot_pairs, report
from benchmarks.__main__ import declared
from benchmarks.dry_run import Operation
from tests.cuda_emulator import counted


class Machine(NamedTuple):
    """name in provenance's rows, compute capability, multiprocessors, clock (Hz), bandwidth (bytes/s), FLOP/s of matrix
    products by what is multiplied, and where that stands."""

    gpu: str
    arch: int
    processors: int
    clock: float
    bandwidth: float
    flops: Mapping[str, float]
    source: str


MACHINES = {
    "h200": Machine(
        "H200", 90, 132, 1.98e9, 4.8e12, {"half": 989e12, "tf32": 494e12, "single": 67e12, "double": 67e12},
        "NVIDIA H200 datasheet (dense rates); multiprocessors and clock: NVIDIA H100 architecture whitepaper",
    ),
    "a100": Machine(
        "A100", 80, 108, 1.41e9, 2.039e12, {"half": 312e12, "tf32": 156e12, "single": 19.5e12, "double": 19.5e12},
        "NVIDIA A100 80GB SXM datasheet; multiprocessors and clock: NVIDIA A100 architecture whitepaper",
    ),
}  # fmt: skip
# Shares of those peaks that large copies and matrix products reach. Assumed, as are START and CALL: what the first run
# measures (its rows carry both rates) replaces them.
COPY, MATMUL = 0.9, 0.8
SYNC = 0.63  # of that, what mma.sync reaches on sm_90, whose own instruction is wgmma
START = 2e-6  # seconds from one small kernel's begin to the next one's
CALL = 5e-6  # seconds of the host for an operation, torch's or ours
AUTOGRAD = 30e-6  # and for a forward and a backward that compute nothing: "floor" in docs/benchmarks, on a CPU
HEADER = """\
Predicted, not measured: `python -m benchmarks model --gpu GPU` made this page. An op's operations are those that its
code puts on the stream, counted by running it on tensors without memory (CUDA C++: by the emulator's counters); its
instructions those of the kernels as {compilers} compile them. Times are microseconds. An operation takes the
longest of

- memory: bytes / {COPY} of the bandwidth, or 64 bytes a clock and multiprocessor that has a program;
- products: FLOPs / {MATMUL} of the peak, and on sm_90 {SYNC} of that where a kernel has no wgmma;
- instructions: of all warps / 4 a clock and multiprocessor that has a program;

and {START:g} us to start. A call takes the longer of its operations in a row and of the host, {CALL:g} us an operation
that Python starts and {AUTOGRAD:g} us where there is a backward. "Of the limit": what the least bytes and FLOPs of the
result (`benchmarks/ops`) take at the peaks, over what the call takes. The shares of the peaks and the times to start
are assumptions; the first run that measures replaces them."""


class Call(NamedTuple):
    """What a call of an op does: our contender of the benchmark, its operations, how often each kernel goes round its
    innermost loops, how many of the operations the host starts one by one from Python, and whether it goes backward."""

    contender: str
    operations: list[Operation]
    rounds: Mapping[str, float]
    host: int
    backward: bool = True


def compilers() -> str:
    """What the page's machine code is made by."""
    from raoe_kernels import _build

    built = (_build.info() or {"modules": {"cuda": {}}})["modules"]["cuda"]
    return f"Triton {version('triton')} and nvcc {built.get('nvcc', '(not here)')}"


@cache
def _functions(arch: int) -> Mapping[str, list[assembly.Instruction]]:
    """Those of the native CUDA module, if it was built, for this architecture."""
    import raoe_kernels

    for module in Path(raoe_kernels.__file__).parent.glob("_native_cuda*.so"):
        return assembly.sass(module, "-arch", f"sm_{arch}")
    return {}


def _native(kernel: str, arch: int, *constants: str) -> list[assembly.Instruction]:
    """The code of a kernel in float; constants are of its template's arguments, as the compiler's names have them."""
    name = kernel.partition("<")[0].rpartition("::")[2]
    mangled = [function for function in _functions(arch) if re.search(rf"\d{name}If", function)]
    chosen = [function for function in mangled if all(each in function for each in constants)]
    return _functions(arch)[chosen[0]] if chosen else []


def _grown(one: counted.Operation, factor: float, code: list[assembly.Instruction]) -> Operation:
    """What the emulator counted, for so many times the pairs."""
    moved, blocks = round((one.read + one.written) * factor), round(one.blocks * factor)
    return Operation(one.name, moved, programs=blocks, warps=one.threads // 32, code=code)


SAMPLE = 1 << 14  # pairs that the emulator runs of many; bytes and blocks grow with them


def pairwise(pairs: int, arch: int) -> Call:
    """raoe_loss in CUDA C++, and torch's pass that scales the gradient; all of a call's kernels start from C++. Of the
    cooperative kernel and the keys before it, instructions are those of the way that is taken (hot_pairs.py)."""
    run = min(pairs, SAMPLE)
    operations = []
    for one in counted.pairwise(run):
        code = _native(one.name, arch, f"Li{one.threads}E") if "one_block" in one.name else []
        operations.append(_grown(one, pairs / run, code))
        if one.name in HOT:
            operations[-1] = operations[-1]._replace(instructions=getattr(_hot(), HOT[one.name]) * pairs / 32)
    return Call("raoe_loss native", [*operations, Operation("aten.mul", 8 * pairs)], {}, 2)


HOT = {"prepare<T>": "keys", "all_blocks": "hot"}  # the emulator's names and hot_pairs'
_hot = cache(hot_pairs.instructions)


def guided(rows: int, arch: int) -> Call:
    """Two launches for as many rows as the L2 cache holds; it is counted on that the second one reads from there."""
    from raoe_kernels.guided import triton_kernels as kernels

    op = declared("guided")
    current, previous = (torch.empty(rows, op.VOCABULARY, dtype=op.DTYPES["cuda"], device="meta") for _ in range(2))
    operations = dry_run.operations(lambda: kernels.forward(current, previous, op.GUIDANCE), arch)
    slices = -(-op.VOCABULARY // kernels.COLUMNS[current.itemsize])
    for place, one in enumerate(operations):
        cached = dry_run.size_of(current, previous) if one.name == "guided_forward_mix" else 0
        operations[place] = one._replace(bytes=(one.bytes - cached) * one.programs // (rows * slices))
    rounds = {"guided_forward_mix": (slices - 1) // kernels.JOINED}
    return Call("guided_log_probs triton", operations, rounds, len(operations), backward=False)


def cosine(pairs: int, arch: int) -> Call:
    """Forward and backward in CUDA C++, a warp a row or, where rows are few, a block; 16 bytes a thread and round."""
    columns, run = declared("cosine").COLUMNS, min(pairs, SAMPLE)
    found = counted.cosine(run, columns)
    lanes = found[0].blocks * found[0].threads // run
    operations = [_grown(one, pairs / run, _native(one.name, arch, "Li4E", f"Li{lanes}E")) for one in found]
    return Call("pairwise_cosine native", operations, {one.name: columns / (4 * lanes) for one in operations}, 2)


def listwise(lists: int, arch: int) -> Call:
    """torch's own operations, one after the other; each reads and writes what it is given."""
    from raoe_kernels import list_mle_loss

    op = declared("listwise")
    student, teacher = (torch.empty(lists, op.ITEMS, device="meta") for _ in range(2))

    def step() -> None:
        list_mle_loss(student.requires_grad_(), teacher, scale=op.SCALE, backend="scan").backward()

    operations = dry_run.operations(step, arch)
    return Call("list_mle_loss scan", operations, {}, len(operations))


def attention(length: int, arch: int) -> Call:
    """dual_attention on right-padded rows. A kernel's FLOPs are those of the tiles that it visits: for each tile of
    BLOCK rows of its own all tiles of OTHER in its sequence, in the one or the other of its loops."""
    from raoe_kernels.attention import triton_kernels as kernels
    from raoe_kernels.attention.padding import Padding

    op = declared("attention")
    lengths, (_, heads, width) = op.drawn(length, "cuda"), op.SHAPE["cuda"]
    shape = (len(lengths), heads, length, width)
    q, k, v = (torch.empty(shape, dtype=op.DTYPES["cuda"], device="meta") for _ in range(3))
    padding = Padding(torch.empty(len(lengths), dtype=torch.int32, device="meta"), None, None, length)
    scale = width**-0.5

    def step() -> None:
        causal, full, *logsums = kernels.forward(q, k, v, padding, scale, True)
        kernels.backward(q, q, q, k, v, padding, scale, causal, full, *logsums, (True, True, True))

    operations, rounds = dry_run.operations(step, arch), {}
    for place, one in enumerate(operations):
        if one.name in PRODUCTS:
            block, other = one.constants["BLOCK"], one.constants["OTHER"]
            own, others = (-(-lengths // size) for size in (block, other))
            tiles = heads * int((own * others).sum())
            operations[place] = one._replace(flops=PRODUCTS[one.name] * 2 * tiles * block * other * width)
            loops = sum(any("MMA" in each.name for each in loop) for loop in assembly.inner_loops(one.code))
            rounds[one.name] = tiles / one.programs / max(1, loops)
    return Call("dual triton", operations, rounds, len(operations))


def infonce(rows: int, arch: int) -> Call:
    """Chunks of rows: a product to logits, a pass to weights, two products to gradients; and a pass over the rows at
    either end. A program's loops go over a row of logits twice."""
    from raoe_kernels.infonce import triton_kernels as kernels
    from raoe_kernels.infonce.problem import Problem

    op = declared("infonce")
    a, p, n = (torch.empty(rows, op.COLUMNS["cuda"], dtype=op.DTYPES["cuda"], device="meta") for _ in range(3))
    problem, needs = Problem(a, p, n, scale=op.SCALE), (True, True, True, False, False)

    def step() -> None:
        loss, saved = kernels.forward(problem, needs)
        kernels.backward(problem, saved, loss, needs, a.dtype)

    operations = dry_run.operations(step, arch)
    rounds = {"info_nce_weights": problem.column_count / kernels.WEIGHTS["BLOCK"]}
    return Call("info_nce_loss triton", operations, rounds, len(operations))


def sigmoid(rows: int, arch: int) -> Call:
    """As infonce; a program's loop goes over a row of logits once."""
    from raoe_kernels.sigmoid import triton_kernels as kernels
    from raoe_kernels.sigmoid.problem import Problem

    op = declared("sigmoid")
    a, p = (torch.empty(rows, op.COLUMNS["cuda"], dtype=op.DTYPES["cuda"], device="meta") for _ in range(2))
    numbers, needs = [torch.empty((), device="meta") for _ in range(2)], (True, True, False, True, True)
    problem = Problem(a, p, None, *numbers, *[None] * 6)

    def step() -> None:
        loss, saved = kernels.forward(problem, needs)
        kernels.backward(problem, saved, loss, needs, a.dtype)

    operations = dry_run.operations(step, arch)
    rounds = {"sigmoid_weights": problem.column_count / kernels.WEIGHTS["BLOCK"]}
    return Call("sigmoid_loss triton", operations, rounds, len(operations))


# Matrix products a tile.
PRODUCTS = {"attention_forward": 2, "attention_backward_q": 3, "attention_backward_kv": 4}
OPS: dict[str, Callable[[int, int], Call]] = {
    "pairwise": pairwise,
    "cosine": cosine,
    "guided": guided,
    "infonce": infonce,
    "sigmoid": sigmoid,
    "attention": attention,
    "listwise": listwise,
}


class Cost(NamedTuple):
    """Seconds that an operation spends on each thing: the longest of the first three, then its start."""

    memory: float
    products: float
    instructions: float
    start: float

    def longest(self) -> str:
        return max(("memory", "products", "instructions"), key=lambda term: getattr(self, term))

    def seconds(self) -> float:
        return getattr(self, self.longest()) + self.start


def cost(operation: Operation, rounds: float, machine: Machine) -> Cost:
    busy = min(machine.processors, operation.programs or machine.processors)  # multiprocessors that have work
    memory = operation.bytes / min(COPY * machine.bandwidth, busy * 64 * machine.clock)
    unit = {2: "half", 4: "single", 8: "double"}.get(operation.dtype.itemsize, "single")
    rate = MATMUL * machine.flops[unit] * busy / machine.processors
    if operation.code and machine.arch >= 90 and not any(one.name == "HGMMA" for one in operation.code):
        rate *= SYNC
    products = operation.flops / rate
    return Cost(memory, products, issued(operation, rounds) / (4 * busy * machine.clock), START)


def issued(operation: Operation, rounds: float) -> float:
    """Instructions of all warps."""
    if operation.instructions:
        return operation.instructions
    return operation.programs * operation.warps * assembly.executed(operation.code, rounds)


HEAD = (
    "| | operations | MB | GFLOP | M instructions | memory | products | instructions | start | host | takes | by | "
    "of the limit | measured |"
)


def page(gpus: Iterable[str], rows: list[report.Row]) -> str:
    """The whole page; `rows` are those of result files, of which the ones of these GPUs stand under "measured"."""
    times = {"START": START * 1e6, "CALL": CALL * 1e6, "AUTOGRAD": AUTOGRAD * 1e6}
    about = HEADER.format(COPY=COPY, MATMUL=MATMUL, SYNC=SYNC, compilers=compilers(), **times)
    lines = ["# What the kernels should take on a GPU", "", about, ""]
    for gpu in gpus:
        machine = MACHINES[gpu]
        lines += [f"## {machine.gpu}", "", f"{machine.source}.", ""]
        for name in OPS:
            lines += of_op(name, machine, rows)
    return "\n".join(lines)


def of_op(name: str, machine: Machine, rows: list[report.Row]) -> list[str]:
    """A row a size, and what the largest is made of."""
    op = declared(name)
    measured = [row for row in rows if machine.gpu in (row.get("gpu") or "") and row["op"] == name]
    lines = [f"### {name}", "", HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for size in op.SIZES["cuda"]:
        call = OPS[name](size, machine.arch)
        lines.append(_row(size, call, machine, op.least(size, "cuda"), _measured(measured, size, call.contender)))
    return [*lines, "", f"{call.contender}, {size:,}:", "", *_parts(call, machine), ""]


def _row(size: int, call: Call, machine: Machine, least: tuple[int, int], measured: str) -> str:
    rounds = [call.rounds.get(one.name, 1) for one in call.operations]
    costs = [cost(one, each, machine) for one, each in zip(call.operations, rounds, strict=True)]
    device, host = sum(each.seconds() for each in costs), CALL * call.host + AUTOGRAD * call.backward
    takes = max(device, host)
    terms = {term: sum(getattr(each, term) for each in costs) for term in Cost._fields}
    # What limits: the term in which the device spends most, and the host where the device waits for it.
    spent = {term: sum(each.seconds() - each.start for each in costs if each.longest() == term) for term in terms}
    spent |= {"start": terms["start"], "host": takes if host > device else 0}
    limit = max(least[0] / machine.bandwidth, least[1] / machine.flops["half"])
    warps = sum(issued(one, each) for one, each in zip(call.operations, rounds, strict=True))
    size_of, flops = (sum(getattr(one, what) for one in call.operations) for what in ("bytes", "flops"))
    cells = [
        f"{size:,}", str(len(costs)), f"{size_of / 1e6:,.2f}", f"{flops / 1e9:,.1f}", f"{warps / 1e6:,.2f}",
        *map(_us, terms.values()), _us(host), f"**{_us(takes)}**", max(spent, key=lambda term: spent[term]),
        f"{limit / takes:.1%}", measured,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _parts(call: Call, machine: Machine) -> list[str]:
    """The operations of a call, those of one name together."""
    lines = ["| operation | times | MB | GFLOP | instructions a warp | takes |", "|---" * 6 + "|"]
    for name in dict.fromkeys(one.name for one in call.operations):
        same = [one for one in call.operations if one.name == name]
        rounds = call.rounds.get(name, 1)
        warps = sum(one.programs * one.warps for one in same)
        code = f"{sum(issued(one, rounds) for one in same) / warps:,.0f}" if warps else ""
        takes = _us(sum(cost(one, rounds, machine).seconds() for one in same))
        size, flops = (sum(getattr(one, what) for one in same) for what in ("bytes", "flops"))
        lines.append(f"| {name} | {len(same)} | {size / 1e6:,.2f} | {flops / 1e9:,.1f} | {code} | {takes} |")
    return lines


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _measured(rows: list[report.Row], size: int, contender: str) -> str:
    found = [row for row in rows if row.get("size") == size and row.get("contender") == contender and "device_s" in row]
    return _us(found[-1]["device_s"]) if found else ""

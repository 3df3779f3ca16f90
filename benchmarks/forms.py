"""`python -m benchmarks.forms`: print the table of docs/functions.md with the backend of each form of an op on CUDA.

The calls run on the CPU, with the selection that `backend="auto"` makes on a GPU, and stop at the first function of the
selected module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

import raoe_kernels as rk
from raoe_kernels import _native
from raoe_kernels._dispatch import Op

PAGE = Path(__file__).parents[1] / "docs" / "functions.md"
FILES = {"native.py": "CUDA C++", "triton_kernels.py": "Triton", "scan.py": "plain torch"}
CHOOSE = ("max_pairs", "takes_packed")  # functions of these modules that only take part in the selection


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def forms() -> dict[str, Callable[[], Any]]:
    """Return {op and form: a call of it}."""
    a, b, scores, labels = rows(4, 8), rows(4, 8), torch.arange(4.0), torch.arange(4)
    q = rows(2, 2, 16, 64, dtype=torch.bfloat16)
    long = rows(1, 2, 1024, 64, dtype=torch.bfloat16)
    logits, lengths = rows(2, 32), torch.tensor([16, 9])
    half, both = rows(4, 8, dtype=torch.bfloat16), ("query_to_doc", "doc_to_query")
    return {
        "pair losses": lambda: rk.raoe_loss(scores, scores, labels),
        "pair losses of more than 2,048 pairs": lambda: rk.cosent_loss(torch.arange(4096.0), torch.arange(4096.0)),
        "pair losses of several widths, (K, B)": lambda: rk.cosent_loss(torch.stack([scores, scores]), scores),
        "`pairwise_cosine`": lambda: rk.pairwise_cosine(a, b),
        "`pairwise_cosine(dims=…)`": lambda: rk.pairwise_cosine(a, b, dims=(4, 8)),
        "`info_nce_loss`, also with `ignore` and `targets`": lambda: rk.info_nce_loss(a, b, b, targets=labels),
        "`info_nce_loss(symmetric=True)`": lambda: rk.info_nce_loss(a, b, symmetric=True),
        "`info_nce_loss(directions=…)`, bfloat16": lambda: rk.info_nce_loss(half, half, directions=both),
        "`info_nce_loss(directions=…)`, other dtypes, or with a guide or hardness": lambda: rk.info_nce_loss(
            a, b, directions=both
        ),
        "`info_nce_loss(scale=TENSOR)`, learned scale": lambda: rk.info_nce_loss(a, b, scale=torch.tensor(20.0)),
        "`info_nce_loss(guide=…)`, one direction": lambda: rk.info_nce_loss(a, b, guide=(a, b)),
        "`info_nce_loss(hardness_mode=…)`, one direction": lambda: rk.info_nce_loss(
            a, b, b, hardness_mode="all_negatives", hardness_strength=1.0
        ),
        "`info_nce_loss(dims=…)`": lambda: rk.info_nce_loss(a, b, dims=(4, 8)),
        "`sigmoid_loss`": lambda: rk.sigmoid_loss(a, b),
        "attention, padded": lambda: rk.bidirectional_attention(q, q, q, lengths=lengths),
        "attention without padding, 16-bit, more than 512 tokens": lambda: rk.dual_attention(long, long, long),
        "`guided_log_probs`, `guided_argmax`": lambda: rk.guided_log_probs(logits, logits, guidance=1.5),
        "`list_mle_loss`, `refine_similarity`": lambda: rk.list_mle_loss(a[:, :4], b[:, :4]),
    }


class Served(Exception):
    """Raised by the first function of the module that runs a call; its argument is the file's name."""


@contextmanager
def as_on_cuda(compiled: bool):
    """Make ops select backends as on a GPU, with or without compiled modules, and raise Served from the selected
    module."""

    def missing(self: Op, name: str, device: torch.device) -> str | None:
        entry = self.backends.get(name)
        if entry is None or (name == "native" and not compiled):
            return "not there"
        return entry.missing(torch.device("cuda")) if entry.missing is _native.missing_beyond_cpu else None

    def select(self: Op, device: torch.device, backend: str = "auto", problem: Any = None) -> ModuleType:
        chosen, self._chosen = self._chosen, {}
        try:
            return selected(self, torch.device("cuda"), backend, problem)
        finally:
            self._chosen = chosen

    def watch(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        is_call = event == "call" and path.name in FILES and "raoe_kernels" in path.parts
        if is_call and frame.f_code.co_name not in (*CHOOSE, "<module>", "<genexpr>", "<lambda>"):
            raise Served(path.name)

    for path in Path(rk.__file__).parent.rglob("*.py"):  # import first: class bodies would count as calls
        if path.name in FILES:
            import_module(".".join(("raoe_kernels", *path.relative_to(Path(rk.__file__).parent).with_suffix("").parts)))
    selected = Op.select
    originals = Op._missing, selected
    Op._missing, Op.select = missing, select  # type: ignore[method-assign, assignment]
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
        Op._missing, Op.select = originals  # type: ignore[method-assign]


def served(call: Callable[[], Any], compiled: bool) -> str:
    """Name the kind of code that runs a call on CUDA."""
    try:
        with as_on_cuda(compiled):
            call()
    except Served as stop:
        return FILES[str(stop)]
    raise RuntimeError("the call reached no backend of raoe_kernels")


def table() -> str:
    """Return the table in Markdown, with a row for each pair of backends."""
    by_backends: dict[tuple[str, str], list[str]] = {}
    for form, call in forms().items():
        by_backends.setdefault((served(call, True), served(call, False)), []).append(form)
    lines = ["| with the compiled module | without it | ops and forms |", "|---|---|---|"]
    lines += [f"| {' | '.join(backends)} | {'; '.join(names)} |" for backends, names in by_backends.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

"""Settings that must precede every import, and fixtures of several folders."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

if not torch.cuda.is_available():
    # The kernels' tests run Triton's interpreter, and triton reads this as it is imported, which sentence-transformers
    # does too.
    os.environ["TRITON_INTERPRET"] = "1"


def without_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


REST = ("adversary", "benchmarks", "cuda_emulator", "faults", "fuzz", "packaging", "sanitizers", "studies",
        "third_party", "versions")  # fmt: skip


def pytest_collection_modifyitems(items):
    """Mark the folders that `make test` leaves out as slow, and start the longest tests first, so that none of them
    is left for the end."""
    for item in items:
        if set(REST) & set(item.path.relative_to(item.config.rootpath).parts):
            item.add_marker("slow")
    items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("timeout")), default=0))


def pytest_collection_finish():
    """Exclude imported modules from garbage collection, which took a third of the tests' time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # so that a library that counts leaked objects at exit finds none


@pytest.fixture(scope="session")
def elsewhere():
    """elsewhere(function, *arguments): the result of a call in a process whose Triton compiles. All tests share the
    process, because importing takes longer than most kernels."""
    with ProcessPoolExecutor(1, get_context("spawn"), without_interpreter) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """The folder of a tiny encoder, which no test changes."""
    from tests.tiny import saved_encoder

    return saved_encoder(tmp_path_factory.mktemp("encoder") / "A")


@pytest.fixture
def drawn(monkeypatch):
    """A list of the figures that are saved."""
    from raoe_train.training import report

    made, real = [], report.run_figure
    monkeypatch.setattr(report, "run_figure", lambda *arguments: made.append(real(*arguments)) or made[-1])
    return made

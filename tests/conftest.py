"""What has to be so before any test is imported, and what tests of several rooms use."""

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


REST = ("adversary", "benchmarks", "cuda_emulator", "faults", "packaging", "sanitizers", "third_party", "versions")


def pytest_collection_modifyitems(items):
    """Rooms that a newcomer's `make test` leaves out; what may take longest comes first, so that no process is left
    alone with it at the end."""
    for item in items:
        if set(REST) & set(item.path.relative_to(item.config.rootpath).parts):
            item.add_marker("slow")
    items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("timeout")), default=0))


def pytest_collection_finish():
    """What is imported and collected by now stays; looking at it as garbage took a third of the tests' time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # a library that counts what is left at the end finds nothing


@pytest.fixture(scope="session")
def elsewhere():
    """elsewhere(function, *arguments): its result in a process whose Triton compiles. One for all tests, as importing
    takes longer than most kernels; what it has compiled is in Triton's cache for all of them."""
    with ProcessPoolExecutor(1, get_context("spawn"), without_interpreter) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture
def drawn(monkeypatch):
    """The figures as they are saved."""
    from raoe_train.artifacts import report

    made, real = [], report.save
    monkeypatch.setattr(report, "save", lambda figure, path: (made.append(figure), real(figure, path)))
    return made

"""What every op must show on a GPU: no host sync, and capture in a CUDA graph; and, on any machine, what its calls ask
of torch besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import HAS_GPU
from tests.kernels.contrast_cases import Recorder

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="torch sees no CUDA device")]

Step = Callable[[], Sequence[Tensor]]


@contextmanager
def no_sync() -> Iterator[None]:
    """An error where the host waits for the device. What is inside must have run before: compiling may wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step: Step) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """A step as a CUDA graph, and the tensors that a replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def close(x: Tensor, y: Tensor) -> bool:
    """For libraries that may take another algorithm on another stream; to bfloat16's digits."""
    return torch.allclose(x, y, rtol=1.6e-2, atol=1e-5)


def flip(*inputs: Tensor) -> Callable[[], None]:
    """What gives the inputs other values: their own, in the opposite order."""

    def change() -> None:
        for x in inputs:
            x.copy_(x.flip(0))

    return change


def replays(step: Step, change: Callable[[], None], same: Callable[[Tensor, Tensor], bool] = torch.equal) -> None:
    """A captured step, replayed after `change` has put other values in the same places, gives what the step itself
    gives for them."""
    graph, results = captured(step)
    graph.replay()
    before = [x.clone() for x in results]
    with torch.no_grad():
        change()
    graph.replay()
    assert not all(torch.equal(x, y) for x, y in zip(before, results, strict=True)), "the replay read no new values"
    for x, y in zip(results, step(), strict=True):
        assert same(x, y)


def operations(step: Callable[[], object]) -> list[str]:
    """The operations of torch that a step runs, in their order: on a GPU, microseconds of the host each."""
    with Recorder() as seen:
        step()
    return seen.calls


class NoLaunch:
    """In the place of a kernel of Triton's: its interpreter runs operations of its own."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **constants: None

"""Gathered losses equal those of the whole batch. Threads replace processes, without encoder and network.
test_global_batch.py has real processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raoe_train.losses import CoSENTLoss, InfoNCELoss, ListMLELoss, RAOELoss, SigmoidLoss, gathering, in_batch

PROCESSES = 3


def threads_as_processes(world: int) -> Any:
    """The part of torch.distributed that gathering uses; each thread is a process with rank `here.rank`."""
    here, barrier, inputs = threading.local(), threading.Barrier(world, timeout=30), [torch.empty(0)] * world

    def exchanged(tensor: Any) -> list[Any]:
        inputs[here.rank] = tensor
        barrier.wait()
        everyone = [each.clone() if isinstance(each, torch.Tensor) else each for each in inputs]
        barrier.wait()
        return everyone

    def all_gather(out: list[torch.Tensor], own: torch.Tensor) -> None:
        for to, each in zip(out, exchanged(own), strict=True):
            to.copy_(each)

    def all_reduce(tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(exchanged(tensor)).sum(0))

    def reduce_scatter(out: torch.Tensor, shares: list[torch.Tensor]) -> None:
        everyone = exchanged(torch.stack([*shares]))
        out.copy_(torch.stack(everyone).sum(0)[here.rank])

    return SimpleNamespace(
        here=here, all_gather=all_gather, all_reduce=all_reduce, reduce_scatter=reduce_scatter,
        get_rank=lambda: here.rank, get_world_size=lambda: world,
        is_available=lambda: True, is_initialized=lambda: True,
    )  # fmt: skip


def rows(count: int, columns: int) -> list[torch.Tensor]:
    """Embeddings of unequal norms and distinct cosines."""
    seeded = torch.Generator().manual_seed(count)
    return [torch.randn(count, 5, generator=seeded, dtype=torch.float64) for _ in range(columns)]


SCORES = torch.tensor([0.1, 0.9, 0.4, 0.4, 0.7, 0.0], dtype=torch.float64)
LABELS = {"score": SCORES, "label": torch.tensor([2, 0, 1, 1, 0, 2])}
# row 1 and the last have one anchor, and a row of the last process has its positive as its negative
TEXTS = {"texts": torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 13], [3, 14, 15]])}
CASES = [
    (CoSENTLoss, {}, 2, LABELS),
    (RAOELoss, {"margin": 1}, 2, LABELS),
    (InfoNCELoss, {}, 3, None),
    (InfoNCELoss, {"symmetric": True, "learn_scale": True}, 2, None),
    (InfoNCELoss, {"directions": ("query_to_doc", "query_to_query")}, 2, None),
    (SigmoidLoss, {}, 3, None),
    (InfoNCELoss, {"symmetric": True}, 3, TEXTS),
    (SigmoidLoss, {}, 3, TEXTS),
]


def value(loss: Any, columns: list[torch.Tensor], given: Any) -> torch.Tensor:
    asked = given if given and "texts" in given else {"labels": given}
    result = loss.compute_loss_from_embeddings(columns, **asked)
    return sum(result.values()) if isinstance(result, dict) else result


@pytest.mark.parametrize(("made", "settings", "columns", "labels"), CASES)
def test_mean_over_processes_equals_the_whole_batch(made, settings, columns, labels, monkeypatch):
    """Of the loss, and of the gradient of every row and of the loss's own numbers."""
    dist = threads_as_processes(PROCESSES)
    whole = [x.requires_grad_() for x in rows(2 * PROCESSES, columns)]
    one = made(None, **settings).double()
    expected = value(one, whole, labels)
    expected.backward()
    monkeypatch.setattr(gathering, "dist", dist)
    own = [[x.detach().split(2)[rank].clone().requires_grad_() for x in whole] for rank in range(PROCESSES)]
    losses = [made(None, **settings, gather_across_devices=True).double() for _ in range(PROCESSES)]

    def process(rank: int) -> torch.Tensor:
        dist.here.rank = rank
        its = labels and {name: x.split(2)[rank] for name, x in labels.items()}
        result = value(losses[rank], own[rank], its)
        result.backward()
        return result.detach()

    with ThreadPoolExecutor(PROCESSES) as pool:
        result = torch.stack([*pool.map(process, range(PROCESSES))])
    torch.testing.assert_close(result.mean(), expected.detach())
    for column, each in enumerate(whole):
        mean = torch.cat([its[column].grad for its in own]) / PROCESSES  # as DistributedDataParallel averages
        torch.testing.assert_close(mean, each.grad)
    for loss in losses:
        for ours, theirs in zip(loss.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("loss", "op"), [(InfoNCELoss, "info_nce_loss"), (SigmoidLoss, "sigmoid_loss")])
@pytest.mark.parametrize("gathered", [False, True])
def test_one_process_gives_its_op_no_targets(loss, op, gathered, monkeypatch):
    """With targets the op would sort them. The ids have 32 bits, half of what the kernels would have to load."""
    calls, call = [], getattr(in_batch, op)
    monkeypatch.setattr(in_batch, op, lambda *rows, **options: calls.append(options) or call(*rows, **options))
    loss(None, gather_across_devices=gathered).compute_loss_from_embeddings(rows(6, 3), **TEXTS)
    (options,) = calls
    assert options["targets"] is None and [x.dtype for x in options["ignore"]] == [torch.int32] * 2


def test_lists_count_by_their_sentences(monkeypatch):
    """Lists of 3 and 4 sentences in one process, of 5 in another, whose gradients are not gathered."""
    lengths, parts = [3, 4, 5], [[3, 4], [5]]
    dist, sizes = threads_as_processes(2), [7, 5]
    (whole,) = rows(12, 1)
    whole.requires_grad_()
    expected = ListMLELoss(None).compute_loss_from_embeddings([whole], {"lengths": torch.tensor(lengths)})
    expected.backward()
    monkeypatch.setattr(gathering, "dist", dist)
    own = [x.clone().requires_grad_() for x in whole.detach().split(sizes)]

    def process(rank: int) -> torch.Tensor:
        dist.here.rank = rank
        loss = ListMLELoss(None, gather_across_devices=True)
        result = loss.compute_loss_from_embeddings([own[rank]], {"lengths": torch.tensor(parts[rank])})
        result.backward()
        return result.detach()

    with ThreadPoolExecutor(2) as pool:
        result = torch.stack([*pool.map(process, range(2))])
    torch.testing.assert_close(result.mean(), expected.detach())
    torch.testing.assert_close(torch.cat([x.grad for x in own]) / 2, whole.grad)

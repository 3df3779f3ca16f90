"""A step of several processes, each with a share of a batch, equals the step of one process, for every loss.

Real processes over gloo, DistributedDataParallel and SGD; what is compared is all parameters after the step.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import BatchEncoding

from raoe_train.encoders import lengths
from raoe_train.encoders.packed import without_pooler
from raoe_train.losses import (
    AnglEContrastiveLoss,
    AnglELoss,
    ByLength,
    CoSENTLoss,
    CosineSimilarityLoss,
    GatedAngularLoss,
    GISTLoss,
    InfoNCELoss,
    ListMLELoss,
    RankMarginLoss,
    RAOELoss,
    SigmoidLoss,
)
from raoe_train.losses.by_length import _most_forwards
from tests.forked import together
from tests.losses.test_infonce_loss import GTE, ROWS, tokenized
from tests.losses.test_listmle_loss import LISTS, collated, teachers
from tests.losses.test_ragged_rows import letters
from tests.tiny import REPLAYS_IN_DOUBLE, SENTENCES, batch, tiny_encoder, total

RATE = 0.01
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}

# How many of the 8 rows (9 for 3 processes) each process has, and of the 4 lists.
SIZES = {1: [8], 2: [4, 4], 3: [3, 3, 3], 4: [2, 2, 2, 2]}
LISTS_OF = {1: [[4]], 2: [[2, 2], [1, 3]], 3: [[2, 1, 1]], 4: [[1, 1, 1, 1]]}

PAIRS = [
    (RankMarginLoss, {}),
    (RankMarginLoss, {"margin": 5}),  # more than any difference of ranks in 4 or 5 rows
    (GatedAngularLoss, {}),
    (RAOELoss, {}),
    (RAOELoss, {"matryoshka_dims": [16, 4], "scale": 5.0}),  # or float32 rounds more than of one width
    (CoSENTLoss, {}),
    (AnglELoss, {}),
]


ALL_NEGATIVES = {"hardness_mode": "all_negatives", "hardness_strength": 3.0}
COLUMNS = [
    (InfoNCELoss, {}, 3),
    (InfoNCELoss, {"symmetric": True}, 4),
    (InfoNCELoss, {"symmetric": True, "matryoshka_dims": [16, 8], "scale": 5.0}, 3),
    (InfoNCELoss, {"symmetric": True, "mask_duplicates": False}, 2),
    (InfoNCELoss, {"directions": GTE, **ALL_NEGATIVES}, 4),
    (InfoNCELoss, {"symmetric": True, **ALL_NEGATIVES}, 4),
    (GISTLoss, {"embed": letters, "scale": 20.0, "margin": 0.05}, 4),
    (GISTLoss, {"embed": letters, "scale": 20.0, "margin": 0.05, "contrast_anchors": False}, 2),
    (SigmoidLoss, {}, 3),
    (SigmoidLoss, {"learn_scale": False}, 4),
    (SigmoidLoss, {"bias": -4.0, "mask_duplicates": False}, 2),
    (AnglEContrastiveLoss, {}, 4),
]
RAGGED = [
    (InfoNCELoss, {"directions": GTE, "hardness_mode": "hard_negatives", "hardness_strength": 3.0}, 4),
    (SigmoidLoss, {"bias": -3.0}, 4),
    (GISTLoss, {"embed": letters, "scale": 20.0, "margin": 0.1}, 4),
]  # in which rows lack negatives


def cases(model: Any, world: int) -> list[tuple[Any, dict[str, Any], Any, list[Any]]]:
    """(loss, its settings, the whole batch, each process's part)."""
    made: list[Any] = []
    rows = (ROWS * 2)[: sum(SIZES[world])]
    inputs = [(loss, arguments, batch(model, len(rows))) for loss, arguments in PAIRS]
    for loss, arguments, columns in COLUMNS + RAGGED:
        labels: dict[str, Any] = {}
        if "embed" in arguments:
            labels["texts"] = [[SENTENCES[row[n]] for row in rows] for n in range(columns)]
        if (loss, arguments, columns) in RAGGED:
            labels["missing"] = torch.tensor([[False, False, n % 3 == 0, n % 4 < 2] for n in range(len(rows))])
        inputs.append((loss, arguments, (tokenized(model, columns, rows), labels or None)))
    for loss, arguments, (features, labels) in inputs:
        made.append((loss, arguments, (features, labels), _parts(features, labels, SIZES[world])))
    for shares in LISTS_OF[world]:
        for squares in (teachers(), None):
            bounds = [(sum(shares[:rank]), sum(shares[: rank + 1])) for rank in range(world)]
            parts = [collated(model, LISTS[a:b], squares and squares[a:b]) for a, b in bounds]
            made.append((ListMLELoss, {}, collated(model, LISTS, squares), parts))
    return made


def _parts(features: list[dict[str, Any]], labels: Any, sizes: list[int]) -> list[Any]:
    def cut(rows: Any, start: int, end: int) -> Any:
        made: Any = {name: value[start:end] for name, value in rows.items() if hasattr(value, "shape")}
        if "texts" in rows:
            made["texts"] = [column[start:end] for column in rows["texts"]]
        return made if isinstance(rows, dict) else BatchEncoding(made)  # as model.preprocess returns columns

    bounds = [(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(sizes))]
    return [([cut(column, *at) for column in features], labels and cut(labels, *at)) for at in bounds]


def step(loss: Any, model: Any, initial: Any, features: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(the loss, all parameters after a step of SGD from `initial`, the loss's own first), in float64."""
    model.load_state_dict(initial)
    loss.to(next(model.parameters()).dtype)
    optimiser = torch.optim.SGD(loss.parameters(), lr=RATE)
    optimiser.zero_grad()
    value = total(loss(copy.deepcopy(features), labels))
    value.backward()
    optimiser.step()
    after = torch.cat([parameter.detach().flatten() for parameter in loss.parameters()])
    return value.detach().double(), after.double()


def packing(loss: Any) -> ByLength:
    return ByLength(loss, packed=True)


def packed_rows(loss: Any, part: Any) -> int:
    """The number of packed rows in a process's part of a batch; 0 if it is not packed."""
    runs = loss.plan(*copy.deepcopy(part)).runs if isinstance(loss, ByLength) else []
    return len(runs) * all("cu_seq_lens_q" in run for run in runs)


def steps(model: Any, world: int, rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """How far the parameters, or the mean over processes of the loss, are from those of one process: the largest
    difference of each case without cached gradients, and with them."""
    from torch.nn.parallel import DistributedDataParallel

    initial = copy.deepcopy(model.state_dict())
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()
    packing(CoSENTLoss(model))
    assert without_pooler(model)
    parallel = DistributedDataParallel(model)  # as in the trainer
    result: tuple[dict[str, float], dict[str, float]] = ({}, {})
    forwards = []
    for made, settings, whole, parts in cases(model, world):
        value, expected = padded = step(made(model, **settings), model, initial, *whole)
        # float32 rounds packed rows in another order than padded batches, by more than the tolerance of processes
        packed = padded
        if model.dtype == torch.float32:
            packed = step(packing(made(model, **settings)), model, initial, *whole)
        assert (expected[-len(before) :] - before).abs().max() > 1e-3, "a step that moves nothing shows nothing"
        for mini_batch_size, differences in zip((None, 2), result, strict=True):
            for around in (None, ByLength, packing) if world < 4 else (None,):
                model[0].model.config._attn_implementation = "sdpa"  # not as packing leaves it
                value, expected = packed if around is packing else padded
                each = made(parallel, **settings, mini_batch_size=mini_batch_size, gather_across_devices=True)
                each = each if around is None else around(each)
                mean, after = step(each, model, initial, *parts[rank])
                dist.all_reduce(mean)
                rows = [len(part[0][0]["input_ids"]) for part in parts]
                name = f"{made.__name__} {settings} {rows} teacher={'teacher' in (whole[1] or {})}"
                away = max((after - expected).abs().max(), (mean / world - value).abs() * RATE)
                differences[f"{name} {getattr(around, '__name__', None)}"] = float(away)
                forwards.append(packed_rows(each, parts[rank]))
                assert (forwards[-1] > 0) == (around is packing)
        if world > 1:
            alone = step(made(parallel, **settings), model, initial, *parts[rank])[1]
            assert (alone - expected).abs().max() > 1e-4, f"{made.__name__} {settings} need not gather here"
    others = torch.tensor(forwards)
    dist.all_reduce(others, dist.ReduceOp.MAX)
    assert world != 2 or others.tolist() != forwards, "processes have different numbers of rows"
    return result


def as_the_page_says(rank: int, world: int, folder: str) -> None:
    """docs/scale.md: your own loop, without cached gradients, three steps of losses with and without a gather."""
    from torch.nn.parallel import DistributedDataParallel

    model = tiny_encoder()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        initial, half, score = copy.deepcopy(model.state_dict()), slice(4 * rank, 4 * rank + 4), torch.arange(8) / 8
        for made, settings in ((CosineSimilarityLoss, {}), (CoSENTLoss, {"gather_across_devices": True})):
            results = [torch.cat([parameter.detach().flatten() for parameter in model.parameters()])]
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
            for loss, part in ((made(model), slice(8)), (made(wrapped, **settings), half)):
                model.load_state_dict(initial)
                optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
                for _ in range(3):
                    columns = [model.preprocess(texts[part]) for texts in (SENTENCES[:8], SENTENCES[3:])]
                    optimiser.zero_grad()
                    loss(columns, score[part]).backward()
                    optimiser.step()
                results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
            torch.testing.assert_close(*results[1:], rtol=0, atol=1e-9)
            assert (results[1] - results[0]).abs().max() > 1e-4
            model.load_state_dict(initial)
            del loss, wrapped
    finally:
        gc.collect()
        dist.destroy_process_group()


def test_processes_exchange_their_numbers_of_forwards_on_the_host(tmp_path):
    """A number on the GPU would wait for the step before. On the device "meta", no number can be read."""
    wrapped = type("DistributedDataParallel", (torch.nn.Module,), {})()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert _most_forwards(3, [wrapped, torch.nn.Linear(1, 1, device="meta")]) == 3
    finally:
        dist.destroy_process_group()


def planned(rank: int, world: int, folder: str) -> None:
    """Losses of a batch whose processes have scores of different ranges, so that ranks in a process mean nothing."""
    model = tiny_encoder()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        features, labels = batch(model, 8)
        labels["score"] = torch.tensor([0.9, 0.8, 0.6, 0.7, 0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
        part = _parts(features, labels, [4, 4])[rank]
        for made, settings in PAIRS:
            alone = ByLength(made(model, **settings))
            gathers = ByLength(made(model, **settings, gather_across_devices=True))
            expected, found = total(alone(alone.plan(features, labels))), total(gathers(gathers.plan(*part)))
            assert torch.allclose(found, expected, rtol=1e-12, atol=0) and expected > 0, (made, settings)
            gradients = []
            for value in (found, expected):
                model.zero_grad(set_to_none=True)
                value.backward()
                gradients.append(torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None]))
            dist.all_reduce(gradients[0])
            torch.testing.assert_close(gradients[0] / world, gradients[1], rtol=0, atol=1e-12)
    finally:
        dist.destroy_process_group()


def test_planned_batches_are_ranked_over_all_processes(tmp_path):
    together(planned, 2, str(tmp_path))


@pytest.mark.slow
def test_a_wrapped_model_in_your_own_loop(tmp_path):
    together(as_the_page_says, 2, str(tmp_path))


def compare(rank: int, world: int, folder: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    lengths.CPU_FORWARD = 1  # by length, processes would make different numbers of forwards
    # Before there is a group, in which transformers would save, and so make, the encoder in the first process alone.
    model = tiny_encoder(double=dtype == torch.float64)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        plain, cached = steps(model, world, rank)
        tolerance = TOLERANCE[dtype]
        limit = tolerance if REPLAYS_IN_DOUBLE else TOLERANCE[torch.float32]
        wrong = {name: away for name, away in plain.items() if not away <= tolerance}
        wrong |= {f"{name}, cached": away for name, away in cached.items() if not away <= limit}
        assert not wrong, f"{dtype} parameters differ: {wrong}"
        assert len(plain) >= 22 * (1 + 2 * (world < 4))
    finally:
        # What is wrapped must be gone by now: a DistributedDataParallel that outlives its group joins the group's
        # threads while it holds the interpreter's lock, which one of them may be waiting for.
        gc.collect()
        dist.destroy_process_group()


@pytest.mark.parametrize("default", ["meta", "cuda"])
def test_the_default_device_changes_nothing(default):
    """Of losses on a CPU: alone, with cached gradients and by length, with tokens packed in a row."""
    model = tiny_encoder()
    initial = copy.deepcopy(model.state_dict())
    for made, settings, whole, _ in cases(model, 1):
        for arguments, around in (({}, packing), ({"mini_batch_size": 2}, copy.copy)):
            model[0].model.config._attn_implementation = "sdpa"
            outside = step(around(made(model, **settings, **arguments)), model, initial, *whole)
            model[0].model.config._attn_implementation = "sdpa"
            with torch.device(default):
                inside = step(around(made(model, **settings, **arguments)), model, initial, *whole)
            assert all(torch.equal(x, y) for x, y in zip(inside, outside, strict=True)), (made, settings)


@pytest.mark.slow
def test_one_process_in_a_group(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "CPU_FORWARD", 1)  # compare sets it, and this process has more tests to run
    compare(0, 1, str(tmp_path), torch.float64)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        *((2, dtype) for dtype in TOLERANCE),
        (3, torch.float64),
        (4, torch.float64),
        pytest.param(4, torch.float32, marks=pytest.mark.exhaustive),
    ],
)
def test_shares_equal_the_whole_batch(tmp_path, world, dtype):
    together(compare, world, str(tmp_path), dtype)

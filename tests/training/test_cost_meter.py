"""What training costs: the time of its loop, and its peak memory."""

from __future__ import annotations

import pytest

from raoe_train.artifacts.memory import CLEAR, peak_mb, reset_peak
from raoe_train.training.cost_meter import CostMeter


class State:
    global_step = 0


def test_time_without_evaluation(monkeypatch):
    """Two steps of 3 s, an evaluation of 10 s and a checkpoint of 5 s after the first: 6 s. A step was done before."""
    import torch

    clock = iter([100.0, 103.0, 113.0, 118.0, 121.0, 121.0])
    monkeypatch.setattr("raoe_train.training.cost_meter.time.perf_counter", lambda: next(clock))
    meter, state = CostMeter(torch.device("cpu")), State()
    state.global_step = 1
    meter.on_train_begin(None, state, None)
    meter.on_step_end(None, state, None)
    meter.on_evaluate(None, state, None)
    meter.on_save(None, state, None)
    meter.on_step_end(None, state, None)
    meter.on_epoch_end(None, state, None)
    state.global_step = 3
    meter.on_train_end(None, state, None)
    costs = meter.costs()
    assert (costs["train_seconds"], costs["train_steps"]) == (6.0, 2)


def test_peak_memory_begins_anew():
    """On Linux, what was freed before is no part of it, and what is freed before it is read is."""
    import torch

    try:
        CLEAR.write_text("5")
    except OSError as error:
        pytest.skip(f"the peak cannot be reset here, it is that of the whole process: {error}")
    block = torch.ones(60_000_000)  # 240 MB
    before = peak_mb(cuda=False)
    del block
    reset_peak(cuda=False)
    after = peak_mb(cuda=False)
    assert before - after > 200
    block = torch.ones(30_000_000)
    del block
    assert peak_mb(cuda=False) - after == pytest.approx(120, abs=20)

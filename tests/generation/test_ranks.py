"""Rank and GPU of a process, from torchrun's environment."""

import pytest
import torch

from raoe_train.jobs.generate import default_device
from raoe_train.processes import from_environment, on_rank_zero, rank_and_world


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "3"}, (2, 3)),
        ({"RANK": "1"}, "RANK must be from 0 to WORLD_SIZE - 1, .* RANK is 1 and WORLD_SIZE is 1"),
        ({"WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE is 0"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be an integer, got 'one'"),
    ],
)
def test_rank_and_world_size(monkeypatch, said, expected):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            rank_and_world()
    else:
        assert rank_and_world() == expected


def test_gpu_of_a_rank(monkeypatch):
    """Four fake GPUs: a process takes the one of its local rank."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (from_environment("LOCAL_RANK", 0), default_device()) == (0, "cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (from_environment("LOCAL_RANK", 0), default_device()) == (3, "cuda:3")
    monkeypatch.setenv("LOCAL_RANK", "5")  # more processes than GPUs
    assert default_device() == "cuda:1"


def test_processes_without_a_group_are_reported(monkeypatch):
    assert on_rank_zero(lambda: "alone") == "alone"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="process 1 of 2 has no process group"):
        on_rank_zero(lambda: "never")

"""Which process this is, by what torchrun or an MPI says."""

from __future__ import annotations

import pytest
import torch

from raoe_train.artifacts.processes import LOCAL_RANKS, RANKS, WORLDS, local_rank, on_rank_zero, rank_and_world
from raoe_train.generation.models import default_device


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in (*RANKS, *WORLDS, *LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "3"}, (2, 3)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"}, (0, 4)),
        # srun, which may set PMI's, starts a torchrun on each node
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "0", "WORLD_SIZE": "4"}, (0, 4)),
    ],
)
def test_who_am_i(monkeypatch, said, expected):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert rank_and_world() == expected


# accelerate's list
@pytest.mark.parametrize(
    "name", ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"]
)
def test_which_gpu_is_mine(monkeypatch, name):
    """Pretended: four GPUs, of which a process takes the one of its number on the machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (local_rank(), default_device()) == (0, "cuda:0")
    monkeypatch.setenv(name, "3")
    assert (local_rank(), default_device()) == (3, "cuda:3")
    monkeypatch.setenv(name, "5")  # more processes than GPUs
    assert default_device() == "cuda:1"


def test_processes_without_a_group_say_so(monkeypatch):
    assert on_rank_zero(lambda: "alone") == "alone"
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ValueError, match="this is process 1 of 2, but there is no process group: on GPUs"):
        on_rank_zero(lambda: "never")

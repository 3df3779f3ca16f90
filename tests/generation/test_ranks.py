"""Rank of a process, from torchrun's environment."""

import pytest

from raoe_train.processes import on_rank_zero, rank_and_world


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
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


def test_processes_without_a_group_are_reported(monkeypatch):
    assert on_rank_zero(lambda: "alone") == "alone"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="process 1 of 2 has no process group"):
        on_rank_zero(lambda: "never")

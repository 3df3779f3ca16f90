"""This process among those that torchrun or accelerate started."""

from __future__ import annotations

import os


def rank_and_world() -> tuple[int, int]:
    """(number of this process, how many there are); (0, 1) for one that was started alone."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

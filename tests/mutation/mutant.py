"""A small change of the code that a fast test is to notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    old: str  # that is there just once
    new: str
    tests: str  # what pytest is given
    reason: str = ""  # why no test can notice it, where none can

    @property
    def room(self) -> str:
        return room(self.file)


def room(file: str) -> str:
    """raoe_train/losses of what is in it; a file right in its package is a room of its own."""
    return "/".join(file.split("/")[:2])


def of(file: str, tests: str, *changes: tuple[str, ...]) -> list[Mutant]:
    """Mutants (old, new) or (old, new, reason) of a file, noticed by the same tests, below tests/."""
    words = " ".join(f"tests/{word}" if word.endswith(".py") or ".py::" in word else word for word in tests.split())
    return [Mutant(file, change[0], change[1], words, *change[2:]) for change in changes]

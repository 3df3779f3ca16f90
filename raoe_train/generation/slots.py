"""Answers under way, and where their contexts are in a batch and its cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from raoe_train.generation.contexts import Context


@dataclass(frozen=True)
class Request:
    """What to answer.

    Attributes:
        near: token ids of the nearer context, the one to answer.
        far: token ids of the farther context, or None for plain decoding.
        guidance: 1 + lambda of Eq. 4; with 1 the farther context has no say and is left out.
        max_new_tokens: at most so many, at least 1.
        seed: of this answer's random numbers, where there are any.
        keep: whether the answer shall carry its nearer context, to be `known` to a later request.
        known: a context that an answer of the same decoder carries. Where near or far begin as it does, that beginning
            is not read again; where one is it, nothing of it is. The answer is the same, up to rounding.
    """

    near: Sequence[int]
    far: Sequence[int] | None = None
    guidance: float = 1.0
    max_new_tokens: int = 64
    seed: int = 0
    keep: bool = False
    known: Context | None = None

    @property
    def guided(self) -> bool:
        return self.far is not None and self.guidance != 1


@dataclass(frozen=True)
class Answer:
    """What was answered.

    Attributes:
        ids: what was generated, an end token included.
        text: decoded without special tokens, up to a stop string, as it is otherwise ("" without a tokenizer).
        finish: "eos", "stop" (a stop string) or "length" (it was cut off).
        context: the nearer context if the request says keep; None otherwise, and where a cache keeps only a window.
    """

    ids: list[int]
    text: str
    finish: str
    context: Context | None = field(default=None, compare=False)


@dataclass
class Slot:
    """An answer under way, and where its rows are."""

    key: Hashable
    request: Request
    near: int
    far: int  # the near row again where there is none
    history: Any
    uniforms: Tensor | None
    ids: list[int] = field(default_factory=list)
    state: Tensor | None = None  # of the nearer context, where it is to be kept


@dataclass
class Plan:
    """The slots as tensors on the model's device: all that a step over N answers, with R rows in the batch, reads."""

    near: Tensor  # [N], the row of each answer's nearer context
    far: Tensor  # [N], that of its farther one; the near row again where there is none: the mix is exactly that row's
    weight: Tensor  # [N], guidance - 1, 0 where there is no farther context
    groups: list[tuple[float, Tensor]]  # (guidance, [n] answers led with it) of each guidance that is not 1
    owner: Tensor  # [R], the answer that a row belongs to
    tokens: Tensor  # [N], each answer's newest
    lengths: Tensor  # [R], tokens of a row that are in the cache
    uniforms: Tensor | None  # [N, most new tokens]
    count: Tensor  # [N], tokens generated so far


def plan_of(slots: list[Slot], model: Any) -> Plan:
    """What a step over `slots` reads, on the model's device."""

    def ints(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=model.device)

    guidance = [slot.request.guidance if slot.request.guided else 1.0 for slot in slots]
    weight = torch.tensor(guidance, dtype=torch.float64 if model.dtype == torch.float64 else torch.float32) - 1
    groups = [
        (value, ints(number for number, other in enumerate(guidance) if other == value))
        for value in dict.fromkeys(guidance)
        if value != 1
    ]
    owners = sorted({(row, number) for number, slot in enumerate(slots) for row in (slot.near, slot.far)})
    drawn = [slot.uniforms for slot in slots if slot.uniforms is not None]
    return Plan(
        near=ints(slot.near for slot in slots),
        far=ints(slot.far for slot in slots),
        weight=weight.to(model.device),
        groups=groups,
        owner=ints(number for _, number in owners),
        tokens=ints(slot.ids[-1] if slot.ids else 0 for slot in slots),
        lengths=ints(lengths(slots)),
        uniforms=torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True).to(model.device) if drawn else None,
        count=ints(len(slot.ids) for slot in slots),
    )


def select(cache: Any, slots: list[Slot], device: Any) -> None:
    """Keep the rows of these slots in the cache, and count them from 0 in their order."""
    kept = sorted({row for slot in slots for row in (slot.near, slot.far)})
    if len(kept) < next(len(keys) for keys, *_ in cache if keys is not None):
        cache.batch_select_indices(torch.tensor(kept, dtype=torch.long, device=device))
    places = {row: place for place, row in enumerate(kept)}
    for slot in slots:
        slot.near, slot.far = places[slot.near], places[slot.far]


def lengths(slots: list[Slot]) -> list[int]:
    """Tokens in the cache, row by row: all but an answer's newest, which the next step puts there."""
    found = {}
    for slot in slots:
        new = max(len(slot.ids) - 1, 0)
        found[slot.near] = len(slot.request.near) + new
        if slot.far != slot.near:
            found[slot.far] = len(slot.request.far or ()) + new
    return [found[row] for row in sorted(found)]

"""Answers under way, and where their contexts are in a batch and its cache."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from raoe_train.generation.contexts import Context, merged


@dataclass(frozen=True)
class Request:
    """What to answer."""

    near: Sequence[int]  # token ids of the nearer context, the one to answer
    far: Sequence[int] | None = None  # those of the farther context, or None for plain decoding
    guidance: float = 1.0  # 1 + lambda of Eq. 4; with 1 the farther context has no say and is left out
    max_new_tokens: int = 64  # at least 1
    seed: int = 0  # of this answer's random numbers, where there are any
    keep: bool = False  # whether the answer shall carry its nearer context, to be `known` to a later request
    # A context that an answer of the same decoder carries. Where near or far begin as it does, that beginning is not
    # read again; where one is it, nothing of it is. The answer is the same, up to rounding.
    known: Context | None = None

    @property
    def guided(self) -> bool:
        return self.far is not None and self.guidance != 1


@dataclass(frozen=True)
class Answer:
    """What was answered."""

    ids: list[int]  # what was generated, an end token included
    text: str  # decoded without special tokens, up to a stop string ("" without a tokenizer)
    finish: str  # "eos", "stop" (a stop string) or "length" (it was cut off)
    # the nearer one if the request says keep; None otherwise, and where a cache keeps only a window
    context: Context | None = field(default=None, compare=False)

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(eq=False)
class Slot:
    """An answer under way."""

    key: Hashable
    request: Request
    history: Any
    uniforms: Tensor | None
    ids: list[int] = field(default_factory=list)
    logits: Tensor | None = None  # [V] at the end of the nearer context, where it is to be kept


@dataclass(eq=False)
class Row:
    """A row of the batch: a context of an answer, and behind it the answer."""

    slot: Slot
    ids: Sequence[int]
    far: bool = False

    @property
    def length(self) -> int:
        """Tokens in the cache: all but the answer's newest, which the next step puts there."""
        return len(self.ids) + max(len(self.slot.ids) - 1, 0)


def device_of(model: Any) -> torch.device:
    """Where a transformers model wants its inputs: of one with a device_map, whose weights may be anywhere, as its hook
    says."""
    said = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return model.device if said is None else torch.device(said)


class Batch:
    """N answers under way, the R rows of their contexts in a left-padded cache, and as tensors what a step reads."""

    def __init__(self, slots: list[Slot], rows: list[Row], cache: Any, model: Any) -> None:
        self.slots, self.rows, self.cache, self.model = slots, rows, cache, model
        ints = functools.partial(torch.tensor, dtype=torch.long, device=device_of(model))
        number = {slot: place for place, slot in enumerate(slots)}
        near = {row.slot: place for place, row in enumerate(rows) if not row.far}
        far = {row.slot: place for place, row in enumerate(rows) if row.far}
        self.near = ints([near[slot] for slot in slots])  # [N], rows of the nearer contexts
        led: dict[float, list[tuple[int, int]]] = {}
        for slot in far:
            led.setdefault(slot.request.guidance, []).append((number[slot], far[slot]))
        # (guidance, [n] answers led with it, [n] rows of their farther contexts)
        self.groups: list[tuple[float, Tensor, Tensor]] = []
        for guidance, pairs in led.items():
            answers, others = ints(pairs).unbind(1)
            self.groups.append((guidance, answers, others))
        self.owner = ints([number[row.slot] for row in rows])  # [R], the answer that a row belongs to
        self.lengths = ints([row.length for row in rows])  # [R], tokens of a row that are in the cache
        self.tokens = ints([slot.ids[-1] if slot.ids else 0 for slot in slots])  # [N], each answer's newest
        self.count = ints([len(slot.ids) for slot in slots])  # [N], tokens generated so far
        # [N, most new tokens]
        drawn = [slot.uniforms for slot in slots if slot.uniforms is not None]
        self.uniforms = torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True).to(device_of(model)) if drawn else None

    def context(self, slot: Slot) -> Context | None:
        """The nearer context of an answer, where it is to be kept: copies, so that nothing holds the whole cache."""
        if slot.logits is None:
            return None
        row = next(place for place, row in enumerate(self.rows) if row.slot is slot and not row.far)
        ids = slot.request.near
        # behind it are the answer's tokens, but for the newest
        end = self.cache.get_seq_length() - (len(slot.ids) - 1)
        place = slice(end - len(ids), end)
        layers = tuple((keys[row, :, place].clone(), values[row, :, place].clone()) for keys, values, *_ in self.cache)
        return Context(tuple(ids), layers, slot.logits)

    def kept(self, slots: list[Slot]) -> Batch:
        """Of these slots alone."""
        places = [place for place, row in enumerate(self.rows) if row.slot in slots]
        if len(places) < len(self.rows):
            # an index of the CPU's is good for layers on several devices
            where = "cpu" if hasattr(self.model, "hf_device_map") else self.model.device
            self.cache.batch_select_indices(torch.tensor(places, device=where))
        return Batch(slots, [self.rows[place] for place in places], self.cache, self.model)

    def joined(self, other: Batch) -> Batch:
        """With the slots of another, and their rows below its own."""
        rows = self.rows + other.rows
        cache = merged(self.cache, other.cache, max(row.length for row in rows))
        return Batch(self.slots + other.slots, rows, cache, self.model)

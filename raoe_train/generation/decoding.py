"""Guided decoding of many rows at once: both contexts in one left-padded batch, with one KV cache.

A row of the batch is a context. An answer that is led from one context towards another has two rows, which go on with
the same tokens; one without guidance has a single row. Rows leave with their answer, and new ones may join rows that
are under way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from raoe_train.generation.contexts import Context, merged, stacked, taken
from raoe_train.generation.mixing import checked_argmax, choose_mix
from raoe_train.generation.sampling import Sampling, draw, uniforms
from raoe_train.generation.slots import Answer, Plan, Request, Slot, lengths, plan_of, select

__all__ = ["Answer", "Context", "GuidedDecoder", "Request"]


class GuidedDecoder:
    """Decodes requests together; each answer is what it would be alone, up to rounding.

    Args:
        model: a transformers causal language model, in eval mode, on its device.
        tokenizer: for texts and stop strings; None gives answers of ids alone.
        sampling: how tokens are chosen; greedily by default. Its eos_token_id, where given, replaces the model's.
        mix: "auto" mixes hidden states where that is exact and logits elsewhere; see choose_mix.
        compile: torch.compile the forward pass of single steps, with dynamic shapes.

    `add` and `step` are for those who let new requests join; `answers` is all of it for a list of requests.

    Raises:
        ValueError: stop strings without a tokenizer, or a mix that cannot be.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        sampling: Sampling | None = None,
        *,
        mix: str = "auto",
        compile: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling or Sampling()
        if self.sampling.stop_strings and tokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        # transformers gives its repetition penalty log-probabilities where there is guidance, and logits elsewhere
        self.mix = choose_mix(model, "logits" if mix == "auto" and self.sampling.reads_sign else mix)
        self.eos = _eos(model, self.sampling)
        self.limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._warpers = self.sampling.warpers(model.device)
        self._windows = any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config).layers)
        self._one = torch.compile(self._forward, dynamic=True) if compile else self._forward
        self._slots: list[Slot] = []
        self._cache: Any = None
        self._plan: Plan | None = None

    @property
    def active(self) -> int:
        """Answers under way."""
        return len(self._slots)

    @property
    def can_join(self) -> bool:
        """Whether requests can be added while others are under way: not where a cache keeps only a window."""
        return self._cache is None or not self._windows

    @torch.no_grad()
    def add(self, requests: Iterable[tuple[Hashable, Request]]) -> list[tuple[Hashable, Answer]]:
        """Begin (key, request) pairs; those of which the first token was the last one come back at once.

        Raises:
            ValueError: an empty context, one too long for the model's positions, guidance or max_new_tokens that cannot
                be, or requests that would join rows that others cannot join (see can_join).
        """
        pairs = list(requests)
        if not pairs:
            return []
        if not self.can_join:
            raise ValueError("this model's cache keeps a window: requests cannot join those that are under way")
        slots: list[Slot] = []
        rows: list[tuple[Sequence[int], Context | None]] = []
        for key, request in pairs:
            self._check(request)
            near = far = len(rows)
            rows.append((request.near, request.known))
            if request.guided and request.far is not None:
                far = len(rows)
                rows.append((request.far, request.known))
            history = self.sampling.history(len(request.near), self.eos, self.model.device)
            drawn = uniforms(request.seed, request.max_new_tokens) if self.sampling.do_sample else None
            slots.append(Slot(key, request, near, far, history, drawn))

        state, cache, order = self._read(rows)
        places = {row: place for place, row in enumerate(order)}
        for slot in slots:
            slot.near, slot.far = places[slot.near], places[slot.far]
            if slot.request.keep and not self._windows:
                slot.state = state[slot.near].clone()
        plan = plan_of(slots, self.model)
        finished = self._take(slots, self._next(state, plan), plan, cache)
        self._join([slot for slot in slots if slot.key not in finished], cache)
        return list(finished.items())

    @torch.no_grad()
    def step(self) -> list[tuple[Hashable, Answer]]:
        """One more token for every answer under way; the pairs (key, answer) that are finished by it."""
        plan = self._plan
        if plan is None:
            return []
        plan.lengths = plan.lengths + 1
        width = self._cache.get_seq_length() + 1
        chosen = self._one(plan.tokens[plan.owner][:, None], width, self._cache, plan)
        finished = self._take(self._slots, chosen, plan, self._cache)
        if finished:
            self._keep([slot for slot in self._slots if slot.key not in finished])
        return list(finished.items())

    def answers(self, requests: Sequence[Request], slots: int | None = None) -> list[Answer]:
        """The answers to `requests`, in their order, `slots` of them at a time (all by default)."""
        waiting = list(enumerate(requests))[::-1]
        slots = slots or len(waiting)
        found: dict[Hashable, Answer] = {}
        while waiting or self.active:
            free = slots - self.active
            # a quarter at a time: every joining copies the cache and pauses the others
            if waiting and (not self.active or (self.can_join and free >= max(1, slots // 4))):
                found.update(self.add(waiting.pop() for _ in range(min(free, len(waiting)))))
            found.update(self.step())
        return [found[number] for number in range(len(requests))]

    def _read(self, rows: Sequence[tuple[Sequence[int], Context | None]]) -> tuple[Tensor, Any, list[int]]:
        """What is new in (ids, known context) rows: [R, D or V] states, a cache, and the order of the rows in both."""
        device = self.model.device
        covered = [0 if known is None or self._windows else known.covers(ids) for ids, known in rows]
        whole = [number for number, (ids, _) in enumerate(rows) if covered[number] == len(ids)]
        begun = [number for number, (ids, _) in enumerate(rows) if 0 < covered[number] < len(ids)]
        # apart, or a single row of which nothing is known would have all others read from their first token
        new = [number for number, count in enumerate(covered) if not count]
        states, caches = [], []
        for numbers in filter(None, (new, begun)):
            group = [rows[number] for number in numbers]
            tail = max(len(rows[number][0]) - covered[number] for number in numbers)
            # all tails are as wide as the longest, so some rows have a few tokens of what is known read again
            before = [(known, max(len(ids) - tail, 0)) for ids, known in group if known is not None]
            cache = stacked(before) if numbers is begun else DynamicCache(config=self.model.config)
            ends = torch.tensor([[0] * (tail - len(ids)) + list(ids[-tail:]) for ids, _ in group], device=device)
            counts = torch.tensor([len(ids) for ids, _ in group], device=device)
            states.append(self._state(ends, max(len(ids) for ids, _ in group), cache, counts))
            caches.append(cache)
        if whole:
            contexts = [known for known in (rows[number][1] for number in whole) if known is not None]
            states.append(torch.stack([known.state for known in contexts]))
            caches.append(stacked([(known, len(known.ids)) for known in contexts]))
        width = max(len(ids) for ids, _ in rows)
        cache = functools.reduce(lambda first, second: merged(first, second, width), caches)
        return torch.cat(states), cache, [*new, *begun, *whole]

    def _forward(self, ids: Tensor, width: int, cache: Any, plan: Plan) -> Tensor:
        """[N] next tokens, or what `_next` gives, from [R, T] ids at the end of `width` columns.

        Nothing here depends on values, so it can be compiled; processors that read a row's history are Python and are
        left out of a compiled graph.
        """
        return self._next(self._state(ids, width, cache, plan.lengths), plan)

    def _state(self, ids: Tensor, width: int, cache: Any, lengths: Tensor) -> Tensor:
        columns = torch.arange(width, device=ids.device)
        padding = width - lengths[:, None]
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": (columns >= padding).long(),
            "past_key_values": cache,
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = (columns[width - ids.shape[1] :] - padding).clamp_min(0)
        return self.mix.state(inputs)

    def _next(self, state: Tensor, plan: Plan) -> Tensor:
        """[N] next tokens, -1 where scores are NaN; [N, V] scores where each row has a history to read."""
        if not (self.sampling.do_sample or self.sampling.has_history):
            return self.mix.best(state, plan)
        scores = self.mix.scores(state, plan)
        if self.sampling.has_history:
            return scores  # the caller goes on: a step of its own for each row
        return self._choose(scores, plan)

    def _choose(self, scores: Tensor, plan: Plan) -> Tensor:
        if plan.uniforms is None:
            return checked_argmax(scores)
        # no warper in use reads the ids
        return draw(self._warpers(plan.tokens[:, None], scores), plan.uniforms.gather(1, plan.count[:, None])[:, 0])

    def _take(self, slots: list[Slot], chosen: Tensor, plan: Plan, cache: Any) -> dict[Hashable, Answer]:
        """Give the slots their tokens; the answers that are finished by them."""
        if chosen.ndim == 2:
            for number, slot in enumerate(slots):
                earlier = torch.tensor([[*slot.request.near, *slot.ids]], device=chosen.device)
                chosen[number : number + 1] = slot.history(earlier, chosen[number : number + 1])
            chosen = self._choose(chosen, plan)
        plan.count = plan.count + 1
        finished: dict[Hashable, Answer] = {}
        for slot, token in zip(slots, chosen.tolist(), strict=True):
            if token < 0:
                raise ValueError("the model's scores of a next token are NaN, or every token is forbidden")
            slot.ids.append(token)
            if why := self._finish(slot):
                finished[slot.key] = Answer(slot.ids, self._text(slot.ids), why, self._context(slot, cache))
        plan.tokens = chosen
        return finished

    def _context(self, slot: Slot, cache: Any) -> Context | None:
        if slot.state is None:
            return None
        # behind it are the answer's tokens, but for the newest
        end = cache.get_seq_length() - (len(slot.ids) - 1)
        return taken(cache, slot.near, end, slot.request.near, slot.state)

    def _finish(self, slot: Slot) -> str | None:
        if slot.ids[-1] in self.eos:
            return "eos"
        if stops := self.sampling.stop_strings:
            # a token is a byte at least, so a stop string that ends here began among so many tokens
            tail = slot.ids[-max(len(stop.encode()) for stop in stops) - 1 :]
            text = self.tokenizer.decode(tail)
            if any(stop in text for stop in stops) and any(stop in self.tokenizer.decode(slot.ids) for stop in stops):
                return "stop"
        return "length" if len(slot.ids) >= slot.request.max_new_tokens else None

    def _text(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        ends = [text.find(stop) for stop in self.sampling.stop_strings or ()]
        return text[: min((end for end in ends if end >= 0), default=len(text))]

    def _join(self, slots: list[Slot], cache: Any) -> None:
        """Put new slots, with the cache of their rows, beside those that are there."""
        if not slots:
            return
        select(cache, slots, self.model.device)
        before = lengths(self._slots)
        for slot in slots:
            slot.near, slot.far = slot.near + len(before), slot.far + len(before)
        if before:
            cache = merged(self._cache, cache, max(before + lengths(slots)))
        self._slots, self._cache = [*self._slots, *slots], cache
        self._plan = plan_of(self._slots, self.model)

    def _keep(self, slots: list[Slot]) -> None:
        self._slots = slots
        if not slots:
            self._cache = self._plan = None
            return
        select(self._cache, slots, self.model.device)
        self._plan = plan_of(slots, self.model)

    def _check(self, request: Request) -> None:
        if not request.near or (request.guided and not request.far):
            raise ValueError("a context is empty: there must be a token to go on from")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        if not 0 <= request.guidance < float("inf"):
            raise ValueError(f"guidance must be finite and not negative, got {request.guidance}")
        longest = max(len(request.near), len(request.far or ())) + request.max_new_tokens
        if self.limit is not None and longest > self.limit:
            raise ValueError(f"context and new tokens are {longest} together, the model has {self.limit} positions")


def _eos(model: Any, sampling: Sampling) -> tuple[int, ...]:
    found = sampling.eos_token_id
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None) if found is None else found
    return () if found is None else tuple(found) if isinstance(found, (list, tuple)) else (int(found),)

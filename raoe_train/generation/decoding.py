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

from raoe_kernels import guided_log_probs
from raoe_train.generation.contexts import Context, merged, stacked
from raoe_train.generation.sampling import Sampling, draw, uniforms
from raoe_train.generation.slots import Answer, Batch, Request, Row, Slot, device_of

__all__ = ["Answer", "Context", "GuidedDecoder", "Request", "Sampling"]


class GuidedDecoder:
    """Decodes requests together; each answer is what it would be alone, up to rounding.

    Args:
        model: a transformers causal language model, in eval mode, on its device.
        tokenizer: for texts and stop strings; None gives answers of ids alone.
        sampling: how tokens are chosen; greedily by default. Its eos_token_id, where given, replaces the model's.

    `add` and `step` are for those who let new requests join; `answers` is all of it for a list of requests.

    Raises:
        ValueError: stop strings without a tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any = None, sampling: Sampling | None = None) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling or Sampling()
        if self.sampling.stop_strings and tokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        self.device = device_of(model)
        self.eos = _eos(model, self.sampling)
        self.limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        taken = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in taken
        # else the head runs over every position of a prompt
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._warpers = self.sampling.warpers(self.device)
        self._windows = any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config).layers)
        self._batch: Batch | None = None

    @property
    def active(self) -> int:
        """Answers under way."""
        return len(self._batch.slots) if self._batch else 0

    @property
    def can_join(self) -> bool:
        """Whether requests can be added while others are under way: not where a cache keeps only a window."""
        return self._batch is None or not self._windows

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
        rows: list[Row] = []
        for key, request in pairs:
            self._check(request)
            history = self.sampling.history(len(request.near), self.eos, self.device)
            drawn = uniforms(request.seed, request.max_new_tokens) if self.sampling.do_sample else None
            slot = Slot(key, request, history, drawn)
            rows.append(Row(slot, request.near))
            if request.guided and request.far is not None:
                rows.append(Row(slot, request.far, far=True))
        slots = [row.slot for row in rows if not row.far]
        logits, rows, cache = self._read(rows)
        for row, its in zip(rows, logits, strict=True):
            if row.slot.request.keep and not row.far and not self._windows:
                row.slot.logits = its.clone()
        finished, left = self._take(Batch(slots, rows, cache, self.model), logits)
        if left is not None:
            self._batch = left if self._batch is None else self._batch.joined(left)
        return finished

    @torch.no_grad()
    def step(self) -> list[tuple[Hashable, Answer]]:
        """One more token for every answer under way; the pairs (key, answer) that are finished by it."""
        batch = self._batch
        if batch is None:
            return []
        batch.lengths = batch.lengths + 1
        width = batch.cache.get_seq_length() + 1
        logits = self._logits(batch.tokens[batch.owner][:, None], width, batch.cache, batch.lengths)
        finished, self._batch = self._take(batch, logits)
        return finished

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

    def _read(self, rows: list[Row]) -> tuple[Tensor, list[Row], Any]:
        """What is new in the rows' contexts: their logits, [R, V], with the rows in their order, and a cache."""
        device = self.device
        covered = {
            row: known.covers(row.ids) if (known := row.slot.request.known) and not self._windows else 0 for row in rows
        }
        whole = [row for row in rows if covered[row] == len(row.ids)]
        begun = [row for row in rows if 0 < covered[row] < len(row.ids)]
        # apart, or a single row of which nothing is known would have all others read from their first token
        new = [row for row in rows if not covered[row]]
        found, caches = [], []
        for group in filter(None, (new, begun)):
            tail = max(len(row.ids) - covered[row] for row in group)
            # all tails are as wide as the longest, so some rows have a few tokens of what is known read again
            before = [(known, max(len(row.ids) - tail, 0)) for row in group if (known := row.slot.request.known)]
            cache = stacked(before) if group is begun else DynamicCache(config=self.model.config)
            ends = torch.tensor([[0] * (tail - len(row.ids)) + list(row.ids[-tail:]) for row in group], device=device)
            counts = torch.tensor([len(row.ids) for row in group], device=device)
            found.append(self._logits(ends, max(len(row.ids) for row in group), cache, counts))
            caches.append(cache)
        if whole:
            contexts = [known for row in whole if (known := row.slot.request.known)]
            found.append(torch.stack([known.logits for known in contexts]))
            caches.append(stacked([(known, len(known.ids)) for known in contexts]))
        width = max(len(row.ids) for row in rows)
        cache = functools.reduce(lambda first, second: merged(first, second, width), caches)
        return torch.cat(found), [*new, *begun, *whole], cache

    def _logits(self, ids: Tensor, width: int, cache: Any, lengths: Tensor) -> Tensor:
        """[R, V] logits at the end of each row, from [R, T] ids at the end of `width` columns."""
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
        return self.model(**inputs, **self._last).logits[:, -1]

    def _take(self, batch: Batch, logits: Tensor) -> tuple[list[tuple[Hashable, Answer]], Batch | None]:
        """Give the slots their next tokens; the answers that are finished by them, and the batch of the others."""
        scores = mixed(logits, batch)
        if self.sampling.has_history:
            for number, slot in enumerate(batch.slots):
                earlier = torch.tensor([[*slot.request.near, *slot.ids]], device=scores.device)
                scores[number : number + 1] = slot.history(earlier, scores[number : number + 1])
        if batch.uniforms is None:
            best = scores.max(-1)  # a NaN counts as the largest
            chosen = torch.where(best.values.isfinite(), best.indices, -1)
        else:
            uniform = batch.uniforms.gather(1, batch.count[:, None])[:, 0]
            chosen = draw(self._warpers(batch.tokens[:, None], scores), uniform)  # no warper in use reads the ids
        batch.tokens, batch.count = chosen, batch.count + 1
        finished: dict[Hashable, Answer] = {}
        for slot, token in zip(batch.slots, chosen.tolist(), strict=True):
            if token < 0:
                raise ValueError("the model's scores of a next token are NaN, or every token is forbidden")
            slot.ids.append(token)
            if why := self._finish(slot):
                finished[slot.key] = Answer(slot.ids, self._text(slot.ids), why, batch.context(slot))
        left = [slot for slot in batch.slots if slot.key not in finished]
        if finished:
            return list(finished.items()), batch.kept(left) if left else None
        return [], batch

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


def mixed(logits: Tensor, batch: Batch) -> Tensor:
    """[N, V] scores of the next tokens, float32 (float64 of float64): the ranking-sentences paper's Eq. 4, log p =
    guidance log p(x | near) - (guidance - 1) log p(x | far), and plain logits where there is nothing to mix."""
    scores = logits[batch.near].to(torch.promote_types(logits.dtype, torch.float32))
    for guidance, answers, far in batch.groups:
        led = guided_log_probs(logits[batch.near[answers]], logits[far], guidance=guidance)
        scores = scores.index_copy(0, answers, led)
    return scores


def _eos(model: Any, sampling: Sampling) -> tuple[int, ...]:
    found = sampling.eos_token_id
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None) if found is None else found
    return () if found is None else tuple(found) if isinstance(found, (list, tuple)) else (int(found),)

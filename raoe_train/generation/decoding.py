"""Guided decoding of many rows at once: both contexts in one left-padded batch, with one KV cache.

A row of the batch is a context. An answer with guidance has two rows, the farther context's after the nearer one's,
which go on with the same tokens; one without has a single row. A context that was read can be kept: a chain's farther
context was the nearer one a step before, and all contexts begin with the same instruction.
A row's choices do not depend on the batch it is in: random numbers come from its own seed, and transformers' processors
that read earlier tokens see this row's, without padding.
"""

import functools
import inspect
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from raoe_kernels import guided_log_probs
from raoe_train.config import AboveZeroToOne, NonNegativeInt, PositiveFloat


@dataclass
class Sampling:
    """How tokens are chosen: fields of transformers.GenerationConfig, with their meaning there.

    Args:
        do_sample: draw tokens at random; false takes the most probable
        repetition_penalty: as GenerationConfig's
        no_repeat_ngram_size: as GenerationConfig's
        temperature: as GenerationConfig's
        top_k: as GenerationConfig's
        top_p: as GenerationConfig's
        eos_token_id: as GenerationConfig's
        stop_strings: as GenerationConfig's
    """

    do_sample: bool = False
    repetition_penalty: PositiveFloat | None = None
    no_repeat_ngram_size: NonNegativeInt | None = None
    temperature: PositiveFloat | None = None
    top_k: NonNegativeInt | None = None
    top_p: AboveZeroToOne | None = None
    eos_token_id: list[NonNegativeInt] | None = None
    stop_strings: list[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("temperature", "top_k", "top_p") if getattr(self, name) is not None]
        if given and not self.do_sample:
            raise ValueError(f"generation.{given[0]} has no effect on greedy decoding: set generation.do_sample true")
        if isinstance(self.stop_strings, str) or not all(self.stop_strings or ()):
            raise ValueError(f"generation.stop_strings must be texts that are not empty, got {self.stop_strings!r}")

    def processors(self) -> Any:
        """The LogitsProcessorList that reads a row's earlier tokens."""
        penalty, size = self.repetition_penalty, self.no_repeat_ngram_size
        steps = (
            penalty not in (None, 1.0) and hf.RepetitionPenaltyLogitsProcessor(float(penalty or 1)),
            size and hf.NoRepeatNGramLogitsProcessor(size),
        )
        return hf.LogitsProcessorList(filter(None, steps))

    def warpers(self) -> Any:
        """The LogitsProcessorList for all rows alike, of logits or log-probabilities; empty without do_sample."""
        steps = (
            self.temperature not in (None, 1.0) and hf.TemperatureLogitsWarper(float(self.temperature or 0)),
            self.top_k and hf.TopKLogitsWarper(self.top_k),
            self.top_p is not None and self.top_p < 1 and hf.TopPLogitsWarper(self.top_p),
        )
        return hf.LogitsProcessorList(filter(None, steps))


@dataclass(frozen=True, eq=False)
class Context:
    """A context that was read, of use only to the decoder that read it (which is not checked)."""

    ids: tuple[int, ...]  # of its L tokens
    layers: tuple[tuple[Tensor, Tensor], ...]  # (keys, values), both [key-value heads, L, dim], without padding
    logits: Tensor  # [V] at its end

    def covers(self, ids: Sequence[int]) -> int:
        """How many first ones of `ids` need not be read again: all if they are this context; else those that both begin
        with, but not the last of `ids`, behind which the logits are not known."""
        if tuple(ids) == self.ids:
            return len(ids)
        same = [one == other for one, other in zip(ids, self.ids, strict=False)]
        return min([*same, False].index(False), len(ids) - 1)


@dataclass(frozen=True)
class Request:
    """What to answer."""

    near: Sequence[int]  # token ids of the nearer context, the one to answer
    far: Sequence[int] | None = None  # those of the farther context, or None for plain decoding
    guidance: float = 1.0  # 1 + lambda of Eq. 4; with 1 the farther context has no say and is left out
    max_new_tokens: int = 64  # at least 1
    seed: int = 0  # of this answer's random numbers, where there are any
    keep: bool = False  # whether the answer shall carry its nearer context, to be `known` to a later request
    # Of an answer by the same decoder: where near or far begin as it does, that is not read again. The answer is the
    # same, up to rounding.
    known: Context | None = None


@dataclass(frozen=True)
class Answer:
    """What was answered."""

    ids: list[int]  # what was generated, an end token included
    text: str  # decoded without special tokens, up to a stop string ("" without a tokenizer)
    finish: str  # "eos", "stop" (a stop string) or "length" (it was cut off)
    # the nearer one if the request says keep; None otherwise, and where a cache keeps only a window
    context: Context | None = field(default=None, compare=False)


@dataclass(eq=False)
class Slot:
    """An answer under way."""

    key: Hashable
    request: Request
    uniforms: Tensor | None = None  # [max_new_tokens], where tokens are drawn
    ids: list[int] = field(default_factory=list)
    logits: Tensor | None = None  # [V] at the end of the nearer context, where it is to be kept


@dataclass(eq=False)
class Row:
    """A row of the batch: a context of an answer, and behind it the answer."""

    slot: Slot
    ids: Sequence[int]
    far: bool = False

    def __len__(self) -> int:
        return len(self.ids) + len(self.slot.ids)


@dataclass(eq=False)
class Batch:
    """Rows under way and their cache, which has all of their tokens but each answer's newest."""

    rows: list[Row]
    cache: Any

    @property
    def slots(self) -> list[Slot]:
        return [row.slot for row in self.rows if not row.far]

    def context(self, slot: Slot) -> Context | None:
        """The nearer context of an answer, where it is to be kept: copies, so that nothing holds the whole cache."""
        if slot.logits is None:
            return None
        place, row = next((place, row) for place, row in enumerate(self.rows) if row.slot is slot and not row.far)
        end = self.cache.get_seq_length() - (len(slot.ids) - 1)
        columns = slice(end - len(row.ids), end)
        layers = ([states[place, :, columns].clone() for states in layer[:2]] for layer in self.cache)
        return Context(tuple(row.ids), tuple((keys, values) for keys, values in layers), slot.logits)

    def without(self, keys: Container[Hashable]) -> "Batch":
        """The rows of all answers but those with these keys."""
        places = [place for place, row in enumerate(self.rows) if row.slot.key not in keys]
        if len(places) < len(self.rows):
            self.cache.batch_select_indices(torch.tensor(places))  # on the CPU: layers may be on several devices
        return Batch([self.rows[place] for place in places], self.cache)

    def joined(self, other: "Batch") -> "Batch":
        """With the rows of another below its own."""
        rows = self.rows + other.rows
        return Batch(rows, merged(self.cache, other.cache, max(map(len, rows)) - 1))


class GuidedDecoder:
    """Decodes requests together; each answer is what it would be alone, up to rounding.

    `answers` is for a list of requests; `add` and `step` let new requests join those under way.

    Args:
        model: a transformers causal language model, in eval mode, on its device.
        tokenizer: for texts and stop strings; None gives answers of ids alone.
        sampling: how tokens are chosen; greedily by default. Its eos_token_id, where given, replaces the model's.
    """

    def __init__(self, model: Any, tokenizer: Any = None, sampling: Sampling | None = None) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling or Sampling()
        self.device = model.device
        eos: Any = self.sampling.eos_token_id
        eos = model.generation_config.eos_token_id if eos is None else eos
        self.eos: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else eos
        self.limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._arguments = inspect.signature(model.forward).parameters
        self._processors, self._warpers = self.sampling.processors(), self.sampling.warpers()
        self._windows = any(type(layer) is not DynamicLayer for layer in hf.DynamicCache(config=model.config).layers)
        self._batch: Batch | None = None

    @property
    def active(self) -> int:
        """Answers under way."""
        return len(self._batch.slots) if self._batch else 0

    @property
    def can_join(self) -> bool:
        """Whether requests can be added while others are under way: not to a cache that keeps a window."""
        return self._batch is None or not self._windows

    @torch.no_grad()
    def add(self, requests: Iterable[tuple[Hashable, Request]]) -> list[tuple[Hashable, Answer]]:
        """Begin (key, request) pairs; those of which the first token was the last one come back at once. ValueError for
        a request that cannot be, or where requests cannot join (see can_join)."""
        pairs = list(requests)
        if not pairs:
            return []
        if not self.can_join:
            raise ValueError("this model's cache keeps a window: requests cannot join those that are under way")
        rows: list[Row] = []
        for key, request in pairs:
            self._check(request)
            slot = Slot(key, request)
            if self.sampling.do_sample:
                slot.uniforms = uniforms(request.seed, request.max_new_tokens)
            rows.append(Row(slot, request.near))
            if request.far is not None and request.guidance != 1:
                rows.append(Row(slot, request.far, far=True))
        logits, cache = self._read(rows)
        for row, its in zip(rows, logits, strict=True):
            if row.slot.request.keep and not row.far and not self._windows:
                row.slot.logits = its.clone()
        finished, left = self._take(Batch(rows, cache), logits)
        if left is not None:
            self._batch = left if self._batch is None else self._batch.joined(left)
        return finished

    @torch.no_grad()
    def step(self) -> list[tuple[Hashable, Answer]]:
        """One more token for every answer under way; the pairs (key, answer) that are finished by it."""
        batch = self._batch
        if batch is None:
            return []
        logits = self._logits([[row.slot.ids[-1]] for row in batch.rows], batch.rows, batch.cache)
        finished, self._batch = self._take(batch, logits)
        return finished

    def answers(self, requests: Sequence[Request], slots: int | None = None) -> list[Answer]:
        """The answers to `requests`, in their order, `slots` of them at a time (by default all)."""
        waiting = list(enumerate(requests))[::-1]
        slots = slots or len(waiting)
        answers: dict[Hashable, Answer] = {}
        while waiting or self.active:
            free = slots - self.active
            # a quarter at a time: every joining copies the cache and pauses the others
            if waiting and (not self.active or (self.can_join and free >= max(1, slots // 4))):
                answers.update(self.add(waiting.pop() for _ in range(min(free, len(waiting)))))
            answers.update(self.step())
        return [answers[number] for number in range(len(requests))]

    def _read(self, rows: list[Row]) -> tuple[Tensor, Any]:
        """The logits at the ends of the rows' contexts, [R, V], and their cache; only what is not known is read."""
        known: list[Any] = [None if self._windows else row.slot.request.known for row in rows]
        covered = [context.covers(row.ids) if context else 0 for row, context in zip(rows, known, strict=True)]
        whole = [place for place, row in enumerate(rows) if covered[place] == len(row.ids)]
        begun = [place for place, row in enumerate(rows) if 0 < covered[place] < len(row.ids)]
        # apart, or a single row of which nothing is known would have all others read from their first token
        new = [place for place in range(len(rows)) if not covered[place]]
        logits, caches = [], []
        for group in filter(None, (new, begun)):
            # all tails are as wide as the longest, so some rows have a few tokens of what is known read again
            tail = max(len(rows[place]) - covered[place] for place in group)
            before = [(known[place], max(len(rows[place]) - tail, 0)) for place in group]
            caches.append(stacked(before) if group is begun else hf.DynamicCache(config=self.model.config))
            ids = [[0] * (tail - len(rows[place])) + list(rows[place].ids[-tail:]) for place in group]
            logits.append(self._logits(ids, [rows[place] for place in group], caches[-1]))
        if whole:
            logits.append(torch.stack([known[place].logits for place in whole]))
            caches.append(stacked([(known[place], len(rows[place])) for place in whole]))
        if len(caches) == 1:
            return logits[0], caches[0]
        width = max(map(len, rows))
        cache = functools.reduce(lambda first, second: merged(first, second, width), caches)
        places = torch.tensor([*new, *begun, *whole]).argsort()
        cache.batch_select_indices(places)
        return torch.cat(logits)[places], cache

    def _logits(self, ids: list[list[int]], rows: list[Row], cache: Any) -> Tensor:
        """[R, V] logits at the end of each row, whose last tokens are `ids` and the others in the cache."""
        tokens = torch.tensor(ids, device=self.device)
        columns = torch.arange(cache.get_seq_length() + tokens.shape[1], device=self.device)
        padding = len(columns) - torch.tensor([[len(row)] for row in rows], device=self.device)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": (columns >= padding).long(),
            "past_key_values": cache,
            "use_cache": True,
        }
        if "position_ids" in self._arguments:
            inputs["position_ids"] = (columns[-tokens.shape[1] :] - padding).clamp_min(0)
        if "logits_to_keep" in self._arguments:  # else the head runs over every position of a prompt
            inputs["logits_to_keep"] = 1
        return self.model(**inputs).logits[:, -1]

    def _take(self, batch: Batch, logits: Tensor) -> tuple[list[tuple[Hashable, Answer]], Batch | None]:
        """Give the slots their next tokens; the answers that are finished by them, and the batch of the others."""
        scores, slots = mixed(logits, batch), batch.slots
        for number, slot in enumerate(slots if self._processors else ()):
            earlier = torch.tensor([[*slot.request.near, *slot.ids]], device=scores.device)
            scores[number : number + 1] = self._processors(earlier, scores[number : number + 1])
        if self.sampling.do_sample:
            uniform = torch.stack([slot.uniforms[len(slot.ids)] for slot in slots if slot.uniforms is not None])
            chosen = draw(self._warpers(None, scores), uniform.to(scores.device))  # no warper reads the ids
        else:
            best = scores.max(-1)  # a NaN counts as the largest
            chosen = torch.where(best.values.isfinite(), best.indices, -1)
        finished: dict[Hashable, Answer] = {}
        for slot, token in zip(slots, chosen.tolist(), strict=True):
            if token < 0:
                raise ValueError("the model's scores of a next token are NaN, or every token is forbidden")
            slot.ids.append(token)
            if why := self._finish(slot):
                text, context = self._text(slot.ids), batch.context(slot)
                finished[slot.key] = Answer(slot.ids, text, why, context)
        return list(finished.items()), batch.without(finished) if len(finished) < len(slots) else None

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
        if not request.near or (request.far is not None and not request.far):
            raise ValueError("a context is empty: there must be a token to go on from")
        longest = max(len(request.near), len(request.far or ())) + request.max_new_tokens
        if self.limit is not None and longest > self.limit:
            raise ValueError(f"context and new tokens are {longest} together, the model has {self.limit} positions")


def mixed(logits: Tensor, batch: Batch) -> Tensor:
    """[N, V] scores of the next tokens, float32 (float64 of float64): log p = guidance log p(x | near) - (guidance - 1)
    log p(x | far), the ranking-sentences paper's Eq. 4; plain logits where there is nothing to mix."""
    near = [place for place, row in enumerate(batch.rows) if not row.far]
    number = {place: answer for answer, place in enumerate(near)}
    scores = logits[near].to(torch.promote_types(logits.dtype, torch.float32))
    for guidance in {row.slot.request.guidance for row in batch.rows if row.far}:
        far = [place for place, row in enumerate(batch.rows) if row.far and row.slot.request.guidance == guidance]
        led = [place - 1 for place in far]
        scores[[number[place] for place in led]] = guided_log_probs(logits[led], logits[far], guidance=guidance)
    return scores


def stacked(beginnings: Sequence[tuple[Context, int]]) -> hf.DynamicCache:
    """A left-padded cache of the first `count` tokens of each (context, count)."""
    width = max(count for _, count in beginnings)

    def rows(layer: int, which: int) -> Tensor:
        states = ((context.layers[layer][which], count) for context, count in beginnings)
        return torch.stack([pad(state[:, :count], (0, 0, width - count, 0)) for state, count in states])

    return hf.DynamicCache([(rows(layer, 0), rows(layer, 1)) for layer in range(len(beginnings[0][0].layers))])


def merged(first: Any, second: Any, width: int) -> hf.DynamicCache:
    """Two caches below each other, as wide as `width`: padding goes, or comes, on the left."""

    def fit(states: Tensor) -> Tensor:
        states = states[:, :, -width:]
        return pad(states, (0, 0, width - states.shape[2], 0))

    pairs = zip(first, second, strict=True)
    return hf.DynamicCache([(torch.cat([fit(a[0]), fit(b[0])]), torch.cat([fit(a[1]), fit(b[1])])) for a, b in pairs])


def uniforms(seed: int, count: int) -> Tensor:
    """[count] float32 in [0, 1) of one row, the same on every device: they are drawn on the CPU."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed % (1 << 63)))


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """[N] int64: where the cumulative probabilities of [N, V] scores pass [N] uniform numbers; -1 for a row with a NaN
    or with nothing but -inf."""
    # float64, so that 10^5 small steps add up to more than 1 - 2^-24, the largest float32 below 1; a token of
    # probability 0 takes no step and is never the first beyond
    cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
    beyond = torch.searchsorted(cumulative, uniform.double()[:, None], right=True)
    return torch.where(cumulative[:, -1].isfinite(), beyond[:, 0], -1)

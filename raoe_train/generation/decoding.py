"""Guided decoding of many requests at once. Nearer and farther contexts share one left-padded batch and one KV cache.

Each row of the batch is a context. An answer with guidance has two rows, the nearer context and then the farther
context, which continue with the same tokens. An answer without guidance has one row. If a context is kept, later
requests skip the tokens that they share with it: a chain's farther context is the nearer context of the previous step,
and all contexts start with the same instruction. An answer does not depend on other requests: random numbers come from
the request's own seed, and transformers' processors get only the earlier tokens of its row, without padding.
"""

import functools
import inspect
import itertools
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from raoe_kernels import guided_argmax, guided_log_probs
from raoe_train.settings import Sampling


def processors(sampling: Sampling) -> Any:
    """Return a LogitsProcessorList of the penalties that depend on the earlier tokens of a row."""
    penalty, size = sampling.repetition_penalty, sampling.no_repeat_ngram_size
    steps = (
        penalty not in (None, 1.0) and hf.RepetitionPenaltyLogitsProcessor(float(penalty or 1)),
        size and hf.NoRepeatNGramLogitsProcessor(size),
    )
    return hf.LogitsProcessorList(filter(None, steps))


def warpers(sampling: Sampling) -> Any:
    """Return a LogitsProcessorList of temperature, top-k and top-p, which are the same for all rows."""
    steps = (
        sampling.temperature not in (None, 1.0) and hf.TemperatureLogitsWarper(float(sampling.temperature or 0)),
        sampling.top_k and hf.TopKLogitsWarper(sampling.top_k),
        sampling.top_p is not None and sampling.top_p < 1 and hf.TopPLogitsWarper(sampling.top_p),
    )
    return hf.LogitsProcessorList(filter(None, steps))


@dataclass(frozen=True, eq=False)
class Context:
    """A context that a decoder has read. Reuse it only in the same decoder (this is not checked)."""

    ids: tuple[int, ...]  # the L tokens of the context
    layers: tuple[tuple[Tensor, Tensor], ...]  # (keys, values), both [key-value heads, L, dim], without padding
    logits: Tensor  # [V] logits after the last token

    def covers(self, ids: Sequence[int]) -> int:
        """Return how many leading tokens of `ids` need not be read again: all if `ids` equals this context, else the
        common prefix, but never the last token of `ids`, because the logits after this token are unknown."""
        if tuple(ids) == self.ids:
            return len(ids)
        same = [one == other for one, other in zip(ids, self.ids, strict=False)]
        return min([*same, False].index(False), len(ids) - 1)


@dataclass(frozen=True)
class Request:
    """A request for an answer."""

    near: Sequence[int]  # token ids of the nearer context, which the answer continues
    far: Sequence[int] | None = None  # token ids of the farther context, or None for plain decoding
    guidance: float = 1.0  # 1 + lambda of Eq. 4; at 1, the farther context has no effect and is not read
    max_new_tokens: int = 64  # at least 1
    seed: int = 0  # seed for this answer's random numbers
    keep: bool = False  # whether to return the nearer context, for `known` of a later request
    # A context from an earlier answer of the same decoder. Tokens that it shares with the start of near or far are not
    # read again. The answer is the same, up to rounding.
    known: Context | None = None


@dataclass(frozen=True)
class Answer:
    """An answer to a request."""

    ids: list[int]  # generated tokens, including the end token if there is one
    text: str  # decoded without special tokens, up to a stop string ("" without a tokenizer)
    finish: str  # "eos", "stop" (a stop string) or "length" (reached max_new_tokens)
    # the nearer context if the request sets keep; always None with a sliding-window cache
    context: Context | None = field(default=None, compare=False)


@dataclass(eq=False)
class Slot:
    """An answer in progress."""

    key: Hashable
    request: Request
    uniforms: Tensor | None = None  # [max_new_tokens] random numbers, if tokens are sampled
    ids: list[int] = field(default_factory=list)
    logits: Tensor | None = None  # [V] logits after the nearer context, if the request sets keep


@dataclass(eq=False)
class Row:
    """A row of the batch: a context, followed by the answer so far."""

    slot: Slot
    ids: Sequence[int]
    far: bool = False

    def __len__(self) -> int:
        return len(self.ids) + len(self.slot.ids)


@dataclass(eq=False)
class Batch:
    """Rows in progress and their cache, which has all tokens of the rows except the newest token of each answer."""

    rows: list[Row]
    cache: Any

    @property
    def slots(self) -> list[Slot]:
        return [row.slot for row in self.rows if not row.far]

    def context(self, slot: Slot) -> Context | None:
        """Return a copy of an answer's nearer context if the request sets keep. A view would hold all of the cache."""
        if slot.logits is None:
            return None
        place, row = next((place, row) for place, row in enumerate(self.rows) if row.slot is slot and not row.far)
        end = self.cache.get_seq_length() - (len(slot.ids) - 1)
        columns = slice(end - len(row.ids), end)
        layers = ([states[place, :, columns].clone() for states in layer[:2]] for layer in self.cache)
        return Context(tuple(row.ids), tuple((keys, values) for keys, values in layers), slot.logits)

    def without(self, keys: Container[Hashable]) -> "Batch":
        """Return the batch without the answers with these keys."""
        places = [place for place, row in enumerate(self.rows) if row.slot.key not in keys]
        if len(places) < len(self.rows):
            self.cache.batch_select_indices(torch.tensor(places, device="cpu"))  # layers may be on several devices
        return Batch([self.rows[place] for place in places], self.cache)

    def join(self, other: "Batch") -> "Batch":
        """Return this batch, followed by the rows of another batch."""
        rows = self.rows + other.rows
        return Batch(rows, merge_caches(self.cache, other.cache, max(map(len, rows)) - 1))


class GuidedDecoder:
    """Decodes requests in one batch. Each answer equals the answer of decoding the request alone, up to rounding.

    Use `answers` for a list of requests. With `add` and `step`, new requests can join requests in progress.

    Args:
        model: a transformers causal language model, in eval mode, on its device.
        tokenizer: decodes answers to texts and finds stop strings. With None, answers have only ids.
        sampling: how tokens are chosen; the default is greedy. sampling.eos_token_id replaces the model's end tokens.
    """

    def __init__(self, model: Any, tokenizer: Any = None, sampling: Sampling | None = None) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling or Sampling()
        self.device = model.device
        eos: Any = self.sampling.eos_token_id
        eos = model.generation_config.eos_token_id if eos is None else eos
        self.eos: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else eos
        self.limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._arguments = inspect.signature(model.forward).parameters
        self._processors, self._warpers = processors(self.sampling), warpers(self.sampling)
        self._windows = any(type(layer) is not DynamicLayer for layer in hf.DynamicCache(config=model.config).layers)
        self._batch: Batch | None = None

    @property
    def active(self) -> int:
        """Number of answers in progress."""
        return len(self._batch.slots) if self._batch else 0

    @property
    def can_join(self) -> bool:
        """Whether `add` can be called now. A sliding-window cache accepts no requests while others are in progress."""
        return self._batch is None or not self._windows

    @torch.no_grad()
    def add(self, requests: Iterable[tuple[Hashable, Request]]) -> list[tuple[Hashable, Answer]]:
        """Start requests, given as (key, request), and return the answers that end at the first token. ValueError for
        an invalid request, or if requests cannot join (see can_join)."""
        pairs = list(requests)
        if not pairs:
            return []
        if not self.can_join:
            raise ValueError("requests cannot join others in a sliding-window cache: call step() until active is 0")
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
        for row, row_logits in zip(rows, logits, strict=True):
            if row.slot.request.keep and not row.far and not self._windows:
                row.slot.logits = row_logits.clone()
        finished, rest = self._take(Batch(rows, cache), logits)
        if rest is not None:
            self._batch = rest if self._batch is None else self._batch.join(rest)
        return finished

    @torch.no_grad()
    def step(self) -> list[tuple[Hashable, Answer]]:
        """Add one token to every answer in progress, and return the (key, answer) pairs that are now finished."""
        batch = self._batch
        if batch is None:
            return []
        logits = self._logits([[row.slot.ids[-1]] for row in batch.rows], batch.rows, batch.cache)
        finished, self._batch = self._take(batch, logits)
        return finished

    def answers(self, requests: Sequence[Request], slots: int | None = None) -> list[Answer]:
        """Return the answers to `requests`, in order. At most `slots` (by default, all) are in progress at a time."""
        waiting = list(enumerate(requests))[::-1]
        slots = slots or len(waiting)
        answers: dict[Hashable, Answer] = {}
        while waiting or self.active:
            free = slots - self.active
            # add at least a quarter at a time, because joining copies the cache and pauses the other requests
            if waiting and (not self.active or (self.can_join and free >= max(1, slots // 4))):
                answers.update(self.add(waiting.pop() for _ in range(min(free, len(waiting)))))
            answers.update(self.step())
        return [answers[number] for number in range(len(requests))]

    def _read(self, rows: list[Row]) -> tuple[Tensor, Any]:
        """Read the rows' contexts, except known prefixes. Return ([R, V] logits after each context, cache)."""
        contexts: list[Any] = [None if self._windows else row.slot.request.known for row in rows]
        prefixes = [context.covers(row.ids) if context else 0 for row, context in zip(rows, contexts, strict=True)]
        whole = [place for place, row in enumerate(rows) if prefixes[place] == len(row.ids)]
        partial = [place for place, row in enumerate(rows) if 0 < prefixes[place] < len(row.ids)]
        # read `new` separately: these rows would make all others start at their first token
        new = [place for place in range(len(rows)) if not prefixes[place]]
        logits, caches = [], []
        for group in filter(None, (new, partial)):
            # tails are as wide as the longest tail, so some rows read a few known tokens again
            tail = max(len(rows[place]) - prefixes[place] for place in group)
            beginnings = [(contexts[place], max(len(rows[place]) - tail, 0)) for place in group]
            caches.append(stack_contexts(beginnings) if group is partial else hf.DynamicCache(config=self.model.config))
            ids = [[0] * (tail - len(rows[place])) + list(rows[place].ids[-tail:]) for place in group]
            logits.append(self._logits(ids, [rows[place] for place in group], caches[-1]))
        if whole:
            logits.append(torch.stack([contexts[place].logits for place in whole]))
            caches.append(stack_contexts([(contexts[place], len(rows[place])) for place in whole]))
        if len(caches) == 1:
            return logits[0], caches[0]
        width = max(map(len, rows))
        cache = functools.reduce(lambda first, second: merge_caches(first, second, width), caches)
        places = torch.tensor([*new, *partial, *whole], device="cpu").argsort()
        cache.batch_select_indices(places)
        return torch.cat(logits)[places], cache

    def _logits(self, ids: list[list[int]], rows: list[Row], cache: Any) -> Tensor:
        """Return [R, V] logits after each row. `ids` has the rows' last tokens; earlier tokens are in the cache."""
        tokens = torch.tensor(ids, device=self.device)
        columns = torch.arange(cache.get_seq_length() + tokens.shape[1], device=self.device)
        padding = len(columns) - torch.tensor([[len(row)] for row in rows], device=self.device)
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": (columns >= padding).long()}
        inputs |= {"past_key_values": cache, "use_cache": True}
        if "position_ids" in self._arguments:
            inputs["position_ids"] = (columns[-tokens.shape[1] :] - padding).clamp_min(0)
        if "logits_to_keep" in self._arguments:  # otherwise the head would run on every position of a prompt
            inputs["logits_to_keep"] = 1
        return self.model(**inputs).logits[:, -1]

    def _take(self, batch: Batch, logits: Tensor) -> tuple[list[tuple[Hashable, Answer]], Batch | None]:
        """Choose the next token of every slot. Return (finished answers, batch of the unfinished ones or None)."""
        slots, tokens = batch.slots, self._choose(batch, logits)
        finished: dict[Hashable, Answer] = {}
        for slot, token in zip(slots, tokens.tolist(), strict=True):
            if token < 0:
                raise ValueError("the model's scores for the next token are NaN, or exclude every token")
            slot.ids.append(token)
            if reason := self._finish(slot):
                text, context = self._text(slot.ids), batch.context(slot)
                finished[slot.key] = Answer(slot.ids, text, reason, context)
        return list(finished.items()), batch.without(finished) if len(finished) < len(slots) else None

    def _choose(self, batch: Batch, logits: Tensor) -> Tensor:
        """Return [N] next tokens, with -1 for an answer without a valid score."""
        if not (self.sampling.do_sample or self._processors):
            return best_tokens(logits, batch)
        scores, slots = mix_logits(logits, batch), batch.slots
        for number, slot in enumerate(slots if self._processors else ()):
            earlier = torch.tensor([[*slot.request.near, *slot.ids]], device=scores.device)
            scores[number : number + 1] = self._processors(earlier, scores[number : number + 1])
        if self.sampling.do_sample:
            uniform = torch.stack([slot.uniforms[len(slot.ids)] for slot in slots if slot.uniforms is not None])
            return draw(self._warpers(None, scores), uniform.to(scores.device))  # warpers do not read the ids
        best = scores.max(-1)  # NaN counts as the largest value
        return torch.where(best.values.isfinite(), best.indices, -1)

    def _finish(self, slot: Slot) -> str | None:
        if slot.ids[-1] in self.eos:
            return "eos"
        if stops := self.sampling.stop_strings:
            # each token has at least one byte, so a stop string that ends here starts within this many tokens
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
            raise ValueError("a context must have at least one token, got an empty context")
        longest = max(len(request.near), len(request.far or ())) + request.max_new_tokens
        if self.limit is not None and longest > self.limit:
            raise ValueError(f"context and max_new_tokens need {longest} positions, but the model has {self.limit}")


def mix_logits(logits: Tensor, batch: Batch) -> Tensor:
    """Return [N, V] scores of the next tokens, float32 or float64: guidance log p(x | near) - (guidance - 1) log p(x |
    far), as in Eq. 4, and plain logits for answers without a farther context."""
    near = [place for place, row in enumerate(batch.rows) if not row.far]
    scores = logits[near].to(torch.promote_types(logits.dtype, torch.float32))
    for guidance, answers, far in _guided(batch):
        scores[answers] = guided_log_probs(logits[[place - 1 for place in far]], logits[far], guidance=guidance)
    return scores


def best_tokens(logits: Tensor, batch: Batch) -> Tensor:
    """Return the argmax of mix_logits, [N] tokens, without computing all scores; all -1 if a logit is not finite."""
    tokens = logits[[place for place, row in enumerate(batch.rows) if not row.far]].argmax(-1)
    for guidance, answers, far in _guided(batch):
        tokens[answers] = guided_argmax(logits[[place - 1 for place in far]], logits[far], guidance=guidance)
    is_valid = logits.gather(1, tokens[_answer_of_rows(batch), None]).isfinite().all()
    return tokens.where(is_valid, -1)


def _answer_of_rows(batch: Batch) -> list[int]:
    """Return the index of each row's answer. The farther context of an answer follows its nearer context."""
    return [count - 1 for count in itertools.accumulate(int(not row.far) for row in batch.rows)]


def _guided(batch: Batch) -> Iterator[tuple[float, list[int], list[int]]]:
    """Yield (guidance, indices of the answers with this guidance, rows of their farther contexts) for each guidance."""
    answers = _answer_of_rows(batch)
    for guidance in {row.slot.request.guidance for row in batch.rows if row.far}:
        far = [place for place, row in enumerate(batch.rows) if row.far and row.slot.request.guidance == guidance]
        yield guidance, [answers[place] for place in far], far


def stack_contexts(beginnings: Sequence[tuple[Context, int]]) -> hf.DynamicCache:
    """Create a left-padded cache with the first `count` tokens of each (context, count)."""
    width = max(count for _, count in beginnings)

    def rows(layer: int, part: int) -> Tensor:
        states = ((context.layers[layer][part], count) for context, count in beginnings)
        return torch.stack([pad(state[:, :count], (0, 0, width - count, 0)) for state, count in states])

    return hf.DynamicCache([(rows(layer, 0), rows(layer, 1)) for layer in range(len(beginnings[0][0].layers))])


def merge_caches(first: Any, second: Any, width: int) -> hf.DynamicCache:
    """Concatenate the rows of two caches. Both are padded or cut on the left to `width` tokens."""

    def fit(states: Tensor) -> Tensor:
        return pad(states, (0, 0, width - states.shape[2], 0))  # negative padding cuts

    pairs = zip(first, second, strict=True)
    return hf.DynamicCache([(torch.cat([fit(a[0]), fit(b[0])]), torch.cat([fit(a[1]), fit(b[1])])) for a, b in pairs])


def uniforms(seed: int, count: int) -> Tensor:
    """Draw [count] float32 numbers in [0, 1) for one answer, on the CPU, so that they are equal on all devices."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed % (1 << 63)), device="cpu")


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """Draw [N] tokens, int64, from [N, V] scores: in each row, the first token whose cumulative probability exceeds the
    row's uniform number. -1 for a row with a NaN, or with only -inf."""
    # float64, so that the sum of 10^5 probabilities exceeds 1 - 2^-24, the largest float32 below 1; a token with
    # probability 0 adds nothing and is never drawn
    cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
    beyond = torch.searchsorted(cumulative, uniform.double()[:, None], right=True)
    return torch.where(cumulative[:, -1].isfinite(), beyond[:, 0], -1)

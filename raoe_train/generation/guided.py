"""Guided decoding of a batch of requests (Eq. 4 of the ranking-sentences paper).

A request contains a nearer context (a prompt that the answer continues) and often a farther context (a prompt from
which guidance moves the answer away). All contexts of all requests are rows of one left-padded batch with one KV cache.
Each token of an answer is appended to both contexts of its request. If all contexts begin with the same tokens, such as
the instruction in a prompt, the model reads these tokens only once. An answer does not depend on other requests: its
random numbers come from its request's seed, and transformers' logits processors get only this request's tokens, without
padding."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from raoe_kernels import guided_argmax, guided_log_probs
from raoe_train.settings import Sampling

SHARED = 8  # fewer common tokens are not worth a forward pass of their own


@dataclass(frozen=True)
class Request:
    near: Sequence[int]  # token ids of the nearer context, which the answer continues
    far: Sequence[int] | None = None  # token ids of the farther context, or None for plain decoding
    guidance: float = 1.0  # 1 + lambda in Eq. 4; at 1, the farther context has no effect and is not read
    max_new_tokens: int = 64  # at least 1
    seed: int = 0  # seed for this answer's random numbers


@dataclass(frozen=True)
class Answer:
    ids: list[int]  # generated tokens, including the end token if there is one
    text: str  # decoded without special tokens, up to a stop string ("" without a tokenizer)
    finish: str  # "eos", "stop" (a stop string) or "length" (reached max_new_tokens)


class GuidedDecoder:
    """Decodes requests in one batch. Up to rounding, each answer is the same as if its request were decoded alone.

    Args:
        model: a transformers causal language model, in eval mode, on its device.
        tokenizer: decodes answers into texts and finds stop strings. With None, answers contain only ids.
        sampling: how tokens are chosen; the default is greedy. sampling.eos_token_id replaces the model's end tokens.
    """

    def __init__(self, model: Any, tokenizer: Any = None, sampling: Sampling | None = None) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling or Sampling()
        eos: Any = self.sampling.eos_token_id
        eos = model.generation_config.eos_token_id if eos is None else eos
        self.eos: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else eos
        self.limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._arguments = inspect.signature(model.forward).parameters
        self._processors = processors(self.sampling)
        # Padding after the common prefix changes distances, for a sliding window and for a model without position ids.
        layers = hf.DynamicCache(config=model.config).layers
        self._shares = "position_ids" in self._arguments and all(type(layer) is DynamicLayer for layer in layers)

    @torch.no_grad()
    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the answers to `requests`, in order.

        Raises:
            ValueError: a context is empty or too long, a guidance value is invalid, or the model's scores are NaN.
        """
        if not requests:
            return []
        for request in requests:
            self._check(request)
        texts: list[list[int]] = [[] for _ in requests]
        finish: dict[int, str] = {}
        sampled = self.sampling.do_sample
        numbers = [uniforms(request.seed, request.max_new_tokens) for request in requests] if sampled else []
        # The request of each row: first the nearer contexts of all requests in progress, then their farther contexts.
        near = list(range(len(requests)))
        far = [n for n in near if requests[n].far is not None and requests[n].guidance != 1]
        logits, cache, mask = self._read([*(requests[n].near for n in near), *(requests[n].far or [] for n in far)])
        while True:
            scores = Scores(logits, [requests[n].guidance for n in near], [near.index(n) for n in far])
            earlier = [[*requests[n].near, *texts[n]] for n in near] if self._processors else []
            uniform = torch.stack([numbers[n][len(texts[n])] for n in near]) if sampled else None
            for n, token in zip(near, self._choose(scores, earlier, uniform).tolist(), strict=True):
                if token < 0:
                    raise ValueError("the model's scores for the next token contain NaN, or are -inf for every token")
                texts[n].append(token)
                if reason := self._ended(texts[n], requests[n].max_new_tokens):
                    finish[n] = reason
            rows = [*near, *far]
            near, far = [n for n in near if n not in finish], [n for n in far if n not in finish]
            if not near:
                return [Answer(ids, self._text(ids), finish[n]) for n, ids in enumerate(texts)]
            if len(near) + len(far) < len(rows):
                places = torch.tensor([place for place, n in enumerate(rows) if n not in finish], device="cpu")
                cache.batch_select_indices(places)  # an index on the CPU, because layers may be on several devices
                mask = mask[places.to(mask.device)]
            mask = pad(mask, (0, 1), value=1)
            logits = self._logits([[texts[n][-1]] for n in (*near, *far)], mask, cache)

    def _read(self, contexts: list[Sequence[int]]) -> tuple[Tensor, Any, Tensor]:
        """Run the model on R contexts. Return ([R, V] logits after each context, KV cache, [R, columns] mask)."""
        cache = hf.DynamicCache(config=self.model.config)
        shared = common_beginning(contexts) if self._shares and len(contexts) > 1 else 0
        if shared < SHARED:
            shared = 0
        else:
            beginning = [list(contexts[0][:shared])]
            self._logits(beginning, torch.ones(1, shared, dtype=torch.long, device=self.model.device), cache)
            cache.batch_repeat_interleave(len(contexts))
        ends = [list(context[shared:]) for context in contexts]
        width = max(map(len, ends))
        padding = [[0] * (width - len(end)) for end in ends]
        seen = [[1] * shared + zeros + [1] * len(end) for zeros, end in zip(padding, ends, strict=True)]
        mask = torch.tensor(seen, device=self.model.device)
        ids = [zeros + end for zeros, end in zip(padding, ends, strict=True)]
        return self._logits(ids, mask, cache), cache, mask

    def _logits(self, ids: list[list[int]], mask: Tensor, cache: Any) -> Tensor:
        """Return [R, V] logits after the new tokens `ids`. The cache contains earlier tokens; the mask covers all."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor(ids, device=mask.device), "attention_mask": mask}
        inputs |= {"past_key_values": cache, "use_cache": True}
        if "position_ids" in self._arguments:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -len(ids[0]) :]
        if "logits_to_keep" in self._arguments:  # otherwise the head would run on every position of a prompt
            inputs["logits_to_keep"] = 1
        return self.model(**inputs).logits[:, -1]

    def _choose(self, scores: "Scores", earlier: list[list[int]], uniform: Tensor | None) -> Tensor:
        """Return [N] next tokens, or -1 where no score is valid. The logits processors read the tokens `earlier`."""
        if uniform is None and not earlier:
            return scores.best()
        mixed = scores.mixed()
        for place, ids in enumerate(earlier):
            row = slice(place, place + 1)
            mixed[row] = self._processors(torch.tensor([ids], device=mixed.device), mixed[row])
        if uniform is not None:
            return draw(mixed, uniform.to(mixed.device))
        best = mixed.max(-1)  # NaN counts as the largest value
        return torch.where(best.values.isfinite(), best.indices, -1)

    def _ended(self, ids: list[int], longest: int) -> str | None:
        """Return the reason why an answer ends after its last token, or None if it continues."""
        if ids[-1] in self.eos:
            return "eos"
        if stops := self.sampling.stop_strings:
            # each token has at least one byte, so a stop string that ends here starts within this many tokens
            tail = self.tokenizer.decode(ids[-max(len(stop.encode()) for stop in stops) - 1 :])
            if any(stop in tail for stop in stops) and any(stop in self.tokenizer.decode(ids) for stop in stops):
                return "stop"
        return "length" if len(ids) >= longest else None

    def _text(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        ends = [text.find(stop) for stop in self.sampling.stop_strings or ()]
        return text[: min((end for end in ends if end >= 0), default=len(text))]

    def _check(self, request: Request) -> None:
        if not request.near or (request.far is not None and not request.far):
            raise ValueError("a context is empty: each context must contain at least one token")
        longest = max(len(request.near), len(request.far or ())) + request.max_new_tokens
        if self.limit is not None and longest > self.limit:
            raise ValueError(f"the context and max_new_tokens need {longest} positions, but the model has {self.limit}")


@dataclass(frozen=True, eq=False)
class Scores:
    """Next-token scores of N answers: guidance * log p(x | near) - (guidance - 1) * log p(x | far), as in Eq. 4."""

    logits: Tensor  # [N + F, V], for N nearer contexts, then for F farther contexts
    guidance: list[float]  # one value for each answer
    answers: list[int]  # for each farther context, the index of its answer among the N rows

    def mixed(self) -> Tensor:
        """Return [N, V] scores, float32 or float64. Answers without a farther context get their plain logits."""
        scores = self.logits[: len(self.guidance)].to(torch.promote_types(self.logits.dtype, torch.float32), copy=True)
        for guidance, near, far in self._guided():
            scores[near] = guided_log_probs(self.logits[near], self.logits[far], guidance=guidance)
        return scores

    def best(self) -> Tensor:
        """Return the argmax of `mixed`, [N] tokens, without computing all scores. If the logit of any chosen token is
        not finite, all returned tokens are -1."""
        tokens = self.logits[: len(self.guidance)].argmax(-1)
        for guidance, near, far in self._guided():
            tokens[near] = guided_argmax(self.logits[near], self.logits[far], guidance=guidance)
        of_rows = torch.cat([tokens, tokens[self.answers]])
        return tokens.where(self.logits.gather(1, of_rows[:, None]).isfinite().all(), -1)

    def _guided(self) -> Iterator[tuple[float, list[int], list[int]]]:
        """Yield (guidance, rows of nearer contexts, rows of farther contexts) for each distinct guidance."""
        for guidance in {self.guidance[answer] for answer in self.answers}:
            rows = [place for place, answer in enumerate(self.answers) if self.guidance[answer] == guidance]
            yield guidance, [self.answers[row] for row in rows], [len(self.guidance) + row for row in rows]


def common_beginning(contexts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens in the contexts' common prefix. The last token of a context is never counted."""
    for place, tokens in enumerate(zip(*contexts, strict=False)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, contexts)) - 1


def processors(sampling: Sampling) -> Any:
    """Return a LogitsProcessorList that applies repetition penalties, then temperature, top-k and top-p."""
    penalty, size, temperature = sampling.repetition_penalty, sampling.no_repeat_ngram_size, sampling.temperature
    steps = (
        penalty not in (None, 1.0) and hf.RepetitionPenaltyLogitsProcessor(float(penalty or 1)),
        size and hf.NoRepeatNGramLogitsProcessor(size),
        temperature not in (None, 1.0) and hf.TemperatureLogitsWarper(float(temperature or 1)),
        sampling.top_k and hf.TopKLogitsWarper(sampling.top_k),
        sampling.top_p is not None and sampling.top_p < 1 and hf.TopPLogitsWarper(sampling.top_p),
    )
    return hf.LogitsProcessorList(filter(None, steps))


def uniforms(seed: int, count: int) -> Tensor:
    """Draw `count` uniform float32 numbers from [0, 1) on the CPU. A seed gives the same numbers on every device."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed % (1 << 63)), device="cpu")


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """Sample N tokens (int64) from [N, V] scores. In each row, choose the first token whose cumulative probability
    exceeds the row's uniform number. The result is -1 for a row with a NaN, or with only -inf."""
    # float64, so that the sum of 10^5 probabilities exceeds 1 - 2^-24, the largest float32 below 1; a token with
    # probability 0 adds nothing and is never drawn
    cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
    beyond = torch.searchsorted(cumulative, uniform.double()[:, None], right=True)
    return torch.where(cumulative[:, -1].isfinite(), beyond[:, 0], -1)

"""Chains of sentences while they grow, many at once: what each step asks, and where a chain ends.

Methods are those of the ranking-sentences paper's Appendix A: in `guided` each sentence answers the one before it, led
away from the one before that (Eq. 3 and 4); `iterative` is without guidance; `single-step` asks for the whole list.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from raoe_train.artifacts.provenance import digest
from raoe_train.config import NonNegativeFloat, NonNegativeInt, PositiveInt
from raoe_train.generation.decoding import Answer, Context, GuidedDecoder, Request, Sampling
from raoe_train.generation.instructions import Instructions, parse_list, unfinished, verify_chain, verify_sentence


@dataclass
class Generation(Sampling):
    """How chains are written.

    Args:
        method: guided, iterative (without guidance) or single-step (one prompt for the list)
        steps: sentences of a chain, without its source
        guidance: 1 + lambda, how far to move away from the sentence before the last (guided)
        max_new_tokens: longest sentence in tokens; the list of single-step may have steps times as many
        batch_size: chains at a time
        verify: draw a sentence that breaks a rule again, up to 5 times where do_sample draws, then move its chain to
            OUTPUT.failed.jsonl; false keeps all
        seed: seed of the random choices of do_sample
        prompt: template in place of the paper's, with {sentence} and perhaps {steps} and {example}; or few-shot, for
            small models
        chat: use the tokenizer's chat template; by default where there is one
        max_input_tokens: skip and count longer sentences to begin with
    """

    method: Literal["guided", "iterative", "single-step"] = "guided"
    steps: PositiveInt = 32
    guidance: NonNegativeFloat = 1.5
    max_new_tokens: PositiveInt = 64
    batch_size: PositiveInt = 16
    verify: bool = True
    seed: NonNegativeInt = 42
    prompt: str | None = None
    chat: bool | None = None
    max_input_tokens: PositiveInt = 128

    def effective(self) -> dict[str, Any]:
        """The settings that have a part in what is written, as plain values."""
        names = ("method", "steps", "guidance", "max_new_tokens", "verify", "seed")
        values = {name: getattr(self, name) for name in names}
        if self.method != "guided":
            values["guidance"] = 1.0
        sampling = {each.name: getattr(self, each.name) for each in fields(Sampling)}
        return values | {name: value for name, value in sampling.items() if value not in (None, False)}


REDRAWS = 5  # of a sentence that breaks a rule


@dataclass
class Chain:
    """One sentence's chain while it grows."""

    key: int
    sentences: list[str]  # the source and what has been written so far
    instructions: Instructions
    generation: Generation
    reason: str | None = field(default=None, init=False)  # why it failed
    context: Context | None = field(default=None, init=False)  # known to the next request; at first another chain's
    tokens: int = field(default=0, init=False)  # of all its answers
    redrawn: int = field(default=0, init=False)  # how often the sentence that is asked for was rejected
    finished: bool = field(default=False, init=False)

    def request(self, limit: int | None) -> Request | None:
        """What to ask next; None where the model's `limit` of positions leaves no room: the chain has failed."""
        wish, step = self.generation, len(self.sentences)
        single = wish.method == "single-step"
        guidance = wish.guidance if wish.method == "guided" and step > 1 else 1.0  # lambda = 0 at first
        near = self.instructions(self.sentences[-1])
        far = self.instructions(self.sentences[-2]) if guidance != 1 else None
        new = wish.max_new_tokens * (wish.steps if single else 1)
        if limit is not None and max(len(near), len(far or ())) + new > limit:
            self.reason = f"no room: a prompt of {len(near)} and {new} new tokens, the model has {limit} positions"
            self.finished = True
            return None
        seed = int(digest([wish.seed, self.key, step, *filter(None, [self.redrawn])])[:15], 16)
        return Request(near, far, guidance, new, seed, not single and step < wish.steps, self.context)

    def take(self, answer: Answer) -> None:
        """Go on with an answer; afterwards it may be finished, or have failed."""
        self.tokens += len(answer.ids)
        steps, text = self.generation.steps, answer.text.strip()
        single = self.generation.method == "single-step"
        if not single and self.generation.verify and self.generation.do_sample and self.redrawn < REDRAWS:
            if self._wrong(text, answer.finish) or verify_chain([*self.sentences, text]):
                self.redrawn += 1
                return
        self.redrawn = 0
        written = unfinished(answer.finish) or parse_list(text, steps) if single else [text]
        if isinstance(written, str):
            # what there is, for those who want to see it
            self.sentences += filter(None, map(str.strip, text.splitlines()))
            self._judge(written)
            written = []
        for sentence in written:
            self.sentences.append(sentence)
            self._judge(self._wrong(sentence, answer.finish))
            if self.finished:
                break
        self.finished = self.finished or single or len(self.sentences) > steps
        if self.reason is None:
            self._judge(verify_chain(self.sentences, steps if self.finished else None))
        self.context = None if self.finished else answer.context

    def _wrong(self, sentence: str, finish: str) -> str | None:
        return verify_sentence(sentence, self.sentences[0], finish) or self.instructions.copied(sentence)

    def _judge(self, reason: str | None) -> None:
        if reason is not None and self.generation.verify:
            self.reason, self.finished = reason, True


def grow(chains: Iterator[Chain], decoder: GuidedDecoder, slots: int) -> Iterator[Chain]:
    """Finished chains of `chains`, as they finish, `slots` of them in flight. Where the decoder lets requests join
    others, steps and new chains do as soon as a quarter of them wait to; else all wait for the last."""
    flying: dict[int, Chain] = {}
    ready: list[Chain] = []
    latest: Context | None = None
    while True:
        for chain in itertools.islice(chains, slots - len(flying)):
            chain.context = latest  # its instruction begins as another chain's does
            flying[chain.key] = chain
            ready.append(chain)
        if not flying:
            return
        answers: list[Any] = []
        if ready and (not decoder.active or (decoder.can_join and 4 * len(ready) >= len(flying))):
            requests = [(chain, chain.request(decoder.limit)) for chain in ready]
            ready = []
            answers += decoder.add((chain.key, request) for chain, request in requests if request is not None)
            for chain, request in requests:
                if request is None:
                    yield flying.pop(chain.key)
        answers += decoder.step()
        for key, answer in answers:
            chain = flying[key]
            chain.take(answer)
            latest = chain.context or latest
            if chain.finished:
                yield flying.pop(key)
            else:
                ready.append(chain)

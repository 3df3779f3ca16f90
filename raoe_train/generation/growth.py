"""Chains of sentences while they grow, many at once: what each step asks, and where a chain ends.

Three methods (the ranking-sentences paper's Appendix A): `guided`, in which each sentence answers the one before it,
led away from the one before that (Eq. 3 and 4); `iterative`, the same without guidance; `single-step`, one instruction
for the whole list.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from raoe_train.artifacts.provenance import digest
from raoe_train.generation.instructions import Instructions, parse_list
from raoe_train.generation.rules import unfinished, verify_chain, verify_sentence
from raoe_train.recipe import Option

if TYPE_CHECKING:
    from raoe_train.generation.contexts import Context
    from raoe_train.generation.decoding import GuidedDecoder
    from raoe_train.generation.endpoint import Endpoint, Reply
    from raoe_train.generation.slots import Answer, Request


@dataclass
class Generation:
    """How chains are written."""

    REST: ClassVar[str] = "decoding"  # the field that takes keys of other names

    method: Annotated[
        Literal["guided", "iterative", "single-step"],
        "guided, iterative (without guidance) or single-step (one prompt for the list)",
    ] = "guided"
    steps: Annotated[int, Option("sentences of a chain, its source not counted", least=1)] = 32
    guidance: Annotated[
        float, Option("1 + lambda: how far from the sentence before the last (guided)", least=0)
    ] = 1.5
    max_new_tokens: Annotated[
        int, Option("longest sentence in tokens; single-step's list may have steps times as many", least=1)
    ] = 64
    batch_size: Annotated[int, Option("chains at a time", least=1)] = 16
    verify: Annotated[bool, "keep chains that break a rule apart; false keeps all among the others"] = True
    seed: Annotated[int, Option("of random choices (do_sample), each chain and step its own", least=0)] = 42
    prompt: Annotated[str | None, "in place of the paper's: text with {sentence}, perhaps {steps} and {example}"] = None
    chat: Annotated[bool | None, "use the tokenizer's chat template [where there is one]"] = None
    max_input_tokens: Annotated[int, Option("longer sentences to begin with are skipped, and counted", least=1)] = 128
    endpoint: Annotated[
        str | None, "URL of a server of OpenAI's protocol that has the model, http://HOST:8000/v1 [the model is here]"
    ] = None
    key: Annotated[str, "environment variable with the endpoint's key, where it wants one"] = "OPENAI_API_KEY"
    decoding: Annotated[dict[str, Any], Option(keys="raoe_train.generation.sampling:sampling_keys")] = field(
        default_factory=dict
    )

    def effective(self) -> dict[str, Any]:
        """The settings that have a part in what is written, as plain values."""
        names = ("method", "steps", "guidance", "max_new_tokens", "verify", "seed")
        values = {name: getattr(self, name) for name in names}
        if self.method != "guided":
            values["guidance"] = 1.0
        if self.endpoint:  # where it is does not matter
            values["endpoint"] = "completions" if self.chat is False else "chat completions"
        return {**values, **{name: value for name, value in sorted(self.decoding.items()) if value is not None}}


@dataclass
class Chain:
    """One sentence's chain while it grows."""

    key: int  # its id
    sentences: list[str]  # the source and what has been written so far
    instructions: Instructions
    generation: Generation
    reason: str | None = field(default=None, init=False)  # why it failed
    # what its last answer was an answer to, as the decoder has it, until it is finished; at first another chain's
    context: Context | None = field(default=None, init=False)
    tokens: int = field(default=0, init=False)  # of all its answers
    finished: bool = field(default=False, init=False)

    def request(self, limit: int | None) -> Request | None:
        """What to ask next; None where the model's `limit` of positions leaves no room, and then it has failed."""
        from raoe_train.generation.slots import Request

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
        seed = int(digest([wish.seed, self.key, step])[:15], 16)
        return Request(near, far, guidance, new, seed, not single and step < wish.steps, self.context)

    def take(self, answer: Answer | Reply) -> None:
        """Go on with an answer; afterwards it may be finished, or have failed."""
        self.tokens += answer.tokens
        steps, text = self.generation.steps, answer.text.strip()
        single = self.generation.method == "single-step"
        written: list[str] | str = [text]
        if single:
            written = unfinished(answer.finish) or parse_list(text, steps)
        if isinstance(written, str):
            # what there is, for those who want to see it
            self.sentences += filter(None, map(str.strip, text.splitlines()))
            self._judge(written)
            written = []
        for sentence in written:
            self.sentences.append(sentence)
            self._judge(verify_sentence(sentence, self.sentences[0], answer.finish))
            if self.finished:
                break
        self.finished = self.finished or single or len(self.sentences) > steps
        if self.reason is None:
            self._judge(verify_chain(self.sentences, steps if self.finished else None))
        self.context = None if self.finished else answer.context

    def _judge(self, reason: str | None) -> None:
        if reason is not None and self.generation.verify:
            self.reason, self.finished = reason, True


def grow(chains: Iterator[Chain], decoder: GuidedDecoder | Endpoint, slots: int) -> Iterator[Chain]:
    """Finished chains of `chains`, as they finish, `slots` of them in flight.

    A chain's next step, or the next chain, joins those under way as soon as a quarter of them wait to, where the
    decoder lets requests join others; else all wait for the last.
    """
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

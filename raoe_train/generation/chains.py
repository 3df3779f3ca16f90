"""Chains of sentences: read their source sentences, create the request for each step, and decide when a chain ends.

The methods are those in Appendix A of the ranking-sentences paper. With `guided`, the model rewrites the last sentence,
and guidance moves the answer away from the second-to-last sentence (Eq. 3 and 4). The method `iterative` is `guided`
without guidance. With `single-step`, a single request asks for all sentences."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from raoe_train.data.columns import RowProblem
from raoe_train.data.sources import each_sentence
from raoe_train.generation.guided import Answer, GuidedDecoder, Request
from raoe_train.generation.instructions import Instructions, flaw, parse_list, unfinished, verify_chain, verify_sentence
from raoe_train.outputs import digest
from raoe_train.settings import Generation, Sentences

REDRAWS = 5  # maximum number of retries for a sentence


def read_starts(data: Sentences, accept: Callable[[str], str | None]) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Read at most data.max_rows sentences. Return ([(row number from 1, sentence)], {reason: number of skipped rows}).

    A row is skipped if it is empty or a duplicate, if it has several lines or no letters, or if `accept` returns a
    reason. Raise ValueError for a row that is not a text (invalid UTF-8, a missing field), unless data.on_error is
    skip.
    """
    skipped: Counter[str] = Counter()
    starts: list[tuple[int, str]] = []
    seen: set[str] = set()
    for number, (place, text) in enumerate(each_sentence(str(data.input), data.columns), 1):
        if isinstance(text, RowProblem) and text.malformed:
            if data.on_error == "raise":
                raise ValueError(f"{place}: {text}; to skip and count such rows, set data.on_error to skip")
            skipped["not a text"] += 1
            continue
        sentence = "" if isinstance(text, RowProblem) else text.strip()
        is_repeated = bool(sentence) and sentence in seen
        reason = "duplicate" if is_repeated else flaw(sentence) or accept(sentence)
        seen.add(sentence)
        if reason is not None:
            skipped[reason] += 1
            continue
        starts.append((number, sentence))
        if len(starts) == data.max_rows:
            break
    if not starts:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in skipped.items()) or "it has no rows"
        raise ValueError(f"{data.input} has no usable sentences to start chains from: {reasons}")
    return starts, dict(skipped)


def acceptable(tokenizer: Any, longest: int) -> Callable[[str], str | None]:
    """Create the function to pass to read_starts as `accept`. The function rejects texts with more than `longest`
    tokens, and texts that contain a special token, because this token could end the instruction."""
    special = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens if token) or "(?!)")

    def reason(sentence: str) -> str | None:
        if special.search(sentence):
            return "special token"
        ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
        return "too long" if len(ids) > longest else None

    return reason


@dataclass
class Chain:
    key: int
    sentences: list[str]  # the source sentence, then the generated sentences
    instructions: Instructions
    generation: Generation
    reason: str | None = field(default=None, init=False)  # why the chain failed, if it did
    tokens: int = field(default=0, init=False)  # number of tokens in all answers
    redrawn: int = field(default=0, init=False)  # how often the next sentence was rejected
    finished: bool = field(default=False, init=False)

    def request(self, limit: int | None) -> Request | None:
        """Return the next request, or None if the chain fails because the request needs more than `limit` positions."""
        settings, step = self.generation, len(self.sentences)
        single = settings.method == "single-step"
        guidance = settings.guidance if settings.method == "guided" and step > 1 else 1.0  # lambda = 0 in step 1
        near = self.instructions(self.sentences[-1])
        far = self.instructions(self.sentences[-2]) if guidance != 1 else None
        new = settings.max_new_tokens * (settings.steps if single else 1)
        if limit is not None and max(len(near), len(far or ())) + new > limit:
            self.reason = f"no room: {len(near)} prompt tokens and {new} new tokens, but only {limit} positions"
            self.finished = True
            return None
        seed = int(digest([settings.seed, self.key, step, *filter(None, [self.redrawn])])[:15], 16)
        return Request(near, far, guidance, new, seed)

    def take(self, answer: Answer) -> None:
        """Add an answer to the chain. The answer may finish the chain or make it fail."""
        self.tokens += len(answer.ids)
        steps, text = self.generation.steps, answer.text.strip()
        single = self.generation.method == "single-step"
        if not single and self.generation.verify and self.generation.do_sample and self.redrawn < REDRAWS:
            if self._wrong(text, answer.finish) or verify_chain([*self.sentences, text]):
                self.redrawn += 1
                return
        self.redrawn = 0
        new = unfinished(answer.finish) or parse_list(text, steps) if single else [text]
        if isinstance(new, str):
            # keep the answer's lines, so that users can see what failed
            self.sentences += filter(None, map(str.strip, text.splitlines()))
            self._judge(new)
            new = []
        for sentence in new:
            self.sentences.append(sentence)
            self._judge(self._wrong(sentence, answer.finish))
            if self.finished:
                break
        self.finished = self.finished or single or len(self.sentences) > steps
        if self.reason is None:
            self._judge(verify_chain(self.sentences, steps if self.finished else None))

    def _wrong(self, sentence: str, finish: str) -> str | None:
        return verify_sentence(sentence, self.sentences[0], finish) or self.instructions.copied(sentence)

    def _judge(self, reason: str | None) -> None:
        if reason is not None and self.generation.verify:
            self.reason, self.finished = reason, True


def grow(chains: Iterator[Chain], decoder: GuidedDecoder, slots: int) -> Iterator[Chain]:
    """Generate at most `slots` chains at a time, and yield chains as they finish. Each batch contains the next request
    of each active chain. When a chain is finished, a waiting chain takes its place."""
    active: list[Chain] = []
    while True:
        active += itertools.islice(chains, slots - len(active))
        if not active:
            return
        requests = [chain.request(decoder.limit) for chain in active]
        answers = iter(decoder.answers([request for request in requests if request is not None]))
        for chain, request in zip(active, requests, strict=True):
            if request is not None:
                chain.take(next(answers))
        yield from (chain for chain in active if chain.finished)
        active = [chain for chain in active if not chain.finished]

"""Chains of sentences as the job `generate` produces them, against transformers' own guidance, step by step.

A prompt is an instruction that all chains share, a sentence, and a few closing tokens; the answer is the sentence of
the next prompt. The first step has no guidance; later steps are guided away from the previous prompt. All contenders
decode greedily in float32, NEW tokens per step (a sentence's length; nothing ends early), and must produce the same
tokens (`same_tokens`) before they are timed. Times include prefill. Tokens per second are rows x STEPS x NEW / seconds.
benchmarks/generation.py times single answers, which cannot reuse an earlier step, with the same model and guidance.

What transformers 5.23.0 can reuse, according to its code: `generate` accepts past_key_values, with the same number of
cached columns for all rows, and extends them in place. So the instruction's keys and values can be copied into every
call, with padding between instruction and sentence, as "instruction cached" does. GuidedDecoder reads the instruction
once for each call, for nearer and farther contexts. UnbatchedClassifierFreeGuidanceLogitsProcessor has its own cache
for the farther context, which always starts empty, and `generate` has no argument for it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.case import Call, Case
from benchmarks.generation import GUIDANCE, VOCABULARY, language_model, padded, read_bytes, same_tokens
from raoe_train.generation import GuidedDecoder, Request

SIZES = {"cpu": [8], "cuda": [8, 32]}
STEPS, NEW = 4, 24
INSTRUCTION, CLOSING = 45, 5
TESTS = ["tests/generation/test_guided.py"]

Rows = list[list[int]]


def case(rows: int, device: str) -> Case:
    model = language_model(device)
    decoder, chains = GuidedDecoder(model), _Chains(rows)
    result: dict[str, Call] = {
        "GuidedDecoder": lambda i: _ours(decoder, chains),
        "transformers guidance_scale": lambda i: _theirs(model, chains),
        "transformers, instruction cached": lambda i: _theirs(model, chains, cached=True),
    }
    outputs = {name: call(0) for name, call in result.items()}
    for name, steps in outputs.items():
        same_tokens(name, _by_chain(steps), _by_chain(outputs["transformers guidance_scale"]))
    title = f"{rows} chains, {STEPS} steps of {NEW} tokens, vocabulary {VOCABULARY:,}"
    return Case(title, result, bytes=read_bytes(model) * STEPS * NEW)


def _by_chain(steps: list[Rows]) -> Rows:
    """Join the tokens of all steps of each chain."""
    return [[token for row in chain for token in row] for chain in zip(*steps, strict=True)]


class _Chains:
    """First prompts of different lengths, and the parts of later prompts."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def ids(length: int) -> list[int]:
            return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()

        self.instruction, self.closing = ids(INSTRUCTION), ids(CLOSING)
        self.sources = [ids(NEW - 3 * (row % 5)) for row in range(rows)]

    def prompts(self, sentences: Rows) -> Rows:
        return [self.instruction + sentence + self.closing for sentence in sentences]


def _ours(decoder: GuidedDecoder, chains: _Chains) -> list[Rows]:
    near, far = chains.prompts(chains.sources), [None] * len(chains.sources)
    steps = []
    for _ in range(STEPS):
        answers = decoder.answers([Request(a, b, GUIDANCE, NEW) for a, b in zip(near, far, strict=True)])
        steps.append([answer.ids for answer in answers])
        near, far = chains.prompts(steps[-1]), near
    return steps


def _theirs(model: Any, chains: _Chains, cached: bool = False) -> list[Rows]:
    device, instruction = model.device, torch.tensor([chains.instruction], device=model.device)
    cache = None
    if cached:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model.model(instruction, past_key_values=cache)
    near, steps = chains.prompts(chains.sources), []
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    for _ in range(STEPS):
        if cache is not None:
            options["past_key_values"] = copy.deepcopy(cache)
            options["past_key_values"].batch_repeat_interleave(len(near))
        ids, mask = padded(near, device, INSTRUCTION if cached else 0)
        tokens = model.generate(ids, attention_mask=mask, **options)
        steps.append(tokens[:, ids.shape[1] :].tolist())
        negative, its_mask = padded(near, device)
        options |= {"negative_prompt_ids": negative, "negative_prompt_attention_mask": its_mask}
        options["guidance_scale"] = GUIDANCE
        near = chains.prompts(steps[-1])
    return steps

"""Cached contexts: equal answers with and without them, and no token is computed twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raoe_train.generation import Context, GuidedDecoder, Request
from raoe_train.generation.decoding import mix_logits
from tests.decoders import DECODERS, tiny_language_model
from tests.generation.test_decoding import WINDOWS

WINDOWED = (*WINDOWS, "mistral")  # its window is 4096 tokens unless said otherwise
PLAIN = [name for name in DECODERS if name not in WINDOWED]
INSTRUCTION, CLOSING = [5, 9, 4, 33, 6], [7, 3]
SOURCES = ([11, 12, 13, 14], [20], [31, 32, 33, 34, 35, 36, 37], [40, 41], [50, 51, 52])
STEPS, NEW = 5, 9


class Seeing(GuidedDecoder):
    """A decoder that records the scores of every token and the (rows, width) of each forward pass."""

    def __init__(self, model, *args, **options) -> None:
        super().__init__(model, *args, **options)
        self.scores, self.shapes = [], []
        model.get_input_embeddings().register_forward_hook(self._see)

    def _take(self, batch, logits):
        self.scores.append(mix_logits(logits, batch))
        return super()._take(batch, logits)

    def _see(self, module, args, output) -> None:
        self.shapes.append(tuple(args[0].shape))


def prompt(sentence) -> list[int]:
    return [*INSTRUCTION, *sentence, *CLOSING]


def grown(decoder, sources=SOURCES, reuse=True, slots=None):
    """The answers of each source's chain. A step or the next chain joins as soon as a place is free."""
    prompts = {key: [prompt(source)] for key, source in enumerate(sources)}
    answers = {key: [] for key in prompts}
    waiting, ready, flying = list(prompts), [], 0
    while waiting or ready or flying:
        while waiting and flying + len(ready) < (slots or len(sources)):
            ready.append(waiting.pop(0))
        done = []
        if ready and (decoder.can_join or not decoder.active):
            requests = []
            for key in ready:
                far = prompts[key][-2] if len(prompts[key]) > 1 else None
                known = answers[key][-1].context if reuse and answers[key] else None
                # lengths and guidance differ, so that chains join each other in the middle of an answer
                new, guidance = NEW - (key + len(answers[key])) % 3, 1.5 + key % 2
                requests.append(
                    (key, Request(prompts[key][-1], far, guidance, new, 10 * key + len(answers[key]), reuse, known))
                )
            flying, ready = flying + len(requests), []
            done += decoder.add(requests)
        done += decoder.step()
        for key, answer in done:
            flying -= 1
            answers[key].append(answer)
            if len(answers[key]) < STEPS:
                prompts[key].append(prompt([token for token in answer.ids if token != 2]))
                ready.append(key)
    return answers


def ids(answers) -> dict[int, list[list[int]]]:
    return {key: [answer.ids for answer in chain] for key, chain in answers.items()}


def close(one: Context, other: Context, atol: float) -> None:
    assert one.ids == other.ids and len(one.layers) == len(other.layers)
    torch.testing.assert_close(one.logits, other.logits, atol=atol, rtol=0)
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.shape[1] == len(one.ids)
            torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.fixture
def llama():
    return tiny_language_model("llama")


@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in PLAIN]
)
def test_cached_contexts_give_equal_chains(name):
    # as in test_decoding, Gemma's mask is NaN beside padding in float64
    double = name != "gemma"
    model = tiny_language_model(name, torch.float64 if double else torch.float32)
    atol = 1e-10 if double else 1e-3
    for source in SOURCES[:3]:
        with_it, without = Seeing(model), Seeing(model)
        result, expected = grown(with_it, [source]), grown(without, [source], reuse=False)
        assert ids(result) == ids(expected)
        for ours, theirs in zip(with_it.scores, without.scores, strict=True):
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
        assert all(answer.context is None for answer in expected[0])
    decoder = GuidedDecoder(model)
    expected = ids(grown(decoder, reuse=False))
    assert len({tuple(row) for chain in expected.values() for row in chain}) > 15
    for slots in (None, 3, 1):
        result = grown(decoder, slots=slots)
        assert ids(result) == expected
        for chain in result.values():
            for answer in chain:
                fresh = decoder.answers([Request(answer.context.ids, max_new_tokens=1, keep=True)])[0]
                close(answer.context, fresh.context, atol)


@pytest.mark.parametrize("name", WINDOWED)
def test_sliding_windows_are_not_cached(name):
    decoder = GuidedDecoder(tiny_language_model(name, torch.float32))
    result = grown(decoder)
    assert ids(result) == ids(grown(decoder, reuse=False))
    assert all(answer.context is None for chain in result.values() for answer in chain)
    # one that is given all the same is not looked at
    context = Context(tuple(INSTRUCTION), (), torch.zeros(32))
    plain = Request(INSTRUCTION, max_new_tokens=NEW)
    assert decoder.answers([replace(plain, known=context)]) == decoder.answers([plain])


# What is read


def test_fully_cached_context(llama):
    decoder = Seeing(llama)
    row = prompt(SOURCES[2])
    (first,) = decoder.answers([Request(row, max_new_tokens=NEW, keep=True)])
    for near, far, read in [
        (row, None, []),
        (row, row, []),
        (row[:-3], None, [(1, 1)]),
        (row[:-3], row, [(1, 1)]),
        ([*row, 8, 9], row, [(1, 2)]),
        ([*row, 8, 9], row[:4], [(2, 2)]),
        ([60, *row], row, [(1, 1 + len(row))]),
        (row[:1], row, [(1, 1)]),
    ]:
        request = Request(near, far, 1.5 if far else 1.0, NEW, keep=True)
        decoder.shapes.clear()
        (result,) = decoder.answers([replace(request, known=first.context)])
        assert decoder.shapes == [*read, *[(1 + (far is not None), 1)] * (len(result.ids) - 1)]
        (expected,) = decoder.answers([request])
        assert result == expected
        close(result.context, expected.context, 1e-10)

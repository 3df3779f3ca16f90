"""Growth of chains: requests of each step, free places, and ends of chains; with a scripted decoder."""

from __future__ import annotations

import pytest

from raoe_train.generation import Answer, Chain, Generation, Instructions, grow
from tests.generation.test_rules import Letters, read


class Script:
    """A decoder with scripted answers; an answer takes one step per letter."""

    can_join, limit = True, None

    def __init__(self, write, can_join=True) -> None:
        self.write, self.can_join, self.flying, self.most = write, can_join, {}, 0

    @property
    def active(self):
        return len(self.flying)

    def add(self, requests):
        assert self.can_join or not self.flying
        done = []
        for key, request in requests:
            text = self.write(key, request)
            text, finish = text if isinstance(text, tuple) else (text, "eos")
            answer = Answer([0] * (len(text) + 1), text, finish, (key, request.near) if request.keep else None)
            if text:
                self.flying[key] = [len(text), answer]
            else:
                done.append((key, answer))
        self.most = max(self.most, self.active)
        return done

    def step(self):
        for entry in self.flying.values():
            entry[0] -= 1
        done = [(key, answer) for key, (left, answer) in self.flying.items() if left == 0]
        for key, _ in done:
            del self.flying[key]
        return done


def chains_of(write, sources, slots=2, can_join=True, limit=None, prompt="{sentence}", **settings):
    wish = Generation(steps=settings.pop("steps", 3), **settings)
    instructions = Instructions(Letters(), wish.method, wish.steps, prompt)
    decoder = Script(write, can_join)
    decoder.limit = limit
    made = (Chain(key, [source], instructions, wish) for key, source in enumerate(sources, 1))
    result = {chain.key: chain for chain in grow(made, decoder, slots)}
    assert sorted(result) == list(range(1, len(sources) + 1)) and decoder.most <= slots and not decoder.active
    return result


def test_each_step_is_guided_by_the_step_before_the_last():
    asked = []

    def write(key, request):
        near, far = read(request.near[1:]), read(request.far[1:]) if request.far else None
        asked.append((near, far, request.guidance, request.max_new_tokens))
        return f" {near}{near[-1]}\n"

    chain = chains_of(write, ["ab"], guidance=1.25, max_new_tokens=9)[1]
    assert (chain.sentences, chain.reason) == (["ab", "abb", "abbb", "abbbb"], None)
    assert asked == [("ab", None, 1, 9), ("abb", "ab", 1.25, 9), ("abbb", "abb", 1.25, 9)]
    asked.clear()
    assert chains_of(write, ["ab"], method="iterative")[1].sentences == chain.sentences
    assert [entry[1:3] for entry in asked] == [(None, 1)] * 3
    asked.clear()
    chains_of(write, ["ab"], guidance=1.0)
    assert [entry[1:3] for entry in asked] == [(None, 1)] * 3


@pytest.mark.parametrize("method", ["guided", "iterative", "single-step"])
def test_cached_contexts_stay_within_their_chain(method):
    asked = []

    def write(key, request):
        asked.append((key, request.near, request.keep, request.known))
        return "1. a\n2. b\n3. c" if method == "single-step" else f"{read(request.near[1:])}x"

    result = chains_of(write, ["a", "bb"], slots=1, method=method)
    assert [chain.context for chain in result.values()] == [None, None]
    if method == "single-step":
        assert [entry[2:] for entry in asked] == [(False, None)] * 2
        return
    assert [entry[0] for entry in asked] == [1, 1, 1, 2, 2, 2]
    assert [entry[2] for entry in asked] == [True, True, False] * 2
    # a fresh chain has another's, for the instruction that they share
    earlier = [None, *asked[:2], *asked[1:2], *asked[3:5]]
    assert [entry[3] for entry in asked] == [entry and entry[:2] for entry in earlier]
    failed = chains_of(lambda key, _: "", ["a"], method=method)[1]
    assert (failed.reason, failed.context) == ("empty", None)


@pytest.mark.parametrize("can_join", [True, False])
def test_waiting_chains_fill_free_places(can_join):
    sources = ["a" * (1 + 7 * n % 5) + str(n) for n in range(13)]
    seeds = []

    def write(key, request):
        seeds.append(request.seed)
        return read(request.near[1:]) + "x" * (key % 4 + 1)

    for slots in (1, 3, 8, 20):
        result = chains_of(write, sources, slots, can_join)
        for key, source in enumerate(sources, 1):
            step = "x" * (key % 4 + 1)
            assert result[key].sentences == [source + step * n for n in range(4)]
    assert len(seeds) == 4 * 39 and len(set(seeds)) == 39


def test_a_chain_ends_where_it_breaks_a_rule():
    words = {
        1: ["fine", "well", "good"],
        2: ["fine", ("half a sen", "length"), "never asked"],
        3: ["", "never asked", "never asked"],
        4: ["fine", "source 4", "SOURCE 4!"],
        5: ["two\n\nlines", "never", "never"],
        6: ["fine", "good", "I cannot help with that."],
    }

    def run_(verify):
        turn = {key: iter(result) for key, result in words.items()}
        sources = [f"source {n}" for n in range(1, 7)]
        return chains_of(lambda key, _: next(turn[key]), sources, verify=verify)

    result = run_(True)
    assert {key: (len(chain.sentences) - 1, chain.reason) for key, chain in result.items()} == {
        1: (3, None),
        2: (2, "not complete: cut off at max_new_tokens"),
        3: (1, "empty"),
        4: (3, "repeated: sentence 3 occurs for the 3rd time"),
        5: (1, "more than one line"),
        6: (3, "boilerplate: 'I cannot help'"),
    }
    for key, chain in run_(False).items():
        assert chain.reason is None
        assert chain.sentences[1:] == [w[0] if isinstance(w, tuple) else w for w in words[key]]

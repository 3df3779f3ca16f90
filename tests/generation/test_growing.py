"""Growth of chains: requests of each step, free places, and ends of chains; with a scripted decoder."""

from __future__ import annotations

from raoe_train.generation import Answer, Chain, Generation, Instructions, grow
from tests.generation.test_rules import Letters, read


class Asking(Chain):
    """A chain that notes which of its requests are whose."""

    asked: dict[int, int] = {}  # noqa: RUF012

    def request(self, limit):
        request = super().request(limit)
        self.asked[id(request)] = self.key
        return request


class Script:
    """A decoder with scripted answers."""

    def __init__(self, write, limit) -> None:
        self.write, self.limit, self.sizes = write, limit, []

    def answers(self, requests):
        self.sizes.append(len(requests))
        results = []
        for request in requests:
            text = self.write(Asking.asked[id(request)], request)
            text, finish = text if isinstance(text, tuple) else (text, "eos")
            results.append(Answer([0] * (len(text) + 1), text, finish))
        return results


def chains_of(write, sources, slots=2, limit=None, prompt="{sentence}", **settings):
    """The finished chains by their keys, and the sizes of the batches in which they grew."""
    wish = Generation(steps=settings.pop("steps", 3), **settings)
    instructions = Instructions(Letters(), wish.method, wish.steps, prompt)
    decoder = Script(write, limit)
    made = (Asking(key, [source], instructions, wish) for key, source in enumerate(sources, 1))
    grown = sorted(grow(made, decoder, slots), key=lambda chain: chain.key)
    result = {chain.key: chain for chain in grown}
    assert [chain.key for chain in grown] == [*range(1, len(sources) + 1)] and all(
        chain.finished for chain in result.values()
    )
    return result, decoder.sizes


def test_each_step_is_guided_by_the_step_before_the_last():
    asked = []

    def write(key, request):
        near, far = read(request.near[1:]), read(request.far[1:]) if request.far else None
        asked.append((near, far, request.guidance, request.max_new_tokens))
        return f" {near}{near[-1]}\n"

    chain = chains_of(write, ["ab"], guidance=1.25, max_new_tokens=9)[0][1]
    assert (chain.sentences, chain.reason) == (["ab", "abb", "abbb", "abbbb"], None)
    assert asked == [("ab", None, 1, 9), ("abb", "ab", 1.25, 9), ("abbb", "abb", 1.25, 9)]
    asked.clear()
    assert chains_of(write, ["ab"], method="iterative")[0][1].sentences == chain.sentences
    assert [entry[1:3] for entry in asked] == [(None, 1)] * 3
    asked.clear()
    chains_of(write, ["ab"], guidance=1.0)
    assert [entry[1:3] for entry in asked] == [(None, 1)] * 3


def test_waiting_chains_take_free_places():
    sources = ["a" * (1 + 7 * n % 5) + str(n) for n in range(13)]
    seeds = []

    def write(key, request):
        seeds.append(request.seed)
        return read(request.near[1:]) + "x" * (key % 4 + 1)

    for slots, batches in {1: [1] * 39, 3: [3] * 12 + [1] * 3, 8: [8] * 3 + [5] * 3, 20: [13] * 3}.items():
        result, sizes = chains_of(write, sources, slots)
        assert sizes == batches
        for key, source in enumerate(sources, 1):
            step = "x" * (key % 4 + 1)
            assert result[key].sentences == [source + step * n for n in range(4)]
    assert len(seeds) == 4 * 39 and len(set(seeds)) == 39
    # the first chain fails at once and makes room for the third, the second for the fourth
    failing = lambda key, request: "" if key == 1 else read(request.near[1:]) + "x"  # noqa: E731
    assert chains_of(failing, ["a", "b", "c", "d"], 2)[1] == [2, 2, 2, 2, 1, 1]


def test_a_chain_without_room_asks_nothing():
    def write(key, request):
        return read(request.near[1:]) + "x"

    result, sizes = chains_of(write, ["short", "much too long a source"], limit=25, max_new_tokens=9)
    assert [chain.reason for chain in result.values()] == [
        None, "no room: 23 prompt tokens and 9 new tokens, but only 25 positions"
    ]  # fmt: skip
    assert sizes == [1, 1, 1] and result[2].sentences == ["much too long a source"]


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
        return chains_of(lambda key, _: next(turn[key]), sources, verify=verify)[0]

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

"""The decoding engine against transformers' generate and guidance, token for token, alone and in batches."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CohereConfig, GraniteConfig

from raoe_kernels import guided_log_probs
from raoe_train.generation import GuidedDecoder, Request, Sampling
from raoe_train.generation.guided import common_beginning, draw, uniforms
from tests.decoders import DECODERS, SIZES, saved_decoder, tiny_language_model

NEW = 12


def contexts() -> list[list[int]]:
    return [
        torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in (8, 3, 5, 2, 11)
    ]


def guided(guidance: float = 1.5, new: int = NEW) -> list[Request]:
    """Requests whose contexts are guided away from the previous one."""
    rows = contexts()
    return [Request(row, rows[number - 1], guidance, new, seed=number) for number, row in enumerate(rows)]


def in_batches(decoder, requests, size) -> list:
    """The answers of requests that are decoded `size` at a time."""
    batches = [requests[start : start + size] for start in range(0, len(requests), size)]
    return [answer for batch in batches for answer in decoder.answers(batch)]


def ids(answers) -> list[list[int]]:
    return [answer.ids for answer in answers]


def generated(model, context, **options) -> list[int]:
    result = model.generate(torch.tensor([context]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)
    return result[0, len(context) :].tolist()


def with_guidance(model, request: Request, **options) -> list[int]:
    negative = torch.tensor([request.far])
    return generated(model, request.near, guidance_scale=request.guidance, negative_prompt_ids=negative, **options)


# Of each kind of attention one is quick.
KINDS = [name if name in ("llama", "qwen2-window", "gemma2") else pytest.param(name, marks=pytest.mark.slow)
         for name in DECODERS]  # fmt: skip


@pytest.fixture(params=KINDS)
def model(request):
    # transformers' eager mask of Gemmas is NaN beside padding in float64
    return tiny_language_model(request.param, torch.float32 if "gemma" in request.param else torch.float64)


@pytest.fixture(scope="module")
def llama():
    return tiny_language_model("llama")


def test_without_guidance_it_is_generate_token_for_token(model):
    rows = contexts()
    alone = [generated(model, row) for row in rows]
    width = max(map(len, rows))
    batch = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    together = model.generate(batch, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    result = ids(GuidedDecoder(model).answers([Request(row, max_new_tokens=NEW) for row in rows]))
    assert result == alone
    for ours, theirs in zip(result, together[:, width:].tolist(), strict=True):
        assert theirs == ours + [0] * (len(theirs) - len(ours))
    # guidance 1 and a farther context equal to the nearer one are lambda = 0, too
    assert ids(GuidedDecoder(model).answers(guided(1.0))) == alone
    same = [Request(row, row, 1.5, NEW) for row in rows]
    assert ids(GuidedDecoder(model).answers(same)) == alone
    assert len({tuple(row) for row in alone}) == 5


def test_guidance_is_transformers_token_for_token(model):
    requests = guided()
    theirs = [with_guidance(model, request) for request in requests]
    assert ids(GuidedDecoder(model).answers(requests)) == theirs
    assert theirs != [generated(model, request.near) for request in requests]


def test_answer_does_not_depend_on_its_batch(model):
    decoder, requests = GuidedDecoder(model), guided()
    requests[1:1] = [Request(contexts()[4], max_new_tokens=NEW), Request(contexts()[0], [9, 8], 0.5, 5)]
    alone = [decoder.answers([request])[0] for request in requests]
    for size in (2, 5, len(requests)):
        assert in_batches(decoder, requests, size) == alone
    assert decoder.answers(requests[::-1]) == alone[::-1]
    assert [answer.finish for answer in alone].count("length") > 1


class Recorder:
    """Rows of each forward pass of the body, and of each product with the head."""

    def __init__(self, model) -> None:
        self.body, self.head = [], []
        forward, head = model.model.forward, model.lm_head.forward
        model.model.forward = lambda **kw: (self.body.append(tuple(kw["input_ids"].shape)), forward(**kw))[1]
        model.lm_head.forward = lambda x: (self.head.append(x.shape[0]), head(x))[1]


def test_finished_rows_leave_the_batch(llama):
    rows = contexts()
    requests = [
        Request(rows[0], rows[1], 1.5, 3),
        Request(rows[1], rows[2], 1.5, 6),
        Request(rows[2], None, 1.5, 5),  # no farther context, no row for it
        Request(rows[3], rows[2], 1.0, 1),
    ]
    decoder = GuidedDecoder(model := tiny_language_model("llama"), None, Sampling(eos_token_id=[]))
    seen = Recorder(model)
    result = decoder.answers(requests)
    assert [len(answer.ids) for answer in result] == [3, 6, 5, 1]
    assert seen.body == [(6, 8), (5, 1), (5, 1), (3, 1), (3, 1), (2, 1)]
    assert seen.head == [6, 5, 5, 3, 3, 2]
    assert decoder.answers([]) == []


# The beginning that all contexts share


def beginning_with(shared: list[int]) -> list[Request]:
    """The guided requests, whose contexts all begin with the tokens `shared`."""
    return [Request(shared + list(r.near), shared + list(r.far), r.guidance, NEW, r.seed) for r in guided()]


@pytest.mark.parametrize("length", [7, 8, 30])
def test_a_common_beginning_changes_no_answer(model, length):
    requests = beginning_with([5 + place % 40 for place in range(length)])
    theirs = [with_guidance(model, request) for request in requests]
    decoder = GuidedDecoder(model)
    assert ids(decoder.answers(requests)) == theirs
    assert ids(in_batches(decoder, requests, 2)) == theirs
    assert ids(decoder.answers(requests[:1])) == theirs[:1]


def test_a_common_beginning_is_read_once():
    def read(name: str, requests: list[Request]) -> list[tuple[int, int]]:
        model = tiny_language_model(name)
        seen = Recorder(model)
        GuidedDecoder(model, None, Sampling(eos_token_id=[])).answers(requests)
        return seen.body[: 1 - NEW]

    shared, longest = [9] * 8, max(map(len, contexts()))
    assert read("llama", beginning_with(shared)) == [(1, 8), (10, longest)]
    assert read("llama", beginning_with(shared[1:])) == [(10, 7 + longest)]  # too short to be worth it
    assert read("mistral-window", beginning_with(shared)) == [(10, 8 + longest)]  # padding would move its window
    one = Request([*shared, 3], None, 1.0, NEW)
    assert read("llama", [one]) == [(1, 9)]
    assert read("llama", [one, one]) == [(1, 8), (2, 1)]  # the last token of a context has to be read for its logits
    assert common_beginning([[3, 4, 5], [3, 4], [3, 4, 6]]) == 1
    assert common_beginning([[3, 4, 5], [3, 7, 5]]) == 1
    assert common_beginning([[4, 4, 5], [3, 4, 5]]) == 0


# Whatever a model does to its logits


def with_a_hook(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output.tanh())
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_language_model("gemma2", torch.float32, final_logit_softcapping=2.0),
        lambda: AutoModelForCausalLM.from_config(CohereConfig(**SIZES, logit_scale=0.0625)).double().eval(),
        lambda: AutoModelForCausalLM.from_config(GraniteConfig(**SIZES, logits_scaling=8.0)).double().eval(),
        lambda: with_a_hook(tiny_language_model("llama")),
    ],
    ids=["soft cap", "times", "by", "hook"],
)
def test_scores_include_scaling_after_the_head(make):
    torch.manual_seed(3)
    model, requests = make(), guided()
    assert ids(GuidedDecoder(model).answers(requests)) == [with_guidance(model, request) for request in requests]


# Sampling


def test_random_answers_depend_on_their_seed_alone(llama):
    sampling = Sampling(do_sample=True, temperature=1.5, top_p=0.9)
    decoder = GuidedDecoder(llama, sampling=sampling)
    alone = [decoder.answers([request])[0] for request in guided()]
    for size in (2, 5):
        assert in_batches(decoder, guided(), size) == alone
    again = [Request(r.near, r.far, r.guidance, r.max_new_tokens, r.seed + 1) for r in guided()]
    assert all(a.ids != b.ids for a, b in zip(decoder.answers(again), alone, strict=True))
    assert all(a.ids != b.ids for a, b in zip(GuidedDecoder(llama).answers(guided()), alone, strict=True))
    # hardly any temperature is greedy
    cold = GuidedDecoder(llama, sampling=Sampling(do_sample=True, temperature=1e-6))
    assert ids(cold.answers(guided())) == ids(GuidedDecoder(llama).answers(guided()))
    first = GuidedDecoder(llama, sampling=Sampling(do_sample=True, top_k=1))
    assert ids(first.answers(guided())) == ids(GuidedDecoder(llama).answers(guided()))


def test_each_token_is_drawn_with_a_random_number_of_its_own(llama):
    answers = GuidedDecoder(llama, sampling=Sampling(do_sample=True, temperature=1.5)).answers(guided())
    for request, answer in zip(guided(), answers, strict=True):
        tokens: list[int] = []
        for number in uniforms(request.seed, NEW)[: len(answer.ids)]:
            near, far = (
                llama(torch.tensor([[*context, *tokens]])).logits[:, -1] for context in (request.near, request.far)
            )
            scores = guided_log_probs(near, far, guidance=request.guidance) / 1.5
            tokens.append(int(draw(scores, number[None])))
        assert answer.ids == tokens


def test_draws_follow_the_probabilities():
    scores = torch.tensor([0.0, -torch.inf, 1.0, -1.0, -torch.inf])
    count = 20000
    sample = draw(scores.expand(count, 5), uniforms(7, count))
    shares = torch.bincount(sample, minlength=5) / count
    torch.testing.assert_close(shares, scores.softmax(-1), atol=0.02, rtol=0)
    assert shares[1] == shares[4] == 0
    edge = torch.tensor([0.0, 1 - 2**-24])
    assert draw(torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]] * 2), edge).tolist() == [1, 2]
    assert draw(torch.tensor([[0.0, torch.nan], [-torch.inf] * 2]), edge).tolist() == [-1, -1]
    assert torch.equal(uniforms(3, 5), uniforms(3, 9)[:5])


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.8}, {"no_repeat_ngram_size": 2}], ids=lambda options: next(iter(options))
)
def test_processors_are_transformers(options):
    model = tiny_language_model("phi3")
    sampling = Sampling(**options)
    decoder, requests = GuidedDecoder(model, sampling=sampling), guided()
    result = ids(decoder.answers(requests))
    assert result == [with_guidance(model, request, **options) for request in requests]
    assert result != ids(GuidedDecoder(model).answers(requests))
    plain = [Request(row, max_new_tokens=NEW) for row in contexts()]
    assert ids(in_batches(decoder, plain, 2)) == [generated(model, row, **options) for row in contexts()]


# Stop strings


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    name = saved_decoder(tmp_path_factory.mktemp("decoder"))
    model = AutoModelForCausalLM.from_pretrained(name).double().eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model, AutoTokenizer.from_pretrained(name)


def test_stop_strings(with_tokenizer):
    model, tokenizer = with_tokenizer
    requests = [Request(tokenizer(text)["input_ids"], max_new_tokens=20) for text in ("a man plays", "two dogs")]
    whole = GuidedDecoder(model, tokenizer, Sampling(eos_token_id=[])).answers(requests)
    text = whole[0].text
    assert text == tokenizer.decode(whole[0].ids, skip_special_tokens=True) and len(whole[0].ids) == 20
    # from the middle of a token's text to that of a later one's
    start = len(tokenizer.decode(whole[0].ids[:6])) - 1
    stop = text[start : start + 8]
    place = text.index(stop)
    decoder = GuidedDecoder(model, tokenizer, Sampling(eos_token_id=[], stop_strings=["no such thing", stop]))
    result = decoder.answers(requests)
    assert (result[0].text, result[0].finish) == (text[:place], "stop")
    needed = next(n for n in range(20) if stop in tokenizer.decode(whole[0].ids[:n]))
    assert result[0].ids == whole[0].ids[:needed]
    assert result[1] == whole[1]


# Invalid input


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "at least one token"),
        (Request([3], [], 1.5), "at least one token"),
        (Request([3], [4], float("nan"), 5), "guidance must be .*got nan"),
        (Request([3], [4], -1, 5), "guidance must be .*got -1"),
        (Request([3] * 60, max_new_tokens=5), "need 65 positions, but the model has 64"),
        (Request([3], [3] * 60, 1.5, max_new_tokens=5), "need 65 positions"),
    ],
)
def test_invalid_requests(llama, request_, message):
    decoder = GuidedDecoder(llama)
    with pytest.raises(ValueError, match=message):
        decoder.answers([Request([3, 4], max_new_tokens=5), request_])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(do_sample=True)], ids=["greedy", "sampled"])
def test_nan_scores_are_an_error(sampling):
    model = tiny_language_model("llama")
    decoder = GuidedDecoder(model, sampling=sampling)
    with torch.no_grad():
        model.model.embed_tokens.weight[40] = torch.nan
    for request in (Request([3, 40], None, 1, 5), Request([3, 40], [3], 1.5, 5), Request([3], [3, 40], 1.5, 5)):
        with pytest.raises(ValueError, match="scores for the next token contain NaN"):
            decoder.answers([request])

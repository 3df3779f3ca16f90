"""Decoders with bidirectional layers: against explicit masks, independent of padding, and invalid input."""

import itertools

import pytest
import torch
from transformers import BertConfig, GPT2Config

from raoe_train.encoders.bidirectional.configuration import BidirectionalConfig
from raoe_train.encoders.bidirectional.modeling import BidirectionalModel
from tests.decoders import DECODERS, WINDOW, padded, sequences, tiny_decoder

ATTENTIONS = [
    (name, attention)
    for name in DECODERS
    for attention in ("eager", "sdpa")
    if (name, attention) != ("gemma2", "sdpa")  # soft-capped: transformers refuses it itself
]


def states(model, ids, mask=None):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state


def check_invariance(name, attention, layers):
    model = BidirectionalModel.around(tiny_decoder(name, attention), layers).eval()
    alone = [states(model, row[None])[0] for row in sequences()]
    for side, fill in itertools.product(("left", "right"), (0, 9)):
        ids, mask = padded(side, fill)
        result = states(model, ids, mask)
        for number, expected in enumerate(alone):
            torch.testing.assert_close(result[number][mask[number].bool()], expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize(("name", "attention"), ATTENTIONS)
def test_padding_and_batch_size_do_not_matter(name, attention):
    for layers in (1, 3):
        check_invariance(name, attention, layers)


@pytest.fixture
def flex_uncompiled():
    """transformers compiles it anew for every length, which takes minutes; masks are the same without."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", DECODERS)
def test_padding_and_batches_change_nothing_with_flex_attention(name, flex_uncompiled):
    check_invariance(name, "flex_attention", 2)


@pytest.mark.parametrize(("name", "attention"), ATTENTIONS)
def test_zero_layers_equal_the_decoder(name, attention):
    decoder = tiny_decoder(name, attention)
    ids, mask = padded("left", 0)
    expected = states(decoder, ids, mask)[mask.bool()]
    result = states(BidirectionalModel.around(decoder, 0), ids, mask)[mask.bool()]
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "phi3"])
def test_all_layers_equal_the_bidirectional_model_of_transformers(name):
    """is_causal=False makes every layer of transformers' model bidirectional."""
    ids, mask = padded("right", 0)
    own = tiny_decoder(name, "sdpa", is_causal=False)
    expected = states(own, ids, mask)[mask.bool()]
    result = states(BidirectionalModel.around(tiny_decoder(name, "sdpa"), 3), ids, mask)[mask.bool()]
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=0)
    assert (expected - states(tiny_decoder(name, "sdpa"), ids, mask)[mask.bool()]).abs().max() > 1e-3


def by_hand(decoder, ids, allowed):
    """A decoder whose last layer attends where the mask `allowed`, [length, length], is true."""
    with torch.no_grad():
        before = decoder(input_ids=ids, output_hidden_states=True).hidden_states[-2]
        place = torch.arange(ids.shape[1])[None]
        rotary = decoder.rotary_emb(before, place)
        additive = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
        last = decoder.layers[-1](
            before, attention_mask=additive, position_embeddings=rotary, position_ids=place, is_causal=False
        )
        return decoder.norm(last)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3", "gemma"])
def test_the_last_layer_by_hand(name, attention):
    q = torch.arange(8)[:, None]
    k = torch.arange(8)[None]
    near = (q - k).abs() < (WINDOW if name.endswith("window") else 99)
    decoder = tiny_decoder(name, attention)
    ids = sequences()[0][None]
    expected = by_hand(decoder, ids, near)
    result = states(BidirectionalModel.around(decoder, 1), ids)
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=0)


def test_checkpointing_and_several_forwards_before_backward():
    """Nothing is kept between calls: two batches of different padding, then one backward."""
    gradients = []
    for checkpointing in (False, True):
        model = BidirectionalModel.around(tiny_decoder("llama", "sdpa"), 2).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert any(getattr(layer, "gradient_checkpointing", False) for layer in model.decoder.layers)
        total = torch.zeros(())
        for side in ("left", "right"):
            ids, mask = padded(side, 5)
            total = total + model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()].square().mean()
        (total + model(input_ids=sequences()[0][None]).last_hidden_state.mean()).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    ids, mask = padded("left", 0)
    model = BidirectionalModel.around(tiny_decoder("llama", "sdpa"), 1).eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    torch.testing.assert_close(states(compiled, ids, mask), states(model, ids, mask), atol=1e-5, rtol=1e-4)


def test_invalid_calls():
    model = BidirectionalModel.around(tiny_decoder("llama", "sdpa"), 1)
    ids, mask = padded("left", 0)
    with pytest.raises(ValueError, match="no key-value cache"):
        model(input_ids=ids, use_cache=True)
    with pytest.raises(ValueError, match=r"must have shape \[batch, length\]"):
        model(input_ids=ids, attention_mask=mask[:, None, None])


@pytest.mark.parametrize(
    ("decoder", "layers", "message"),
    [
        (BertConfig(), 1, "'bert'. Encoders are already bidirectional"),
        (GPT2Config(), 1, "decoder of type gemma, .* got 'gpt2'"),
        ("llama", 4, "from 0 to 3, got 4"),
        ("llama", -1, "from 0 to 3, got -1"),
    ],
)
def test_models_that_cannot_become_bidirectional(decoder, layers, message):
    config = tiny_decoder(decoder).config if isinstance(decoder, str) else decoder
    with pytest.raises(ValueError, match=message):
        BidirectionalConfig(config, layers)

"""Texts packed in one row have the embeddings and gradients of the padded model; other models are refused.

On the CPU, with the attention that replaces the GPU's kernel there.
"""

from __future__ import annotations

import itertools
from copy import deepcopy
from functools import cache

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import CONFIG_MAPPING, AutoModel

from raoe_train.encoders.bidirectional.modeling import PACKED, BidirectionalModel
from raoe_train.encoders.packed import pack, why_not
from tests.decoders import DECODERS, tiny_decoder
from tests.tiny import tiny_encoder

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
HERE = ("cpu", "cuda")
COMMON = {"vocab_size": 64, "pad_token_id": 1, "initializer_range": 0.2}
ALIKE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
ROBERTA = {**COMMON, **ALIKE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = {
    "bert": ROBERTA,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "distilbert": {**COMMON, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "dropout": 0.0,
                   "attention_dropout": 0.0},
    "modernbert": {**COMMON, **ALIKE, "global_attn_every_n_layers": 2, "local_attention": 24, "cls_token_id": 3,
                   "sep_token_id": 4, "bos_token_id": 3, "eos_token_id": 4},
}  # fmt: skip
PLAIN = [name for name in DECODERS if "window" not in name and name not in ("gemma2", "gemma3")]


@cache
def first_module():
    return tiny_encoder(double=False)[0]


def sentence_transformer(inner, pooling="mean"):
    """One with `inner` in it, whatever its tokenizer: features come tokenised."""
    module = deepcopy(first_module())
    module.model = inner
    config = inner.decoder.config if isinstance(inner, BidirectionalModel) else inner.config
    return SentenceTransformer(modules=[module, Pooling(getattr(config, "hidden_size", 16), pooling)])


def encoder(kind, pooling="mean", attention="sdpa", **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = CONFIG_MAPPING[kind](**{**ENCODERS.get(kind, ROBERTA), **changes})
        inner = AutoModel.from_config(config, attn_implementation=attention)
    return sentence_transformer(inner, pooling).train()


def decoder(name, layers, **changes):
    inner = BidirectionalModel.around(tiny_decoder(name, "sdpa", initializer_range=0.2, **changes), layers)
    return sentence_transformer(inner).train()


def texts(lengths=(8, 3, 11, 5, 1), side="right", types=False):
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.ones(len(lengths), max(lengths), dtype=torch.long), torch.zeros(len(lengths), max(lengths)).long()
    for row, length in enumerate(lengths):
        place = slice(0, length) if side == "right" else slice(max(lengths) - length, None)
        ids[row, place], mask[row, place] = torch.randint(5, 64, (length,), generator=generator), 1
    kinds = {"token_type_ids": torch.randint(2, ids.shape, generator=generator)} if types else {}
    return {"input_ids": ids, "attention_mask": mask, **kinds, "modality": "text"}


def results(model, features):
    """Embeddings, and the gradient of every parameter."""
    model.zero_grad()
    embeddings = model(dict(features))["sentence_embedding"]
    weights = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(3)).to(embeddings)
    (embeddings * weights).sum().backward()
    return [embeddings.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check(model, features, dtype=torch.float64, rounded=False):
    """rounded: transformers' RMSNorm goes through float32 whatever the model's dtype."""
    model, tolerance = model.to(dtype), TOLERANCE[torch.float32 if rounded else dtype]
    expected = results(deepcopy(model), features)
    packed = pack(model, features, HERE)
    assert packed["input_ids"].shape == (1, int(features["attention_mask"].sum()))
    result = results(model, packed)
    # One of all gradients: those of the keys' biases are 0 but for rounding.
    scale = [expected[0].abs().max()] + [max(g.abs().max() for g in expected[1:])] * (len(expected) - 1)
    for a, b, largest in zip(result, expected, scale, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(largest))
    again = results(model, features)  # a padded batch in the same model, after it
    for a, b, largest in zip(again, expected, scale, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(largest))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders(kind, dtype):
    check(encoder(kind), texts(types=kind == "bert"), dtype)


@pytest.mark.parametrize("pooling", ["cls", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens"])
def test_poolings(pooling):
    check(encoder("bert", pooling), texts())


def test_a_prompt_is_left_out_of_pooling():
    model = encoder("bert")
    model[1].include_prompt = False
    check(model, {**texts((8, 3, 11, 5)), "prompt_length": 2})


@pytest.mark.parametrize("name", PLAIN)
def test_decoders(name):
    for layers, side in itertools.product((0, 1, 2), ("left", "right")):
        check(decoder(name, layers), texts(side=side), rounded=name != "phi")


def test_decoders_in_single_precision():
    check(decoder("llama", 1), texts(side="left"), torch.float32)


def test_a_window_wider_than_the_texts():
    check(decoder("mistral-window", 2, sliding_window=11), texts(), rounded=True)
    check(decoder("gemma3", 2, sliding_window=11), texts(), rounded=True)  # and its own scale
    check(encoder("modernbert", local_attention=22), texts())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("make", [lambda: encoder("modernbert"), lambda: decoder("llama", 1)])
def test_on_a_gpu(make):
    features = {key: value.cuda() if torch.is_tensor(value) else value for key, value in texts().items()}
    check(make().cuda(), features, torch.float32)


def test_with_gradient_checkpointing():
    for model in (encoder("bert"), decoder("phi", 2)):
        model[0].model.activation_checkpointing_enable()
        check(model, texts())


def test_embedding_does_not_depend_on_neighbours():
    model = encoder("bert").double()
    alone = model(texts((8,)))["sentence_embedding"]
    torch.testing.assert_close(model(pack(model, texts(), HERE))["sentence_embedding"][:1], alone, rtol=0, atol=1e-12)


REFUSED = {
    "relative positions": (lambda: encoder("mpnet", attention="eager"), "MPNetModel"),
    "attention dropout": (lambda: encoder("bert", attention_probs_dropout_prob=0.1), "the model has attention dropout"),
    "an encoder's window": (lambda: encoder("modernbert", local_attention=20), "sliding window of 10 tokens"),
    "a decoder's window": (lambda: decoder("qwen2-window", 1), "sliding window of 3 tokens"),
    "eager": (lambda: encoder("bert", attention="eager"), "eager"),
    "a soft cap": (lambda: sentence_transformer(BidirectionalModel.around(tiny_decoder("gemma2"), 1)), "eager"),
    "a decoder that looks back": (lambda: encoder("bert", is_decoder=True), "BertModel"),
    "no Pooling": (lambda: SentenceTransformer(modules=[encoder("bert")[0]]), "is not a Transformer with Pooling"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_model_warns_once(name, caplog):
    make, reason = REFUSED[name]
    model, features = make(), texts()
    assert pack(model, features, HERE) is features
    assert pack(model, features, HERE) is features
    output = [record.getMessage() for record in caplog.records if "padded" in record.getMessage()]
    assert len(output) <= 1
    assert reason in why_not(model, 11)


def test_without_dropout_in_evaluation():
    check_model = encoder("bert", attention_probs_dropout_prob=0.1).eval()
    assert "cu_seq_lens_q" in pack(check_model, texts(), HERE)


def test_packing_is_skipped_on_cpu_and_without_padding():
    model, level = encoder("bert"), texts((4, 4))
    assert pack(model, level, HERE) is level
    features = texts()
    assert pack(model, features) is features
    assert model[0].model.config._attn_implementation == "sdpa"
    packed = pack(model, features, HERE)
    assert pack(model, packed, HERE) is packed


def test_packed_model_saves_its_usual_attention(tmp_path):
    model = decoder("llama", 1)
    pack(model, texts(), HERE)
    assert model[0].model.decoder.config._attn_implementation == PACKED
    model[0].model.save_pretrained(tmp_path)
    assert PACKED not in (tmp_path / "config.json").read_text()
    assert BidirectionalModel.from_pretrained(tmp_path).decoder.config._attn_implementation == "sdpa"

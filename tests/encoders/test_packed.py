"""Packed rows give the losses and gradients of each text encoded alone, for every model that can be packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from raoe_train import losses as ours
from raoe_train.encoders.embed import encode_sentences
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.packed import PACKED, Packing, pack, packing_of
from raoe_train.losses.by_length import ByLength, loss_of
from tests.decoders import saved_decoder
from tests.losses.test_global_batch import REPLAYS_IN_DOUBLE
from tests.tiny import SENTENCES, encoder_of, gradients, tiny_encoder, total

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
HEADS = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "roberta": SIZES,
    "xlm-roberta": SIZES,
    "camembert": SIZES,
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
    "modernbert": {**SIZES, "local_attention": 64, "global_attn_every_n_layers": 2},
    "llama": HEADS,
    "mistral": HEADS,
    "qwen2": HEADS,
    "qwen3": {**HEADS, "head_dim": 8},
}
IN_FLOAT32 = ("modernbert", "llama", "mistral", "qwen2", "qwen3")  # transformers computes parts in float32
TEXTS = [*SENTENCES, "", "the", " ".join(["a very long text about dogs and trains"] * 5)]


def family(name: str, pooling: str = "mean") -> Any:
    return encoder_of(name, FAMILIES[name], pooling)


def columns_of(model: Any, count: int = 2, rows: int = 9) -> list[dict[str, Any]]:
    """Columns with texts that also occur in other rows and columns, an empty text and one that is cut."""
    texts = [[TEXTS[(3 * row + 5 * column) % len(TEXTS)] for row in range(rows)] for column in range(count)]
    texts[1][0] = texts[0][0]
    texts[-1][2] = texts[0][4]
    return [model.preprocess(column) for column in texts]


def alone(model: Any, loss: Any, features: Any, labels: Any) -> Any:
    """The loss of texts that were encoded one by one."""
    columns = []
    for column in features:
        rows = []
        for row, real in enumerate(column["attention_mask"].bool()):
            text = {name: x[row : row + 1, real] if torch.is_tensor(x) and x.ndim == 2 else x
                    for name, x in column.items()}  # fmt: skip
            rows.append(model(text)["sentence_embedding"])
        columns.append(torch.cat(rows))
    inner = getattr(loss, "loss", loss)
    arguments = inner.prepare_labels(features, labels) if isinstance(inner, ours.base.CachedLoss) else labels
    return loss_of(loss, columns, arguments, features)


def compare(model: Any, loss: Any, features: Any, labels: Any, tolerance: float = 1e-12, **settings: Any) -> Any:
    """Compare loss and gradients of the packed row with those of texts alone."""
    if not REPLAYS_IN_DOUBLE and getattr(loss, "uses_gradient_cache", False):
        tolerance = max(tolerance, 1e-5)
    model.zero_grad()
    expected = total(alone(model, loss, features, labels))
    expected.backward()
    its = gradients(model)
    model.zero_grad()
    packed = ByLength(loss, packed=True, **settings)
    plan = packed.plan(features, labels)
    assert all("cu_seq_lens_q" in run for run in plan.runs)
    value = total(packed([dict(column) for column in features], labels))
    value.backward()
    assert its.abs().max() > 0
    assert abs(value - expected) <= tolerance * abs(expected)
    assert (gradients(model) - its).abs().max() <= tolerance * its.abs().max()
    return plan


def scores(rows: int = 9) -> dict[str, torch.Tensor]:
    score = torch.rand(rows, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return {"score": score, "label": torch.arange(rows) % 3}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cached", [{}, {"mini_batch_size": 2}, {"mini_batch_num_tokens": 40}],
                         ids=["at once", "by rows", "by tokens"])  # fmt: skip
def test_every_family(name, cached):
    model = family(name)
    assert pack(model) is None and isinstance(packing_of(model), Packing)
    plan = compare(model, ours.CoSENTLoss(model, **cached), columns_of(model), scores(),
                   1e-6 if name in IN_FLOAT32 else 1e-12)  # fmt: skip
    assert len(plan.runs) == 1 or cached
    limit = cached.get("mini_batch_num_tokens", 10**9)
    assert all(run["input_ids"].shape[1] <= limit or len(run["cu_seq_lens_q"]) == 2 for run in plan.runs)


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_made_without_reading_the_padding(name):
    """As by length on a GPU; a model that cannot be packed keeps its attention."""
    model = family(name)
    (features, *_), config = columns_of(model), model[0].model.config
    expected = model(dict(features))["sentence_embedding"]
    assert pack(model, packed=False) is None and config._attn_implementation == "raoe_padded"
    torch.testing.assert_close(model(dict(features))["sentence_embedding"], expected, rtol=1e-12, atol=1e-12)
    assert isinstance(packing_of(model), str)
    assert pack(model) is None and pack(model, packed=False) is None and config._attn_implementation == PACKED
    config.model_type, config._attn_implementation = "unknown", "sdpa"
    assert pack(model, packed=False) and config._attn_implementation == "sdpa"


@pytest.mark.parametrize("pooling", ["cls", "last", "max", "weighted_mean"])
def test_poolings(pooling):
    model = family("bert", pooling)
    compare(model, ours.RAOELoss(model), columns_of(model), scores())


@pytest.mark.parametrize(
    "mode", ["mean", "mean_sqrt_len_tokens", "cls", "max", "lasttoken", "weightedmean", ["mean", "max"]]
)
def test_prompts_that_pooling_leaves_out(mode):
    model = family("bert")
    model[1].pooling_mode, model[1].include_prompt = mode, False
    features = [model.preprocess(texts, prompt="the dog ") for texts in (SENTENCES[:9], SENTENCES[2:])]
    plan = compare(model, ours.RAOELoss(model), features, scores())
    planned = mode != "weightedmean"
    assert ("pooled_tokens" in plan.runs[0]) == planned == len(model[1]._forward_pre_hooks)
    with torch.no_grad():  # of a text without its prompt, pooling leaves out other tokens
        shorter = model.preprocess(["the"]) | {"prompt_length": features[0]["prompt_length"]}
        assert "pooled_tokens" not in ByLength(ours.CoSENTLoss(model), packed=True).plan([shorter, shorter]).runs[0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("settings", [{}, {"bidirectional_layers": 1}, {"bidirectional_layers": "all"},
                                      {"bidirectional_layers": 1, "prompt": 'Say "{text}" in one word:"'}])  # fmt: skip
def test_decoders(tmp_path, side, settings):
    """BeLLM: causal layers below, bidirectional ones on top, in the same row."""
    model = load_encoder(saved_decoder(tmp_path), device="cpu", pooling="mean", **settings).double().train(False)
    model.tokenizer.padding_side = side
    features = [model.preprocess([SENTENCES[(row + 3 * column) % 11] for row in range(9)]) for column in range(2)]
    for cached in ({}, {"mini_batch_num_tokens": 20}):
        compare(model, ours.RAOELoss(model, **cached), features, scores(), 1e-6)


def test_models_that_cannot_be_packed_go_by_length(caplog):
    mpnet = tiny_encoder()
    sizes = {"vocab_size": len(mpnet.tokenizer), "pad_token_id": 1}
    mpnet[0].model = AutoModel.from_config(CONFIG_MAPPING["mpnet"](**sizes, **SIZES)).double()
    loss = ByLength(ours.CoSENTLoss(mpnet), packed=True)
    assert caplog.messages == ["texts are not packed, but encoded by length: packed attention does not support mpnet"]
    assert all("cu_seq_lens_q" not in run for run in loss.plan(columns_of(mpnet), scores()).runs)
    eager = family("bert")
    eager[0].model.config._attn_implementation = "eager"
    assert packing_of(eager) == "the model's attention is eager, not sdpa"
    assert pack(eager) == "the model's attention is eager, not sdpa"


def test_batches_that_do_not_fit_go_by_length():
    """A text longer than a sliding window, and one without tokens; the same loss."""
    window = family("modernbert")
    window[0].model.config.sliding_window = 3
    for model in (window, family("bert")):
        features = columns_of(model)
        features[0]["attention_mask"][1] = 0
        before = total(ours.CoSENTLoss(model)([dict(each) for each in features], scores()))
        loss = ByLength(ours.CoSENTLoss(model), packed=True)
        assert all("cu_seq_lens_q" not in run for run in loss.plan(features, scores()).runs)
        torch.testing.assert_close(total(loss(features, scores())), before, rtol=1e-6, atol=0)


def test_encoding_packed(tmp_path):
    model = family("roberta")
    alone = encode_sentences(model, SENTENCES)
    assert pack(model) is None
    rows: list[int] = []
    model[0].register_forward_pre_hook(lambda module, given: rows.append(given[0]["input_ids"].shape[0]))
    assert abs(encode_sentences(model, SENTENCES) - alone).max() < 1e-6
    assert rows == [1]
    # padded batches still work, and the name of the attention is not saved
    assert abs(model.encode(SENTENCES) - alone).max() < 1e-6
    model.save_pretrained(str(tmp_path / "saved"))
    assert PACKED not in "".join(file.read_text() for file in (tmp_path / "saved").rglob("*.json"))


@pytest.mark.parametrize("settings", [{}, {"bidirectional_layers": 1},
                                      {"bidirectional_layers": 1, "load_in_4bit": True}],
                         ids=["causal", "bidirectional", "4 bits"])  # fmt: skip
def test_adapters_and_gradient_accumulation(tmp_path, settings):
    """The gradient of LoRA over two batches, packed and by length, of models that are loaded with both attentions."""
    base, results = saved_decoder(tmp_path), []
    for packed in (False, True):
        attention = PACKED if packed else "sdpa"
        lora = {"r": 4, "lora_dropout": 0.0, "init_lora_weights": False}
        model = load_encoder(base, device="cpu", pooling="mean", lora=lora, attention=attention, **settings).train()
        loss, values = ByLength(ours.RAOELoss(model), packed=packed), []
        for start in (0, 5):
            features = [model.preprocess([TEXTS[(row + step + start) % 11] for row in range(9)]) for step in (0, 3)]
            assert packed == ("cu_seq_lens_q" in loss.plan(features, scores()).runs[0])
            values.append(total(loss(features, scores())))
            values[-1].backward()
        assert all("lora_" in name for name, weight in model.named_parameters() if weight.grad is not None)
        results.append((torch.stack(values).detach(), gradients(model)))
    # bitsandbytes may round the scales of its blocks
    tolerance = 0.02 if "load_in_4bit" in settings else 1e-5
    assert results[0][1].abs().max() > 0
    torch.testing.assert_close(results[1][0], results[0][0], rtol=tolerance, atol=0)
    assert (results[1][1] - results[0][1]).abs().max() <= tolerance * results[0][1].abs().max()


def test_loading_with_packed_attention(tmp_path):
    tiny_encoder(double=False).save_pretrained(str(tmp_path / "encoder"))
    model = load_encoder(str(tmp_path / "encoder"), device="cpu", attention=PACKED)
    assert isinstance(packing_of(model), Packing)
    mpnet = AutoModel.from_config(CONFIG_MAPPING["mpnet"](vocab_size=len(model.tokenizer), pad_token_id=1, **SIZES))
    mpnet.save_pretrained(str(tmp_path / "mpnet"))
    model.tokenizer.save_pretrained(str(tmp_path / "mpnet"))
    with pytest.raises(ValueError, match=r"raoe_packed cannot be used .*: packed attention does not support mpnet"):
        load_encoder(str(tmp_path / "mpnet"), device="cpu", attention=PACKED)

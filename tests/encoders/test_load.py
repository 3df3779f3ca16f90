"""Creating, loading and saving encoders: pooling, random weights, chat templates, adapters."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import CONFIG_MAPPING, AutoModel, AutoTokenizer

from raoe_train import run
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.scratch import add_lora
from raoe_train.losses import InfoNCELoss
from raoe_train.settings import Model
from raoe_train.training.trainer import Trainer
from tests.decoders import saved_decoder
from tests.tiny import SENTENCES, saved_encoder, tiny_encoder
from tests.training.small_runs import arguments


@pytest.mark.parametrize(
    ("pooling", "saved"), [(None, "mean"), ("last", "lasttoken"), ("weighted_mean", "weightedmean")]
)
def test_pooling_is_saved(tmp_path, pooling, saved):
    model = load_encoder(Model(name="scratch", pooling=pooling, device="cpu", max_seq_length=16), sentences=SENTENCES)
    model.save_pretrained(str(tmp_path / "m"))
    again = SentenceTransformer(str(tmp_path / "m"), device="cpu")
    assert again[1].pooling_mode == saved
    assert torch.equal(torch.tensor(again.encode(SENTENCES)), torch.tensor(model.encode(SENTENCES)))
    # A saved encoder keeps its pooling unless another one is set.
    assert load_encoder(Model(name=str(tmp_path / "m"), device="cpu"))[1].pooling_mode == saved
    changed = load_encoder(Model(name=str(tmp_path / "m"), pooling="max", device="cpu"))
    assert changed[1].pooling_mode == "max"


def test_default_pooling_of_modernbert(tmp_path):
    from transformers import BertTokenizer, ModernBertConfig, ModernBertModel

    load_encoder(Model(name="scratch", device="cpu"), sentences=SENTENCES).save_pretrained(str(tmp_path / "st"))
    tokenizer = BertTokenizer.from_pretrained(str(tmp_path / "st"))
    config = ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    ModernBertModel(config).save_pretrained(tmp_path / "modern")
    tokenizer.save_pretrained(tmp_path / "modern")
    assert load_encoder(Model(name=str(tmp_path / "modern"), device="cpu"))[1].pooling_mode == "cls"


def test_weights_of_a_new_encoder_depend_on_the_seed():
    first, again, other = (
        load_encoder("scratch", device="cpu", sentences=SENTENCES, seed=seed)[0].model.state_dict()
        for seed in (1, 1, 2)
    )
    name = "encoder.layer.0.attention.self.query.weight"
    assert first[name].equal(again[name]) and not first[name].equal(other[name])


def test_an_adapter_with_more_tokens_than_its_base_model_is_named(tmp_path):
    model = load_encoder(saved_encoder(tmp_path / "base"), device="cpu")
    model.tokenizer.add_tokens(["<new>"])
    model[0].model.resize_token_embeddings(len(model.tokenizer))
    add_lora(model[0].model, {"r": 2})
    model.save_pretrained(str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"out cannot be loaded: the weight shapes .* save the base model"):
        load_encoder(str(tmp_path / "out"), device="cpu")


def test_chat_template_is_not_applied_to_texts(tmp_path):
    folder = saved_decoder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ bos_token + message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    theirs, ours = SentenceTransformer(folder, device="cpu"), load_encoder(folder, device="cpu", pooling="mean")
    features = [theirs.preprocess(["a man", "a train"]), theirs.preprocess(["a dog", "music"])]
    assert features[0]["modality"] == "message", "or this test shows nothing"
    assert InfoNCELoss(theirs)(features).isfinite()
    assert ours.preprocess(["a man"])["input_ids"].tolist() == [tokenizer("a man")["input_ids"]]


def test_reports_of_weights_that_encoders_do_not_use_are_not_printed(tmp_path):
    """Such as a decoder's head; transformers reports them. A missing layer is still reported, and refused by raoe."""
    base, printed, logger = saved_decoder(tmp_path), list[str](), logging.getLogger("transformers.modeling_utils")
    handler = logging.Handler()
    handler.emit = lambda record: printed.append(record.getMessage())
    logger.addHandler(handler)
    try:
        file = f"{base}/model.safetensors"
        save_file(load_file(file) | {"lm_head.weight": torch.ones(4, 4)}, file, {"format": "pt"})
        lora = {"r": 2, "use_dora": True}
        load_encoder(base, device="cpu", pooling="mean", lora=lora).save_pretrained(str(tmp_path / "adapter"))
        load_encoder(str(tmp_path / "adapter"), device="cpu")
        run("export", **{"model.name": str(tmp_path / "adapter"), "merge": True, "output": str(tmp_path / "merged")})
        assert not printed
        AutoModel.from_pretrained(base)
        assert "lm_head" in printed.pop() and not printed, "other code has its reports"
        weights = {key: each for key, each in load_file(file).items() if "layers.0.self_attn.q_proj" not in key}
        save_file(weights, file, {"format": "pt"})
        with pytest.raises(ValueError, match="is incomplete: 1 weights are missing"):
            load_encoder(base, device="cpu", pooling="mean")
        assert "q_proj" in printed.pop()
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("kind", ["mistral", "bert"])
def test_tokens_without_a_row_are_named(tmp_path, caplog, kind):
    """Batches by length need no padding, so such an encoder would train, and what is saved could not be loaded."""
    saved = saved_decoder(tmp_path, kind) if kind != "bert" else saved_encoder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.add_tokens(["playing"])
    tokenizer.save_pretrained(saved)
    model = load_encoder(saved, device="cpu", pooling="mean")
    assert "no row for 1 of the tokens, such as 'playing': call the model's resize_token_embeddings" in caplog.text
    tokenizer.add_special_tokens({"pad_token": "[NONE]"})
    tokenizer.save_pretrained(saved)
    problem = r"no row for 2 of the tokens, including the padding token '\[NONE\]': call the model's resize_"
    with pytest.raises(ValueError, match=problem):
        load_encoder(saved, device="cpu", pooling="mean")
    model.tokenizer.add_special_tokens({"pad_token": "[NONE]"})
    with pytest.raises(ValueError, match=problem):
        Trainer(model, arguments(tmp_path), loss=InfoNCELoss(model))
    model.transformers_model.resize_token_embeddings(len(tokenizer))
    Trainer(model, arguments(tmp_path), loss=InfoNCELoss(model))


def encoder_decoder(folder: Path, kind: str) -> str:
    """A whole T5 or one of its relatives, as hubs have them."""
    tokenizer = tiny_encoder().tokenizer
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    config = CONFIG_MAPPING[kind](vocab_size=len(tokenizer), **sizes)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    for part in (AutoModel.from_config(config), tokenizer):
        part.save_pretrained(folder / kind)
    return str(folder / kind)


@pytest.mark.parametrize(("kind", "dora"), [("bert", True), ("t5", False), ("mt5", True), ("umt5", False)])
def test_a_trained_adapter_is_loaded_and_merged_as_it_was_trained(tmp_path, kind, dora):
    base = saved_encoder(tmp_path / "bert") if kind == "bert" else encoder_decoder(tmp_path, kind)
    model = load_encoder(base, device="cpu", pooling="mean", lora={"r": 2, "use_dora": dora})
    before = {key: weight.clone() for key, weight in model.named_parameters() if "magnitude" in key}
    data = Dataset.from_dict({"anchor": SENTENCES, "positive": SENTENCES[::-1]})
    trainer = Trainer(model, arguments(tmp_path, learning_rate=0.1), data, loss=InfoNCELoss(model, scale=5))
    trainer.train()
    trained = model.eval().encode(SENTENCES)
    now = dict(model.named_parameters())
    assert dora == any((now[key] - weight).abs().max() > 0.01 for key, weight in before.items())
    model.save_pretrained(str(tmp_path / "adapter"))
    run("export", **{"model.name": str(tmp_path / "adapter"), "merge": True, "output": str(tmp_path / "merged")})
    merged = load_encoder(str(tmp_path / "merged"), device="cpu")
    assert not any("decoder" in key for key in load_file(tmp_path / "merged" / "model.safetensors"))
    again = load_encoder(str(tmp_path / "adapter"), device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(weight.requires_grad)
    trainer._load_from_checkpoint(str(tmp_path / "adapter"))  # as a run that resumes, or returns to its best step
    for other in (merged, again, model.eval()):
        np.testing.assert_allclose(other.encode(SENTENCES), trained, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_an_adapter_with_missing_or_unknown_weights_is_refused(tmp_path, kind):
    base = saved_encoder(tmp_path / "bert") if kind == "bert" else saved_decoder(tmp_path)
    load_encoder(base, device="cpu", pooling="mean", lora={"r": 2}).save_pretrained(str(tmp_path / "adapter"))
    (file,) = (tmp_path / "adapter").rglob("adapter_model.safetensors")
    weights = load_file(file)
    (first, value), *others = weights.items()
    problem = f"1 adapter weights are missing or unexpected: {first.removeprefix('base_model.model.')[:20]}"
    for changed in (dict(others), {**weights, first.replace("lora_A", "lora_X"): value.clone()}):
        save_file(changed, file)
        with pytest.raises(ValueError, match=problem):
            load_encoder(str(tmp_path / "adapter"), device="cpu")
        with pytest.raises(ValueError, match=problem):
            run("export", **{"model.name": str(tmp_path / "adapter"), "merge": True, "output": str(tmp_path / "out")})


def test_an_adapter_of_a_language_model_is_loaded(tmp_path):
    """Its keys start with the name of the language model's own encoder."""
    base = saved_encoder(tmp_path / "bert")
    load_encoder(base, device="cpu", lora={"r": 2, "init_lora_weights": False}).save_pretrained(str(tmp_path / "plain"))
    expected = load_encoder(str(tmp_path / "plain"), device="cpu").encode(SENTENCES)
    (file,) = (tmp_path / "plain").rglob("adapter_model.safetensors")
    renamed = {key.replace("base_model.model.", "base_model.model.bert."): w for key, w in load_file(file).items()}
    save_file(renamed, file)
    assert np.array_equal(load_encoder(str(tmp_path / "plain"), device="cpu").encode(SENTENCES), expected)


def test_a_checkpoint_on_4_bits_has_all_trained_weights(tmp_path):
    """Also those of modules_to_save, whose names do not contain lora."""
    options = {"lora": {"r": 2, "modules_to_save": ["norm"]}, "load_in_4bit": True, "device": "cpu", "pooling": "mean"}
    trained, fresh = (load_encoder(saved_decoder(tmp_path), **options) for _ in range(2))
    with torch.no_grad():
        for weight in filter(lambda weight: weight.requires_grad, trained.parameters()):
            weight.add_(0.1)
    fresh.load_state_dict(trained.state_dict())
    assert np.array_equal(fresh.eval().encode(SENTENCES), trained.eval().encode(SENTENCES))


def test_an_adapter_on_4_bits_is_loaded_unquantized_if_asked(tmp_path):
    """And saved so, because further training would train it on unquantized weights."""
    four = load_encoder(saved_decoder(tmp_path), device="cpu", pooling="mean", load_in_4bit=True, lora={"r": 2})
    four.save_pretrained(str(tmp_path / "four"))
    load_encoder(str(tmp_path / "four"), device="cpu", load_in_4bit=False).save_pretrained(str(tmp_path / "whole"))
    for name, asked, expected in (("four", None, True), ("four", False, False), ("whole", None, False)):
        model = load_encoder(str(tmp_path / name), device="cpu", load_in_4bit=asked)
        assert model[0].model.is_quantized == expected
        assert all(weight.is_floating_point() for weight in model.parameters()) != expected
    plain = load_encoder(saved_encoder(tmp_path / "plain"), device="cpu", load_in_4bit=False)
    assert len(plain.encode(SENTENCES)) == len(SENTENCES)

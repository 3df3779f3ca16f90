"""Creating, loading and saving encoders: pooling, random weights, chat templates."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.settings import Model
from raoe_train.losses import InfoNCELoss
from raoe_train.training.trainer import Trainer
from tests.decoders import saved_decoder
from tests.tiny import SENTENCES, saved_encoder
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


def test_random_weights(tmp_path):
    load_encoder(Model(name="scratch", device="cpu"), sentences=SENTENCES).save_pretrained(str(tmp_path / "m"))
    saved = Model(name=str(tmp_path / "m"), device="cpu")
    new = Model(name=str(tmp_path / "m"), device="cpu", random_weights=True)
    old, first, second, other = (
        load_encoder(config, seed=seed) for config, seed in ((saved, 1), (new, 1), (new, 1), (new, 2))
    )
    weights = [model[0].model.embeddings.word_embeddings.weight for model in (old, first, second, other)]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[3])


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


@pytest.mark.parametrize("kind", ["mistral", "bert"])
def test_tokens_without_a_row_are_named(tmp_path, caplog, kind):
    """Batches by length need no padding, so such an encoder would train, and what is saved could not be loaded."""
    saved = saved_decoder(tmp_path, kind) if kind != "bert" else saved_encoder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.add_tokens(["playing"])
    tokenizer.save_pretrained(saved)
    model = load_encoder(saved, device="cpu", pooling="mean")
    assert "rows, but none for 1 tokens, such as 'playing': call the model's resize_token_embeddings" in caplog.text
    tokenizer.add_special_tokens({"pad_token": "[NONE]"})
    tokenizer.save_pretrained(saved)
    problem = r"none for 2 tokens, including the padding token '\[NONE\]': call the model's resize_token_embeddings"
    with pytest.raises(ValueError, match=problem):
        load_encoder(saved, device="cpu", pooling="mean")
    model.tokenizer.add_special_tokens({"pad_token": "[NONE]"})
    with pytest.raises(ValueError, match=problem):
        Trainer(model, arguments(tmp_path), loss=InfoNCELoss(model))
    model.transformers_model.resize_token_embeddings(len(tokenizer))
    Trainer(model, arguments(tmp_path), loss=InfoNCELoss(model))

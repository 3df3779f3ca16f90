"""One model over several devices, as far as a CPU has several: itself and the disk, and hooks that move nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from raoe_train import run
from raoe_train.encoders.device_map import spread
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.named import Model, identity
from raoe_train.generation import GuidedDecoder, Request
from raoe_train.generation.models import LanguageModel, load_language_model, load_tokenizer
from raoe_train.losses import InfoNCELoss
from raoe_train.training import Trainer
from tests.decoders import saved_decoder
from tests.tiny import SENTENCES

PARTS = ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")
HALF_ON_DISK = {**dict.fromkeys(PARTS, "cpu"), "layers.1": "disk"}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved_decoder(tmp_path_factory.mktemp("decoder"))


def with_head(parts):
    return {**{f"model.{name}": place for name, place in parts.items()}, "lm_head": parts["embed_tokens"]}


@pytest.mark.parametrize(
    "device_map", ["auto", {"": "cpu"}, with_head(HALF_ON_DISK), with_head(dict.fromkeys(PARTS, "disk"))], ids=str
)
def test_a_writer_says_the_same_wherever_its_layers_are(decoder, device_map):
    tokenizer = load_tokenizer(LanguageModel(decoder))
    ids = [tokenizer(text)["input_ids"] for text in SENTENCES]
    requests = [Request(ids[0], ids[1], 1.5, 9), Request(ids[2], None, 1.0, 3), Request(ids[3], ids[2], 2.0, 6)]

    def answers(**where):
        model = load_language_model(LanguageModel(decoder, dtype="float64", **where))
        return [answer.ids for answer in GuidedDecoder(model, tokenizer).answers(requests, slots=2)]

    assert answers(device_map=device_map) == answers(device="cpu")


def test_an_encoder_says_the_same_wherever_its_layers_are(decoder, tmp_path):
    plain = load_encoder(decoder, pooling="mean", device="cpu")
    expected = plain.encode(SENTENCES)
    (tmp_path / "saved").mkdir()
    plain.save(str(tmp_path / "saved"))
    for name in (decoder, str(tmp_path / "saved")):
        for device_map in ("auto", HALF_ON_DISK):
            made = load_encoder(name, pooling="mean", device_map=device_map)
            np.testing.assert_array_equal(made.encode(SENTENCES), expected)
    assert made.hf_device_map["layers.1"] == "disk"
    assert identity(Model(decoder, device_map="auto")) == identity(Model(decoder, device="cpu"))


def test_dots_of_a_recipe_are_names_of_parts(decoder, tmp_path):
    """Where "layers.1" is read as a section, the map is the same."""
    (tmp_path / "in.txt").write_text("\n".join(SENTENCES))
    shared = {"model.name": decoder, "model.pooling": "mean", "data.input": str(tmp_path / "in.txt")}
    run("encode", **shared, **{"model.device": "cpu", "output": str(tmp_path / "a.npy")})
    run("encode", **shared, **{"model.device_map": HALF_ON_DISK, "output": str(tmp_path / "b.npy")})
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))


@pytest.mark.parametrize("lora", [{}, {"r": 2, "lora_dropout": 0.3}], ids=["all", "lora"])
def test_training_leaves_an_encoder_where_it_is(decoder, tmp_path, monkeypatch, lora):
    """As with two GPUs, whose hooks a CPU can have, too: nobody moves it, and it learns the same."""
    pairs = Dataset.from_dict({"anchor": SENTENCES[:8], "positive": SENTENCES[3:11]})

    def trained(spread_out):
        model = load_encoder(decoder, pooling="mean", device="cpu", bidirectional_layers=1, lora=lora)
        if spread_out:
            inner = model[0].model.decoder
            dispatch_model(inner, dict.fromkeys(PARTS, "cpu"), force_hooks=True)
            model.clear_placement_cache()
            model.hf_device_map = inner.hf_device_map
        arguments = SentenceTransformerTrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none",
            use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        with monkeypatch.context() as patch:
            if spread_out:
                patch.setattr(SentenceTransformer, "_apply", moved)
            Trainer(model, arguments, pairs, loss=InfoNCELoss(model, mini_batch_size=2)).train()
        return model

    def moved(*_, **__):
        raise AssertionError("it was moved to one device")

    plain, ours = trained(False), trained(True)
    assert hasattr(ours[0].model.decoder.layers[1], "_hf_hook")
    for (name, first), (_, second) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert torch.equal(first, second), name
    with pytest.raises(ValueError, match="device_map is for batches read by length"):
        Trainer(ours, SentenceTransformerTrainingArguments(str(tmp_path)), pairs, by_length=False)


def test_what_does_not_go_together(decoder, monkeypatch):
    for settings, problem in (
        ({"device": "cpu"}, "leave model.device out"),
        ({"random_weights": True}, "device_map is for saved weights"),
        ({"name": "scratch"}, "device_map is for saved weights"),
        ({"device_map": HALF_ON_DISK}, r"leaves 5 parts without room on a GPU \(embed_tokens, rotary_emb, "),
        ({"device_map": "everywhere"}, "device_map takes NAME=VALUE or auto or balanced"),
    ):
        with pytest.raises(ValueError, match=problem):
            load_encoder(settings.pop("name", decoder), **{"device_map": "auto", "lora": {"r": 2}, **settings})
    with pytest.raises(ValueError, match=r"leave model\.device out"):
        load_language_model(LanguageModel(decoder, device="cpu", device_map="auto"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for load in (lambda: load_encoder(decoder, device_map="auto"),
                 lambda: load_language_model(LanguageModel(decoder, device_map="auto"))):  # fmt: skip
        with pytest.raises(ValueError, match="one process's, whose model has several GPUs: start it without torchrun"):
            load()


def test_weights_that_found_no_room_are_not_trained():
    """Pretended: accelerate's map of two GPUs that are too small."""
    model = torch.nn.Module()
    model.hf_device_map = {"embed_tokens": 0, "layers.0": 1, "layers.1": "cpu"}
    with pytest.raises(ValueError, match="leaves 1 parts"):
        spread(model, train=True)
    assert spread(model, train=False) == model.hf_device_map
    model.hf_device_map = {"embed_tokens": 0, "layers.0": 1}
    assert spread(model, train=True) == model.hf_device_map


def test_a_dry_run_has_no_devices(decoder, tmp_path):
    rows = "sentence1\tsentence2\tscore\n" + "".join(f"{text}\ta man\t0.{n % 10}\n" for n, text in enumerate(SENTENCES))
    (tmp_path / "pairs.tsv").write_text(rows)
    with pytest.raises(ValueError, match="dry_run loads no weights, so no device has them"):
        run("train", **{"model.name": decoder, "model.device_map": "auto", "loss.name": "cosent",
                        "data.train": str(tmp_path / "pairs.tsv"), "dry_run": True})  # fmt: skip

"""Pooling of models that do not declare it: by family name, or a guess with a warning; else the saved one."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from raoe_train.encoders.load import load_encoder
from raoe_train.settings import FrozenEncoder
from tests.tiny import tiny_encoder

META = {"format": "pt"}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A function that saves a BERT by transformers alone, in a folder of that name."""
    model = tiny_encoder()

    def save(name: str) -> str:
        folder = str(tmp_path_factory.mktemp("models") / name)
        model[0].model.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
        return folder

    return save


def pooling(model) -> str:
    return model[1].pooling_mode


@pytest.mark.parametrize("name", ["unsup-simcse-bert", "SynCSE-partial-RoBERTa-base"])
def test_simcse_uses_the_first_token(bare, caplog, name):
    assert pooling(load_encoder(bare(name))) == "cls" and not caplog.text
    assert pooling(load_encoder(FrozenEncoder(bare(name)))) == "cls"  # also for teachers and references
    assert pooling(load_encoder(bare(name), pooling="mean")) == "mean"


def test_guessed_pooling_warns(bare, caplog):
    folder = bare("somebodys-encoder")
    assert pooling(load_encoder(folder)) == "mean"
    assert f"{folder} does not define its pooling, so mean pooling is used" in caplog.text
    caplog.clear()
    load_encoder(folder, pooling="cls")
    assert pooling(load_encoder(bare("bert-base-uncased"))) == "mean" and not caplog.text  # a language model


def test_missing_weights_are_an_error(bare):
    """They would be random. Missing pooler weights are allowed: nothing uses them."""
    folder = bare("bert-base-uncased")
    weights = load_file(f"{folder}/model.safetensors")
    pooler = [key for key in weights if "pooler" in key]
    save_file({key: weights[key] for key in weights if key not in pooler}, f"{folder}/model.safetensors", META)
    assert pooler and load_encoder(folder) is not None
    cut = [key for key in weights if "output.dense" in key]
    save_file({key: weights[key] for key in weights if key not in cut}, f"{folder}/model.safetensors", META)
    with pytest.raises(ValueError, match=rf"is incomplete: {len(cut)} weights .*output\.dense"):
        load_encoder(FrozenEncoder(folder))


@pytest.mark.parametrize("length", [1, 2])
def test_max_length_must_leave_room_for_text(bare, length):
    with pytest.raises(ValueError, match=r"leaves no room for text: .* adds 2 special tokens"):
        load_encoder(bare("bert-base-uncased"), max_seq_length=length)
    assert load_encoder(bare("bert-base-uncased"), max_seq_length=3).max_seq_length == 3


def test_saved_pooling_is_kept(tmp_path, caplog):
    folder = str(tmp_path / "my-simcse")
    tiny_encoder().save(folder)
    assert pooling(load_encoder(folder)) == pooling(SentenceTransformer(folder)) == "mean" and not caplog.text

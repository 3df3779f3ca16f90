"""Frozen encoders: names and sections, loading, encoding and the cache."""

import json

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from raoe_train import parts
from raoe_train.config import hints_of
from raoe_train.encoders import embed as frozen
from raoe_train.encoders.load import Changes, as_model, load_encoder
from raoe_train.inputs import recorded
from raoe_train.settings import Encoder, FrozenEncoder, Model
from tests.tiny import SENTENCES

# As jina-embeddings-v3 is published: a module of its own, whose forward takes the task.
CUSTOM = """
import torch

class Letters(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(26.0))

    def tokenize(self, texts, **kwargs):
        counts = [[text.lower().count(chr(97 + letter)) for letter in range(26)] for text in texts]
        return {"counts": torch.tensor(counts, dtype=torch.float32)}

    def forward(self, features, task=None):
        features["sentence_embedding"] = (features["counts"] + {None: 0, "text-matching": 1}[task]) * self.weight
        return features

    def get_sentence_embedding_dimension(self):
        return 26

    def save(self, folder, *args, **kwargs):
        pass

    @staticmethod
    def load(folder):
        return Letters()
"""


def test_identity_is_equal_for_equal_encoders(encoder):
    frozen_encoder = FrozenEncoder(encoder, prompt="query: {text}", device="cpu", batch_size=3, cache="x")
    same = Model(encoder, prompt="query: {text}"), Encoder(encoder, prompt="query: {text}", device="cuda")
    assert recorded(frozen_encoder) == recorded(same[0]) == recorded(same[1])
    for other in (
        FrozenEncoder(encoder),
        FrozenEncoder(encoder, prompt="query: {text}", task="x"),
        FrozenEncoder(encoder, prompt="query: {text}", pooling="max"),
        Model(encoder, prompt="query: {text}", dtype="bfloat16"),
    ):
        assert recorded(other) != recorded(frozen_encoder)


def test_a_name_and_settings(encoder):
    model = load_encoder(encoder, device="cpu", lora={"r": 2}, max_seq_length=8)
    assert model.max_seq_length == 8 and any("lora" in name for name, _ in model.named_parameters())
    assert {*Changes.__annotations__} == {*hints_of(Model)}
    assert as_model(Encoder("a"), lora={"r": "1"}).lora == {"r": 1}
    with pytest.raises(ValueError, match=r"unknown key model.poolin \(did you mean model.pooling\?\)"):
        load_encoder(encoder, poolin="max")
    with pytest.raises(ValueError, match="max_seq_length must be an integer"):
        load_encoder(encoder, max_seq_length="long")


def test_a_prompt_is_a_template_or_a_prefix(encoder):
    with_prefix, with_template, without = (
        frozen.embedder(FrozenEncoder(encoder, prompt=prompt, device="cpu"), "teacher")(SENTENCES)
        for prompt in ("a man ", "a man {text}", None)
    )
    model = SentenceTransformer(encoder, device="cpu")
    np.testing.assert_array_equal(with_prefix, model.encode(SENTENCES, prompt="a man ", batch_size=64))
    np.testing.assert_array_equal(with_prefix, with_template)
    np.testing.assert_array_equal(without, model.encode(SENTENCES, batch_size=64))
    assert np.abs(with_prefix - without).max() > 1e-3


def test_encoder_with_custom_code_is_loaded_unchanged(tmp_path):
    (tmp_path / "custom_st.py").write_text(CUSTOM)
    module = {"idx": 0, "name": "0", "path": "", "type": "custom_st.Letters", "kwargs": ["task"]}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    (tmp_path / "config_sentence_transformers.json").write_text("{}")
    teacher = FrozenEncoder(str(tmp_path), trust_remote_code=True, task="text-matching", device="cpu", prompt="abc ")
    result = frozen.embedder(teacher, "teacher")(SENTENCES)
    model = SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu")
    np.testing.assert_array_equal(result, model.encode(SENTENCES, task="text-matching", prompt="abc "))
    assert np.abs(result - model.encode(SENTENCES)).max() > 0
    with pytest.raises(ValueError, match="the custom module Letters does not support LoRA"):
        load_encoder(str(tmp_path), trust_remote_code=True, device="cpu", lora={"r": 2})


def test_embeddings_are_cached(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "SHARD", 4)
    teacher = FrozenEncoder(encoder, device="cpu", cache=str(tmp_path))
    made = frozen.embeddings(teacher, SENTENCES, "reference")
    np.testing.assert_allclose(made, SentenceTransformer(encoder, device="cpu").encode(SENTENCES), atol=1e-6)
    assert len(list(tmp_path.glob("*/*.npy"))) == 3
    monkeypatch.setattr(frozen, "encode_sentences", None)  # nothing is encoded again, for any role and batch size
    paths = frozen.embedding_parts(Model(encoder), SENTENCES, "other role", tmp_path)
    np.testing.assert_array_equal(parts.read_parts(paths), made)
    with pytest.raises(TypeError):
        frozen.embeddings(teacher, SENTENCES[:4], "reference")

"""Scores and token correlations by layer, and representative words, against another way to each."""

import copy

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import CONFIG_MAPPING, AutoModel

from benchmarks.studies import bellm
from benchmarks.studies.__main__ import main
from benchmarks.studies.pretrain import small_llama
from raoe_train.data.files import write_rows
from raoe_train.encoders.bidirectional.configuration import ARCHITECTURES
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.settings import Model, Scratch
from raoe_train.evaluation.tasks import read_tasks
from tests.tiny import SENTENCES

SIZES = {
    "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 16, "head_dim": 8, "pad_token_id": 0, "sliding_window": 64, "max_position_embeddings": 40,
}  # fmt: skip
PROMPT = 'The word for {text} is:"'


def spread(model):
    """Larger weights, so that every layer matters."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise.to(parameter.dtype))
    return model


@pytest.fixture(scope="module", autouse=True)
def saved(tmp_path_factory):
    """FOLDER/llama and FOLDER/bert, with tokenizers."""
    global FOLDER
    FOLDER = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 16, "layers": 3, "heads": 2, "intermediate_size": 16}
    with torch.random.fork_rng(devices=[]):
        model, tokenizer = small_llama(SENTENCES, 80, vocab_size=300, **sizes)
    for part in (spread(model), tokenizer):
        part.save_pretrained(FOLDER / "llama")
    scratch = Scratch(vocab_size=300, **sizes)
    bert = load_encoder(Model(name="scratch", device="cpu", scratch=scratch), sentences=SENTENCES)
    spread(bert).save_pretrained(str(FOLDER / "bert"))


def encoder(name="llama", **settings):
    return load_encoder(Model(name=str(FOLDER / name), device="cpu", max_seq_length=40, **settings)).double().eval()


def around(inner):
    """An encoder with another transformer in it."""
    model = encoder(pooling="mean")
    model[0].model = inner
    return model


def decoder(architecture):
    torch.manual_seed(3)
    config = CONFIG_MAPPING[architecture](**SIZES)
    return spread(AutoModel.from_config(config).double()).eval()


def shorter(whole, count):
    """A new model of fewer layers with the weights of the first ones."""
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    model = AutoModel.from_config(config).double().eval()
    assert not model.load_state_dict(whole.state_dict(), strict=False).missing_keys
    return model


@pytest.fixture
def task(tmp_path):
    rows = [
        {"sentence1": SENTENCES[i % 11], "sentence2": SENTENCES[(5 * i + 2) % 11], "score": 7 * i % 11 / 2}
        for i in range(15)
    ]
    write_rows(tmp_path / "a.jsonl", list(rows[0]), rows)
    write_rows(tmp_path / "b.jsonl", list(rows[0]), rows[4:])
    return tmp_path


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "bert", "distilbert", "modernbert"])
def test_embeddings_are_those_of_shorter_models(architecture):
    whole = decoder(architecture)
    for size in (4, 64):
        layers, correlations = bellm.encode_by_layer(around(copy.deepcopy(whole)), SENTENCES, batch_size=size)
        assert correlations.shape == (len(SENTENCES), 4)
        for count, found in enumerate(layers, 1):
            np.testing.assert_allclose(found, around(shorter(whole, count)).encode(SENTENCES), atol=1e-6)
    assert np.abs(np.diff(layers, axis=0)).max(axis=(1, 2)).min() > 1e-3


@pytest.mark.parametrize(
    "settings, pivot",
    [
        ({"pooling": "mean"}, -1),
        ({"prompt": PROMPT, "pooling": "last"}, -1),
        ({"bidirectional_layers": 2, "pooling": "mean"}, -1),
        ({"name": "bert"}, 0),
    ],
)
def test_dependency(settings, pivot, task):
    """Against one sentence at a time, without padding, a pair of tokens at a time."""
    model, expected = encoder(**settings), []
    for text in SENTENCES:
        features = model.preprocess([text], prompt=model.prompts.get("default"))
        with torch.no_grad():
            hidden = model[0](features)["token_embeddings"][0].numpy()
        others = np.delete(hidden, pivot % len(hidden), axis=0)
        expected.append(np.mean([stats.spearmanr(hidden[pivot], row).statistic for row in others]))
    found = bellm.by_layer(model, read_tasks(["a"], task), batch_size=4)
    assert found["dependency"][-1] == pytest.approx(np.mean(expected), abs=1e-6) and np.ptp(expected) > 0.01
    assert found["quartiles"] == pytest.approx(np.percentile(expected, (25, 50, 75)), abs=1e-6)
    assert len(found["dependency"]) == 3


def test_the_command(task, tmp_path, capsys):
    words = ["bellm", "--model", str(FOLDER / "llama"), "--tasks", "a", "--data_dir", str(task), "--output"]
    words.append(str(tmp_path / "out"))
    assert main([*words, "--words", "--model.prompt", PROMPT]) == 0
    assert "3 layers: " in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bellm.json", "layers.png"}
    assert main([*words, "--words"]) == 2
    assert "--words needs --model.prompt with {text}" in capsys.readouterr().err

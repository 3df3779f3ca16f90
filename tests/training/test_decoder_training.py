"""Training decoders: triplets, and BeLLM's recipe on a small one."""

from __future__ import annotations

import pytest
import torch

from raoe_train import run
from raoe_train.cli import load
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.settings import Model
from raoe_train.jobs.check import check_encoder
from tests.decoders import saved_decoder
from tests.tiny import SENTENCES, training_data


def nli_file(path, premises=12):
    lines = ["premise\thypothesis\tlabel"]
    for n in range(premises):
        for label, word in enumerate(("surely", "maybe", "never")):
            lines.append(f"{SENTENCES[n % len(SENTENCES)]} {n}\t{word} {SENTENCES[(n + 1) % len(SENTENCES)]}\t{label}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    nli_file(folder / "nli.tsv")
    saved_decoder(folder)
    return folder


def test_triplets_of_a_pair_file(tmp_path, capsys):
    source = nli_file(tmp_path / "nli.tsv")
    config = load("train", "bellm", {"data.train": [source]})
    datasets, texts = training_data(config)
    assert datasets["nli"].column_names == ["anchor", "positive", "negative"] and len(datasets["nli"]) == 12
    assert datasets["nli"][0]["positive"].startswith("surely") and datasets["nli"][0]["negative"].startswith("never")
    assert len(list(texts)) == 36
    assert ": 12 rows, 12 rows dropped (neutral)" in capsys.readouterr().out
    datasets, _ = training_data(load("train", "bellm", {"data.train": [source], "data.neutral": True}))
    assert datasets["nli"].column_names == ["anchor", "positive", "negative", "neutral"]
    (tmp_path / "none.tsv").write_text("premise\thypothesis\tlabel\na b\tc\t0\n")
    with pytest.raises(ValueError, match="contradict"):
        training_data(load("train", "bellm", {"data.train": [str(tmp_path / "none.tsv")]}))


def test_infonce_trains_a_bidirectional_decoder(decoder, tmp_path):
    folder = decoder
    prompt = 'Summarize sentence {text} in one word:"'
    results = {}
    for mini in (None, 4):
        out = tmp_path / f"out{mini}"
        made = {
            "model.name": str(folder / "llama"),
            "model.device": "cpu",
            "model.prompt": prompt,
            "model.bidirectional_layers": "all",
            "model.pooling": "mean",
            "model.dtype": "float32",
            "model.load_in_4bit": False,
            "model.lora": {"r": 2, "lora_dropout": 0},
            "data.train": [str(folder / "nli.tsv")],
            "data.dev": None,
            "loss.mini_batch_size": mini,
            "evaluation.tasks": [],
            "training": {"per_device_train_batch_size": 12, "learning_rate": 1e-3, "bf16": False},
            "output": str(out),
        }
        metrics = run("train", "bellm", **made)
        assert metrics["steps"] == 3 and metrics["scale"] == {"nli": 20}
        results[mini] = load_encoder(Model(name=str(out), device="cpu"))
        assert check_encoder(results[mini])["failed"] == []
    # gradient caching is the same training
    plain, cached = (torch.tensor(results[mini].encode(SENTENCES)) for mini in (None, 4))
    torch.testing.assert_close(cached, plain, atol=1e-3, rtol=1e-2)

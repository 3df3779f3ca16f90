"""Training decoders: triplets, the tiny recipe, analyses in `evaluate`."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from raoe_train import run
from raoe_train.cli import load
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.settings import Model, Scratch
from raoe_train.jobs.check import check_encoder
from tests.tiny import SENTENCES, training_data

SCRATCH = {
    "architecture": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "layers": 2,
    "heads": 2,
    "intermediate_size": 32,
    "dropout": 0.0,
}


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
    made = Model(name="scratch", device="cpu", max_seq_length=32, scratch=Scratch(**SCRATCH))
    model = load_encoder(made, sentences=[text for n in range(12) for text in (f"{text} {n}" for text in SENTENCES)])
    whole = AutoModelForCausalLM.from_config(model[0].model.config)
    whole.model.load_state_dict(model[0].model.state_dict())
    whole.save_pretrained(folder / "out")
    model.tokenizer.save_pretrained(folder / "out")
    return folder


def test_triplets_of_a_pair_file(tmp_path, capsys):
    source = nli_file(tmp_path / "nli.tsv")
    config = load("train", "bellm-tiny", {"data.train": [source]})
    datasets, texts = training_data(config)
    assert datasets["nli"].column_names == ["anchor", "positive", "negative"] and len(datasets["nli"]) == 12
    assert datasets["nli"][0]["positive"].startswith("surely") and datasets["nli"][0]["negative"].startswith("never")
    assert len(list(texts)) == 36
    assert "12 triplets, 12 rows dropped (neutral)" in capsys.readouterr().out
    datasets, _ = training_data(load("train", "bellm-tiny", {"data.train": [source], "data.neutral": True}))
    assert datasets["nli"].column_names == ["anchor", "positive", "negative", "neutral"]
    (tmp_path / "none.tsv").write_text("premise\thypothesis\tlabel\na b\tc\t0\n")
    with pytest.raises(ValueError, match="contradict"):
        training_data(load("train", "bellm-tiny", {"data.train": [str(tmp_path / "none.tsv")]}))


def test_infonce_trains_a_bidirectional_decoder(decoder, tmp_path):
    folder = decoder
    prompt = 'Summarize sentence {text} in one word:"'
    results = {}
    for mini in (None, 4):
        out = tmp_path / f"out{mini}"
        options = {
            "model.name": str(folder / "out"),
            "model.device": "cpu",
            "model.prompt": prompt,
            "model.bidirectional_layers": "all",
            "data.train": [str(folder / "nli.tsv")],
            "data.dev": None,
            "loss.mini_batch_size": mini,
            "evaluation.tasks": [],
            "training": {"num_train_epochs": 3, "per_device_train_batch_size": 12, "learning_rate": 1e-3},
            "output": str(out),
        }
        metrics = run("train", "bellm-tiny", **options)
        assert metrics["steps"] == 3 and metrics["scale"] == {"nli": 20}
        results[mini] = load_encoder(Model(name=str(out), device="cpu"))
        assert check_encoder(results[mini])["failed"] == []
    # gradient caching is the same training
    plain, cached = (torch.tensor(results[mini].encode(SENTENCES)) for mini in (None, 4))
    torch.testing.assert_close(cached, plain, atol=1e-3, rtol=1e-2)


def test_evaluate_with_analyses(decoder, tmp_path):
    folder = decoder
    lines = ["sentence1\tsentence2\tscore", *(f"{text} 1\t{SENTENCES[0]}\t{n}" for n, text in enumerate(SENTENCES))]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    options = {
        "model.name": str(folder / "out"),
        "model.device": "cpu",
        "model.prompt": 'Summarize sentence {text} in one word:"',
        "tasks": [str(tmp_path / "pairs.tsv")],
        "analyses": ["degradation", "dependency", "words"],
        "output": str(tmp_path / "found.json"),
    }
    result = run("evaluate", **options)["analyses"]
    assert result["degradation"]["layers"] == [1, 2]
    score = json.loads((tmp_path / "found.json").read_text())["tasks"][options["tasks"][0]]["spearman"]
    assert result["degradation"]["average"][-1] == pytest.approx(score)
    assert -1 <= result["dependency"]["lower_quartile"] <= result["dependency"]["upper_quartile"] <= 1
    assert result["words"]["sentences"] == 12 and 0 <= result["words"]["rare_share"] <= 1
    assert [path.name for path in tmp_path.glob("*.png")] == ["found-degradation.png"]
    with pytest.raises(ValueError, match="analyses must be a list, each one of degradation, dependency, words, got"):
        run("evaluate", **{**options, "analyses": ["layers"]})


@pytest.mark.slow
def test_the_tiny_recipe_learns(tmp_path):
    metrics = run("train", "bellm-tiny", output=str(tmp_path / "out"))
    assert metrics["before"]["tasks"]["builtin#test"]["spearman"] < 45
    assert metrics["after"]["tasks"]["builtin#test"]["spearman"] > 75
    model = load_encoder(Model(name=str(tmp_path / "out"), device="cpu"))
    assert check_encoder(model)["failed"] == []

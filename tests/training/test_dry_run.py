"""Dry runs with a small BERT that has a config and a tokenizer, but no weights."""

import math

import pytest
import torch
from transformers import BertConfig, BertModel

from raoe_train import run
from raoe_train.encoders import preflight as sizes
from tests.tiny import SENTENCES, tiny_encoder

SIZES = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, vocab_size=120)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    BertConfig(**SIZES, max_position_embeddings=64).save_pretrained(folder / "model")
    tiny_encoder().tokenizer.save_pretrained(folder / "model")
    for name, rows in (("a", 10), ("b", 3)):
        lines = [f"{SENTENCES[n % 11]}\t{SENTENCES[(n + 1) % 11]}\t{n}\t{n % 3}\n" for n in range(rows)]
        (folder / f"{name}.tsv").write_text("sentence1\tsentence2\tscore\tlabel\n" + "".join(lines))
    return {
        "recipe": "raoe-s1",
        "dry_run": True,
        "model": {"name": str(folder / "model"), "max_seq_length": 8, "device": "cpu"},
        "data": {"train": [str(folder / "a.tsv"), str(folder / "b.tsv")]},
        "training": {"per_device_train_batch_size": 4, "num_train_epochs": 3},
    }


def test_steps_tokens_and_memory_by_hand(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = run("train", **asked)
    assert result["rows"] == {"a": 10, "b": 3} and result["steps"] == 3 * (3 + 1)  # incomplete batches, and none mixed
    tokenizer = tiny_encoder().tokenizer
    tokens = {text: min(len(ids), 8) for text, ids in zip(SENTENCES, tokenizer(SENTENCES)["input_ids"], strict=True)}
    rows = {name: [tokens[SENTENCES[n % 11]] + tokens[SENTENCES[(n + 1) % 11]] for n in range(count)]
            for name, count in result["rows"].items()}  # fmt: skip
    assert result["tokens"] == 3 * (sum(rows["a"]) + sum(rows["b"]))
    size = sum(weight.numel() for weight in BertModel(BertConfig(**SIZES, max_position_embeddings=64)).parameters())
    assert result["parameters"] == result["trained"] == size
    assert (memory := result["memory_gb"])["weights"] == pytest.approx(4 * size / 1e9)
    assert memory["gradients and optimizer"] == pytest.approx(12 * size / 1e9)
    row = max(sum(its) / len(its) for its in rows.values())  # of the longer source
    bert, kept = BertModel(BertConfig(**SIZES, max_position_embeddings=64)), {}
    own = {weight.data_ptr() for weight in bert.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        bert.train()(torch.zeros(8, math.ceil(row / 2), dtype=torch.long))  # 4 rows of two texts
    size = sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in own)
    assert memory["activations"] == pytest.approx(size * (row / 2) / math.ceil(row / 2) / 1e9, rel=0.2)
    assert memory["sum"] == pytest.approx(sum(value for name, value in memory.items() if name != "sum"))
    assert f"{result['steps']} steps" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_settings_that_reduce_memory(asked):
    plain = run("train", **asked)["memory_gb"]
    smaller = run("train", **{**asked, "loss": {"mini_batch_size": 1}})["memory_gb"]
    assert smaller["activations"] == pytest.approx(plain["activations"] / 4) and smaller["weights"] == plain["weights"]
    few, more = (run("train", **{**asked, "loss": {"mini_batch_num_tokens": size}})["memory_gb"] for size in (10, 30))
    assert more["activations"] == pytest.approx(3 * few["activations"]) and more["activations"] < plain["activations"]
    short = run("train", **{**asked, "training": {"per_device_train_batch_size": 4, "max_steps": 6, "bf16": True}})
    assert short["steps"] == 6 and short["memory_gb"]["activations"] == pytest.approx(plain["activations"] / 2)
    lora = {"lora": {"r": 2, "target_modules": ["query", "value"]}}
    assert run("train", **{**asked, "model": asked["model"] | lora})["trained"] == 3 * 2 * 2 * (16 + 16)


def test_settings_that_do_not_fit(asked, tmp_path, monkeypatch):
    """An error before anything is loaded, because the folder has no weights."""
    size = sum(weight.numel() for weight in BertModel(BertConfig(**SIZES, max_position_embeddings=64)).parameters())
    monkeypatch.setattr(sizes, "device_memory", lambda device: 16 * size - 1)
    real = {**asked, "dry_run": False, "output": str(tmp_path / "out")}
    with pytest.raises(ValueError, match=r"does not fit: its weights, gradients and Adam's moments take about 0\.0 GB"):
        run("train", **real)
    monkeypatch.setattr(sizes, "device_memory", lambda device: 16 * size)
    with pytest.raises(OSError, match="no file named"):  # now it is the weights that are missing
        run("train", **real)


def test_missing_files_are_reported(asked, tmp_path):
    data = {**asked["data"], "dev": str(tmp_path / "dev.tsv")}
    with pytest.raises(FileNotFoundError, match=r"no such file: .*dev\.tsv"):
        run("train", **{**asked, "data": data})
    with pytest.raises(FileNotFoundError, match=r"no such model directory: \./nowhere"):
        run("train", **{**asked, "model": {"name": "./nowhere"}})


def test_hub_error_names_the_model(asked, tmp_path, monkeypatch):
    """The hub's own error has several lines, and none names the model."""
    from transformers import AutoConfig

    def gated(*args, **keys):
        raise OSError("401 Client Error.\n\nCannot access gated repo.\nPlease log in.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", gated)
    monkeypatch.setattr("raoe_train.encoders.load._load", gated)
    for dry in (True, False):
        with pytest.raises(OSError, match=r"^a/b cannot be loaded: 401 Client Error\. Cannot access gated repo\. "):
            run("train", **{**asked, "model": {"name": "a/b"}, "dry_run": dry, "output": str(tmp_path / "out")})


def test_models_without_a_config(asked):
    with pytest.raises(ValueError, match=r"dry_run cannot estimate model\.name scratch"):
        run("train", **{**asked, "model": {"name": "scratch"}})


def test_an_older_folder_of_sentence_transformers(asked, tmp_path):
    """With transformer and tokenizer in a folder of their own."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "0_Transformer").symlink_to(asked["model"]["name"])
    older = {**asked["model"], "name": str(tmp_path / "old")}
    assert run("train", **{**asked, "model": older}) == run("train", **asked)

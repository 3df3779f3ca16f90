"""A small language model pretrained from scratch, then used by `generate` and `train`."""

import re

import pytest

import raoe_train as rt
from benchmarks.studies.__main__ import main

TINY = ["--sizes.vocab_size", "600", "--sizes.hidden_size", "32", "--sizes.layers", "2", "--sizes.heads", "2",
        "--sizes.intermediate_size", "32"]  # fmt: skip


@pytest.mark.slow
def test_a_pretrained_decoder_writes_chains_and_becomes_an_encoder(tmp_path, capsys):
    words = ["pretrain", "--data", "builtin-nli#train", "--max_length", "32", *TINY, "--training.bf16", "false"]
    short = [*words, "--training.max_steps=1", f"--output={tmp_path / 'short'}"]
    longer = [*words, "--training.max_steps=60", "--training.learning_rate=3e-3", f"--output={tmp_path / 'lm'}"]
    assert main(short) == main(longer) == 0
    little, much = (float(number) for number in re.findall(r"perplexity ([\d.]+)", capsys.readouterr().out))
    assert much < little / 5
    assert main(longer) == 2, "the output is there"
    assert main([*words, "--sises.layers=1", "--output=new"]) == 2

    sentences = tmp_path / "sentences.txt"
    sentences.write_text("A man plays a guitar.\nA dog sleeps.\n")
    made = rt.generate(
        model={"name": str(tmp_path / "lm"), "device": "cpu"}, data={"input": str(sentences)},
        generation={"steps": 2, "prompt": "{sentence}", "do_sample": True, "max_new_tokens": 24, "verify": False},
        output=str(tmp_path / "chains.jsonl"),
    )  # fmt: skip
    assert made["chains"] + sum(made["failed_chains"].values()) == 2
    metrics = rt.train(
        "bellm", model={"name": str(tmp_path / "lm"), "device": "cpu", "load_in_4bit": False, "dtype": None},
        data={"train": ["builtin-nli#train"], "max_rows": 200}, training={"max_steps": 2, "save_strategy": "no"},
        output=str(tmp_path / "encoder"),
    )  # fmt: skip
    assert metrics["steps"] == 2
    assert rt.load_encoder(str(tmp_path / "encoder"), device="cpu").encode("a man").shape == (32,)

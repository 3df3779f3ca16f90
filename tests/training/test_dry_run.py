"""A dry run: a few steps, from which the whole run's time and memory are known; and models that do not fit."""

import functools
import json
import random
import re
import subprocess
import sys

import pytest
from transformers import BertConfig, BertModel

from raoe_train import run
from raoe_train.training.callbacks import Meter
from tests.tiny import SENTENCES, tiny_encoder

SIZES = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, vocab_size=120)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    BertModel(BertConfig(**SIZES, max_position_embeddings=64)).save_pretrained(tmp_path / "model")
    tiny_encoder().tokenizer.save_pretrained(tmp_path / "model")
    for name, rows in (("a", 10), ("b", 3)):
        lines = [f"{SENTENCES[n % 11]}\t{SENTENCES[(n + 1) % 11]}\t{n}\t{n % 3}\n" for n in range(rows)]
        (tmp_path / f"{name}.tsv").write_text("sentence1\tsentence2\tscore\tlabel\n" + "".join(lines))
    return {
        "recipe": "raoe-s1",
        "model": {"name": "model", "max_seq_length": 8, "device": "cpu"},
        "data": {"train": ["a.tsv", "b.tsv"]},
        "training": {"per_device_train_batch_size": 4, "num_train_epochs": 3},
    }


def test_steps_time_and_memory(asked, tmp_path, monkeypatch, capsys):
    ends = iter([5.0, 7.0, 7.5, 8.5])  # seconds after each step

    def on_step_end(meter, args, state, control, **kwargs):
        meter.seconds = next(ends)
        if state.global_step == 1:
            meter.first_seconds = meter.seconds

    monkeypatch.setattr(Meter, "on_step_end", on_step_end)
    monkeypatch.setattr(Meter, "on_epoch_end", lambda *_, **__: None)
    monkeypatch.setattr("raoe_train.training.callbacks.peak_mb", lambda cuda: 1234.5)
    before = sorted(tmp_path.rglob("*"))
    found = run("train", **asked, dry_run=True)
    steps = 3 * (3 + 1)  # incomplete batches, and none mixed
    expected = {"rows": {"a": 10, "b": 3}, "steps": steps, "seconds": pytest.approx(steps * (8.5 - 5) / 3)}
    assert found == {**expected, "peak_memory_mb": 1234.5}
    assert "12 steps take about 14.0 seconds; peak memory 1.23 GB" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("training", "steps"), [({"gradient_accumulation_steps": 2, "num_train_epochs": 1}, 2), ({"min_steps": 13}, 13)]
)
def test_steps_are_those_of_the_run(asked, training, steps):
    asked["training"] |= training
    assert run("train", **asked, dry_run=True)["steps"] == steps
    assert run("train", **asked, output="out")["steps"] == steps


@pytest.mark.slow
def test_memory_is_that_of_the_whole_run(tmp_path):
    """On a CPU too, where torch compiles products for the shapes of every batch. Layers share shapes, so one is enough:
    with the 1,024 shapes that torch keeps by itself the run takes 40 % more than the dry run, with our 64 10 %."""
    draw, known, rows = random.Random(0), " ".join(SENTENCES).split(), 800
    texts = [" ".join(draw.choices(known, k=draw.randint(1, 40))) for _ in range(2 * rows)]
    lines = [f"{first}\t{second}\t{draw.random()}\n" for first, second in zip(texts[:rows], texts[rows:], strict=True)]
    (tmp_path / "pairs.tsv").write_text("sentence1\tsentence2\tscore\n" + "".join(lines))
    shape = {"hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 1536}
    words = ["--model.name=scratch", *(f"--model.scratch.{key}={value}" for key, value in shape.items())]
    words += ["--model.device=cpu", "--data.train=pairs.tsv", "--output=out", "--evaluation.certificate=false"]
    words += ["--data.dev_share=0", "--training.eval_strategy=no", "--training.bf16=true", "--training.max_steps=50"]
    words += ["--training.per_device_train_batch_size=16", "--training.min_steps=0"]
    command = [sys.executable, "-m", "raoe_train", "train", "adapt", *words]
    python = functools.partial(subprocess.run, check=True, capture_output=True, text=True, cwd=tmp_path)
    dry = re.findall(r"peak memory ([\d.]+) GB", python([*command, "--dry_run=true"]).stdout)
    python(command)
    whole = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert whole["steps"] == 50
    assert [float(peak) for peak in dry] == [pytest.approx(whole["peak_memory_mb"] / 1000, rel=0.2)]


def test_an_error_of_the_hub_names_the_model(asked, monkeypatch):
    """Theirs has several lines, and none that says which model it is."""
    from transformers import AutoConfig

    def gated(*args, **keys):
        raise OSError("401 Client Error.\n\nCannot access gated repo.\nPlease log in.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", gated)
    monkeypatch.setattr("raoe_train.encoders.load._load", gated)
    for dry in (True, False):
        with pytest.raises(OSError, match=r"^a/b cannot be loaded: 401 Client Error\. Cannot access gated repo\. "):
            run("train", **{**asked, "model": {"name": "a/b"}, "dry_run": dry, "output": "out"})

"""Saved bidirectional decoders: loading in fresh processes, merging, further training, and never silently causal."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from raoe_train import run
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.padding import SENTENCES as CHECKED
from raoe_train.jobs.check import check_encoder
from raoe_train.settings import Model
from tests.decoders import saved_decoder
from tests.tiny import SENTENCES

ROOT = Path(__file__).parents[2]
PROMPT = 'say {text} in one word:"'
LORA = {"r": 4, "lora_alpha": 8}
# name: how the base is loaded before it is saved again
KINDS = {
    "full": {"bidirectional_layers": 1},
    "two": {"bidirectional_layers": 2, "pooling": "last"},
    "lora": {"bidirectional_layers": 1, "lora": LORA},
    "lora-causal": {"lora": LORA},
    "qlora": {"bidirectional_layers": 1, "lora": LORA, "load_in_4bit": True},
}
LOAD = """
import json, sys
{before}
from sentence_transformers import SentenceTransformer
found = {{}}
for name in sys.argv[1:]:
    try:
        found[name] = SentenceTransformer(name, device="cpu"{options}).encode({sentences!r}).tolist()
    except Exception as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def load_in_a_fresh_process(folders, before="", options="", path=None):
    code = LOAD.format(before=before, options=options, sentences=SENTENCES)
    environment = {**os.environ, "PYTHONPATH": path or "", "HF_MODULES_CACHE": str(folders[0].parent / "modules")}
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folders[0],
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{name: (folder, embeddings before it was saved)}, and the folder of all."""
    folder = tmp_path_factory.mktemp("saved")
    base = saved_decoder(folder)
    options = {}
    for name, settings in KINDS.items():
        config = Model(name=base, device="cpu", prompt=PROMPT, max_seq_length=24, **settings)
        model = load_encoder(config, train=True)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():  # as after training: a new adapter has no effect
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        model.eval()
        options[name] = (folder / name, model.encode(SENTENCES))
        model.save_pretrained(str(folder / name), create_model_card=False)
    return folder, options


@pytest.mark.slow
def test_saved_model_loads_unchanged_in_a_fresh_process(saved):
    folder, made = saved
    folders = [folder / name for name in KINDS]
    registered = "from raoe_train.encoders.bidirectional import register; register()"
    known = load_in_a_fresh_process(folders, registered, path=str(ROOT))
    for name, (place, expected) in made.items():
        np.testing.assert_allclose(np.array(known[str(place)]), expected, atol=1e-5, err_msg=name)
    unknown = load_in_a_fresh_process(folders)
    for place in folders:
        assert isinstance(unknown[str(place)], str) and "trust_remote_code" in unknown[str(place)], unknown[str(place)]
    # the code saved beside the weights does not import raoe
    before = "import importlib.util; assert importlib.util.find_spec('raoe_train') is None"
    trusted = load_in_a_fresh_process(folders, before, ", trust_remote_code=True") if not _installed() else known
    for name, (place, expected) in made.items():
        np.testing.assert_allclose(np.array(trusted[str(place)]), expected, atol=1e-5, err_msg=name)


def _installed() -> bool:
    """Whether this Python finds raoe_train without PYTHONPATH, as after pip install -e."""
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('raoe_train') is None)"
    return subprocess.run([sys.executable, "-c", code], cwd="/", env={**os.environ, "PYTHONPATH": ""}).returncode == 0


def test_saved_model_passes_the_check(saved):
    folder, made = saved
    for name in made:
        model = load_encoder(Model(name=str(folder / name), device="cpu"))
        result = check_encoder(model)
        assert result["failed"] == [], (name, result)
        assert result["bidirectional"]["seen"] == (name != "lora-causal")
        np.testing.assert_allclose(model.encode(SENTENCES), made[name][1], atol=1e-5, err_msg=name)


def test_check_detects_dependence_on_padding(saved, capsys):
    from raoe_train.encoders.bidirectional import modeling

    folder, _ = saved
    with pytest.MonkeyPatch.context() as patch:  # padding is seen: the fault of BiLLM's own code
        patch.setattr(modeling, "create_bidirectional_mask", lambda *_, **__: None)
        result = run("check", **{"model.name": str(folder / "full")})
    assert any(name.startswith("padding") for name in result["failed"])
    assert f"failed checks: {', '.join(result['failed'])}" in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:  # the layer is causal again

        def causal(layer, args, kwargs, window):
            return args, {key: value for key, value in kwargs.items() if key != "lifted"}

        patch.setattr(modeling, "lift", causal)
        result = run("check", **{"model.name": str(folder / "full")})
    assert result["failed"] == ["bidirectional"]


@pytest.mark.parametrize("name", ["lora", pytest.param("lora-causal", marks=pytest.mark.slow)])
def test_merging_leaves_plain_weights_with_the_same_embeddings(saved, tmp_path, name):
    folder, made = saved
    result = run("export", **{"model.name": str(folder / name), "merge": True, "output": str(tmp_path / "merged")})
    assert result["merged"] and not (tmp_path / "merged" / "adapter").exists()
    model = load_encoder(Model(name=str(tmp_path / "merged"), device="cpu"))
    np.testing.assert_allclose(model.encode(SENTENCES), made[name][1], atol=1e-5)
    assert not any("lora" in key for key, _ in model.named_parameters())
    kind = json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"]
    assert kind == ("llama" if name == "lora-causal" else "raoe_bidirectional")
    if name == "lora-causal":  # loadable anywhere
        results = load_in_a_fresh_process([tmp_path / "merged"])
        np.testing.assert_allclose(np.array(results[str(tmp_path / "merged")]), made[name][1], atol=1e-5)


def test_4_bit_adapter_merges_into_full_weights(saved, tmp_path, capsys):
    folder, made = saved
    merge = {"model.name": str(folder / "qlora"), "merge": True}
    told = run("export", **merge, output=str(tmp_path / "merged"))["cosines"]
    quantized, whole = (load_encoder(str(place), device="cpu") for place in (folder / "qlora", tmp_path / "merged"))
    first, second = (each.encode(CHECKED, normalize_embeddings=True) for each in (quantized, whole))
    cosines = (first * second).sum(1)
    assert told == {"mean": pytest.approx(cosines.mean(), abs=1e-3), "min": pytest.approx(cosines.min(), abs=1e-3)}
    assert 0.5 < told["min"] < told["mean"] < 0.9999, "or this test shows nothing"
    printed = capsys.readouterr().out
    assert "was trained on 4-bit weights, but is merged into the unquantized weights" in printed
    assert f"mean {told['mean']:.4f}, lowest {told['min']:.4f};" in printed
    assert "cosines" not in run("export", **merge | {"model.name": str(folder / "lora")}, output=str(tmp_path / "lora"))
    assert "4-bit" not in capsys.readouterr().out
    model = load_encoder(Model(name=str(tmp_path / "merged"), device="cpu"))
    assert model[0].model.config.base_quantization is None
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    result, expected = model.encode(SENTENCES), made["qlora"][1]
    cosine = (result * expected).sum(1) / np.linalg.norm(result, axis=1) / np.linalg.norm(expected, axis=1)
    # close, but not equal: the base has full weights, not 4-bit ones
    assert cosine.min() > 0.9 and np.abs(result - expected).max() > 1e-6


def test_export_removes_only_the_model_it_replaces(saved, tmp_path):
    folder, _ = saved
    source, old = tmp_path / "source", tmp_path / "old"
    shutil.copytree(folder / "full", source)
    run("export", **{"model.name": str(folder / "two"), "output": str(old)})
    (old / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for model, output, message in (
        ("lora", tmp_path / "out", "is an adapter: add --merge"),
        (source, source / "1_Pooling" / "x", "lies inside the model folder"),
    ):
        with pytest.raises(ValueError, match=message):
            run("export", **{"model.name": str(folder / model), "output": str(output), "overwrite": True})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    run("export", **{"model.name": str(source), "output": str(old), "overwrite": True})
    assert json.loads((old / "config.json").read_text())["bidirectional_layers"] == 1
    assert (old / "notes.txt").is_file() and not list(tmp_path.glob(".*"))


def write_triplets(path: Path, rows: int = 24) -> str:
    count = len(SENTENCES)
    lines = ["anchor\tpositive\tnegative"]
    for i in range(rows):
        lines.append("\t".join(f"{SENTENCES[(i + step) % count]} {i}" for step in (0, 1, 5)))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def write_pairs(path: Path) -> str:
    """A dev set on which these short trainings gain; if they lost, the start would be saved."""
    lines = ["sentence1\tsentence2\tscore"]
    lines += [f"{a}\t{b}\t{i % 7}" for i, (a, b) in enumerate(itertools.pairwise(SENTENCES))]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def recipe_settings(folder: Path, base: str, **changes):
    training = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "logging_steps": 1, "learning_rate": 1e-2}
    return {"model.name": base, "model.device": "cpu", "data.dev": write_pairs(folder / "dev.tsv"),
            "training": training, "output": str(folder / "out"), **changes}  # fmt: skip


def trained(folder: Path, base: str) -> float:
    """The distance of a finished run's embeddings from its base's, with the same prompt."""
    recipe = load_encoder(Model(name=str(folder / "out"), device="cpu"))
    assert check_encoder(recipe)["failed"] == []
    inner = recipe[0].model
    adapter = recipe.encode(SENTENCES)
    inner.decoder.disable_adapters()
    return float(np.abs(recipe.encode(SENTENCES) - adapter).max())


def test_the_bellm_recipe_trains_qlora(tmp_path, caplog, monkeypatch):
    """The shipped recipe with 4-bit weights, LoRA, checkpointing and bfloat16, on a tiny decoder on the CPU."""
    base, enabled = saved_decoder(tmp_path), []
    enable = SentenceTransformer.gradient_checkpointing_enable

    def of_6_0(self, gradient_checkpointing_kwargs=None):  # it takes none of what transformers' trainer adds
        enabled.append(gradient_checkpointing_kwargs)
        enable(self, gradient_checkpointing_kwargs)

    monkeypatch.setattr(SentenceTransformer, "gradient_checkpointing_enable", of_6_0)
    with caplog.at_level(logging.ERROR):
        metrics = run(
            "train", "bellm", **recipe_settings(tmp_path, base, **{"data.train": write_triplets(tmp_path / "nli.tsv")})
        )
    assert metrics["steps"] == 6 and metrics["pairs"] == {"nli": 24} and enabled == [{"use_reentrant": False}]
    assert "best model" not in caplog.text  # sentence-transformers only logs that it could not be loaded
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["bidirectional_layers"] == 2 and config["base_model"] == base
    assert config["base_quantization"]["bnb_4bit_quant_type"] == "nf4"
    adapter = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (32, 32, 0.1)
    every = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {name.rpartition(".")[2] for name in adapter["target_modules"]} == every
    assert len(adapter["target_modules"]) in (len(every), 2 * len(every))  # of both layers
    assert trained(tmp_path, base) > 1e-3


def test_4_bit_weights_have_gradients_after_evaluation(tmp_path):
    """bitsandbytes packs them for a forward in evaluation, on some CPUs, and forgets the gradient of what it packed."""
    config = Model(name=saved_decoder(tmp_path), device="cpu", load_in_4bit=True, lora=LORA, bidirectional_layers=1)
    gradients = []
    for evaluated in (False, True):
        model = load_encoder(config, train=True)
        if evaluated:
            model.encode(SENTENCES)
        model.train()
        embeddings = model(model.preprocess(SENTENCES))["sentence_embedding"]
        embeddings.square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for n, p in model.named_parameters() if "lora_B" in n]))
    # packing rounds the scales of its blocks to bfloat16
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()


def test_second_stage_continues_the_adapter(tmp_path):
    base = saved_decoder(tmp_path)
    options = recipe_settings(tmp_path, base, **{"data.train": write_triplets(tmp_path / "nli.tsv"), "model.lora": LORA,
                                              "model.bidirectional_layers": 1, "loss": "InfoNCELoss"})  # fmt: skip
    run("train", None, **options)
    before = load_encoder(Model(name=str(tmp_path / "out"), device="cpu")).encode(SENTENCES)
    second = {**options, "model.name": str(tmp_path / "out"), "output": str(tmp_path / "second"), "data.dev": None}
    for key in ("model.lora", "model.bidirectional_layers"):
        second.pop(key)
    run("train", None, **second)
    model = load_encoder(Model(name=str(tmp_path / "second"), device="cpu"))
    assert model[0].model.config.base_model == base and model[0].model.config.bidirectional_layers == 1
    assert np.abs(model.encode(SENTENCES) - before).max() > 1e-3
    with pytest.raises(ValueError, match=r"LoRA adapter and model\.lora differ in r"):
        run("train", None, **{**second, "model.lora": {"r": 2}, "output": str(tmp_path / "third")})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_in_4bit": True}, "4-bit weights cannot be trained: set model.lora"),
        ({"lora": {"rank": 4}}, "unknown key model.lora.rank"),
    ],
)
def test_invalid_settings(tmp_path, changes, message):
    settings = {"name": saved_decoder(tmp_path), "device": "cpu", **changes}
    with pytest.raises(ValueError, match=message):
        load_encoder(Model(**settings), sentences=SENTENCES, train=True)


def test_encoders(tmp_path):
    """Without bidirectional layers and 4 bits, but with LoRA, saved as sentence-transformers saves it."""
    from tests.tiny import tiny_encoder

    encoder = tiny_encoder(double=False)
    encoder.save_pretrained(str(tmp_path / "bert"), create_model_card=False)
    with pytest.raises(ValueError, match="load_in_4bit needs a decoder"):
        load_encoder(Model(name=str(tmp_path / "bert"), device="cpu", load_in_4bit=True))
    changes = {"data.train": write_triplets(tmp_path / "nli.tsv"), "model.lora": LORA, "loss": "InfoNCELoss"}
    run("train", None, **recipe_settings(tmp_path, str(tmp_path / "bert"), **changes))
    configs = [Model(name=str(tmp_path / name), device="cpu") for name in ("bert", "out")]
    before, after = (load_encoder(config).encode(SENTENCES) for config in configs)
    assert np.abs(before - after).max() > 1e-4
    run("export", **{"model.name": str(tmp_path / "out"), "merge": True, "output": str(tmp_path / "merged")})
    merged = load_encoder(Model(name=str(tmp_path / "merged"), device="cpu")).encode(SENTENCES)
    np.testing.assert_allclose(merged, after, atol=1e-5)

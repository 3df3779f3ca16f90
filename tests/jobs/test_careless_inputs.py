"""Unintended input that once gave a wrong result, a traceback or lost work."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest
from datasets import ClassLabel, Dataset
from safetensors.torch import load_file, save_file

import raoe_train as rt
from raoe_train.inputs import fingerprint
from raoe_train.jobs.shared import check_paths
from tests.tiny import load, saved_encoder
from tests.training.small_runs import write_pairs


def changed(folder: Path) -> None:
    """Change the weights of an encoder, as further training does."""
    (file,) = folder.rglob("model.safetensors")
    save_file({name: weight + 0.1 for name, weight in load_file(file).items()}, file, {"format": "pt"})


SAID = "config_sentence_transformers.json"


def configured(folder: Path, **values: object) -> None:
    """Change values of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("how", ["a linked folder", "an adapter", "our adapter"])
def test_fingerprint_covers_links_and_base_models(how, tmp_path):
    base, model = Path(saved_encoder(tmp_path / "base")), tmp_path / "model"
    model.mkdir()
    (model / "again").symlink_to(model)
    if how == "a linked folder":
        (model / "0_Transformer").symlink_to(base)
    elif how == "an adapter":
        (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    else:
        (model / "config.json").write_text(json.dumps({"base_model": str(base)}))
    before = fingerprint(str(model))
    assert before == fingerprint(str(model))
    changed(base)
    after = fingerprint(str(model))
    for name in (".git/HEAD", ".cache/huggingface/download/a.lock", ".gitattributes", "run.png"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(b"0")
        assert after == fingerprint(str(model)) != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*.json")],
        lambda folder: (folder / "modules.json").write_text('[{"idx": 0}]'),
        lambda folder: (folder / SAID).write_text("{"),
        lambda folder: (folder / SAID).write_text('{"prompts": [1]}'),
        lambda folder: configured(folder, hidden_size=32),
        lambda folder: configured(folder, num_hidden_layers=2),
    ],
)
def test_damaged_encoder_is_one_clear_error(damage, tmp_path):
    damage(folder := Path(saved_encoder(tmp_path / "enc")))
    tasks = [write_pairs(tmp_path / "p.tsv")]
    for use in (rt.load_encoder, lambda name: rt.evaluate(tasks=tasks, model={"name": name})):
        with pytest.raises((ValueError, OSError), match="enc"):
            use(str(folder))


def test_rows_in_memory_equal_rows_of_a_file(tmp_path):
    path = write_pairs(tmp_path / "p.tsv")
    expected = rt.read_pairs(path).to_dict()
    table = pd.read_csv(path, sep="\t")
    assert rt.read_pairs(table).to_dict() == rt.read_pairs(Dataset.from_pandas(table)).to_dict() == expected
    words = ClassLabel(names=["contradiction", "entailment"])
    named = Dataset.from_dict({"sentence1": ["a"], "sentence2": ["b"], "label": [0]}).cast_column("label", words)
    assert rt.read_pairs(named)["label"][:] == [2]
    for wrong in (None, 3, [{"sentence1": "a"}]):
        with pytest.raises(ValueError, match="a Dataset or a DataFrame, got"):
            rt.read_pairs(wrong)


def test_only_inputs_are_compared_with_outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp1").mkdir()
    (tmp_path / "exp1.tsv").touch()
    free = {"data.train": ["exp1.tsv"], "training.run_name": "exp1", "model.revision": "exp1"}
    check_paths(load("train", None, {**free, "output": "exp1"}))
    for key in ("data.train", "data.dev", "model.name", "teacher.name", "polarity.reference.name", "evaluation.tasks"):
        with pytest.raises(ValueError, match=rf"output .*exp1 would overwrite the input {key}"):
            check_paths(load("train", None, {key: "exp1", "output": "exp1"}))
    for name in ("a.tsv.gz", "a.tsv.bak", "a.tsv2", "a"):  # beside the output a.tsv, but nothing that jobs write there
        (tmp_path / name).touch()
        check_paths(load("score", None, {"data.input": name, "output": "a.tsv"}))
    for name in ("a.tsv", "a.tsv.json", "a.tsv.failed.jsonl", "a.tsv.parts", "a.tsv.examples.npz"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=r"output .*a\.tsv would overwrite the input data\.input"):
            check_paths(load("score", None, {"data.input": name, "output": "a.tsv"}))
    with pytest.raises(ValueError, match=r"teacher\.cache .* would overwrite the input data\.train"):
        check_paths(load("train", None, {"data.train": "a.tsv+exp1#dev", "teacher.cache": "exp1"}))


def test_names_that_are_not_utf_8_are_refused_before_any_work(tmp_path, monkeypatch):
    """Libraries cannot write them; without UTF-8 mode, LANG=C makes such names of all that is not ASCII."""
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / name).mkdir()
    rows, model = write_pairs(tmp_path / f"{name}.tsv"), saved_encoder(tmp_path / "plain")
    shutil.copytree(model, tmp_path / name / "model")
    plain, output = write_pairs(tmp_path / "rows.tsv"), str(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    calls: list[tuple[str, dict[str, object]]] = [
        ("train", {"model.name": "scratch", "data.train": [rows], "output": output}),
        ("train", {"model.name": "scratch", "data.train": [plain], "output": str(tmp_path / name / "x" / "out")}),
        ("train", {"model.name": model, "data.train": [plain], "model.prompt": f"{name} {{text}}", "output": output}),
        ("evaluate", {"model.name": model, "tasks": [f"sts:{rows}"]}),
        ("evaluate", {"model.name": str(tmp_path / name / "model"), "tasks": [plain]}),
        ("encode", {"model.name": model, "data.input": plain, "output": str(tmp_path / f"{name}.npy")}),
        ("export", {"model.name": str(tmp_path / name / "model"), "output": output}),
    ]
    for job, settings in calls:
        with pytest.raises(ValueError, match=r"caf\\udce9.* is not UTF-8: rename it or, .* set PYTHONUTF8=1"):
            rt.run(job, **settings)
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ValueError, match="is not UTF-8"):
        rt.encode(model={"name": model}, data={"input": plain}, output="out.npy")
    assert sorted(tmp_path.rglob("*")) == before


def test_positions_reserved_for_padding(tmp_path):
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    AutoTokenizer.from_pretrained(saved_encoder(tmp_path / "enc")).save_pretrained(tmp_path / "of")
    config = AutoConfig.for_model("roberta", vocab_size=120, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                  intermediate_size=16, max_position_embeddings=20, pad_token_id=1)  # fmt: skip
    AutoModel.from_config(config).save_pretrained(tmp_path / "of")
    model = rt.load_encoder(tmp_path / "of", pooling="mean", max_seq_length=18)
    assert model.encode(["a man plays a guitar on the stage " * 9]).shape == (1, 16)
    with pytest.raises(ValueError, match="only 18 positions"):
        rt.load_encoder(tmp_path / "of", pooling="mean", max_seq_length=19)

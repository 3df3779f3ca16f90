"""Unintended input that once gave a wrong result, a traceback or lost work."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

import raoe_train as rt
from raoe_train.artifacts import report
from raoe_train.artifacts.provenance import fingerprint
from raoe_train.cli import load
from raoe_train.jobs.shared import check_paths
from raoe_train.losses.by_length import fits
from raoe_train.training.arguments import trainer_settings
from tests.tiny import saved_encoder, tiny_encoder
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


@pytest.mark.parametrize("how", ["a linked folder", "a link to itself", "an adapter", "our adapter"])
def test_fingerprint_covers_links_and_base_models(how, tmp_path):
    base, model = Path(saved_encoder(tmp_path / "base")), tmp_path / "model"
    model.mkdir()
    (model / "weights.bin").write_bytes(b"1")
    if how == "a linked folder":
        (model / "0_Transformer").symlink_to(base)
    elif how == "a link to itself":
        (model / "again").symlink_to(model)
        base = model
    elif how == "an adapter":
        (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    else:
        (model / "config.json").write_text(json.dumps({"base_model": str(base)}))
    before = fingerprint(str(model))
    assert before == fingerprint(str(model))
    if base == model:
        (model / "weights.bin").write_bytes(b"2")
    else:
        changed(base)
    after = fingerprint(str(model))
    (model / ".git").mkdir()
    (model / ".git" / "HEAD").write_bytes(b"0")
    assert after == fingerprint(str(model)) != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*.json")],
        lambda folder: (folder / "modules.json").write_text("null"),
        lambda folder: (folder / "modules.json").write_text('[{"idx": 0}]'),
        lambda folder: next(folder.glob("*_Pooling/config.json")).write_text("[1]"),
        lambda folder: (folder / SAID).write_text("null"),
        lambda folder: (folder / SAID).write_text("{"),
        lambda folder: (folder / SAID).write_text('{"prompts": [1]}'),
        lambda folder: (folder / SAID).write_text('{"prompts": null}'),
        lambda folder: configured(folder, hidden_size=32),
        lambda folder: configured(folder, hidden_act="gelx"),
        lambda folder: configured(folder, num_attention_heads=3),
        lambda folder: configured(folder, num_hidden_layers=2),
    ],
)
def test_damaged_encoder_is_one_clear_error(damage, tmp_path):
    damage(folder := Path(saved_encoder(tmp_path / "enc")))
    tasks = [write_pairs(tmp_path / "p.tsv")]
    for use in (rt.load_encoder, lambda name: rt.evaluate(tasks=tasks, model={"name": name})):
        with pytest.raises((ValueError, OSError), match="enc"):
            use(str(folder))


def test_missing_model_name_is_an_error(tmp_path):
    pairs = write_pairs(tmp_path / "p.tsv")
    tasks, out = {"tasks": [pairs]}, {"output": str(tmp_path / "out")}
    trained = partial(rt.train, data={"train": [pairs]}, loss="CoSENTLoss", **out)
    for use in (partial(rt.evaluate, **tasks), partial(rt.evaluate_model, None, **tasks), partial(rt.export, **out),
                rt.check, trained):  # fmt: skip
        with pytest.raises(ValueError, match=r"model\.name is missing"):
            use()


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("output: 2026_11_26", "output", "2026_11_26"),
        ("model: {name: 007}", "model.name", "007"),
        ("data: {train: [1:30, 007, x]}", "data.train", ["1:30", "007", "x"]),
        ("data: {labels: {007: 1, 1:30: 0}}", "data.labels", {"007": 1, "1:30": 0}),
        ("training: {seed: 7, learning_rate: 1e-4}", "training.seed", 7),
    ],
)
def test_names_that_look_like_numbers_stay_names(text, key, value, tmp_path):
    (tmp_path / "r.yaml").write_text(text)
    result = load("train", tmp_path / "r.yaml")
    for part in key.split("."):
        result = getattr(result, part)
    assert result == value


def test_keys_that_have_no_effect_are_errors(tmp_path):
    for job, key in (("score", "data.max_rows"), ("encode", "data.max_rows"), ("mine", "data.labels"),
                     ("generate", "data.labels"), ("evaluate", "data.labels"), ("train", "config")):  # fmt: skip
        with pytest.raises(ValueError, match=f"unknown key {key}"):
            load(job, None, {key: 1})


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


def test_types_of_labels_and_rows():
    model = tiny_encoder()
    features = [model.preprocess(["a", "b"]), model.preprocess(["a", "dog"])]
    loss = rt.losses.CoSENTLoss(model)
    expected = loss(features, torch.tensor([1.0, 0.0]))
    assert loss(features, [1.0, 0.0]) == loss(features, np.array([1.0, 0.0])) == expected
    for pairs in ([], Dataset.from_dict({"a": ["b"]}).to_iterable_dataset(), None):
        with pytest.raises(ValueError, match=r"pairs must be a datasets\.Dataset"):
            rt.calibrate(model, loss, pairs)
    static = SentenceTransformer(modules=[StaticEmbedding(model.tokenizer, embedding_dim=16)], device="cpu")
    columns = [static.preprocess(["a", "b"]), static.preprocess(["a", "dog"])]
    for of in (rt.losses.CoSENTLoss, rt.losses.RankMarginLoss, rt.losses.InfoNCELoss):
        with pytest.raises(ValueError, match="leave mini_batch_size out"):
            of(static, mini_batch_size=1)(columns, torch.tensor([1.0, 0.0]))


def test_save_steps_implies_the_strategy(tmp_path):
    off = {"save_steps": 2, "save_strategy": "no"}
    for asked, when in (({"save_steps": 2}, "steps"), (off, "no"), ({}, "epoch")):
        training = load("train", None, {"training": asked}).training
        assert trainer_settings(training, tmp_path, device="cpu", has_dev=False)["save_strategy"] == when


def test_only_inputs_are_compared_with_outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp1").mkdir()
    (tmp_path / "exp1.tsv").touch()
    free = {"data.train": ["exp1.tsv"], "training.run_name": "exp1", "model.revision": "exp1"}
    check_paths(load("train", None, {**free, "output": "exp1"}))
    for key in ("data.train", "data.dev", "model.name", "teacher.name", "polarity.reference.name", "evaluation.tasks"):
        with pytest.raises(ValueError, match=rf"output .*exp1 would overwrite the input {key}"):
            check_paths(load("train", None, {key: "exp1", "output": "exp1"}))
    with pytest.raises(ValueError, match=r"teacher\.cache .* would overwrite the input data\.train"):
        check_paths(load("train", None, {"data.train": "a.tsv+exp1#dev", "teacher.cache": "exp1"}))


@pytest.mark.parametrize("key", ["data.input", "beside"])
def test_an_input_is_no_output(key, tmp_path):
    rows, model = Path(write_pairs(tmp_path / "rows.tsv")), saved_encoder(tmp_path / "enc")
    before = rows.read_bytes()
    settings = {"data": {"input": str(rows)}, "model": {"name": model}, "overwrite": True}
    with pytest.raises(ValueError, match=r"would overwrite the input|contains the input"):
        rt.encode(**settings, output=str(rows if key == "data.input" else tmp_path / "rows"))
    assert rows.read_bytes() == before


def test_foreign_outputs_are_kept(tmp_path):
    model, record = saved_encoder(tmp_path / "enc"), tmp_path / "out.npy.json"
    (tmp_path / "s.txt").write_text("a man\na dog\n")
    record.write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="not written by raoe-train"):
        rt.encode(data={"input": str(tmp_path / "s.txt")}, model={"name": model}, output=str(tmp_path / "out.npy"))
    assert record.read_text() == '{"mine": 1}'
    run = tmp_path / "run"
    pairs = write_pairs(tmp_path / "pairs.tsv")
    wrong = {"model": {"name": model}, "loss": "CoSENTLoss", "training": {"max_steps": 1}, "output": str(run)}
    with pytest.raises(ValueError, match=r"is not a known label .x"):
        rt.train(**wrong | {"loss": "RAOELoss"}, data={"train": [pairs], "labels": {"x": 0}})
    rt.train(**wrong, data={"train": [pairs]})  # the failed run left nothing behind
    with pytest.raises(ValueError, match="holds a run of `train`"):
        rt.export(model={"name": model}, output=str(run), overwrite=True)
    assert (run / "metrics.json").exists()


def test_plot_error_does_not_end_the_run(caplog):
    def draw():
        raise RuntimeError("matplotlib does not know \\q")

    assert report.pictures(draw) == [] and "no plots" in caplog.text


@pytest.mark.parametrize("name", ["pairs.json", "pairs", "pairs.xlsx", "folder"])
def test_unknown_format_is_not_looked_up_on_a_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    shutil.copy(write_pairs(tmp_path / "x.tsv"), tmp_path / "pairs")
    for each in ("pairs.json", "pairs.xlsx"):
        (tmp_path / each).write_text("[]")
    with pytest.raises(ValueError, match=r"unknown format|is a folder"):
        rt.read_pairs(name)


def test_values_reformatted_by_tables(tmp_path):
    file = tmp_path / "d.jsonl"
    good = [{"sentence1": "a", "sentence2": f"b{i}", "score": i} for i in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [{"sentence1": "a", "sentence2": "b"}, *good]))
    assert len(rt.read_pairs(file, on_error="skip", require=["score"])) == 5
    (tmp_path / "d.csv").write_text("sentence1,sentence2,label\na,b,1.0\na,c,2.0\na,d,0\n")
    assert list(rt.read_pairs(tmp_path / "d.csv")["label"]) == [1, 2, 0]


class Reads(CoSENTLoss):
    def forward(self, sentence_features, labels):
        return super().forward(sentence_features, labels) + 1


class Both(torch.nn.Module):
    def forward(self, sentence_features, labels):
        return self.compute_loss_from_embeddings([], labels) + 1

    def compute_loss_from_embeddings(self, embeddings, labels):
        return torch.zeros(())


class Inherits(CoSENTLoss):
    def compute_loss_from_embeddings(self, embeddings, labels):
        return super().compute_loss_from_embeddings(embeddings, labels)


def test_custom_forward_is_called():
    model = tiny_encoder()
    assert not fits(Reads(model)) and not fits(Both()) and fits(Inherits(model)) and fits(CoSENTLoss(model))


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "camembert"])
def test_positions_reserved_for_padding(kind, tmp_path):
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    AutoTokenizer.from_pretrained(saved_encoder(tmp_path / "enc")).save_pretrained(tmp_path / "of")
    config = AutoConfig.for_model(kind, vocab_size=120, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                  intermediate_size=16, max_position_embeddings=20, pad_token_id=1)  # fmt: skip
    AutoModel.from_config(config).save_pretrained(tmp_path / "of")
    model = rt.load_encoder(tmp_path / "of", pooling="mean", max_seq_length=18)
    assert model.encode(["a man plays a guitar on the stage " * 9]).shape == (1, 16)
    with pytest.raises(ValueError, match="only 18 positions"):
        rt.load_encoder(tmp_path / "of", pooling="mean", max_seq_length=19)

"""Recipes: inheritance, overrides, types, and errors that help."""

import functools
from pathlib import Path

import pytest
import yaml

from raoe_train.cli import load
from raoe_train.recipe import UNDER, merge, nest, shipped, to_dict


def test_every_shipped_recipe_loads():
    assert {"raoe-s1", "raoe-s2", "demo", "margins"} <= set(shipped())
    for name, path in shipped().items():
        job = "generate" if "generation" in (yaml.safe_load(path.read_text()) or {}) else "train"
        assert load(job, name).model


def test_stage_1_is_the_papers_appendix_b():
    config = load("train", "raoe-s1")
    loss = config.loss
    assert [loss[key] for key in ("name", "scale", "margin", "rank_weight", "angle_weight")] == ["raoe", 20, 2, 1, 1]
    training = config.training
    assert (training["epochs"], training["batch_size"], training["learning_rate"], training["seed"]) == (
        5,
        512,
        5e-5,
        42,
    )
    stage_2 = load("train", "raoe-s2")
    assert (stage_2.loss["name"], stage_2.loss["margin"], stage_2.training["epochs"]) == ("rank_margin", 2, 10)
    assert stage_2.training["learning_rate"] == 5e-5
    assert load("train", "raoe-s1-modernbert-large").model.name == "answerdotai/ModernBERT-large"


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("training.learning_rate", "5e-5", 5e-5),
        ("training.bf16", "true", True),
        ("training.report_to", "none", "none"),
        ("training.max_steps", "1e3", 1000),
        ("training.eval_strategy", False, "no"),  # YAML's no
        ("training.bf16", "auto", "auto"),
        ("training.by_length", "packed", "packed"),
        ("data.cache_dir", "~/cache", str(Path.home() / "cache")),
        ("data.train", ["~/a.tsv#dev"], [str(Path.home() / "a.tsv#dev")]),
        ("loss.scale", "5e-1", 0.5),
        ("loss.margin", "16", 16.0),
        ("loss.mini_batch_size", "32", 32),
        ("loss.mini_batch_size", "null", None),
        ("loss.gather_across_devices", "no", False),
        ("loss.gather_across_devices", True, True),
        ("data.train", "a.tsv", ["a.tsv"]),
        ("data.train", ["a.tsv", "b.tsv"], ["a.tsv", "b.tsv"]),
        ("data.score_scale", ["1", "5"], [1.0, 5.0]),
        ("data.columns", ["sentence1=premise", "sentence2=h"], {"sentence1": "premise", "sentence2": "h"}),
        ("data.columns.score", "similarity", {"score": "similarity"}),
        ("data.labels", {"yes": "0", "no": 1}, {"yes": 0, "no": 1}),
        ("model.name", 7, "7"),
    ],
)
def test_values_take_the_declared_type(key, given, value):
    found = to_dict(load("train", None, {key: given}))
    for part in key.split(".")[:2]:
        found = found[part]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"loss.nam": "mse"}, r"unknown key loss\.nam \(did you mean loss\.name\?\)"),
        ({"los.name": "mse"}, r"unknown key los"),
        ({"modle": {}}, r"unknown key modle"),
        ({"loss.margin": "two"}, r"loss\.margin must be a number, got 'two'"),
        ({"loss.mini_batch_size": "1.5"}, r"loss\.mini_batch_size must be an integer, got '1.5'"),
        ({"loss.mini_batch_size": True}, r"loss\.mini_batch_size must be an integer, got True"),
        ({"loss.gather_across_devices": "maybe"}, r"loss\.gather_across_devices must be true or false"),
        ({"loss": "mse"}, r"loss must be a mapping"),
        ({"model.name": ["a", "b"]}, r"model\.name must be a string, got \['a', 'b'\]"),
        ({"data.columns": ["premise"]}, r"data\.columns takes NAME=VALUE"),
        ({"training.epochs": -3}, r"training\.epochs must be above 0, got -3"),
        ({"training.gradient_accumulation_steps": "-1"}, r"gradient_accumulation_steps must be at least 1, got -1"),
        ({"training.bf16": "maybe"}, r"training\.bf16 must be true or false or auto, got 'maybe'"),
        ({"training.learning_rate": "abc"}, r"training\.learning_rate must be a number, got 'abc'"),
        ({"training.learning_rate": "nan"}, r"training\.learning_rate must be above 0, got nan"),
        ({"training.per_device_train_batch_size": 0}, r"training\.batch_size must be at least 1, got 0"),
        ({"training.max_steps": "1.5"}, r"training\.max_steps must be an integer, got 1\.5"),
        ({"loss.mini_batch_size": "x" * 1000}, r"must be an integer, got 'x{199}$"),
        ({"training.eval_strategy": "never"}, r"training\.eval_strategy must be one of no, steps, epoch, got 'never'"),
        ({"model.max_seq_length": 0}, r"model\.max_seq_length must be at least 1, got 0"),
        ({"data.max_rows": 0}, r"data\.max_rows must be at least 1, got 0"),
    ],
)
def test_errors_name_the_key(overrides, message):
    with pytest.raises(ValueError, match=message):
        load("train", None, overrides)


def test_unknown_job_and_recipe():
    with pytest.raises(ValueError, match=r"unknown job 'trian' \(did you mean train\?\)"):
        load("trian")
    with pytest.raises(ValueError, match=r"no recipe is called 'raoe-s11' \(did you mean raoe-s1\?\)"):
        load("train", "raoe-s11")
    with pytest.raises(FileNotFoundError, match=r"no such file: .*nowhere\.yaml"):
        load("train", "nowhere.yaml")


def test_recipes_extend_each_other_and_overrides_win(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: raoe-s1\nloss: {margin: 7}\ntraining: {batch_size: 8}\n")
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\ntraining.warmup_steps: 0.1\nloss: {scale: 10}\n")
    config = load("train", child, {"training": {"per_device_train_batch_size": 16}})
    assert (config.loss["margin"], config.loss["scale"], config.loss["name"]) == (7, 10, "raoe")
    # One key, whichever of its names is used.
    assert config.training["batch_size"] == 16
    assert "per_device_train_batch_size" not in config.training
    assert config.training["warmup_steps"] == 0.1


def test_a_recipe_cannot_extend_itself(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ValueError, match="extends itself"):
        load("train", tmp_path / "a.yaml")


@pytest.mark.parametrize(
    "text",
    ["- a list", "a: [", "just words", "model: &m {lora: *m}", "data: {train: &t [*t]}", "a: " + "[" * 5000],
    ids=str.__len__,
)
def test_broken_recipes_are_user_errors(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"recipe .*broken"):
        load("train", path)


def test_a_resolved_recipe_is_a_recipe(tmp_path):
    config = load("train", "demo", {"loss.margin": 3, "data.labels": {"yes": 0}})
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(to_dict(config)))
    assert load("train", path) == config


def test_configurations_share_no_state():
    load("train").data.train.append("x")
    load("train").loss["margin"] = 3
    assert load("train").data.train == [] and load("train").loss["margin"] == 2


def test_nest_and_merge():
    assert nest({"a.b": 1, "a": {"c.d": 2}}) == {"a": {"b": 1, "c": {"d": 2}}}
    assert nest({"jinaai/jina-v3": {"x": 1}}) == {"jinaai/jina-v3": {"x": 1}}
    rates = {"learning_rate_mapping": {"encoder": 1e-4, r"layer\.0.": 1e-5}}  # patterns of names, dots and all
    assert nest({"training": rates}) == {"training": rates}
    assert nest({"learning_rate_mapping.layer.0": 1}) == {"learning_rate_mapping": {"layer.0": 1}}
    old = {"a": {"b": 1}}
    assert merge(old, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert old == {"a": {"b": 1}}
    assert merge({"a": {"b": 1}}, {"a": None}) == {"a": None}


def test_a_bare_word_and_keys_of_its_section_go_together():
    for given in ({"model": "X", "model.prompt": "{text}"}, {"model.prompt": "{text}", "model": "X"}):
        model = load("encode", None, given).model
        assert (model.name, model.prompt) == ("X", "{text}")
    assert load("encode", None, {"model.name": "X", "model": "Y"}).model.name == "Y"
    for given in ({"polarity": "X"}, {"polarity.k": 4, "polarity": "X"}):
        with pytest.raises(ValueError, match="polarity must be a mapping of keys"):
            load("evaluate", None, given)
    with pytest.raises(ValueError, match="loss must be a mapping of keys"):
        load("train", "raoe-s1", {"loss": "mse"})


def test_words_take_the_place_of_a_mapping_that_is_no_section():
    assert load("train", "bellm", {"model.lora": "r=16"}).model.lora == {"r": 16}
    assert load("train", None, {"data.columns": "score=a", "data.columns.score": "b"}).data.columns == {"score": "b"}


def test_rates_by_patterns_of_names():
    given = {"training.learning_rate_mapping": {"encoder": 1e-4, "layer.0.": 1e-5}}
    given["training.learning_rate_mapping.layer.1."] = "2e-5"
    found = load("train", None, given).training["learning_rate_mapping"]
    assert found == {"encoder": 1e-4, "layer.0.": 1e-5, "layer.1.": 2e-5}


@pytest.mark.parametrize("layers", [[{UNDER: "x"}], [{"name": "mse"}, {UNDER: [1]}], [{UNDER: 3}, {"name": "mse"}]])
def test_what_is_under_another_name_is_a_mapping(layers):
    """A key that only layers write; a file may have it all the same."""
    with pytest.raises(ValueError, match=r"loss\.under another name must be a mapping of keys, got "):
        load("train", None, functools.reduce(merge, [{"loss": layer} for layer in layers]))


def test_what_a_layer_between_said_of_the_loss_holds():
    """A study's settings say a scale, its variants a name, and the recipe below them both."""
    layers = merge({"loss": {"scale": 5, "ties": "random"}}, {"loss": {"name": "raoe"}})
    loss = load("train", "raoe-s1", layers).loss
    assert (loss["scale"], loss["margin"]) == (5, 2)  # not raoe-s1's 20, which comes first
    assert loss["ties"] == "average"  # listmle's word, which raoe cannot have
    assert set(load("train", "raoe-s1", {"loss.name": "mse"}).loss) == {"name", "matryoshka_dims"}
    with pytest.raises(ValueError, match=r"loss mse has no loss\.margin"):
        load("train", "raoe-s1", {"loss": {"name": "mse", "margin": 3}})

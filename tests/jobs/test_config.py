"""Settings of every job: layers, types, errors that name the key, and help."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raoe_train import cli
from raoe_train.cli import JOBS, config_of, configure, main
from raoe_train.config import checked, dataclass_in, describe, keys_of, merge, shipped, to_dict
from raoe_train.jobs.settings import TrainConfig
from tests.tiny import load


def command(*words, job="train"):
    """The configuration from a command line."""
    return checked(configure([job, *words])[2])


def test_later_layers_win(tmp_path):
    (tmp_path / "a.yaml").write_text("training: {seed: 1, learning_rate: 0.5}\nloss.margin: 7\n")
    (tmp_path / "b.yaml").write_text("training.seed: 2\n")
    files = ("--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"))
    result = command("raoe-s1", *files, "--training.learning_rate", "5e-1", "--training.bf16", "auto")
    assert result.loss.chosen.__name__ == "RAOELoss" and result.loss.init_args["margin"] == 7
    assert result.loss.init_args["rank_weight"] == load("train", "raoe-s1").loss.init_args["rank_weight"]
    training = result.training
    assert (training.seed, training.learning_rate, training.bf16, training.num_train_epochs) == (2, 0.5, "auto", 5)
    assert command("raoe-s1", "--training.seed=3", *files).training.seed == 3  # wherever it stands
    assert load("train", tmp_path / "a.yaml", {"training": {"seed": 4}}).training.learning_rate == 0.5


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--data.train a.tsv b.tsv", "data.train", ["a.tsv", "b.tsv"]),
        ("--data.train 1.10 007 null", "data.train", ["1.10", "007", "null"]),
        ("--data.train ~/a.tsv", "data.train", [str(Path.home() / "a.tsv")]),
        ("--data.score_scale 1 5", "data.score_scale", [1.0, 5.0]),
        ("--data.labels yes=0 no=1 x=null", "data.labels", {"yes": 0, "no": 1, "x": None}),
        ("--model.lora r=4 lora_alpha=8", "model.lora", {"r": 4, "lora_alpha": 8}),
        ("--loss.gather_across_devices --overwrite", "loss.init_args.gather_across_devices", True),
        ("--loss.mini_batch_size null", "loss.init_args.mini_batch_size", None),
        ("--loss.margin=-0", "loss.init_args.margin", 0.0),
        ("--model.scratch.num_hidden_layers 3", "model.scratch", {"num_hidden_layers": 3}),
    ],
)
def test_words(words, key, value):
    result = to_dict(command(*words.split()))
    for part in key.split("."):
        result = result[part]
    assert result == value and type(result) is type(value)


def test_nested_and_dotted_settings_are_the_same():
    nested = {
        "model": {"name": "x", "scratch": {"num_hidden_layers": 3}},
        "training": {"seed": 1},
        "loss": {"margin": 3},
    }
    dotted = {"model.name": "x", "model.scratch": {"num_hidden_layers": 3}, "training.seed": 1, "loss.margin": 3}
    assert load("train", None, nested) == load("train", None, dotted)
    lists = {"data.train": ["a", "b"], "data": {"columns": {"score": "s"}, "labels": {"a.b": 1}}}
    result = load("train", None, lists).data
    assert (result.train, result.columns, result.labels) == (["a", "b"], {"score": "s"}, {"a.b": 1})
    teacher = {"teachers": ["a", "b/c-1.5"], "teacher": {"b/c-1.5": {"prompt": "query: "}}}
    assert load("score", None, teacher).teacher == teacher["teacher"]
    load("train").data.train.append("x")
    assert load("train").data.train == []  # configurations share no state


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--modle.name x", "unknown key modle.name (did you mean model.name?)"),
        ("--training.epochs 1", "unknown key training.epochs (did you mean training.num_train_epochs?)"),
        (
            "--loss.margn 1",
            "unknown key loss.margn (did you mean loss.margin?): --loss.help RAOELoss lists its keywords",
        ),
        ("--loss.temperature 1", "unknown key loss.temperature (use scale, the inverse of a temperature): --loss.help"),
        ("--loss CoSENTLoss --loss.margin 1", "unknown key loss.margin: --loss.help CoSENTLoss lists its keywords"),
        ("--loss ../../x", "loss must be the name of a loss class, got ../../x: --loss.help lists the known losses"),
        ("--loss RAOELos", "loss must be the name of a loss class, got RAOELos (did you mean RAOELoss?): --loss.help"),
        ("--print_config=skip_default", "unknown recipe 'skip_default'"),
        ("--data.train+ x", "unknown key data.train+ (did you mean data.train?)"),
        ("--data.train+=x", "unknown key data.train+ (did you mean data.train?)"),
        ("--training.keep null", "training.keep must be a number of at least 0 or auto, got 'null'"),
        ("--training.seed -1", "training.seed must be an integer of at least 0 and below 4294967296, got '-1'"),
        ("--training.max_steps true", "training.max_steps must be an integer above 0 or null, got 'true'"),
        ("--training.num_train_epochs .inf", "training.num_train_epochs must be a number above 0, got '.inf'"),
        ("--training.weight_decay abc", "training.weight_decay must be a number, got 'abc'"),
        ("--training.output_dir x", "unknown key training.output_dir"),
        ("--training.eval_strategy never", "must be one of no, steps, epoch or null, got 'never'"),
        ("--polarity.reference x", "polarity.reference is a section, not a setting: set --polarity.reference.KEY"),
        ("--model.name a b", "model.name must be a string, got ['a', 'b']"),
        ("--output", "--output needs a value: a string or null"),
        ("--data.columns premise", "data.columns must be a mapping, NAME=VALUE ..., got 'premise'"),
        ("--data.train a --data.train b", "--data.train is given twice; list several values after one"),
        ("raoe-s11", "unknown recipe 'raoe-s11' (did you mean raoe-s1?)"),
    ],
)
def test_errors_name_the_key(words, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        command(*words.split())
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("name", ["[final] pairs.tsv", "{a} b.tsv", "a: b.tsv", "- a.tsv", "[1].tsv"])
def test_names_of_files_are_not_read_as_yaml(name):
    assert command("--data.train", name).data.train == load("train", None, {"data.train": name}).data.train == [name]
    assert command("--data.train", "x", name).data.train == ["x", name]


@pytest.mark.parametrize("text", ["training: {keep: null}", "training.seed: null", "model: {name: }"])
def test_null_is_refused_where_the_help_does_not_name_it(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"(training\.keep|training\.seed|model\.name) must be .* got None"):
        load("train", tmp_path / "a.yaml")


def test_another_loss_has_its_own_defaults(tmp_path):
    layer = tmp_path / "layer.yaml"
    layer.write_text("loss: {class_path: GISTLoss}")
    for loss in (
        load("train", "raoe-s1", {"loss": "GISTLoss"}).loss,
        load("train", "raoe-s1", {"loss": {"class_path": "GISTLoss"}}).loss,
        command("raoe-s1", "--loss", "GISTLoss").loss,
        command("--config", "raoe-s1", "--config", str(layer)).loss,
    ):  # not the margin of 2 of raoe-s1
        assert (loss.chosen.__name__, loss.init_args["margin"], loss.init_args["scale"]) == ("GISTLoss", 0, 100)
    assert load("train", "raoe-s1", {"loss": {"init_args": {"scale": 7}}}).loss.init_args["margin"] == 2
    assert load("train", None, {"loss": "CoSENTLoss"}).loss.init_args["scale"] == 20  # its own default
    assert load("train", None, {"loss": "raoe_train.losses.GISTLoss"}) == load("train", None, {"loss": "GISTLoss"})
    assert command("--loss.scale", "5", "--loss", "CoSENTLoss").loss.init_args["scale"] == 5
    given = {"loss.angle_weight": 2, "loss.class_path": "RAOELoss"}
    assert load("train", None, given).loss.init_args["angle_weight"] == 2


def test_settings_that_exclude_each_other_are_compared_after_all_layers():
    with pytest.raises(ValueError, match=r"generation\.temperature has no effect on greedy decoding"):
        load("generate", None, {"generation.temperature": 0.5})
    assert load("generate", None, {"generation.temperature": 0.5, "generation.do_sample": True})


def test_custom_loss(tmp_path, monkeypatch):
    own = "from raoe_train.losses import Loss\nclass MyLoss(Loss):\n  def __init__(self, model, power: int = 2): ...\n"
    (tmp_path / "my_losses.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    loss = command("--loss", "my_losses.MyLoss", "--loss.power", "3").loss
    assert loss.chosen.__name__ == "MyLoss" and loss.init_args["power"] == 3
    with pytest.raises(ValueError, match=r"loss\.power must be an integer, got 'x'"):
        command("--loss", "my_losses.MyLoss", "--loss.power", "x")


@pytest.mark.parametrize(
    "text", ["- a list", "a: [", "just words", "seed: !!bool x", "a: " + "[" * 5000, "\x00"], ids=str.__len__
)
def test_broken_recipes_are_named(tmp_path, text):
    (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^recipe .*broken\.yaml.*$"):
        load("train", tmp_path / "broken.yaml")


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    "text", ["data: {train: &t [*t]}", "model: &m {name: *m}", "x: &x {y: [*x]}", BOMB, BOMB + "data: {train: *a39}"]
)
def test_recursive_recipes_are_refused(tmp_path, text):
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbf" + text.encode())  # a byte order mark is right
    for layers in ((tmp_path / "r.yaml", None), (None, yaml.safe_load(text))):
        with pytest.raises(ValueError, match=r"^(data\.train|model\.name) must be|^unknown key (x|a0)"):
            load("train", *layers)


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_survive_a_round_trip(tmp_path, name):
    job = "generate" if "generation" in yaml.safe_load(shipped()[name].read_text()) else "train"
    config = load(job, name)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(to_dict(config)))
    assert load(job, tmp_path / "again.yaml") == config


@pytest.mark.parametrize("job", JOBS)
def test_what_is_printed_is_a_recipe(tmp_path, capsys, job):
    assert main([job, "--print_config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    result = checked(merge(config_of(job), [tmp_path / "printed.yaml"]))
    assert result == load(job)


EXAMPLES = {
    "an integer": "3", "a number": "0.5", "a string": "some", "the name of a class": "CoSENTLoss",
    "a list of values": "[]", "each an integer": "3 4", "each a number": "0.5 1", "each a string": "some more",
    "NAME=VALUE ...": "a=1 b=2", "a mapping": "{}", "{NAME: {KEY: VALUE}}": '{"a":{"prompt":"x"}}',
}  # fmt: skip


def examples(kind):
    """What a user types for the type of a key in the help, such as "an integer above 0 or null"."""
    for part in re.split(r", | or ", kind.replace("one of ", "")):
        name = re.sub(r" (above|of at least|below|of at most) .*", "", part)
        yield EXAMPLES.get(name, part).split()


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=() if job in ("score", "check") else pytest.mark.slow) for job in JOBS]
)
def test_every_form_that_the_help_shows_is_accepted(job, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "1000")
    assert main([job, "--help"]) == 0
    text = capsys.readouterr().out
    keys, config = keys_of(config_of(job)), config_of(job)()
    folded = [f"{section}.{key}" for section, names in re.findall(r"--(\S+)\.KEY VALUE sets (.*(?:\n  .*)*)", text)
              for key in re.findall(r"\w+", names)]  # fmt: skip
    entries = re.findall(r"^  --(\S+) (\S+).*?\s{2,}.*\((.*); default: (.*)\)$", text, re.MULTILINE)
    entries += [(name, "", describe(keys[name].type), "null") for name in folded]
    sections = {key.rpartition(".")[0] for key in keys}
    assert {name for name, *_ in entries} == keys.keys() - sections
    first = ["--generation.do_sample"] * (job == "generate")  # which some keys require
    for name, form, kind, default in entries:
        for value in [[]] * form.startswith("[") + [*examples(kind)]:
            configure([job, *(first if "do_sample" not in name else []), f"--{name}", *value])
        if form and default != '""':
            assert configure([job, f"--{name}", default])[2] == config, name
    (tmp_path / "empty.yaml").touch()
    options = ["--config", str(tmp_path / "empty.yaml"), "--traceback"]
    assert main([job, *options, "--print_config"]) == main([job, "--print_config", *options]) == 0


def test_help(capsys):
    assert main(["train", "demo", "--overwrite", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.index(TrainConfig.essentials[-1]) < text.index("model:") and "--training.optim" not in text
    assert all(key.text for key in keys_of(TrainConfig).values() if not dataclass_in(key.type))
    assert main(["train", "--loss.help", "CoSENTLoss"]) == 0 and "--loss.scale VALUE" in capsys.readouterr().out
    assert main(["train", "--loss.help"]) == 0 and "CoSENTLoss, " in capsys.readouterr().out
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {job} " in text for job in JOBS) and all(name in text for name in shipped())
    assert main([]) == 2 and main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"raoe {cli.version('raoe')}\n")


def test_help_imports_nothing_heavy():
    code = """import json, sys
from raoe_train.cli import JOBS, main
lines = [["--help"], ["--version"], ["trian"], ["train", "no-such-recipe"], ["mine", "no.yaml"]]
lines += [["train", "--data.train", "a", "--output", "o", *words.split()] for words in json.loads(sys.argv[1])]
lines += [["mine", "--data.input", "no.tsv"], ["evaluate", "--model.name", "x", "--tasks", "no.tsv"]]
wrong = len(lines)
lines += [[job, option] for job in JOBS for option in ("--help", "--print_config")[: 2 - (job == "train")]]
done = [main(words) for words in lines]
sys.exit(str([{*done[2:wrong]}, {"torch", "transformers", "sentence_transformers"} & {*sys.modules}]))"""
    wrong = ["--training.seed x", "--data.dev no.tsv", "--data.guard a.tsv+no.csv"]
    done = subprocess.run([sys.executable, "-c", code, json.dumps(wrong)], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("[{2}, set()]\n"), done.stderr


def test_completion(tmp_path):
    pytest.importorskip("argcomplete")
    for line, word in (("raoe-train tr", "train"), ("raoe-train train demo --model.po", "--model.pooling")):
        variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words")}
        variables |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
        subprocess.run([sys.executable, "-m", "raoe_train"], env=os.environ | variables, check=True)
        assert (tmp_path / "words").read_text().split() == [word]

"""Kinds of faults in training, each with several members: weights in 16 bits, a result worse than the start, rows that
are left out, steps, settings of other versions, moved and interrupted runs."""

import json
import os
import shutil
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses as st
from sentence_transformers.sentence_transformer.modules import Dense

import raoe_train as rt
from raoe_train.losses.base import LossParts
from raoe_train.training import report
from raoe_train.training.callbacks import EXTRA, LogFile
from tests.tiny import SENTENCES, saved_encoder, tiny_encoder
from tests.training.small_runs import settings, write_pairs

BF16, FP16 = torch.bfloat16, torch.float16


def start_in(folder, dtype, *, dense=False, **changes):
    """Settings of a run whose encoder was saved in a dtype."""
    model = tiny_encoder(double=False)
    if dense:
        model.append(Dense(16, 16))
    model.to(dtype).save_pretrained(str(folder / "start"))
    made = settings(folder, **{"model.name": str(folder / "start"), "model.scratch": {}, "data.dev": None})
    training = made["training"] | {"learning_rate": 2e-5, "bf16": False}
    return {**made, "training": training, **changes}


def weights_of(folder):
    model = SentenceTransformer(str(folder), device="cpu")
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(BF16, {}), (FP16, {}), (BF16, {"dense": True}), (FP16, {"evaluation.certificate": True})],
    ids=str,
)
def test_sixteen_bits_are_trained_in_float32(tmp_path, capsys, monkeypatch, dtype, options):
    """As many weights change as from float32, and they are saved as they were."""
    seen = []
    note = lambda *_, model=None, **__: seen.extend(weight.dtype for weight in model.parameters())  # noqa: E731
    monkeypatch.setattr(LogFile, "on_train_begin", note)
    if "evaluation.certificate" in options:
        options = {**options, "data.dev": write_pairs(tmp_path / "dev.tsv", rows=24), "evaluation.guard_budget": 100}
    rt.train("raoe-s1", **start_in(tmp_path, dtype, **options))
    assert {*seen} == {torch.float32}
    assert f"are trained in float32, and saved in {str(dtype)[6:]}" in capsys.readouterr().out
    assert {weight.dtype for weight in weights_of(tmp_path / "out").values()} == {dtype}


@pytest.mark.parametrize("bf16", [None, False])
def test_an_explicit_false_keeps_products_in_float32(tmp_path, monkeypatch, bf16):
    seen = []
    monkeypatch.setattr("raoe_train.training.arguments.multiplies_bfloat16", lambda use_cpu: True)
    monkeypatch.setattr(LogFile, "on_train_begin", lambda self, args, *_, **__: seen.append(args.bf16))
    options = start_in(tmp_path, BF16)
    options["training"] |= {"bf16": bf16, "max_steps": 1}
    rt.train("raoe-s1", **options)
    assert seen == [bf16 is None]


@pytest.mark.parametrize("changes", [{"model.dtype": "float16"}, {"model.lora": {"r": 2}}], ids=["asked", "frozen"])
def test_float16_on_a_cpu_is_trained_without_bfloat16(tmp_path, monkeypatch, changes):
    """torch's layer norm on CPUs mixes no bfloat16 with float16: auto leaves bfloat16 out, true is refused at once."""
    monkeypatch.setattr("raoe_train.training.arguments.multiplies_bfloat16", lambda use_cpu: True)
    options = start_in(tmp_path, FP16, **changes)
    options["training"] |= {"bf16": True, "max_steps": 1}
    with pytest.raises(ValueError, match=r"float16 weights cannot be trained on a CPU with training.bf16 true"):
        rt.train("raoe-s1", **options)
    assert not (tmp_path / "out").exists()
    options["training"] |= {"bf16": "auto"}
    assert rt.train("raoe-s1", **options)["steps"] == 1


def test_small_steps_add_up(tmp_path, monkeypatch):
    """From bfloat16 nearly as many weights change as from float32; checkpoints have them in float32."""
    monkeypatch.setattr("raoe_train.outputs.Output.clear", lambda output: None)
    kept = {}
    for dtype in (torch.float32, BF16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        options = start_in(folder, dtype)
        start = weights_of(options["model.name"])
        rt.train("raoe-s1", **options)
        last = sorted((folder / "out" / "checkpoints").iterdir(), key=lambda path: int(path.name[11:]))[-1]
        trained = weights_of(last)
        assert {weight.dtype for weight in trained.values()} == {torch.float32}
        kept[dtype] = sum(int((trained[name] != start[name].float()).sum()) for name in start)
    assert kept[BF16] > 0.9 * kept[torch.float32] > 0


@pytest.mark.parametrize("how", ["whole", "dense", "asked"])
def test_weights_that_stay_in_sixteen_bits_are_said(tmp_path, caplog, how):
    """In rt.Trainer, and with model.dtype in a recipe."""
    if how == "asked":
        rt.train("raoe-s1", **start_in(tmp_path, torch.float32, **{"model.dtype": "bfloat16"}))
    else:
        model = tiny_encoder(double=False)
        model.append(Dense(16, 16))
        (model if how == "whole" else model[2]).to(BF16)
        rows = Dataset.from_dict({"anchor": SENTENCES, "positive": SENTENCES[::-1]})
        arguments = SentenceTransformerTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
        rt.Trainer(model, arguments, rows, loss=rt.losses.InfoNCELoss(model))
    assert [record.levelname for record in caplog.records if "16-bit" in record.message] == ["WARNING"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_adapters_are_in_float32_on_a_frozen_base_in_sixteen_bits(tmp_path, dtype):
    tiny_encoder(double=False).to(torch.float32 if dtype else BF16).save_pretrained(str(tmp_path / "a"))
    lora = {"r": 2, "target_modules": ["query"], "modules_to_save": ["pooler"]}
    model = rt.load_encoder(str(tmp_path / "a"), device="cpu", lora=lora, dtype=dtype)
    trained = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    assert trained == {torch.float32} and BF16 in {weight.dtype for weight in model.parameters()}
    assert rt.load_encoder(saved_encoder(tmp_path / "b"), device="cpu", train=True).saved_dtypes == {}


@pytest.mark.parametrize("recipe", ["raoe-s1", "cosent", pytest.param("adapt", marks=pytest.mark.slow)])
def test_the_start_competes(tmp_path, capsys, recipe):
    """A rate that destroys the encoder: what is saved is not worse than the start, and the exit status says so."""
    start = rt.train(recipe, **settings(tmp_path, **{"output": str(tmp_path / "first")}))
    made = settings(tmp_path, **{"model.name": str(tmp_path / "first"), "model.scratch": {}})
    made["training"] |= {"learning_rate": 10.0, "warmup_ratio": None, "eval_steps": None, "eval_strategy": "epoch"}
    result = rt.train(recipe, **made)
    assert result["after"]["spearman"] == pytest.approx(result["before"]["spearman"]) and start
    assert result["failed"] == 1 and "the start is saved" in capsys.readouterr().out
    assert result["best_step"] in (0, None) or recipe == "adapt"


def test_a_worse_last_model_is_said(tmp_path, capsys):
    """Without evaluation in training, the last model is asked for."""
    rt.train("raoe-s1", **settings(tmp_path, **{"output": str(tmp_path / "first")}))
    made = settings(tmp_path, **{"model.name": str(tmp_path / "first"), "model.scratch": {}})
    made["training"] |= {"learning_rate": 10.0, "eval_strategy": "no"}
    result = rt.train("raoe-s1", **made)
    assert result["after"]["spearman"] < result["before"]["spearman"] and result["failed"] == 1
    assert "the last model is saved" in capsys.readouterr().out


def test_lower_needs_two_scores():
    assert "from 2.00 to 1.00" in report.lower({"ndcg@10": 1.0}, {"ndcg@10": 2.0})
    for before in ({}, {"spearman": None}, {"spearman": 1.0}):
        assert report.lower({"spearman": 1.0}, before) == ""


ROWS = {"anchor": [f"text {n}" for n in range(64)], "positive": [f"answer {min(n // 4, 7)}" for n in range(64)]}
MANY = {"anchor": [f"text {n}" for n in range(64)], "positive": [f"answer {n}" for n in range(64)]}
STREAM = Dataset.from_dict(MANY).to_iterable_dataset()
FEW = {name: texts[:10] for name, texts in MANY.items()}


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"min_steps": 12}, 12),
        ({"min_steps": 3}, 10),
        ({"min_steps": 9, "dataloader_drop_last": True, "per_device_train_batch_size": 30}, 9),
        ({"min_steps": 7, "gradient_accumulation_steps": 4}, 7),
        ({"min_steps": 99, "max_steps": 2}, 2),
        ({"min_steps": 8, "data": {"max_rows": 12, "redraw": True}, "per_device_train_batch_size": 5}, 8),
    ],
    ids=str,
)
def test_min_steps(tmp_path, changes, steps):
    data = {f"data.{key}": value for key, value in changes.get("data", {}).items()}
    made = settings(tmp_path, **{"data.dev": None}, **data)
    training = {name: value for name, value in changes.items() if name != "data"}
    made["training"] |= {"per_device_train_batch_size": 8, **training}
    result = rt.train("raoe-s1", **made)
    assert result["steps"] == steps
    assert json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[-1])["step"] <= steps


def test_batch_sizes_are_not_searched(tmp_path):
    """Each try would have the first size."""
    made = settings(tmp_path)
    made["training"] |= {"auto_find_batch_size": True}
    with pytest.raises(ValueError, match="auto_find_batch_size"):
        rt.train("raoe-s1", **made)
    arguments = SentenceTransformerTrainingArguments(str(tmp_path / "a"), auto_find_batch_size=True, use_cpu=True)
    with pytest.raises(ValueError, match="auto_find_batch_size"):
        rt.Trainer(tiny_encoder(double=False), arguments, Dataset.from_dict(MANY))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"args": {}}, "SentenceTransformerTrainingArguments, got {}"), ({"model": "minilm"}, "Module, got 'minilm'"),
     ({"loss": "CoSENTLoss"}, r"pass rt\.losses\.CoSENTLoss\(model\)")],
)  # fmt: skip
def test_names_are_no_objects(changes, named):
    with pytest.raises(ValueError, match=named):
        rt.Trainer(**{"model": tiny_encoder(double=False), "train_dataset": Dataset.from_dict(MANY), **changes})
    with pytest.raises(ValueError, match="needs a loaded encoder, got 'minilm'"):
        rt.evaluate_model("minilm", tasks=["a.tsv"])


def test_a_setting_of_a_later_version_changes_no_output(tmp_path, monkeypatch, capsys):
    """A record has only settings that differ from defaults; another value of a setting is another run."""
    made = settings(tmp_path)
    first = rt.train("raoe-s1", **made)
    record = tmp_path / "out" / "made_from.json"
    content = json.loads(record.read_text())
    recipe = content["settings"]
    assert "patience" not in recipe["training"] and not {"evaluation", "polarity", "teacher"} & {*recipe}
    assert rt.train("raoe-s1", **made) == first
    record.write_text(json.dumps({**content, "finished": False}))
    assert rt.train("raoe-s1", **made)["after"] == first["after"]  # trains again, as nothing is left to resume
    with pytest.raises(ValueError, match=r"training\.patience"):
        rt.train("raoe-s1", **{**made, "training": made["training"] | {"patience": 3}})


def stop_at(step, how):
    """A step at which a run gets a signal, or dies."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == step - 1:
            how()

    return on_step_begin


@pytest.mark.slow
@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 4), (signal.SIGTERM, 6), (signal.SIGTERM, 7)])
def test_signals_leave_a_checkpoint(tmp_path, monkeypatch, number, step):
    """A run that a signal ends resumes at its step, and ends as one in one go; handlers are restored."""
    names = ("whole", "stopped")
    before = signal.getsignal(number)
    results = []
    for name in names:
        made = settings(tmp_path, **{"output": str(tmp_path / name)})
        made["training"] |= {"eval_steps": 5, "eval_strategy": "steps"}
        if name == "stopped":
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                kill = stop_at(step, lambda: os.kill(os.getpid(), number))
                patch.setattr(LogFile, "on_step_begin", kill, raising=False)
                rt.train("raoe-s1", **made)
            assert (tmp_path / name / "checkpoints" / f"checkpoint-{step}" / EXTRA).exists()
            assert signal.getsignal(number) is before
        results.append(rt.train("raoe-s1", **made))
    assert results[0]["after"] == results[1]["after"] and results[1]["train_steps"] == 10 - step
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in names]
    assert files[0] == files[1]


@pytest.mark.parametrize("way", ["recipe", "trainer", "latest"])
def test_a_moved_run_keeps_its_best_checkpoint(tmp_path, monkeypatch, way):
    """The state of a checkpoint names the best one by an absolute path."""
    made = settings(tmp_path, **{"output": str(tmp_path / "old")})
    made["training"] |= {"eval_steps": 2, "eval_strategy": "steps", "learning_rate": 1e-9, "patience": 9}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LogFile, "on_step_begin", stop_at(7, lambda: os.kill(os.getpid(), 15)), raising=False)
        rt.train("raoe-s1", **made)
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.move(old, new)
    states = []
    monkeypatch.setattr(LogFile, "on_train_begin", lambda self, args, state, *_, **__: states.append(state))
    if way == "recipe":
        rt.train("raoe-s1", **{**made, "output": str(new)})
    else:
        monkeypatch.setattr("transformers.Trainer.train", lambda self, resume_from_checkpoint: None)
        model = tiny_encoder(double=False)
        arguments = SentenceTransformerTrainingArguments(str(new / "checkpoints"), use_cpu=True, report_to="none")
        trainer = rt.Trainer(model, arguments, Dataset.from_dict(MANY), loss=rt.losses.InfoNCELoss(model))
        trainer.train(resume_from_checkpoint=True if way == "latest" else str(new / "checkpoints" / "checkpoint-7"))
        state = json.loads((new / "checkpoints" / "checkpoint-7" / "trainer_state.json").read_text())
        states.append(SimpleNamespace(**state))
    best = states[0].best_model_checkpoint
    assert best and best.startswith(str(new))


def parts():
    return LossParts({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})


@pytest.mark.parametrize(
    ("result", "total"),
    [
        (lambda: torch.tensor(5.0) + parts(), 8),
        (lambda: parts() + torch.tensor(5.0), 8),
        (lambda: sum([parts(), torch.tensor(1.0), parts()]), 7),
        (lambda: torch.tensor(2.0) * parts() / 4, 1.5),
        (lambda: parts() / torch.tensor(2.0), 1.5),
        (lambda: 1 + parts(), 4),
    ],
)
def test_parts_of_a_loss_are_numbers(result, total):
    value = result()
    assert isinstance(value, LossParts) and float(torch.stack([*value.values()]).sum()) == total


@pytest.mark.parametrize(
    ("loss", "shape", "cut"),
    [
        (st.MarginMSELoss, (16,), False),
        (st.DistillKLDivLoss, (16,), False),
        (st.MSELoss, (16,), True),
        (st.EmbedDistillLoss, (3, 16), True),
    ],
)
def test_only_embeddings_are_cut_to_a_width(loss, shape, cut):
    """The labels of other losses may have as many columns by chance."""
    from raoe_train.losses.by_length import _cut_labels

    labels = torch.zeros(4, *shape)
    assert _cut_labels(loss(tiny_encoder()), labels, 8).shape[-1] == (8 if cut else 16)


@pytest.mark.parametrize("name", ["InfoNCELoss", "CoSENTLoss", "MultipleNegativesRankingLoss"])
def test_a_loss_that_is_always_zero_is_said(tmp_path, caplog, name):
    """Batches of one row, for which there is nothing to tell apart: an error, or one warning."""
    model = tiny_encoder(double=False)
    columns = {"sentence1": SENTENCES, "sentence2": SENTENCES[::-1]}
    rows = Dataset.from_dict({**columns, "score": [0.1 * n for n in range(11)]} if name == "CoSENTLoss" else columns)
    arguments = SentenceTransformerTrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=1, logging_steps=3,
        num_train_epochs=1, save_strategy="no",
    )  # fmt: skip
    loss = getattr(st if name.startswith("Multiple") else rt.losses, name)(model)
    trainer = rt.Trainer(model, arguments, rows, loss=loss)
    if name == "InfoNCELoss":
        with pytest.raises(ValueError, match="train: a batch of one row has no negatives"):
            trainer.train()
    else:
        trainer.train()
        assert sum("nothing is learned" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("prompts", "named"),
    [({"anchr": "q: "}, "anchr"), ({"a": {"anchr": "q: "}}, "anchr"), ({"b": "q: "}, "'b'"), ({"b": {"x": ""}}, "'b'")],
)
def test_prompts_of_no_column_are_named(tmp_path, caplog, prompts, named):
    model, data = tiny_encoder(double=False), DatasetDict(a=Dataset.from_dict(MANY))
    arguments = SentenceTransformerTrainingArguments(str(tmp_path), use_cpu=True, prompts=prompts)
    rt.Trainer(model, arguments, data, loss=rt.losses.InfoNCELoss(model))
    assert named in caplog.text and "is not a column or dataset (known: a, anchor, positive)" in caplog.text
    caplog.clear()
    for good in ({"anchor": "q: "}, {"a": {"positive": "d: "}}, "q: "):
        arguments = SentenceTransformerTrainingArguments(str(tmp_path), use_cpu=True, prompts=good)
        rt.Trainer(model, arguments, DatasetDict(a=Dataset.from_dict(MANY)), loss=rt.losses.InfoNCELoss(model))
        assert "no column" not in caplog.text


@pytest.mark.parametrize("name", ["RAOE_KERNEL_BACKEND", "RAOE_KERNELS_BACKND", "RAOE_BACKEND"])
def test_environment_variables_that_look_like_ours_are_said(monkeypatch, name):
    from raoe_kernels import _dispatch

    monkeypatch.setenv(name, "scan")
    with pytest.warns(UserWarning, match=name):
        _dispatch._environment.__wrapped__()


def test_the_card_names_its_model_and_no_folder(tmp_path):
    rt.train("raoe-s1", **settings(tmp_path, **{"model.name": saved_encoder(tmp_path / "base"), "model.scratch": {}}))
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in card and "sentence_transformers_model_id" not in card
    assert "**Base model:** base" in card
    assert card.index("## Recipe and scores") < card.index("## Model Details")


@pytest.mark.parametrize("strategy", [None, "epoch", "steps"])
def test_a_dev_set_needs_checkpoints(tmp_path, strategy):
    made = settings(tmp_path)
    made["training"] |= {"save_strategy": "no", "eval_strategy": strategy}
    with pytest.raises(ValueError, match=r"training\.save_strategy"):
        rt.train("raoe-s1", **made)


@pytest.mark.parametrize(
    ("changes", "training", "stays"),
    [
        ({"data.train": ["bad.tsv"]}, {}, False),
        ({"data.dev": "bad.tsv"}, {}, False),
        ({"data.redraw": True, "data.max_rows": 12}, {"batch_sampler": "no_duplicates"}, False),
        ({}, {"learning_rate": 1e20}, False),
        ({"overwrite": True}, {"learning_rate": 1e20}, False),
        ({}, {"learning_rate": 1e20, "logging_steps": 1}, True),
    ],
    ids=str,
)
def test_a_failed_run_leaves_only_work(tmp_path, monkeypatch, changes, training, stays):
    """Nothing, or a log. A lock that a killed job left goes as well."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.tsv").write_text("sentence1\tsentence2\tscore\tlabel\na\tb\tx\tneutral\n")
    made = settings(tmp_path, **changes)
    made["training"] |= training
    if "overwrite" in changes:
        rt.train("raoe-s1", **settings(tmp_path))
    (tmp_path / ".out.lock").touch()
    with pytest.raises((ValueError, FloatingPointError)):
        rt.train("raoe-s1", **made)
    assert {path.name for path in tmp_path.iterdir()} - {"out"} == {"bad.tsv", "train.tsv", "dev.tsv"}
    assert (tmp_path / "out").exists() == stays


def test_the_log_of_a_run_has_no_rates_of_nothing(tmp_path):
    rt.train("raoe-s1", **settings(tmp_path))
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    values = {name: value for entry in log for name, value in entry.items()}
    assert values["train_samples_per_second"] > 0 and values["eval_runtime"] > 0
    assert all(value for name, value in values.items() if name.endswith(("_per_second", "_flos")))
    assert "eval_samples_per_second" not in values


@pytest.mark.parametrize("kind", [dict, DatasetDict])
@pytest.mark.parametrize("losses", ["one", "two"])
def test_several_sets_need_a_loss_that_chooses_the_best(tmp_path, kind, losses):
    model = tiny_encoder(double=False)
    pairs = {"sentence1": SENTENCES, "sentence2": SENTENCES[::-1]}
    scored = {**pairs, "score": [*range(11)]}
    data = kind(a=Dataset.from_dict(FEW), b=Dataset.from_dict(scored if losses == "two" else pairs))
    loss = rt.losses.InfoNCELoss(model)
    loss = loss if losses == "one" else {"a": loss, "b": rt.losses.CoSENTLoss(model)}
    options = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch", "use_cpu": True}
    for metric in (None, "loss", "eval_loss"):
        arguments = SentenceTransformerTrainingArguments(str(tmp_path), metric_for_best_model=metric, **options)
        with pytest.raises(ValueError, match="eval_a_loss or eval_b_loss"):
            rt.Trainer(model, arguments, data, data, loss=loss)
    arguments.metric_for_best_model, arguments.num_train_epochs = "eval_b_loss", 1
    trainer = rt.Trainer(model, arguments, data, data, loss=loss)
    trainer.train()
    assert trainer.state.best_metric > 0


@pytest.mark.parametrize("place", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: {"a": Dataset.from_dict(MANY), "b": IterableDataset.from_generator(lambda: iter([]))}, "'b' must"),
        (lambda: {"a": [MANY]}, "'a' must .* list"),
        (lambda: [MANY], "got list"),
    ],
)
def test_data_that_cannot_be_read_are_said(tmp_path, place, make, named):
    model = tiny_encoder(double=False)
    arguments = SentenceTransformerTrainingArguments(str(tmp_path), use_cpu=True, max_steps=1)
    data = {"train_dataset": Dataset.from_dict(MANY), place: make()}
    with pytest.raises(ValueError, match=named):
        rt.Trainer(model, arguments, **data, loss=rt.losses.InfoNCELoss(model))


@pytest.mark.parametrize("label", [-100, -1, 7])
@pytest.mark.parametrize("name", ["RAOELoss", "GatedAngularLoss", "RankMarginLoss"])
def test_labels_are_classes_from_zero(tmp_path, name, label):
    """The marks of a missing label are refused in any batch where the loss reads labels; any class is allowed."""
    model = tiny_encoder(double=False)
    data = Dataset.from_dict({"a": SENTENCES, "b": SENTENCES, "score": [*range(11)], "label": [0, 1] * 5 + [label]})
    arguments = SentenceTransformerTrainingArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=3)
    trainer = rt.Trainer(model, arguments, data, loss=getattr(rt.losses, name)(model))
    is_refused = label < 0 and name != "RankMarginLoss"
    with pytest.raises(ValueError, match=f"whole numbers from 0.*{label}") if is_refused else nullcontext():
        trainer.train()

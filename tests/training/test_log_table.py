"""What a run says while it trains: a table, a bar where there is a terminal, and what trackers are told."""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace

import pytest
from sentence_transformers import SentenceTransformer
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from raoe_train import run
from raoe_train.data.pairs import read_pairs
from raoe_train.encoders import lengths
from raoe_train.evaluation.sts import StsEvaluator
from raoe_train.losses import CoSENTLoss, RAOELoss
from raoe_train.training.arguments import trainer_settings
from raoe_train.training.log_table import LogTable
from raoe_train.training.measures import summary
from raoe_train.training.trainer import Trainer
from tests.tiny import saved_encoder
from tests.training.small_runs import settings, write_pairs
from tests.training.test_trainer import arguments


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return saved_encoder(tmp_path_factory.mktemp("encoder"))


class Told(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def trained(folder, encoder, loss=RAOELoss, callbacks=(), dev=True, by_length=True, **changes):
    model = SentenceTransformer(encoder, device="cpu")
    pairs = read_pairs(write_pairs(folder / "train.tsv", rows=40))
    by_default = {"max_steps": 8, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4}
    args = arguments(folder, **{**by_default, **changes})
    evaluator = StsEvaluator(pairs, 8, "dev") if dev else None
    trainer = Trainer(
        model, args, pairs, loss=loss(model), evaluator=evaluator, callbacks=list(callbacks), by_length=by_length
    )
    trainer.train()
    return trainer


def test_a_table_in_place_of_dictionaries(tmp_path, encoder, capsys):
    """One line a step that is logged, with its parts, and its evaluation where there is one."""
    trainer = trained(tmp_path, encoder, metric_for_best_model="eval_dev_spearman_cosine")
    said = capsys.readouterr()
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0] == ["step", "loss", "rank", "angle", "dev", "pairs/s", "left"]
    assert [line[0] for line in lines[1:]] == ["2", "4", "6", "8"]
    assert [len(line) for line in lines[1:]] == [6, 7, 6, 7]  # dev at 4 and 8
    assert "{" not in said.out and "8/8" not in said.err  # nobody watches a bar in a file
    history = trainer.state.log_history
    for line in lines[1:]:
        entry = next(entry for entry in history if entry["step"] == int(line[0]) and "loss" in entry)
        assert [float(word) for word in line[1:4]] == pytest.approx(
            [entry["loss"], entry["rank"], entry["angle"]], rel=1e-3, abs=0
        )
    found = next(entry for entry in history if "eval_dev_spearman_cosine" in entry and entry["step"] == 4)
    assert float(lines[2][4]) == pytest.approx(100 * found["eval_dev_spearman_cosine"], rel=0, abs=0.006)
    assert lines[-1][-1] == "00:00"


def test_columns_that_come_later_get_another_head(tmp_path, encoder, capsys):
    """No metric was named, and none is known before it is found; a loss without parts has none."""
    trained(tmp_path, encoder, loss=CoSENTLoss)
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert heads == [["step", "loss", "pairs/s", "left"], ["step", "loss", "dev", "pairs/s", "left"]]
    model = SentenceTransformer(encoder, device="cpu")
    pairs = read_pairs(write_pairs(tmp_path / "train.tsv", rows=40))
    trainer = Trainer(model, arguments(tmp_path), loss=CoSENTLoss, evaluator=StsEvaluator(pairs, 8, "dev"))
    trainer.evaluate()  # outside training
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "dev"] and line.split()[0] == "0"


def test_a_bar_where_there_is_a_terminal(tmp_path, encoder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    trained(tmp_path, encoder, dev=False, eval_strategy="no")
    said = capsys.readouterr()
    assert "8/8" in said.err and "{" not in said.out + said.err
    assert [line.split()[0] for line in said.out.splitlines()] == ["step", "2", "4", "6", "8"]
    trained(tmp_path, encoder, dev=False, eval_strategy="no", disable_tqdm=True)
    assert "8/8" not in capsys.readouterr().err


def test_callbacks_of_ones_own_stay(tmp_path, encoder, capsys):
    class Bar(ProgressCallback):
        pass

    bar, printer = Bar(), PrinterCallback()
    trainer = trained(tmp_path, encoder, callbacks=[bar, printer], dev=False, eval_strategy="no", disable_tqdm=True)
    kinds = [type(each) for each in trainer.callback_handler.callbacks]
    assert bar in trainer.callback_handler.callbacks and printer in trainer.callback_handler.callbacks
    assert kinds.count(PrinterCallback) == kinds.count(LogTable) == 1
    assert "{'loss'" in capsys.readouterr().out


def test_only_the_first_process_prints(capsys):
    table, state = LogTable(), SimpleNamespace(is_world_process_zero=False, global_step=2, log_history=[{"loss": 1.0}])
    args, control = SimpleNamespace(disable_tqdm=True, metric_for_best_model=None), None
    for state.is_world_process_zero in (False, True):
        table.on_train_begin(args, state, control)
        args.eval_strategy, state.max_steps = "no", 4
        table.on_log(args, state, control, logs={"loss": 1.0})
        table.on_step_begin(args, state, control)
        assert bool(capsys.readouterr().out) == state.is_world_process_zero


@pytest.mark.parametrize("by_length", [True, False])
def test_what_trackers_are_told(tmp_path, encoder, by_length):
    """Parts, gradient norm, tau, tokens and what padding was saved; the trainer's own history is as it was."""
    told = Told()
    whole = {"per_device_train_batch_size": 40, "max_steps": 4, "eval_strategy": "no"}  # every batch is all pairs
    trainer = trained(tmp_path, encoder, callbacks=[told], dev=False, by_length=by_length, **whole)
    steps = [logs for logs in told.logs if "loss" in logs]
    assert len(steps) == 2
    batch = next(iter(trainer.get_train_dataloader()))
    columns = [
        {key.removeprefix(name): value for key, value in batch.items() if key.startswith(name)}
        for name in ("sentence1_", "sentence2_")
    ]
    padded = sum(column["input_ids"].numel() for column in columns)
    runs = lengths.by_length(columns, keep_leading=True).features
    read = sum(run["input_ids"].numel() for run in runs) if by_length else padded
    assert not by_length or read < padded
    for logs in steps:  # of two steps each
        assert {"rank", "angle", "grad_norm", "learning_rate"} <= {*logs}
        assert logs["tau"] == 20.0 and logs["pairs_per_second"] > 0
        assert (logs["tokens"], logs["padding_saved"]) == (2 * read, pytest.approx(1 - read / padded))
    extra = {"tau", "tokens", "padding_saved", "pairs_per_second"}
    assert not any(extra & {*entry} for entry in trainer.state.log_history)


def events(folder):
    """Scalars of TensorBoard's files: a record is its length, a checksum, an Event and a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            at += length + 16
    return found


def test_tensorboard_by_one_word(tmp_path):
    """Its files stay when checkpoints go, and are no part of what a model is; another tracker is no other run."""
    pytest.importorskip("tensorboardX")
    from raoe_train.artifacts.provenance import fingerprint

    made = settings(tmp_path, **{"training.report_to": "tensorboard"})
    run("train", "raoe-s1", **made)
    found = events(tmp_path / "out" / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [2, 4, 6, 8, 10]
    assert {f"train/{name}" for name in ("rank", "angle", "grad_norm", "tau", "tokens", "padding_saved")} <= {*found}
    assert len(found["eval/dev_spearman_cosine"]) == 2
    before = fingerprint(str(tmp_path / "out"))
    again = run("train", "raoe-s1", **{**made, "training.report_to": "none"})
    assert again["steps"] == 10
    next((tmp_path / "out" / "tensorboard").iterdir()).unlink()
    assert fingerprint(str(tmp_path / "out")) == before


@pytest.mark.parametrize("tracker", ["tensorbored", "comet_ml"])
def test_a_tracker_that_is_not_there(tmp_path, tracker):
    with pytest.raises(ValueError, match=f"^training: .*{'Comet' if tracker == 'comet_ml' else tracker}"):
        trainer_settings({"report_to": tracker}, tmp_path, device="cpu", has_dev=False)


def test_the_interpolation_weight_is_printed():
    scores = {"spearman": 70.0, "tasks": {}}
    curve = [{"weight": 0.5, "dev": 71.25}, {"weight": 1, "dev": None}]
    said = summary({"before": scores, "after": scores, "interpolation": {"weight": 0.5, "curve": curve}})
    last = said.splitlines()[-1]
    assert last == "interpolation weight 0.5, of 0 before to 1 after training; dev at 0.5: 71.25, 1: -"


def test_an_evaluation_without_a_correlation_shows_its_loss(capsys):
    """Apart from the training loss, whose name transformers gives it behind eval_."""
    table = LogTable()
    state = SimpleNamespace(is_world_process_zero=True, global_step=4, log_history=[{"loss": 1.5}], max_steps=4)
    args = SimpleNamespace(disable_tqdm=True, metric_for_best_model=None, eval_strategy="no")
    table.on_train_begin(args, state, None)
    table.on_log(args, state, None, logs={"loss": 1.5})
    table.on_log(args, state, None, logs={"eval_loss": 0.5, "eval_runtime": 9.0})
    table.on_train_end(args, state, None)
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "loss", "dev", "loss"] and line.split() == ["4", "1.5", "0.5"]
    assert summary({"before": {}, "after": {}}) == ""

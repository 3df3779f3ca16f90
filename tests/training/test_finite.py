"""A NaN loss: where the run stops, which rows it names, and the files left."""

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

import raoe_train as rt
from raoe_train import run
from raoe_train.encoders.load import load_encoder
from raoe_train.jobs.check import check_encoder
from raoe_train.losses import CoSENTLoss, RAOELoss, SigmoidLoss
from raoe_train.settings import Model
from tests.tiny import SENTENCES, tiny_encoder
from tests.training.small_runs import arguments, saving

PAIR = 27  # whose batch goes wrong


def by_row(monkeypatch, change, from_step):
    """From a step on, the loss of the batch that holds the pair goes through `change`; the batches' scores by step."""
    batches, real = [], RAOELoss.compute_loss_from_embeddings

    def compute(self, embeddings, labels):
        loss = real(self, embeddings, labels)
        batches.append(labels["score"].tolist())
        if len(batches) >= from_step and ROWS[PAIR] in batches[-1]:
            loss["rank"] = change(loss["rank"])
        return loss

    monkeypatch.setattr(RAOELoss, "compute_loss_from_embeddings", compute)
    monkeypatch.setattr(RAOELoss, "reads_order", False)  # the plan keeps the scores, which name the rows
    return batches


ROWS = {PAIR: None}


@pytest.fixture
def pairs(tmp_path):
    """Pairs with distinct scores, which identify the rows of a batch."""
    path = tmp_path / "pairs.tsv"
    rows = [f"{SENTENCES[i % 11]} {i}\t{SENTENCES[(3 * i + 1) % 11]}\tneutral\t{i / 8}" for i in range(40)]
    path.write_text("sentence1\tsentence2\tlabel\tscore\n" + "\n".join(rows) + "\n")
    ROWS[PAIR] = PAIR / 8
    return str(path)


def of_gradient(loss):
    """The unchanged loss, with a NaN gradient."""
    return loss + torch.sqrt(loss * 0)


@pytest.mark.parametrize(
    ("change", "said", "every"),
    [
        pytest.param(lambda loss: loss * float("nan"), "the loss is nan", 2, marks=pytest.mark.slow),
        (lambda loss: loss / 0, "the loss is inf", "late"),
        (of_gradient, "weights became NaN or infinite after the optimizer step", 1),  # seen before its checkpoint
        (of_gradient, "weights became NaN or infinite after the optimizer step", 3),  # seen at the next step's loss
    ],
)
def test_nan_loss_stops_the_run_and_names_the_rows(pairs, tmp_path, monkeypatch, change, said, every):
    options = {**saving(tmp_path, 2), "data.train": [pairs]}
    if every == "late":  # as on CUDA, where a loss is read in the next step
        monkeypatch.setattr("raoe_train.training.callbacks.READ_LATE", ("cpu",))
        every = 3
    options["training"]["save_steps"] = every
    with monkeypatch.context() as patch:
        batches = by_row(patch, change, from_step=4)
        with pytest.raises(FloatingPointError) as caught:
            run("train", "raoe-s1", **options)
    step = next(n for n, scores in enumerate(batches, 1) if n >= 4 and ROWS[PAIR] in scores)
    text = str(caught.value)
    assert text.startswith(f"step {step}: {said}")
    shown = text.partition("as the encoder reads them:\n")[2].splitlines()
    assert [" | " in line for line in shown[:9]] == [True] * 8 + [False]
    for line, score in zip(shown, batches[step - 1], strict=False):
        first, second = line.split(" | ")
        row = int(score * 8)
        assert first.startswith(f"  [CLS] {SENTENCES[row % 11]}") and second.startswith("[CLS] ")
    assert "learning_rate (now 0.001)" in text and "loss.scale (now 20)" in text
    # The earlier checkpoint is complete, and the same command resumes from it.
    last = tmp_path / "out" / "checkpoints" / f"checkpoint-{(step - 1) // every * every}"
    assert (len(batches) > step) == ("weights" in said and every == 3)
    assert check_encoder(load_encoder(Model(name=str(last), device="cpu")))["failed"] == []
    for path in last.parent.glob("checkpoint-*"):
        assert all(value.isfinite().all() for value in load_file(path / "model.safetensors").values())
    again = run("train", "raoe-s1", **options)
    assert again["steps"] == 10


def test_gradients_of_a_learned_scale_do_not_add_up(tmp_path):
    """Without the callback of sentence-transformers, which versions before 6.2 lack, as with it."""
    rows = Dataset.from_dict({"anchor": SENTENCES, "positive": [*reversed(SENTENCES)]})
    scales = []
    for is_new in (True, False):
        model = tiny_encoder(double=False)
        trainer = rt.Trainer(model, arguments(tmp_path, max_steps=3, optim="sgd"), rows, loss=SigmoidLoss(model))
        for each in [*trainer.callback_handler.callbacks]:
            if type(each).__name__ == "_OptimizerZeroGradCallback" and not is_new:
                trainer.remove_callback(each)
        trainer.train()
        scales.append(float(trainer.loss.logit_bias))
    assert scales[0] == scales[1] != -10


def test_a_loss_that_is_read_late_is_read_after_the_last_step(tmp_path, monkeypatch):
    monkeypatch.setattr("raoe_train.training.callbacks.READ_LATE", ("cpu",))
    real = SigmoidLoss.of_columns
    # the gradient stays finite
    monkeypatch.setattr(SigmoidLoss, "of_columns", lambda *arguments: real(*arguments) + float("inf"))
    rows = Dataset.from_dict({"anchor": SENTENCES, "positive": [*reversed(SENTENCES)]})
    model = tiny_encoder(double=False)
    with pytest.raises(FloatingPointError, match="step 1: the loss is inf"):
        rt.Trainer(model, arguments(tmp_path, max_steps=1), rows, loss=SigmoidLoss(model)).train()


def test_the_loss_is_not_read_back_to_filter_nan(tmp_path, monkeypatch):
    """transformers' filter waits for a GPU twice a step."""
    read, isnan = [], torch.isnan
    monkeypatch.setattr(torch, "isnan", lambda value: read.append(value) or isnan(value))
    rows = Dataset.from_dict({"sentence1": SENTENCES, "sentence2": SENTENCES[::-1], "score": [*range(len(SENTENCES))]})
    model = tiny_encoder(double=False)
    trainer = rt.Trainer(model, arguments(tmp_path, max_steps=2), rows, loss=CoSENTLoss(model))
    trainer.train()
    assert trainer.state.global_step == 2 and not read

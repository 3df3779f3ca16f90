"""What a loss has of its own is in the checkpoints: a run that goes on is the run that nobody stopped, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import DatasetDict
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as stock
from torch import nn
from transformers import set_seed

from raoe_train.losses import CoSENTLoss, InfoNCELoss
from raoe_train.training.trainer import Trainer
from tests.tiny import saved_encoder
from tests.training.small_runs import arguments
from tests.training.test_trainer import pairs


class Learned(CoSENTLoss):
    """A loss with a parameter, a buffer that counts and one that is for no checkpoint."""

    def __init__(self, model: Any, scale: Any = 20.0, **cached: Any) -> None:
        super().__init__(model, scale, **cached)
        self.factor = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def of_pairs(self, similarity: Any, score: Any, label: Any) -> Any:
        self.seen += 1
        return super().of_pairs(similarity * self.factor * (1 + 0.1 * self.seen), score, label)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return saved_encoder(tmp_path_factory.mktemp("encoder"), dropout=0.1)


def matryoshka(model):
    return stock.MatryoshkaLoss(model, Learned(model), [16, 4])


CASES: dict[str, Any] = {
    "by length": (Learned, True),
    "cached": (lambda model: Learned(model, mini_batch_size=3), True),
    "Matryoshka, padded": (matryoshka, False),
    "by dataset": ({"a": Learned, "b": lambda model: Learned(model, 5.0), "c": InfoNCELoss}, True),
}


def trained(folder, encoder, loss, by_length, checkpoint=None):
    """The trainer after 6 steps, checkpoints at 2, 4 and 6; from a checkpoint if there is one."""
    set_seed(3)
    model = SentenceTransformer(encoder, device="cpu")
    data: Any = pairs(folder / "a.tsv", rows=48)
    if isinstance(loss, dict):
        a, b, c = (data.select(range(16)) for _ in "abc")  # so that 6 steps see all
        data = DatasetDict(a=a, b=b, c=c.select_columns(["sentence1", "sentence2"]))
    args = arguments(folder, max_steps=6, save_strategy="steps", save_steps=2, learning_rate=1e-2, weight_decay=0.0)
    trainer = Trainer(model, args, data, loss=loss, by_length=by_length)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return trainer


def learned(trainer):
    """Our parameters and buffers, by the loss's name."""
    losses = trainer.loss if isinstance(trainer.loss, dict) else {"": trainer.loss}
    result = {name: each for name, loss in losses.items() for each in loss.modules() if isinstance(each, Learned)}
    return {name: (float(loss.factor.detach()), int(loss.seen)) for name, loss in result.items()}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "cached" else ()) for case in CASES]
)
def test_loss_parameters_are_resumed(tmp_path, encoder, case):
    loss, by_length = CASES[case]
    whole = trained(tmp_path, encoder, loss, by_length)
    expected = learned(whole)
    assert all(factor != 0.5 and seen > 0 for factor, seen in expected.values())
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    saved = torch.load(checkpoint / "loss_state_0.pt", weights_only=True)
    assert {key.rpartition(".")[2] for key in saved} == {"factor", "seen"}  # neither the model nor what is scratch
    again = trained(tmp_path, encoder, loss, by_length, checkpoint)
    assert learned(again) == expected
    ours, theirs = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_without_state_there_is_no_file_and_another_loss_is_refused(tmp_path, encoder):
    trained(tmp_path, encoder, CoSENTLoss, True)
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    assert not list(checkpoint.glob("loss_state*"))
    with pytest.raises(ValueError, match=r"another loss: this loss has the tensors loss\.factor \[\], .* has none"):
        trained(tmp_path, encoder, Learned, True, checkpoint)

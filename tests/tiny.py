"""A tiny encoder for tests of training, created in a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentence_transformers
import torch
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModel

from raoe_train.cli import config_of
from raoe_train.config import checked, merge
from raoe_train.encoders.load import load_encoder
from raoe_train.settings import Model

# sentence-transformers 6.0 replays cached gradients in float32, whatever the encoder's type.
REPLAYS_IN_DOUBLE = Version(sentence_transformers.__version__) >= Version("6.2")
SENTENCES = [
    "a man plays a guitar on the stage",
    "someone is playing music",
    "two dogs run through the snow",
    "the dog sleeps",
    "a child reads a long and interesting book about birds",
    "nobody reads",
    "the train arrives late in the evening",
    "a train is on time",
    "people walk",
    "a woman cooks dinner for her family and friends",
    "dinner is being cooked",
]


def load(job: str, recipe: Any = None, settings: Any = None) -> Any:
    """The configuration object of a job."""
    return checked(merge(config_of(job), [recipe, settings]))


def tiny_encoder(dropout: float = 0.0, double: bool = True, **settings: Any) -> Any:
    """A SentenceTransformer of one layer on the CPU."""
    scratch = {
        "vocab_size": 120,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    config = Model(name="scratch", device="cpu", max_seq_length=16, scratch=scratch, **settings)
    model = load_encoder(config, sentences=SENTENCES)
    return (model.double() if double else model).train()


def encoder_of(kind: str, sizes: dict[str, Any], pooling: str = "mean") -> Any:
    """A SentenceTransformer with a tiny transformer of a model_type, float64, without dropout."""
    model = tiny_encoder(pooling=pooling)
    tokenizer = model.tokenizer
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": None}
    config = CONFIG_MAPPING[kind](vocab_size=len(tokenizer), max_position_embeddings=64, **special, **sizes)
    torch.manual_seed(3)
    model[0].model = AutoModel.from_config(config).double().eval()
    return model.train(False)


def saved_encoder(folder: Path, **changes: Any) -> str:
    """The folder with a tiny encoder in it; `changes` are keywords of tiny_encoder."""
    tiny_encoder(double=False, **changes).save_pretrained(str(folder))
    return str(folder)


def batch(model: Any, rows: int = 9) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Two tokenized columns of `rows` sentences, with scores (one tie) and labels of three classes."""
    first = [SENTENCES[row % len(SENTENCES)] for row in range(rows)]
    second = [SENTENCES[(3 * row + 1) % len(SENTENCES)] for row in range(rows)]
    generator = torch.Generator().manual_seed(5)
    score = torch.rand(rows, generator=generator, dtype=torch.float64)
    if rows > 4:
        score[1] = score[4]
    label = torch.arange(rows) % 3
    return [model.preprocess(first), model.preprocess(second)], {"score": score, "label": label}


def gradients(model: Any) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def total(loss: Any) -> torch.Tensor:
    """The number that a trainer computes from the result of a loss module."""
    return torch.stack(list(loss.values())).sum() if isinstance(loss, dict) else loss


def training_data(config: Any) -> Any:
    """(datasets, texts) that a TrainConfig trains on, see read_training_data."""
    from raoe_train.training.training_data import read_training_data

    return read_training_data(config, Path(config.output or "", "teacher"))


def evaluate_encoder(model: Any, tasks: Any, data_dir: Any = None, batch_size: int = 64, **how: Any) -> Any:
    from raoe_train.evaluation.tasks import evaluate_tasks, read_tasks

    return evaluate_tasks(model, read_tasks(tasks, data_dir, **how), batch_size)

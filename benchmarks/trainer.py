"""Real training steps, with collation in the process or in 4 workers: raoe_train.Trainer, packed and by length, against
sentence-transformers' trainer, both with CoSENTLoss. In bf16 on a GPU.

Texts are words of the built-in corpus, as many as texts of SNLI have tokens. A time is that of all steps of a run; a
run of two steps precedes it. All texts are tokenized before the first step, which is part of the time, except for
"tokens in each step". "of it: collation" is the time to collate, and plan, the batches of the run in one thread.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import tempfile
from typing import Any

import torch

from benchmarks.case import Call, Case
from benchmarks.equal_lengths import minilm, rows
from benchmarks.train_step import ST, drawn

SIZES = {"cpu": [32], "cuda": [512]}
STEPS = {"cpu": 10, "cuda": 30}
TESTS = ["tests/losses/test_planned.py"]


def case(pairs: int, device: str) -> Case:
    model, name = minilm(device)
    steps = STEPS[device]
    data = texts(pairs * steps)
    ours = ("packed", "by length") if device == "cuda" else ("by length",)
    ways = (*ours, f"{ours[0]}, tokens in each step", ST)
    contenders: dict[str, Call] = {
        f"{way}, {workers} workers": training(copy.deepcopy(model), way, workers, pairs, steps, data)
        for way in ways
        for workers in (0, 4)
    }
    batches = [[data[row] for row in range(start, start + pairs)] for start in range(0, len(data), pairs)]
    contenders |= {f"of it: collation, {way}": call for way, call in collations(model, data, batches).items()}
    weights = sum(weight.numel() for weight in model.parameters())
    return Case(f"{steps} steps of {pairs:,} pairs, {name}", contenders, 4 * 8 * weights * steps, once=True)


def texts(pairs: int) -> Any:
    from datasets import Dataset

    words = itertools.cycle(" ".join(row["sentence1"] for row in rows(2000)).split())
    columns = {
        name: [" ".join(itertools.islice(words, int(length) - 2)) for length in lengths.clip(3)]
        for name, lengths in zip(("sentence1", "sentence2"), drawn("SNLI", pairs), strict=True)
    }
    score = torch.rand(pairs, generator=torch.Generator().manual_seed(0))
    return Dataset.from_dict({**columns, "score": score.tolist()})


def made(model: Any, way: str, workers: int, pairs: int, data: Any) -> Any:
    """Return a trainer for two steps."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss

    from raoe_train import Trainer

    folder = tempfile.TemporaryDirectory()  # exists as long as a reference to it does
    is_gpu = model.device.type == "cuda"
    settings: Any = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    arguments = SentenceTransformerTrainingArguments(
        folder.name, per_device_train_batch_size=pairs, dataloader_num_workers=workers, bf16=is_gpu, use_cpu=not is_gpu,
        max_steps=2, **settings,
    )  # fmt: skip
    ours: Any = {} if way == ST else {"packed": way.startswith("packed"), "pretokenize": "each step" not in way}
    kind: Any = SentenceTransformerTrainer if way == ST else Trainer
    trainer = kind(model, arguments, data, loss=CoSENTLoss(model), **ours)
    trainer.folder = folder
    return trainer


def training(model: Any, way: str, workers: int, pairs: int, steps: int, data: Any) -> Call:
    trainer = made(model, way, workers, pairs, data)
    trainer.train()
    trainer.args.max_steps = steps

    def call(_: int) -> None:
        trainer.train()

    return call


def collations(model: Any, data: Any, batches: list[list[dict[str, Any]]]) -> dict[str, Call]:
    ways = {"texts tokenized before": "", "texts tokenized in the step": "tokens in each step", ST: ST}
    trainers = {way: made(copy.deepcopy(model), name, 0, 32, data) for way, name in ways.items()}
    collators = {way: trainer.get_train_dataloader().collate_fn for way, trainer in trainers.items()}

    def call(_: int, collator: Any) -> None:
        before = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread, as in a worker
        try:
            for batch in batches:
                collator(batch)
        finally:
            os.environ["TOKENIZERS_PARALLELISM"] = before or "true"

    return {way: functools.partial(call, collator=collator) for way, collator in collators.items()}

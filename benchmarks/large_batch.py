"""One RAOELoss step by length, from 64 to 65,536 pairs: time, and memory, which stays flat with mini-batches.

Lengths are those of SNLI, as in benchmarks/train_step.py; "small" has two layers of width 128 and random weights.
Without mini-batches, the activations of all texts are in memory at once. With mini-batches (gradient caching by
sentence-transformers' CachedLossMixin) only those of one mini-batch are, besides the embeddings and their gradient. The
loss sees whole batches in both cases. Batches of more than 512 pairs are measured once. MiniLM's largest batch takes a
quarter of an hour on 2 cores.
"""

from __future__ import annotations

import torch

from benchmarks.case import Call, Case
from benchmarks.equal_lengths import encoder, minilm, step
from benchmarks.train_step import TOKENS, drawn, rows_of

SIZES = {"cpu": [64, 512, 4096, 65536], "cuda": [64, 512, 4096, 65536]}
PLAIN_UP_TO = {"small": 4096, "MiniLM": 512}  # most pairs whose activations comfortably fit into 24 GiB
TESTS = ["tests/losses/test_losses.py"]


def case(pairs: int, device: str) -> Case:
    from raoe_train.losses import ByLength, RAOELoss

    models = {"small": encoder(device, {"hidden_size": 128, "num_hidden_layers": 2}), "MiniLM": minilm(device)[0]}
    features = [rows_of(lengths, device) for lengths in drawn("SNLI", pairs)]
    generator = torch.Generator().manual_seed(0)
    labels = {
        "score": torch.rand(pairs, generator=generator).to(device),
        "label": torch.randint(3, (pairs,), generator=generator).to(device),
    }
    contenders: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for kind, model in models.items():
        cached = ByLength(RAOELoss(model, mini_batch_num_tokens=TOKENS))
        contenders[f"{kind}, {TOKENS:,} tokens at a time"] = step(model, cached, features, labels)
        plain = f"{kind}, all at once"
        if pairs > PLAIN_UP_TO[kind]:
            missing[plain] = "the activations of all texts do not fit into memory"
        else:
            contenders[plain] = step(model, ByLength(RAOELoss(model)), features, labels)
    weights = sum(weight.numel() for weight in models["small"].parameters())
    return Case(f"{pairs:,} pairs", contenders, bytes=4 * 8 * weights, missing=missing, once=pairs > 512)

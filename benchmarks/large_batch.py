"""One RAOELoss step from 64 to 65,536 pairs: time, and memory that stays flat where texts are encoded piece by piece.

"small" is two layers of width 128 with random weights, MiniLM as in benchmarks/train_step.py, whose step this is.
Without mini-batches every text's activations are there at once; with them (gradient caching, sentence-transformers'
CachedLossMixin) those of one mini-batch, besides embeddings and their gradient. The loss sees whole batches either way.
"""

from __future__ import annotations

from benchmarks.case import Call, Case
from benchmarks.train_step import collated, encoder, minilm, step

SIZES = {"cpu": [64, 512, 4096, 65536], "cuda": [64, 512, 4096, 65536, 1 << 20]}
MINI_BATCH = {"small": 256, "MiniLM": 64}
# pairs whose activations fit into 24 GiB with room to spare, and a step of which ends in half an hour on 2 cores
PLAIN_UP_TO = {"small": 4096, "MiniLM": 512}
CACHED_UP_TO = {"cpu": {"MiniLM": 16384}, "cuda": {}}
TESTS = ["tests/train/test_losses.py"]


def case(pairs: int, device: str) -> Case:
    from raoe_train.losses import RAOELoss

    contenders: dict[str, Call] = {}
    missing: dict[str, str] = {}
    weights = 0
    for kind, size in MINI_BATCH.items():
        cached, plain = f"{kind}, {size} at a time", f"{kind}, all at once"
        if pairs > CACHED_UP_TO[device].get(kind, pairs):
            missing[cached] = "takes more than half an hour"
        model = encoder(device, {"hidden_size": 128, "layers": 2}) if kind == "small" else minilm(device)[0]
        weights = weights or sum(weight.numel() for weight in model.parameters())
        features, labels = collated(model, pairs)
        if cached not in missing:
            contenders[cached] = step(model, RAOELoss(model, mini_batch_size=size), features, labels)
        if pairs > PLAIN_UP_TO[kind]:
            missing[plain] = "the activations of so many texts at once"
        else:
            contenders[plain] = step(model, RAOELoss(model), features, labels)
    return Case(f"{pairs:,} pairs", contenders, bytes=4 * 8 * weights, missing=missing)

"""One RAOELoss step from 64 to 65,536 pairs: time, and memory that stays flat where texts are encoded piece by piece.

"small" is two layers of width 128 with random weights, MiniLM as in benchmarks/equal_lengths.py, whose step this is.
Without mini-batches every text's activations are there at once; with them (gradient caching, sentence-transformers'
CachedLossMixin) those of one mini-batch, besides embeddings and their gradient. The loss sees whole batches either way.
Batches of more than 512 pairs are measured once. MiniLM's largest takes 22 minutes on 2 cores.
"""

from __future__ import annotations

from benchmarks.case import Call, Case
from benchmarks.equal_lengths import collated, encoder, minilm, step

SIZES = {"cpu": [64, 512, 4096, 65536], "cuda": [64, 512, 4096, 65536, 1 << 20]}
MINI_BATCH = {"small": 256, "MiniLM": 64}
PLAIN_UP_TO = {"small": 4096, "MiniLM": 512}  # pairs whose activations fit into 24 GiB with room to spare
TESTS = ["tests/losses/test_losses.py"]


def case(pairs: int, device: str) -> Case:
    from raoe_train.losses import RAOELoss

    models = {"small": encoder(device, {"hidden_size": 128, "layers": 2}), "MiniLM": minilm(device)[0]}
    contenders: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for kind, model in models.items():
        features, labels = collated(model, pairs)
        size = MINI_BATCH[kind]
        contenders[f"{kind}, {size} at a time"] = step(model, RAOELoss(model, mini_batch_size=size), features, labels)
        plain = f"{kind}, all at once"
        if pairs > PLAIN_UP_TO[kind]:
            missing[plain] = "the activations of so many texts at once"
        else:
            contenders[plain] = step(model, RAOELoss(model), features, labels)
    weights = sum(weight.numel() for weight in models["small"].parameters())
    return Case(f"{pairs:,} pairs", contenders, bytes=4 * 8 * weights, missing=missing, once=pairs > 512)

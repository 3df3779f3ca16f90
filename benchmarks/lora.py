"""A LoRA step of decoders in bf16, with random weights and texts of SNLI's lengths: packed, by length, and padded as in
sentence-transformers; and the most pairs whose step fits into the GPU's memory. Needs peft."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import timing
from benchmarks.case import Call, Case
from benchmarks.equal_lengths import encoder
from benchmarks.train_step import ST, batch, contender, drawn

SIZES = {"cpu": [16], "cuda": [256]}
HEADS = {"num_attention_heads": 14, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "cuda": {
        "a 0.5B-shaped decoder": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, **HEADS},
        "4 layers of a 7B-shaped decoder": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 4,
                                            "num_attention_heads": 28, "num_key_value_heads": 4},
    },
    "cpu": {"a small decoder": {"hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2, **HEADS}},
}  # fmt: skip
DOUBLINGS = {"cpu": 1, "cuda": 5}  # of the number of pairs, to find the most that fit
TESTS = ["tests/encoders/test_packed.py"]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def cases(pairs: int, device: str) -> Iterator[Case]:
    for title, shape in SHAPES[device].items():
        model = decoder(shape, device)
        contenders = {way: trained(model, way, pairs) for way in ("packed", "by length", ST)}
        weights = sum(weight.numel() for weight in model.parameters())
        details = partial(most, model, pairs, DOUBLINGS[device])
        yield Case(f"{title}, LoRA, {pairs:,} pairs", contenders, 2 * weights, rounds=8, details=details)


def decoder(shape: dict[str, int], device: str) -> Any:
    from peft import LoraConfig
    from transformers import Qwen2Config, Qwen2Model

    model = encoder("cpu", {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8})
    with torch.device(device):
        inner = Qwen2Model(Qwen2Config(vocab_size=32000, **shape)).to(torch.bfloat16)
    inner.add_adapter(LoraConfig(r=16, target_modules=LAYERS))
    model[0].model = inner
    return model.to(device).train()


def trained(model: Any, way: str, pairs: int) -> Call:
    columns, score = batch(drawn("SNLI", pairs))
    for column in columns:
        del column["token_type_ids"]
    return contender(model, way, "bf16", columns, score)


def most(model: Any, pairs: int, doublings: int, way: str) -> dict[str, int]:
    """The most pairs whose step fits, to an eighth of it; at most `pairs` doubled `doublings` times."""
    return {"most_pairs": largest(lambda count: fits(model, way, count), pairs, pairs << doublings)}


def fits(model: Any, way: str, pairs: int) -> bool:
    result = True
    try:
        trained(model, way, pairs)(0)
        timing.wait(model.device.type)
    except torch.OutOfMemoryError:
        result = False
    gc.collect()
    torch.cuda.empty_cache()
    return result


def largest(holds: Callable[[int], bool], low: int, end: int) -> int:
    """The largest number from low to end for which it holds, to an eighth; it holds for `low`."""
    high = low
    while high < end and holds(2 * high):
        high *= 2
    low, step = high, high // 2
    while high < end and step >= high // 8 > 0:
        low, step = low + step * holds(low + step), step // 2
    return low

"""Test whether a text's embedding depends on padding or on the other texts in its batch."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from raoe_train.encoders.lengths import Grouping, by_length, device_of

SENTENCES = (
    "Yes.",
    "A dog is barking.",
    "Two men are playing chess in the park.",
    "The committee will publish its report before the end of the year.",
    "Nobody at the station could say why the evening train was late again, or when the next one would come.",
    "She put the letters into the drawer, locked it, and went down to the garden without another word, where the "
    "children had been waiting since noon for somebody to tell them what would happen next.",
)
# {dtype of the weights: largest difference in one dimension of normalized embeddings that can be rounding error}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
SHARDED = ("FSDPModule", "FullyShardedDataParallel")


def tolerance(model: Any) -> float:
    """Return the largest tolerance in TOLERANCE for the dtypes of a model's weights."""
    return max((TOLERANCE.get(weight.dtype, 0.0) for weight in model.parameters()), default=0.0)


def unit_embeddings(model: Any, batches: Iterable[Sequence[str] | Mapping[str, Any]]) -> np.ndarray:
    """Encode batches of texts (with the default prompt) or tokenized columns, in evaluation mode and without gradients.
    Return normalized embeddings, (texts, D) float64. The model's training mode and the random state do not change."""
    prompt = model.prompts.get(model.default_prompt_name)
    device, modes = device_of(model), {module: module.training for module in model.modules()}
    generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with generators, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            model.eval()
            columns = (each if isinstance(each, Mapping) else model.preprocess(each, prompt=prompt) for each in batches)
            moved = (send_to_device(column, device) for column in columns)
            parts = [model.forward(column)["sentence_embedding"].double().cpu().numpy() for column in moved]
        finally:
            model.train(modes[model])  # a quantized BidirectionalModel unpacks its weights
            for module, mode in modes.items():
                module.training = mode
    embeddings = np.concatenate(parts)
    return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)  # NaN stays NaN


def reads_padding(model: Any) -> str | None:
    """Return a message if a SentenceTransformer's embeddings depend on padding, because by_length would then change the
    embeddings. Two texts are encoded together, then the shorter text alone. Return None for a model that encodes no
    texts, is sharded (all processes would have to encode), or is quantized (evaluation can round 4-bit weights)."""
    weights, kinds = [*model.parameters()], {base.__name__ for each in model.modules() for base in type(each).__mro__}
    is_sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1") or not kinds.isdisjoint(SHARDED)
    if is_sharded or not all(each.numel() and each.is_floating_point() and not each.is_meta for each in weights):
        return None
    # transformers computes parts of float64 models in float32, and GPUs may compute in TF32
    least = TOLERANCE[torch.float32 if device_of(model).type == "cpu" else torch.float16]
    for route in getattr(next(iter(model.children()), None), "sub_modules", [None]):  # the routes of a Router
        try:
            features = model.preprocess([SENTENCES[-1], SENTENCES[0]], **({"task": route} if route else {}))
            alone = by_length([features], Grouping(most=1))
            if alone is None or "cu_seq_lens_q" in features:
                continue
            single, padded = (unit_embeddings(model, each) for each in (alone.features[:1], [features]))
        except Exception:  # of any library: the model encodes images, or needs features that only batches have
            continue
        difference = np.linalg.norm(padded[int(alone.rows[0].argmin())] - single)
        if difference > 2 * max(tolerance(model), least):
            return f"padding changes the embedding of a text by {difference:.2%}"
    return None

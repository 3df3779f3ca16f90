"""The job `check`: test whether the embedding of a sentence depends on the rest of its batch.

An embedding depends on its batch if the model attends to padding tokens, or if it attends differently without padding.
"""

from typing import Any

import numpy as np

from raoe_train.jobs.settings import CheckConfig
from raoe_train.jobs.shared import job
from raoe_train.outputs import versions


@job
def check(config: CheckConfig) -> dict[str, Any]:
    """Check that the embeddings of a saved encoder depend neither on padding nor on the batch size.

    For a BidirectionalModel, also check that tokens attend to later tokens if and only if some layers are
    bidirectional.

    Returns:
        {"differences": {name: float}, "tolerance", "failed": [names], "bidirectional": {"layers", "seen"}, "model",
        "versions"}. Each difference is the largest absolute difference, in one dimension, between the normalized
        embedding of a sentence when encoded alone and when encoded in a batch. "seen" tells whether a token's state
        depends on later tokens. The check fails if "seen" contradicts the configuration. Raises the same errors as
        load_encoder.
    """
    from raoe_train.encoders.load import load_encoder

    result = check_encoder(load_encoder(config.model))
    print("largest difference between a sentence's embedding when encoded in a batch and when encoded alone "
          f"(limit {result['tolerance']:g}):")  # fmt: skip
    for name, value in result["differences"].items():
        print(f"  {name:<28} {value:.1e}")
    layers, seen = result["bidirectional"].values()
    note = "" if layers is None else f"; bidirectional layers: {layers}"
    print(f"  hidden states {'depend' if seen else 'do not depend'} on later tokens{note}")
    print(f"failed checks: {', '.join(result['failed']) or 'none'}")
    return {**result, "model": config.model.name, "versions": versions()}


def check_encoder(model: Any) -> dict[str, Any]:
    """Check a SentenceTransformer in memory. Return the result of `check` without the keys "model" and "versions"."""
    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel
    from raoe_train.encoders.padding import SENTENCES, tolerance, unit_embeddings

    inner, tokenizer = getattr(model[0], "model", None), model.tokenizer  # None for a StaticEmbedding
    layers = inner.config.bidirectional_layers if isinstance(inner, BidirectionalModel) else None
    # check both sides: bidirectional decoders have relative positions, so padding may be on either side
    original_side = getattr(tokenizer, "padding_side", "right")
    sides = [original_side] if layers is None else ["right", "left"]
    seen = inner is not None and _sees_later_tokens(model)
    single = unit_embeddings(model.eval(), ([text] for text in SENTENCES))
    differences = {}
    for side in sides:
        tokenizer.padding_side = side
        for size in (2, 3, len(SENTENCES)):
            batches = ([*SENTENCES[at : at + size]] for at in range(0, 6, size))
            difference = np.abs(unit_embeddings(model, batches) - single).max()
            differences[f"padding {side}, batches of {size}"] = float(difference)
    tokenizer.padding_side = original_side
    limit = tolerance(model)
    failed = [name for name, value in differences.items() if not value <= limit]
    if layers is not None and seen != (layers > 0):
        failed.append("bidirectional")
    state = {"layers": layers, "seen": seen}
    return {"differences": differences, "tolerance": limit, "failed": failed, "bidirectional": state}


def _sees_later_tokens(model: Any) -> bool:
    """Return whether the first token's final hidden state changes if the last token of the sentence is replaced."""
    import torch

    features = model.preprocess(["Two men are playing chess in the park."])
    features = {key: value.to(model.device) for key, value in features.items() if hasattr(value, "to")}
    with torch.no_grad():
        first = model[0].model(**features).last_hidden_state[0, 0].float()
        tokens = features["input_ids"].clone()
        tokens[0, -1] = tokens[0, -2]
        other = model[0].model(**{**features, "input_ids": tokens}).last_hidden_state[0, 0].float()
    return bool((first - other).abs().max() > 1e-6 * first.abs().max())

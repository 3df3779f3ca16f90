"""Intra-sentence dependency: how alike a sentence's last hidden states are to that of its pivot token (the BeLLM
paper's Section 2 and 5.5, Figures 2 and 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.evaluation.tasks import EmbeddingTask, Task


def analyse(model: Any, tasks: Mapping[str, Task], output: Path | None, batch_size: int) -> dict[str, Any]:
    """The analysis `dependency` of the job `evaluate`.

    The paper's means on the STS-B test set are about 0.17 for LLaMA 7B, 0.15 for ChatGLM 6B and 0.35 for BERT base.
    """
    return summary(dependency(model, sentences_of(tasks), batch_size=batch_size))


def dependency(model: Any, sentences: Sequence[str], *, batch_size: int = 64) -> np.ndarray:
    """Mean over a sentence's tokens of Spearman's correlation between their last hidden states and the pivot's: [n]
    float64; NaN where undefined, without a token beside the pivot or with a state whose values are all equal.

    The pivot is the last real token of decoders and the first, [CLS], of encoders, as in the paper, whatever the
    pooling is. The paper does not say which tokens count: here it is all real ones but the pivot, those of the prompt
    and special ones (BOS, [SEP]) too, since the pivot's state depends on them as on the sentence's own. So compare
    models under the same prompt.
    """
    pivot = -1 if is_decoder(model) else 0
    found = {
        text: _mean_correlation(tokens.cpu().double().numpy(), pivot)
        for texts, states in token_states(model, sentences, batch_size)
        for text, tokens in zip(texts, states, strict=True)
    }
    return np.array([found[text] for text in sentences])


def summary(values: np.ndarray) -> dict[str, Any]:
    """What dependency found, in numbers; the last four are None where all are undefined."""
    defined = values[~np.isnan(values)]
    numbers = [float(defined.mean()), *map(float, np.percentile(defined, (25, 50, 75)))] if len(defined) else [None] * 4
    names = ("mean", "lower_quartile", "median", "upper_quartile")
    counts = {"sentences": len(values), "undefined": len(values) - len(defined)}
    return {**counts, **dict(zip(names, numbers, strict=True))}


def is_decoder(model: Any) -> bool:
    """Whether a SentenceTransformer is of a decoder, also one with bidirectional layers."""
    # transformers marks every attention module so; hooks that lift a mask leave the mark
    return any(getattr(module, "is_causal", False) for module in model[0].model.modules())


def sentences_of(tasks: Mapping[str, Task]) -> list[str]:
    """The different sentences of tasks; those of mteb are not known here."""
    embedded = [task for task in tasks.values() if isinstance(task, EmbeddingTask)]
    return list(dict.fromkeys(text for task in embedded for text in task.sentences()))


def token_states(model: Any, sentences: Sequence[str], batch_size: int = 64) -> Iterator[tuple[list[str], list[Any]]]:
    """Batches of different sentences, the longest first, and the last hidden states of their real tokens, [tokens, d]
    each, on the model's device and of its dtype, under its own prompt. ValueError for a state that is not finite."""
    if not sentences:
        raise ValueError("sentences must list at least one text")
    distinct = sorted(dict.fromkeys(sentences), key=len, reverse=True)
    training = model.training
    try:
        for start in range(0, len(distinct), batch_size):
            texts = distinct[start : start + batch_size]
            found = model.encode(texts, batch_size=batch_size, output_value=None, show_progress_bar=False)
            if "attention_mask" not in found[0]:
                raise ValueError("states are read from padded batches: set model[0].unpad_inputs to False")
            states = [item["token_embeddings"][item["attention_mask"].bool()] for item in found]
            for text, tokens in zip(texts, states, strict=True):
                if not tokens.isfinite().all():
                    raise ValueError(f"the encoder gives NaN or infinity for {text!r}")
            yield texts, states
    finally:
        model.train(training)


def _mean_correlation(states: np.ndarray, pivot: int) -> float:
    from scipy import stats

    if len(states) < 2:
        return np.nan
    ranks = stats.rankdata(states, axis=1)
    ranks -= ranks.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(ranks, axis=1)
    with np.errstate(invalid="ignore"):
        correlations = ranks @ ranks[pivot] / (norms * norms[pivot])
    return float(np.delete(correlations, pivot).mean())

"""Intra-sentence dependency: how alike a sentence's last hidden states are to that of its pivot token (the BeLLM
paper's Section 2 and 5.5, Figures 2 and 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.evaluation.tasks import EmbeddingTask, Task

PIVOTS = {"last": -1, "first": 0}


def analyse(model: Any, tasks: Mapping[str, Task], output: Path | None, batch_size: int) -> dict[str, Any]:
    """The analysis `dependency` of the job `evaluate`: a summary, and beside its output a plot."""
    from raoe_train.studies.plots import plot_dependency

    values = dependency(model, sentences_of(tasks), batch_size=batch_size)
    if output:
        plot_dependency({output.stem: values}, output.with_name(f"{output.stem}-dependency.png"))
    return summary(values)


def dependency(model: Any, sentences: Sequence[str], *, pivot: str | None = None, batch_size: int = 64) -> np.ndarray:
    """Mean over a sentence's tokens of Spearman's correlation between their last hidden states and the pivot's.

    The correlation is over the hidden dimensions, equal values having their mean rank. The paper does not say which
    tokens count: here it is all real ones but the pivot, those of the prompt and special ones (BOS, [SEP]) too, since
    the pivot's state depends on them as on the sentence's own. So compare models under the same prompt.

    Args:
        model: a SentenceTransformer; its prompt is used.
        sentences: n texts; each different one is encoded once.
        pivot: "last", the last real token, which is that of a prompt's suffix where there is one, or "first", [CLS];
            by default "last" for decoders and "first" for encoders, as in the paper, whatever the pooling is.
        batch_size: sentences at a time.

    Returns:
        [n] float64; NaN where undefined: no token beside the pivot, or a state whose values are all equal.

    Raises:
        ValueError: another pivot, or as token_states.
    """
    pivot = pivot or default_pivot(model)
    if pivot not in PIVOTS:
        raise ValueError(f"pivot must be one of {', '.join(PIVOTS)}, got {pivot!r}")
    found = {
        text: _mean_correlation(tokens.cpu().double().numpy(), PIVOTS[pivot])
        for texts, states in token_states(model, sentences, batch_size)
        for text, tokens in zip(texts, states, strict=True)
    }
    return np.array([found[text] for text in sentences])


def summary(values: np.ndarray) -> dict[str, Any]:
    """What dependency found, in numbers: {"sentences", "undefined", "mean", "lower_quartile", "median",
    "upper_quartile"}, the last four None where all are undefined.

    The paper's means on the STS-B test set are about 0.17 for LLaMA 7B, 0.15 for ChatGLM 6B and 0.35 for BERT base.
    """
    values = np.asarray(values, dtype=float)
    defined = values[~np.isnan(values)]
    numbers = [float(defined.mean()), *map(float, np.percentile(defined, (25, 50, 75)))] if len(defined) else [None] * 4
    names = ("mean", "lower_quartile", "median", "upper_quartile")
    counts = {"sentences": len(values), "undefined": len(values) - len(defined)}
    return {**counts, **dict(zip(names, numbers, strict=True))}


def default_pivot(model: Any) -> str:
    """ "last" for a SentenceTransformer of a decoder, also one with bidirectional layers; "first" for others."""
    # transformers marks every attention module so; hooks that lift a mask leave the mark
    causal = any(getattr(module, "is_causal", False) for module in model[0].model.modules())
    return "last" if causal else "first"


def sentences_of(tasks: Mapping[str, Task]) -> list[str]:
    """The different sentences of tasks; those of mteb are not known here."""
    embedded = [task for task in tasks.values() if isinstance(task, EmbeddingTask)]
    return list(dict.fromkeys(text for task in embedded for text in task.sentences()))


def token_states(model: Any, sentences: Sequence[str], batch_size: int = 64) -> Iterator[tuple[list[str], list[Any]]]:
    """Batches of different sentences, the longest first, and the last hidden states of their real tokens.

    Yields:
        texts, and for each of them a tensor [tokens, d] on the model's device and of its dtype, under its own prompt.

    Raises:
        ValueError: no sentences, a state that is not finite, or a model that encodes without padding.
    """
    if isinstance(sentences, str) or not len(sentences):
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

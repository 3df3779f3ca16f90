"""Polarity and semantic scores: whether what an encoder retrieves is of the sentence's class, and whether it is still
about the same thing (the margins paper's Eq. 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from raoe_train.encoders.embed import encode_sentences, unit_rows
from raoe_train.encoders.neighbours import nearest

DISCOUNTS = ("linear", "none")


def weights(k: int, discount: str = "linear") -> np.ndarray:
    """[k] weights of retrieved sentences, the nearest first, of sum 1: linear, w_i = 2 (k + 1 - i) / (k (k + 1)) for i
    from 1 (the margins paper, section 3.1), or all the same."""
    if discount not in DISCOUNTS:
        raise ValueError(f"discount must be one of {', '.join(DISCOUNTS)}, got {discount!r}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return np.full(k, 1 / k) if discount == "none" else 2 * (k - np.arange(k)) / (k * (k + 1))


class PolarityEvaluator(SentenceEvaluator):
    """Scores of an encoder, which retrieves for each sentence the k nearest of the source sentences:

    - polarity, P(s) = sum_i w_i [class of s_i = class of s] (Eq. 1), whether they are of its class;
    - similarity, S(s) = sum_i w_i cos_R(s, s_i) (Eq. 2), whether a frozen reference finds them like it. The reference's
      own S is what there is to keep.

    Calling it gives {NAME_polarity, NAME_polarity_std, NAME_similarity, NAME_similarity_std} in percent, mean and
    (population) standard deviation over the sentences; `by_class` and `curve` say more about the embeddings at hand.

    Args:
        sentences: n texts.
        labels: their classes, any number of them, compared by ==.
        source_sentences: m texts to retrieve from, k at least.
        source_labels: their classes.
        reference: [n + m, d] embeddings by the reference of the sentences and then the source sentences, or a
            SentenceTransformer that makes them, once.
        k: how many are retrieved.
        discount: see weights.
        batch_size: sentences at a time.
        name: before the names of the scores.

    Raises:
        ValueError: texts without labels, fewer than k source sentences, a class of the sentences that no source
            sentence has, or embeddings that are not finite.
    """

    def __init__(
        self,
        sentences: Sequence[str],
        labels: Sequence[Any],
        source_sentences: Sequence[str],
        source_labels: Sequence[Any],
        reference: Any,
        k: int = 16,
        discount: str = "linear",
        batch_size: int = 64,
        name: str = "",
    ) -> None:
        super().__init__()
        for what, texts, classes in (("labels", sentences, labels), ("source_labels", source_sentences, source_labels)):
            if len(texts) != len(classes):
                raise ValueError(f"{what} has {len(classes)} entries for {len(texts)} sentences")
        if len(source_sentences) < k:
            raise ValueError(f"k is {k} and there are {len(source_sentences)} source sentences: lower k")
        if absent := sorted(map(str, set(labels) - set(source_labels))):
            raise ValueError(f"no source sentence is of class {', '.join(absent)}: none can be found")
        weights(k, discount)  # what they cannot be is found now
        self.k, self.discount = k, discount
        self.texts = [*sentences, *source_sentences]
        self.labels, self.source_labels = list(labels), list(source_labels)
        self.batch_size, self.name = batch_size, name
        found = reference if isinstance(reference, np.ndarray) else self._embed(reference)
        if len(found) != len(self.texts):
            raise ValueError(f"reference has {len(found)} rows for {len(self.texts)} sentences and source sentences")
        self.reference = unit_rows(np.asarray(found))
        self.primary_metric = f"{name}_polarity" if name else "polarity"

    def _embed(self, model: Any) -> np.ndarray:
        return encode_sentences(model, self.texts, self.batch_size)

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        named = self.prefix_name_to_metrics(_percent(*self.scores(self._embed(model))), self.name)
        self.store_metrics_in_model_card_data(model, named, epoch, steps)
        return named

    def scores(self, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(P, S) of each sentence, [n] each, from 0 to 1 and from -1 to 1.

        Args:
            embeddings: [n + m, d] of the sentences and then the source sentences.
        """
        return self._weighted(*self.retrieved(embeddings, self.k), self.k)

    def retrieved(self, embeddings: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the k nearest source sentences of each sentence: whether they are of its class, [n, k] float64, and their
        cosine with it by the reference, [n, k] float64."""
        n = len(self.labels)
        unit = unit_rows(embeddings)
        found, _ = nearest(unit[:n], unit[n:], k)
        classes = {label: number for number, label in enumerate(dict.fromkeys(self.source_labels))}
        own = np.array([classes[label] for label in self.labels])
        theirs = np.array([classes[label] for label in self.source_labels])
        # a row at a time: [n, k, d] of them all may be large
        cosines = np.stack([self.reference[n + places] @ self.reference[i] for i, places in enumerate(found)])
        return (theirs[found] == own[:, None]).astype(np.float64), cosines.astype(np.float64)

    def report(self, embeddings: np.ndarray, curve: Sequence[int] = ()) -> tuple[dict[str, Any], np.ndarray]:
        """(a summary in percent, P of each sentence, [n] from 0 to 1).

        The summary is {"polarity", "polarity_std", "similarity", "similarity_std", "sentences", "sources", "k",
        "by_class": {class: the first four and "sentences"}, "curve": {k: {"polarity", "similarity"}} for each k of
        `curve`}.
        """
        most = max([self.k, *curve])
        if most > len(self.source_labels):
            raise ValueError(f"k is {most} and there are {len(self.source_labels)} source sentences: lower k")
        found = self.retrieved(embeddings, most)
        polarity, similarity = self._weighted(*found, self.k)
        labels = np.array(list(map(str, self.labels)))

        def of(chosen: np.ndarray) -> dict[str, Any]:
            return {**_percent(polarity[chosen], similarity[chosen]), "sentences": int(chosen.sum())}

        result: dict[str, Any] = {
            **of(np.ones(len(labels), bool)),
            "sources": len(self.source_labels),
            "k": self.k,
            "by_class": {label: of(labels == label) for label in sorted(set(labels.tolist()))},
        }
        if curve:
            means = {str(size): _percent(*self._weighted(*found, size)) for size in curve}
            result["curve"] = {
                size: {name: mean[name] for name in ("polarity", "similarity")} for size, mean in means.items()
            }
        return result, polarity

    def _weighted(self, same: np.ndarray, cosines: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(P, S) of each sentence by the first k of what it found."""
        w = weights(k, self.discount)
        return same[:, :k] @ w, cosines[:, :k] @ w


def _percent(polarity: np.ndarray, similarity: np.ndarray) -> dict[str, float]:
    """Means and standard deviations over sentences, x 100."""
    found: dict[str, float] = {}
    for name, values in (("polarity", polarity), ("similarity", similarity)):
        found |= {name: 100 * float(values.mean()), f"{name}_std": 100 * float(values.std())}
    return found

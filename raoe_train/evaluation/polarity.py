"""Polarity and semantic scores, and the tasks polarity:NAME of them: whether what an encoder retrieves is of the
sentence's class, and whether it is still about the same thing (the margins paper's Eq. 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from raoe_train.artifacts.provenance import fingerprint
from raoe_train.data.labelled import distinct, labelled_table
from raoe_train.data.tables import drawn
from raoe_train.encoders.embed import embeddings, encode_sentences, nearest, unit_rows
from raoe_train.encoders.settings import settings_said
from raoe_train.evaluation.finding import TEST, TRAIN, find_source
from raoe_train.evaluation.outcomes import Outcomes
from raoe_train.evaluation.tasks import Reading, Task

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

    - polarity, P(s) = sum_i w_i [class of s_i = class of s] (Eq. 1);
    - similarity, S(s) = sum_i w_i cos_R(s, s_i) (Eq. 2), by a frozen reference R. Its own S is what there is to keep.

    Calling it gives {NAME_polarity, NAME_polarity_std, NAME_similarity, NAME_similarity_std} in percent, mean and
    (population) standard deviation over the sentences.

    Args:
        sentences, labels: n texts and their classes, any number of them, compared by ==.
        source_sentences, source_labels: m texts to retrieve from, k at least, and their classes.
        reference: [n + m, d] embeddings by the reference of the sentences and then the source sentences, or a
            SentenceTransformer that makes them, once.
        k: how many are retrieved.
        discount: see weights.
        batch_size: sentences at a time.
        name: before the names of the scores.

    Raises:
        ValueError: texts without labels, too few source sentences, or none of a class, or embeddings not finite.
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
        if absent := sorted(map(str, set(labels) - set(source_labels))):
            raise ValueError(f"no source sentence is of class {', '.join(absent)}: none can be found")
        self.texts, self.labels = [*sentences, *source_sentences], list(labels)
        numbers = {label: number for number, label in enumerate(dict.fromkeys(source_labels))}
        self.classes = np.array([numbers[label] for label in (*labels, *source_labels)])
        self.k, self.discount = self._enough(k), discount
        weights(k, discount)  # what they cannot be is found now
        self.batch_size, self.name = batch_size, name
        found = reference if isinstance(reference, np.ndarray) else self._embed(reference)
        if len(found) != len(self.texts):
            raise ValueError(f"reference has {len(found)} rows for {len(self.texts)} sentences and source sentences")
        self.reference = unit_rows(found)
        self.primary_metric = f"{name}_polarity" if name else "polarity"

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
        return self._weighted(*self._retrieved(embeddings, self.k), self.k)

    def report(self, embeddings: np.ndarray, curve: Sequence[int] = ()) -> tuple[dict[str, Any], np.ndarray]:
        """(a summary in percent, P of each sentence, [n] from 0 to 1).

        The summary is {"polarity", "polarity_std", "similarity", "similarity_std", "sentences", "sources", "k",
        "by_class": {class: the first four and "sentences"}, "curve": {k: {"polarity", "similarity"}} for each k of
        `curve`}.
        """
        found = self._retrieved(embeddings, self._enough(max([self.k, *curve])))
        polarity, similarity = self._weighted(*found, self.k)
        labels = np.array(list(map(str, self.labels)))

        def of(chosen: np.ndarray) -> dict[str, Any]:
            return {**_percent(polarity[chosen], similarity[chosen]), "sentences": int(chosen.sum())}

        result = {
            **of(np.full(len(labels), True)),
            "sources": len(self.texts) - len(labels),
            "k": self.k,
            "by_class": {label: of(labels == label) for label in sorted(set(labels.tolist()))},
        }
        if curve:
            means = {str(k): _percent(*self._weighted(*found, k)) for k in curve}
            result["curve"] = {
                k: {name: mean[name] for name in ("polarity", "similarity")} for k, mean in means.items()
            }
        return result, polarity

    def _embed(self, model: Any) -> np.ndarray:
        return encode_sentences(model, self.texts, self.batch_size)

    def _enough(self, k: int) -> int:
        sources = len(self.texts) - len(self.labels)
        if sources < k:
            raise ValueError(f"k is {k} and there are {sources} source sentences: lower k")
        return k

    def _retrieved(self, embeddings: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the k nearest source sentences of each sentence: whether they are of its class, [n, k] float64, and their
        cosine with it by the reference, [n, k] float64."""
        n, unit = len(self.labels), unit_rows(embeddings)
        found, _ = nearest(unit[:n], unit[n:], k)
        # a row at a time: [n, k, d] of them all may be large
        cosines = np.stack([self.reference[n + places] @ self.reference[i] for i, places in enumerate(found)])
        return (self.classes[n + found] == self.classes[:n, None]).astype(np.float64), cosines.astype(np.float64)

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


def read_polarity(name: str, reading: Reading) -> Task:
    """The labelled texts of a task: of test all, or options.max_sentences, are scored, and options.sources times as
    many of train, drawn, are retrieved (the margins paper, section 3.2)."""
    options = reading.polarity
    encoder = options.reference
    if encoder is None:
        raise ValueError(
            f"polarity.reference is missing: the frozen encoder whose cosines the semantic score of {name} is made of"
        )
    source = find_source(name, reading.data_dir, "polarity", whole=True)
    data, _ = labelled_table(source, columns=reading.columns, on_error=reading.on_error)
    where = source if isinstance(source, str) else f"task {name!r}"
    splits = data["split"][:]
    test, train = (data.select([k for k, its in enumerate(splits) if its == split]) for split in (TEST, TRAIN))
    if not len(test):
        raise ValueError(f"{where} has no split {TEST!r}; splits {TRAIN} and {TEST} are needed")
    test, train = drawn(test, options.max_sentences, options.seed), distinct(train, {})[0]
    wanted = options.sources * len(test)
    if len(train) < wanted:
        raise ValueError(
            f"{where}: {options.sources} times the {len(test)} sentences of test are {wanted}, and train has "
            f"{len(train)}: lower polarity.sources or polarity.max_sentences"
        )
    sources = drawn(train, wanted, options.seed)
    (texts, labels), (others, theirs) = ((data["text"][:], data["label"][:]) for data in (test, sources))

    @cache
    def evaluator() -> PolarityEvaluator:  # made when the first encoder is scored, as it asks the reference
        reference = embeddings(encoder, [*texts, *others], "reference", options.cache)
        return PolarityEvaluator(texts, labels, others, theirs, reference, options.k, options.discount)

    def score(embeddings: np.ndarray) -> tuple[dict[str, Any], Outcomes]:
        result, polarity = evaluator().report(embeddings, options.curve)
        return result, Outcomes(100 * polarity)

    # what is said beyond the name stands beside it, so that a bare name's results stay those they were
    said = settings_said(encoder)
    reference = said.pop("name")
    made_by = {**asdict(options), "cache": None, "reference": reference, "files": fingerprint(reference), **said}
    return Task("polarity", "polarity", [[*texts, *others], labels, theirs, made_by], [*texts, *others], score)

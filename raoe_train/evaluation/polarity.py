"""Polarity and similarity scores (Eq. 1 and 2 of the margins paper), and the tasks `polarity:NAME`. The scores measure
whether the sentences that an encoder retrieves share the class (polarity) and the topic (similarity) of the query."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from raoe_train.data.mining import distinct, labelled_table
from raoe_train.encoders.embed import embeddings, encode_sentences, nearest, unit_rows
from raoe_train.evaluation.tasks import TEST, TRAIN, Outcomes, Reading, Task, find_task
from raoe_train.processes import rank_and_world


def weights(k: int, discount: str = "linear") -> np.ndarray:
    """Return [k] weights for the retrieved sentences, nearest first. The weights sum to 1. With "linear", w_i =
    2 (k + 1 - i) / (k (k + 1)) for i = 1 … k (section 3.1 of the margins paper). With "none", all weights are equal."""
    if discount not in ("linear", "none"):
        raise ValueError(f"discount must be 'linear' or 'none', got {discount!r}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return np.full(k, 1 / k) if discount == "none" else 2 * (k - np.arange(k)) / (k * (k + 1))


class PolarityEvaluator(SentenceEvaluator):
    """Scores an encoder by the k source sentences s_1 … s_k that it retrieves for a sentence s (nearest by cosine).

    The polarity of s is P(s) = sum_i w_i [class of s_i = class of s] (Eq. 1). The similarity of s is S(s) = sum_i w_i
    cos_R(s, s_i) (Eq. 2), where cos_R is the cosine similarity computed with a frozen reference encoder R. As a
    baseline, compute S for R itself.

    A call returns {NAME_polarity, NAME_polarity_std, NAME_similarity, NAME_similarity_std} in percent. These scores are
    the means and the population standard deviations of P and S over the sentences.

    Args:
        sentences, labels: n texts and their classes. There may be any number of classes; they are compared with ==.
        source_sentences, source_labels: m texts (m >= k) to retrieve from, and their classes.
        reference: a SentenceTransformer, or its [n + m, d] embeddings of the sentences, then of the source sentences.
        k, discount: number of sentences to retrieve, and how to weight them (see `weights`).
        batch_size: number of sentences to encode at a time.
        name: prefix of the score names.

    Raises:
        ValueError: unequal numbers of texts and labels, too few source sentences, a class without source sentences, or
            embeddings that are not finite.
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
        for key, texts, classes in (("labels", sentences, labels), ("source_labels", source_sentences, source_labels)):
            if len(texts) != len(classes):
                raise ValueError(f"{key} needs one label per sentence: expected {len(texts)}, got {len(classes)}")
        if absent := sorted(map(str, set(labels) - set(source_labels))):
            advice = "add source sentences of this class. Otherwise, the polarity of its sentences is always 0"
            raise ValueError(f"no source sentence has class {', '.join(absent)}: {advice}")
        self.texts, self.labels = [*sentences, *source_sentences], list(labels)
        numbers = {label: number for number, label in enumerate(dict.fromkeys(source_labels))}
        self.classes = np.array([numbers[label] for label in (*labels, *source_labels)])
        self.k, self.batch_size, self.name = k, batch_size, name
        if (sources := len(self.texts) - len(self.labels)) < k:
            raise ValueError(f"k is {k}, but there are only {sources} source sentences: lower k")
        self.weights = weights(k, discount)
        if not isinstance(reference, np.ndarray):
            reference = encode_sentences(reference, self.texts, batch_size)
        if (rows := len(reference)) != len(self.texts):
            needs = "reference needs one row per text (sentences, then source_sentences)"
            raise ValueError(f"{needs}: expected {len(self.texts)}, got {rows}")
        self.reference = unit_rows(reference)
        self.primary_metric = f"{name}_polarity" if name else "polarity"

    def __call__(self, model: Any, output_path: Any = None, epoch: int = -1, steps: int = -1) -> dict[str, float]:
        scores = self.scores(encode_sentences(model, self.texts, self.batch_size))
        metrics = self.prefix_name_to_metrics(_percent(*scores), self.name)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def scores(self, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the polarity, [n] from 0 to 1, and the similarity, [n] from -1 to 1, of each sentence, computed from
        its k nearest source sentences. `embeddings`, [n + m, d], contains a row for each sentence, then a row for each
        source sentence."""
        n, unit, w = len(self.labels), unit_rows(embeddings), self.weights
        places, _ = nearest(unit[:n], unit[n:], len(w))
        is_same = (self.classes[n + places] == self.classes[:n, None]).astype(np.float64)
        # compute row by row, because [n, k, d] may be large
        cosines = np.stack([self.reference[n + row] @ self.reference[i] for i, row in enumerate(places)])
        return is_same @ w, cosines.astype(np.float64) @ w

    def report(self, embeddings: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        """Return (result, polarity of each sentence, [n] from 0 to 1). The result is {"polarity", "polarity_std",
        "similarity", "similarity_std", "sentences", "sources", "k", "by_class": {class: values of the first five
        keys}}, with scores in percent."""
        polarity, similarity = self.scores(embeddings)
        labels = np.array(list(map(str, self.labels)))

        def of(rows: np.ndarray) -> dict[str, Any]:
            return {**_percent(polarity[rows], similarity[rows]), "sentences": int(rows.sum())}

        result: dict[str, Any] = {
            **of(np.full(len(labels), True)),
            "sources": len(self.texts) - len(labels),
            "k": self.k,
            "by_class": {label: of(labels == label) for label in sorted(set(labels.tolist()))},
        }
        return result, polarity


def _percent(polarity: np.ndarray, similarity: np.ndarray) -> dict[str, float]:
    metrics = {"polarity": polarity.mean(), "polarity_std": polarity.std()}
    metrics |= {"similarity": similarity.mean(), "similarity_std": similarity.std()}
    return {name: 100 * float(value) for name, value in metrics.items()}


def read_polarity(name: str, reading: Reading) -> Task:
    """Read a polarity task (section 3.2 of the margins paper). At most max_sentences texts from the test split are
    scored. The source sentences are drawn at random from the train split, `sources` of them for each scored text."""
    options = reading.polarity
    if (encoder := options.reference) is None:
        raise ValueError(f"--polarity.reference.name is missing: name the encoder that measures similarity for {name}")
    source = find_task(name, reading.data_dir, "polarity", whole=True)
    data, _ = labelled_table(source, **reading.rows)
    splits = data["split"][:]
    test, train = (data.select([k for k, part in enumerate(splits) if part == split]) for split in (TEST, TRAIN))
    if not len(test):
        raise ValueError(f"{source} has no split {TEST!r}: polarity tasks need the splits {TRAIN} and {TEST}")
    test, train = _sample(test, options.max_sentences, options.seed), distinct(train, {})[0]
    count = options.sources * len(test)
    if len(train) < count:
        needs = f"split train must have {count} sentences ({options.sources} for each of {len(test)} test sentences)"
        raise ValueError(f"{source}: {needs}, but has {len(train)}: lower polarity.sources or polarity.max_sentences")
    sources = _sample(train, count, options.seed)
    (texts, labels), (corpus, classes) = ((data["text"][:], data["label"][:]) for data in (test, sources))

    @cache
    def evaluator() -> PolarityEvaluator:  # created only once, because it encodes with the reference
        reference = embeddings(encoder, [*texts, *corpus], "reference")
        return PolarityEvaluator(texts, labels, corpus, classes, reference, options.k, options.discount)

    if rank_and_world()[1] > 1:
        evaluator()  # processes share the work if the reference has a cache, and only rank 0 may call `score`

    def score(embeddings: np.ndarray) -> tuple[dict[str, Any], Outcomes]:
        result, polarity = evaluator().report(embeddings)
        return result, Outcomes(100 * polarity)

    return Task("polarity", "polarity", [*texts, *corpus], score)


def _sample(data: Any, limit: int | None, seed: int) -> Any:
    if limit is None or limit >= len(data):
        return data
    return data.select(sorted(random.Random(seed).sample(range(len(data)), limit)))

"""Tasks polarity:NAME: the polarity and semantic scores of an encoder on labelled texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.artifacts.provenance import fingerprint
from raoe_train.config import PolarityConfig
from raoe_train.data.labelled import distinct, read_labelled
from raoe_train.data.tables import drawn
from raoe_train.encoders.frozen import embeddings as embeddings_of
from raoe_train.encoders.named import FrozenEncoder
from raoe_train.evaluation.finding import TEST, TRAIN, find_source
from raoe_train.evaluation.tasks import EmbeddingTask, Examples

if TYPE_CHECKING:
    from datasets import Dataset

    from raoe_train.evaluation.tasks import Reading


@dataclass(frozen=True)
class PolarityTask(EmbeddingTask):
    """Labelled sentences, and others to retrieve from; see PolarityEvaluator.

    Attributes:
        test: the sentences that are scored.
        sources: those that are retrieved.
        options: how; its reference is asked when the first encoder is scored.
        batch_size: sentences at a time, for the reference.
    """

    kind = "polarity"
    main = "polarity"
    test: Dataset
    sources: Dataset
    options: PolarityConfig
    batch_size: int

    def content(self) -> Any:
        options = {**asdict(self.options), "cache": None, "files": fingerprint(str(self.options.reference))}
        return [self.sentences(), self.test["label"][:], self.sources["label"][:], options]

    def sentences(self) -> list[str]:
        return [*self.test["text"][:], *self.sources["text"][:]]

    def score(self, embeddings: np.ndarray) -> tuple[dict[str, Any], Examples]:
        """PolarityEvaluator.report, with the P of each sentence."""
        from raoe_train.evaluation.polarity_evaluator import PolarityEvaluator

        options = self.options
        encoder = FrozenEncoder(options.reference, cache=options.cache, batch_size=self.batch_size)
        reference = embeddings_of(encoder, self.sentences(), "reference")
        evaluator = PolarityEvaluator(
            self.test["text"][:],
            self.test["label"][:],
            self.sources["text"][:],
            self.sources["label"][:],
            reference,
            options.k,
            options.discount,
        )
        result, polarity = evaluator.report(embeddings, options.curve)
        return result, Examples(100 * polarity)


def read_polarity(name: str, reading: Reading) -> PolarityTask:
    """The labelled texts of a task, with splits train and test: of all of test, or options.max_sentences of it, the
    scores are, and options.sources times as many of train, drawn, are retrieved (the margins paper, section 3.2).

    Raises:
        ValueError: no reference, an unknown or ambiguous name, too few sentences in train, or as read_labelled.
    """
    options = reading.polarity
    if not options.reference:
        raise ValueError(
            f"polarity.reference is missing: the frozen encoder whose cosines the semantic score of {name} is made of"
        )
    source = find_source(name, reading.data_dir, "polarity", whole=True)
    data = read_labelled(source, columns=reading.columns, on_error=reading.on_error)
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
    return PolarityTask(test, drawn(train, wanted, options.seed), options, reading.batch_size)

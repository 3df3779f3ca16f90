"""Tasks polarity:NAME: the polarity and semantic scores of an encoder on labelled texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.artifacts.provenance import fingerprint
from raoe_train.data.labelled import distinct, labelled_table
from raoe_train.data.tables import drawn
from raoe_train.encoders import frozen
from raoe_train.encoders.named import settings_said
from raoe_train.evaluation.finding import TEST, TRAIN, find_source
from raoe_train.evaluation.outcomes import Outcomes
from raoe_train.evaluation.tasks import EmbeddingTask, Polarity, Reading

if TYPE_CHECKING:
    from datasets import Dataset

    from raoe_train.evaluation.polarity_evaluator import PolarityEvaluator


@dataclass(frozen=True)
class PolarityTask(EmbeddingTask):
    """Labelled sentences that are scored, and `sources` to retrieve from; see PolarityEvaluator."""

    kind = "polarity"
    main = "polarity"
    test: Dataset
    sources: Dataset
    options: Polarity

    def content(self) -> Any:
        # what is said beyond the name stands beside it, so that a bare name's results stay those they were
        said = settings_said(self.options.reference)
        name = said.pop("name")
        options = {**asdict(self.options), "cache": None, "reference": name, "files": fingerprint(name), **said}
        return [self.sentences(), self.test["label"][:], self.sources["label"][:], options]

    def sentences(self) -> list[str]:
        return [*self.test["text"][:], *self.sources["text"][:]]

    @cached_property
    def evaluator(self) -> PolarityEvaluator:
        """What scores encoders. Making it asks the reference: once, when the first encoder is scored."""
        from raoe_train.evaluation.polarity_evaluator import PolarityEvaluator

        options = self.options
        reference = frozen.embeddings(options.reference, self.sentences(), "reference", options.cache)
        (test, labels), (sources, theirs) = ((data["text"][:], data["label"][:]) for data in (self.test, self.sources))
        return PolarityEvaluator(test, labels, sources, theirs, reference, options.k, options.discount)

    def score(self, embeddings: np.ndarray) -> tuple[dict[str, Any], Outcomes]:
        """PolarityEvaluator.report, with the P of each sentence."""
        result, polarity = self.evaluator.report(embeddings, self.options.curve)
        return result, Outcomes(100 * polarity)


def read_polarity(name: str, reading: Reading) -> PolarityTask:
    """The labelled texts of a task, with splits train and test: of all of test, or options.max_sentences of it, the
    scores are, and options.sources times as many of train, drawn, are retrieved (the margins paper, section 3.2)."""
    options = reading.polarity
    if not options.reference.name:
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
    return PolarityTask(test, drawn(train, wanted, options.seed), options)

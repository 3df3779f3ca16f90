"""The kinds of training data that losses read. Their readers are in raoe_train.training.reads,
which losses do not import, because a loss can also be used without raoe's data."""

import pkgutil
from dataclasses import dataclass
from typing import Any

from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from raoe_train.losses.collators import ListCollator, RowCollator, ScoreLabelCollator, TextCollator

HOME = "raoe_train.training.reads"


@dataclass(frozen=True)
class Reads:
    """The kind of training data that a loss needs."""

    name: str  # for messages, such as "triplets"
    # arguments: source; data with this source's labels and score_scale; model.prompt; whether to read
    # NLI labels. Result: (datasets.Dataset, counts), with counts as in raoe_train.data.tables.
    reader: str  # MODULE:FUNCTION
    collator: type[SentenceTransformerDataCollator] = RowCollator

    def read(self, *arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Call the reader."""
        return pkgutil.resolve_name(self.reader)(*arguments)


SCORED_PAIRS = Reads("scored pairs", f"{HOME}:ranked_pairs", ScoreLabelCollator)
COSINES = Reads("scored pairs", f"{HOME}:cosines")  # RowCollator passes the scores as labels
ROWS = Reads("rows", f"{HOME}:rows")  # anchor, positive, any number of negatives
ROWS_WITH_TEXTS = Reads("rows", f"{HOME}:rows", TextCollator)
TRIPLETS = Reads("triplets", f"{HOME}:triplets")  # with a neutral text if data.neutral is set
ONE_NEGATIVE = Reads("triplets", f"{HOME}:one_negative")
LABELLED_PAIRS = Reads("labelled pairs", f"{HOME}:two_classes")
CLASSES = Reads("NLI pairs", f"{HOME}:nli_classes")
LISTS = Reads("lists", f"{HOME}:lists", ListCollator)  # training_data adds the targets
RANKING = (ROWS, ROWS_WITH_TEXTS, TRIPLETS, ONE_NEGATIVE)  # dev sets may lack scores

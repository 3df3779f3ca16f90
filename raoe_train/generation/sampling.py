"""How a token is chosen from scores: greedily or at random, with transformers' own processors, in its order.

A row's choices do not depend on the batch it is in: random numbers come from the row's own seed, and processors that
read earlier tokens see this row's, without padding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raoe_train.config import AboveZeroToOne, NonNegativeInt, PositiveFloat

# Fields of GenerationConfig that are applied to all rows alike
WARPERS = ("temperature", "top_k", "top_p")


@dataclass
class Sampling:
    """How tokens are chosen: fields of transformers.GenerationConfig, with their meaning there.

    Args:
        do_sample: draw tokens at random; false takes the most probable
        repetition_penalty: as GenerationConfig's
        no_repeat_ngram_size: as GenerationConfig's
        temperature: as GenerationConfig's
        top_k: as GenerationConfig's
        top_p: as GenerationConfig's
        eos_token_id: as GenerationConfig's
        stop_strings: as GenerationConfig's
    """

    do_sample: bool = False
    repetition_penalty: PositiveFloat | None = None
    no_repeat_ngram_size: NonNegativeInt | None = None
    temperature: PositiveFloat | None = None
    top_k: NonNegativeInt | None = None
    top_p: AboveZeroToOne | None = None
    eos_token_id: list[NonNegativeInt] | None = None
    stop_strings: list[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in WARPERS if getattr(self, name) is not None]
        if given and not self.do_sample:
            raise ValueError(f"generation.{given[0]} has no effect on greedy decoding: set generation.do_sample true")
        if isinstance(self.stop_strings, str) or not all(self.stop_strings or ()):
            raise ValueError(f"generation.stop_strings must be texts that are not empty, got {self.stop_strings!r}")

    def processors(self) -> Any:
        """The LogitsProcessorList that reads a row's earlier tokens."""
        import transformers as hf

        penalty, size = self.repetition_penalty, self.no_repeat_ngram_size
        steps = (
            penalty not in (None, 1.0) and hf.RepetitionPenaltyLogitsProcessor(float(penalty or 1)),
            size and hf.NoRepeatNGramLogitsProcessor(size),
        )
        return hf.LogitsProcessorList(filter(None, steps))

    def warpers(self) -> Any:
        """The LogitsProcessorList for all rows alike, of logits or log-probabilities; empty without do_sample."""
        import transformers as hf

        steps = (
            self.temperature not in (None, 1.0) and hf.TemperatureLogitsWarper(float(self.temperature or 0)),
            self.top_k and hf.TopKLogitsWarper(self.top_k),
            self.top_p is not None and self.top_p < 1 and hf.TopPLogitsWarper(self.top_p),
        )
        return hf.LogitsProcessorList(filter(None, steps))


def uniforms(seed: int, count: int) -> Tensor:
    """[count] float32 in [0, 1) of one row, the same on every device: they are drawn on the CPU."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed % (1 << 63)))


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """[N] int64: where the cumulative probabilities of [N, V] scores pass [N] uniform numbers; -1 for a row with a NaN
    or with nothing but -inf."""
    # float64, so that 10^5 small steps add up to more than 1 - 2^-24, the largest float32 below 1; a token of
    # probability 0 takes no step and is never the first beyond
    cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
    beyond = torch.searchsorted(cumulative, uniform.double()[:, None], right=True)
    return torch.where(cumulative[:, -1].isfinite(), beyond[:, 0], -1)

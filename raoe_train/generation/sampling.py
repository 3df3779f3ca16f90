"""How a token is chosen from scores: greedily or at random, with transformers' own processors.

A row's choices depend on that row alone, not on the batch it is in: its random numbers come from its own seed, and
processors that read earlier tokens see this row's, without padding.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Fields of GenerationConfig that are understood. Read by the row's own history, then applied to all rows alike:
HISTORY = ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_new_tokens", "suppress_tokens")
WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
ENDS = ("eos_token_id", "stop_strings")
FIELDS = ("do_sample", *HISTORY, *WARPERS, *ENDS)
# Fields that say what happens anyway.
ANYWAY: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "guidance_scale": 1}


@dataclasses.dataclass
class Sampling:
    """Fields of transformers.GenerationConfig, with their meaning there; None leaves a step out."""

    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    min_new_tokens: int | None = None
    suppress_tokens: list[int] | None = None
    eos_token_id: int | list[int] | None = None
    stop_strings: list[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in WARPERS if getattr(self, name) is not None]
        if given and not self.do_sample:
            raise ValueError(f"generation.{given[0]} has no effect on greedy decoding: set generation.do_sample true")
        if isinstance(self.stop_strings, str):
            self.stop_strings = [self.stop_strings]
        if self.stop_strings is not None and not all(isinstance(s, str) and s for s in self.stop_strings):
            raise ValueError(f"generation.stop_strings must be texts that are not empty, got {self.stop_strings!r}")

    @classmethod
    def of(cls, fields: Mapping[str, Any], others: Sequence[str] = ()) -> Sampling:
        """From fields of a GenerationConfig; ValueError for an unknown one, or one that we would have to ignore.

        A field that is None asks for nothing, and one that says what happens anyway is accepted, too. `others` are
        further names to suggest where an unknown field looks like one.
        """
        from transformers import GenerationConfig

        defaults = GenerationConfig().to_dict()
        kept = {}
        for name, value in fields.items():
            if name in FIELDS:
                kept[name] = value
            elif name not in defaults or name.startswith("_"):
                close = difflib.get_close_matches(name, [*others, *FIELDS, *defaults], n=1, cutoff=0.5)
                hint = f" (did you mean generation.{close[0]}?)" if close else ""
                raise ValueError(f"unknown key generation.{name}{hint}")
            elif value not in (None, defaults[name], ANYWAY.get(name)):
                raise ValueError(
                    f"generation.{name} is a field of GenerationConfig that this job has no use for; "
                    f"it knows {', '.join(FIELDS)}"
                )
        return cls(**kept)

    @property
    def reads_sign(self) -> bool:
        """Whether a constant added to a row's scores would change the outcome, so that they must be log-probabilities
        where transformers would have those."""
        return self.repetition_penalty not in (None, 1.0)

    @property
    def has_history(self) -> bool:
        return any(getattr(self, name) is not None for name in HISTORY)

    def history(self, prompt_length: int, eos: Sequence[int], device: Any) -> Any:
        """The LogitsProcessorList of one row: what depends on its earlier tokens. Its order is transformers'."""
        import transformers as hf

        processors = hf.LogitsProcessorList()
        if self.repetition_penalty not in (None, 1.0):
            processors.append(hf.RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty or 1)))
        if self.no_repeat_ngram_size:
            processors.append(hf.NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.bad_words_ids:
            processors.append(hf.NoBadWordsLogitsProcessor(self.bad_words_ids, list(eos)))
        if self.min_new_tokens and eos:
            processors.append(
                hf.MinNewTokensLengthLogitsProcessor(prompt_length, self.min_new_tokens, list(eos), device=device)
            )
        if self.suppress_tokens:
            processors.append(hf.SuppressTokensLogitsProcessor(self.suppress_tokens, device=device))
        return processors

    def warpers(self, device: Any) -> Any:
        """The LogitsProcessorList for all rows alike, in transformers' order. None of them sees a difference between
        logits and log-probabilities."""
        import transformers as hf

        made = hf.LogitsProcessorList()
        if not self.do_sample:
            return made
        if self.temperature not in (None, 1.0):
            made.append(hf.TemperatureLogitsWarper(float(self.temperature or 0)))  # refuses 0
        if self.top_k:
            made.append(hf.TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            made.append(hf.TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            made.append(hf.MinPLogitsWarper(self.min_p))
        if self.typical_p is not None and self.typical_p < 1:
            made.append(hf.TypicalLogitsWarper(mass=self.typical_p))
        if self.epsilon_cutoff:
            made.append(hf.EpsilonLogitsWarper(epsilon=self.epsilon_cutoff))
        if self.eta_cutoff:
            made.append(hf.EtaLogitsWarper(epsilon=self.eta_cutoff, device=device))
        return made


def uniforms(seed: int, count: int) -> Tensor:
    """[count] float32 in [0, 1) of one row, the same on every device: they are drawn on the CPU."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed % (1 << 63)))


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """[N] int64: where the cumulative probabilities of [N, V] scores pass the [N] uniform numbers.

    -1 for a row with a NaN or with nothing but -inf.
    """
    # float64, so that 10^5 small steps add up; a token of probability 0 takes no step and is never the first beyond
    cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
    beyond = torch.searchsorted(cumulative, uniform.double()[:, None] * cumulative[:, -1:], right=True)
    token = beyond[:, 0].clamp_max(scores.shape[-1] - 1)
    return torch.where(cumulative[:, -1].isfinite(), token, -1)

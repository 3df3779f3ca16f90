"""What a forward pass leaves of each context, its state, and the next tokens' scores of two contexts' mix.

The ranking-sentences paper's Eq. 4, log p = guidance log p(x | near) - (guidance - 1) log p(x | far), in two ways:

- MixHidden mixes what enters the head. A linear head (its bias too, since the weights sum to 1) commutes with that, so
  the head runs once a row and the logits of single contexts never exist. What is left out is the normaliser, the same
  for all tokens of a row.
- MixLogits mixes log-probabilities, by raoe_kernels. It is for models that do more to logits than a linear head.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raoe_kernels import guided_argmax, guided_log_probs
from raoe_train.generation.slots import Batch

# What configurations call a factor that all logits are multiplied (True) or divided by.
FACTORS = {"logit_scale": True, "lm_head_multiplier": True, "logits_scaling": False}
# Known to bend logits after the head. With small random weights a soft cap is all but straight, and the comparison
# with the model's own logits would miss it.
BENDING = ("final_logit_softcapping", "final_logits_softcapping", "logits_soft_cap", "output_logit_softcapping")


class MixHidden:
    """Scores by mixing hidden states after the final norm, in float32, and one product with the head."""

    name = "hidden"

    def __init__(self, body: nn.Module, head: nn.Linear, factor: float) -> None:
        self.body, self.head, self.factor = body, head, factor

    def state(self, inputs: Mapping[str, Any]) -> Tensor:
        """[R, D] hidden states at the end of each row, after the final norm."""
        return self.body(**inputs).last_hidden_state[:, -1]

    def scores(self, state: Tensor, batch: Batch) -> Tensor:
        """[N, V] logits of the mix, float32 (float64 for a model in float64): Eq. 4 but for a constant a row."""
        near, far = (_wide(state[rows]) for rows in (batch.near, batch.far))
        mixed = near + batch.weight[:, None] * (near - far)
        logits = _wide(self.head(mixed.to(self.head.weight.dtype)))
        return logits if self.factor == 1 else logits * self.factor

    def best(self, state: Tensor, batch: Batch) -> Tensor:
        """[N] int64, the greedy tokens; -1 where a score is NaN or all are -inf."""
        return checked_argmax(self.scores(state, batch))


class MixLogits:
    """Scores by mixing log-probabilities; a row without a farther context has its plain logits."""

    name = "logits"

    def __init__(self, model: Any) -> None:
        self.model = model
        # else the head runs over every position of a prompt
        kept = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.last: dict[str, Any] = {"logits_to_keep": 1} if kept else {}

    def state(self, inputs: Mapping[str, Any]) -> Tensor:
        """[R, V] logits at the end of each row."""
        return self.model(**inputs, **self.last).logits[:, -1]

    def scores(self, state: Tensor, batch: Batch) -> Tensor:
        """[N, V] float32 (float64 for a model in float64): Eq. 4, and logits where there is nothing to mix."""
        scores = _wide(state[batch.near])
        for guidance, answers in batch.groups:
            near, far = state[batch.near[answers]], state[batch.far[answers]]
            scores = scores.index_copy(0, answers, guided_log_probs(near, far, guidance=guidance))
        return scores

    def best(self, state: Tensor, batch: Batch) -> Tensor:
        """[N] int64, the greedy tokens; -1 where a score is NaN or all are -inf. No log-softmax is taken."""
        tokens = checked_argmax(state[batch.near])
        for guidance, answers in batch.groups:
            near, far = state[batch.near[answers]], state[batch.far[answers]]
            chosen = guided_argmax(near, far, guidance=guidance)
            # what is chosen is NaN wherever any of near is, so `tokens` has seen that; a NaN of far shows here
            value = far.gather(1, chosen[:, None])[:, 0]
            tokens = tokens.index_copy(0, answers, torch.where((tokens[answers] < 0) | value.isnan(), -1, chosen))
        return tokens


def choose_mix(model: Any, wish: str = "auto") -> MixHidden | MixLogits:
    """How to mix for a causal language model: by "auto" hidden states where that is exact, else logits; "hidden" or
    "logits" insist. ValueError for another wish, and for "hidden" where it is not exact; the message says why not."""
    if wish not in ("auto", "hidden", "logits"):
        raise ValueError(f"mix must be auto, hidden or logits, got {wish!r}")
    if wish == "logits":
        return MixLogits(model)
    found = _linear_head(model)
    if wish == "hidden" and isinstance(found, str):
        raise ValueError(f"mix hidden is not exact for this model: {found}")
    return MixLogits(model) if isinstance(found, str) else found


@torch.no_grad()
def _linear_head(model: Any) -> MixHidden | str:
    """By the model's body and head, if its logits are a linear function of the body's output; else why they are not.

    What the configuration says is checked on a few tokens: the model's own logits must be those of head and body.
    """
    head, body, config = model.get_output_embeddings(), model.base_model, model.config.get_text_config()
    if type(head) is not nn.Linear or not head.weight.is_floating_point():
        return f"its head is a {type(head).__name__}, which may round what goes in"
    if head._forward_hooks or head._forward_pre_hooks:
        return "hooks on its head may change what goes in or comes out"
    if body is model:
        return "it has no body apart from the head"
    for name in BENDING:
        if getattr(config, name, None):
            return f"{name} bends its logits after the head"
    factor = 1.0
    for name, multiplied in FACTORS.items():
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value:
            factor *= value if multiplied else 1 / value
    ids = torch.arange(1, 5, device=model.device)[None] % config.vocab_size
    own = model(input_ids=ids, use_cache=False).logits[:, -1]
    output = body(input_ids=ids, use_cache=False)
    if getattr(output, "last_hidden_state", None) is None:
        return "its body returns no last_hidden_state"
    ours = head(output.last_hidden_state)[:, -1] * factor
    # the same products, so all but bit-equal where nothing else happens
    allowed = 16 * torch.finfo(ours.dtype).eps * _wide(own).abs().amax()
    if ours.shape == own.shape and bool((_wide(ours) - _wide(own)).abs().amax() <= allowed):
        return MixHidden(body, head, factor)
    return "its logits are not those of head and body"


def checked_argmax(scores: Tensor) -> Tensor:
    """[N] int64, the best token of each of [N, V] scores; -1 where one is NaN or all are -inf."""
    best = scores.max(-1)  # a NaN counts as the largest
    return torch.where(best.values.isfinite(), best.indices, -1)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()

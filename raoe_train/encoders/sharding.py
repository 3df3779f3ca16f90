"""Copy a sharded (FSDP 2) encoder with all weights, so that sentence-transformers can save and evaluate the copy."""

import copy
from collections.abc import Mapping
from typing import Any

from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def before_sharding(model: Any) -> Any:
    """Return a copy of a SentenceTransformer without its weights, for the function `unsharded`. Also freeze BERT's
    unused pooler, because torch cannot resume a sharded run if a trainable weight has no optimizer state."""
    empty = {id(each): nn.Parameter(each.detach().to("meta"), each.requires_grad) for each in model.parameters()}
    without_weights = copy.deepcopy(model, empty)
    for name, weight in model.named_parameters():
        if ".pooler." in name and len(model) > 1 and type(model[1]) is Pooling:
            weight.requires_grad_(False)
    return without_weights


def unsharded(without_weights: Any, model: Any, weights: Mapping[str, Tensor] | None = None) -> Any:
    """Load weights into the copy of a sharded model, and return the copy. If `weights` is None, all processes collect
    the model's weights together."""
    collected: Any = weights
    if weights is None:
        collected = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    without_weights.load_state_dict(collected, assign=True)
    card = without_weights.model_card_data = model.model_card_data
    card.model = without_weights  # the card shows embeddings of this model
    return without_weights

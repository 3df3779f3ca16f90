"""SimCSE's MLP over an embedding: in training, and nothing in evaluation or what is saved (its mlp_only_train)."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Dense


class TrainingHead(Dense):
    """tanh of a linear layer, while the model is in training; the embedding as it is in evaluation."""

    def forward(self, features: dict[str, Any], **others: Any) -> dict[str, Any]:
        return super().forward(features) if self.training else features


def add_head(model: Any, seed: int, saved: bool) -> None:
    """One at the end of a SentenceTransformer: `saved`, the one that it was trained with, where there is one, which
    SimCSE's checkpoints have as BERT's pooler; else new, its weights drawn as the encoder's own once were."""
    inner, width, weight = model.transformers_model, model.get_embedding_dimension(), next(model.parameters())
    own = getattr(getattr(inner, "pooler", None), "dense", None)
    if saved and own is not None and getattr(own.weight, "_is_hf_initialized", False):
        start, bias = own.weight.detach().clone(), own.bias.detach().clone()
    else:
        std, generator = getattr(inner.config, "initializer_range", 0.02), torch.Generator().manual_seed(seed)
        start, bias = torch.randn(width, width, generator=generator) * std, torch.zeros(width)
    head = TrainingHead(width, width, init_weight=start, init_bias=bias)
    model.append(head.to(model.device, weight.dtype))


def drop_head(model: Any) -> None:
    """Take it out again, where there is one."""
    for name, module in list(model.named_children()):
        if isinstance(module, TrainingHead):
            del model._modules[name]

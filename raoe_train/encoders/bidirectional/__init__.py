"""Decoders whose last layers look both ways: their configuration and model class for transformers.

`register` makes `AutoModel`, and with it `SentenceTransformer`, load what was saved as such a model.
"""

from __future__ import annotations


def register() -> None:
    """Tell transformers of BidirectionalConfig and BidirectionalModel; once is enough, more does no harm."""
    from transformers import AutoConfig, AutoModel

    from raoe_train.encoders.bidirectional.configuration import BidirectionalConfig
    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel

    AutoConfig.register(BidirectionalConfig.model_type, BidirectionalConfig, exist_ok=True)
    AutoModel.register(BidirectionalConfig, BidirectionalModel, exist_ok=True)

"""Decoders whose last layers are bidirectional: their configuration and model class for transformers."""


def register() -> None:
    """Register BidirectionalModel with transformers, so that AutoModel and SentenceTransformer load saved models."""
    from transformers import AutoConfig, AutoModel

    from raoe_train.encoders.bidirectional.configuration import BidirectionalConfig
    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel

    AutoConfig.register(BidirectionalConfig.model_type, BidirectionalConfig, exist_ok=True)
    AutoModel.register(BidirectionalConfig, BidirectionalModel, exist_ok=True)

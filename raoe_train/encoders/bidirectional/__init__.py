"""Decoders whose last layers look both ways: their configuration and model class for transformers."""


def register() -> None:
    """Make `AutoModel`, and with it `SentenceTransformer`, load saved models of this kind."""
    from transformers import AutoConfig, AutoModel

    from raoe_train.encoders.bidirectional.configuration import BidirectionalConfig
    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel

    AutoConfig.register(BidirectionalConfig.model_type, BidirectionalConfig, exist_ok=True)
    AutoModel.register(BidirectionalConfig, BidirectionalModel, exist_ok=True)

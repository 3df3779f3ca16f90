"""Configuration of a decoder with bidirectional layers: the decoder's configuration and the number of such layers.

This file and modeling.py are saved with the weights. They must not import other modules of raoe_train, so that a saved
model can be loaded with trust_remote_code even if raoe is not installed.
"""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

# model_type of the tested decoders
ARCHITECTURES = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi", "phi3", "qwen2", "qwen3")


class BidirectionalConfig(PreTrainedConfig):
    """Configuration of a BidirectionalModel.

    Args:
        text_config: the decoder's configuration.
        bidirectional_layers: number of final layers that have no causal mask (BeLLM, Section 3.2, Eq. 4); can be 0.
        base_model: name of the decoder to which an adapter belongs; None for a model that is saved with all weights.
        base_revision: revision of base_model on the hub.
        base_quantization: quantization of base_model, as keys of transformers.BitsAndBytesConfig.
    """

    model_type = "raoe_bidirectional"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012 - transformers' own declaration
    _auto_class = "AutoConfig"

    def __init__(
        self,
        text_config: PreTrainedConfig | dict[str, Any] | None = None,
        bidirectional_layers: int = 1,
        base_model: str | None = None,
        base_revision: str | None = None,
        base_quantization: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(text_config, dict):
            text_config = CONFIG_MAPPING[text_config.get("model_type", "llama")](**text_config)
        # transformers calls the constructor without arguments to read the defaults
        self.text_config = CONFIG_MAPPING["llama"]() if text_config is None else text_config
        check(self.text_config, bidirectional_layers)
        self.bidirectional_layers = bidirectional_layers
        self.base_model = base_model
        self.base_revision = base_revision
        self.base_quantization = base_quantization
        # transformers copies this attention implementation to the decoder's config, so start with the decoder's own
        kwargs.setdefault("attn_implementation", self.text_config._attn_implementation)
        super().__init__(**kwargs)

    def forget_base(self) -> None:
        """Remove the reference to the base model, for a model that is saved with all weights."""
        self.base_model = self.base_revision = self.base_quantization = None

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        # With these keys, transformers would expect quantized weights, so base_quantization replaces these keys.
        for key in ("quantization_config", "_pre_quantization_dtype"):
            values["text_config"].pop(key, None)
        return values


def check(decoder: PreTrainedConfig, layers: int) -> None:
    """Raise ValueError if the last `layers` layers of a decoder cannot be made bidirectional."""
    if decoder.model_type not in ARCHITECTURES:
        encoder = "" if getattr(decoder, "is_decoder", False) else ". Encoders are already bidirectional"
        kinds = ", ".join(ARCHITECTURES)
        raise ValueError(f"bidirectional layers need a decoder of type {kinds}, got {decoder.model_type!r}{encoder}")
    depth = decoder.num_hidden_layers
    if not 0 <= layers <= depth:
        raise ValueError(f"bidirectional_layers must be a whole number from 0 to {depth}, got {layers!r}")
    if getattr(decoder, "use_bidirectional_attention", None) or not getattr(decoder, "is_causal", True):
        raise ValueError(f"all layers of this decoder ({decoder.model_type!r}) are already bidirectional")
    unknown = set(getattr(decoder, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"bidirectional layers need full or sliding attention, got {', '.join(sorted(unknown))}")


def windows(decoder: PreTrainedConfig) -> list[int | None]:
    """Return the size of each layer's sliding window, or None for a layer with full attention."""
    window, depth = getattr(decoder, "sliding_window", None), decoder.num_hidden_layers
    kinds = getattr(decoder, "layer_types", None)
    if kinds is None:
        return [window] * depth
    return [window if kind == "sliding_attention" else None for kind in kinds]

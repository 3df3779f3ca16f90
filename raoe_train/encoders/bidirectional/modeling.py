"""A decoder whose last layers are bidirectional: a wrapper around any decoder class in transformers.

Hooks on the last layers replace the causal mask. The new mask is built in `forward` and passed to the layers as an
argument. Forward passes share no state, so gradients are also correct with gradient checkpointing, or if several
forward passes precede one backward pass.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, BitsAndBytesConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput

from .configuration import BidirectionalConfig, windows

ADAPTER = "adapter"  # folder of a LoRA adapter in peft's format, next to the configuration
PACKED, PADDED = "raoe_packed", "raoe_padded"  # implementations that raoe_train/encoders/packed.py registers
HUB = ("cache_dir", "token", "local_files_only")
ATTENTION = ("eager", "sdpa", "flex_attention")


class BidirectionalModel(PreTrainedModel):
    """A decoder with bidirectional layers, which `AutoModel` and `SentenceTransformer` can load. Padding may be on
    either side. Without the argument `decoder`, the weights are random."""

    config: BidirectionalConfig
    config_class = BidirectionalConfig
    decoder: Any  # a decoder class of transformers
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _auto_class = "AutoModel"

    def __init__(self, config: BidirectionalConfig, decoder: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.decoder = AutoModel.from_config(config.text_config) if decoder is None else decoder
        self._no_split_modules = self.decoder._no_split_modules
        inner = self.decoder.config
        if getattr(inner, "attn_logit_softcapping", None) is not None and inner._attn_implementation == "sdpa":
            inner._attn_implementation = "eager"  # SDPA does not support a soft cap
        count = config.bidirectional_layers
        lifted = list(zip(self.decoder.layers, windows(inner), strict=True))[-count:] if count else []
        for layer, window in lifted:
            layer.register_forward_pre_hook(partial(lift, window=window), with_kwargs=True)
        self.register_state_dict_post_hook(_leave_out_quantized)
        self.register_load_state_dict_pre_hook(lambda module, *_: module._unpack())
        self.register_load_state_dict_post_hook(_do_not_miss_quantized)
        if decoder is None:
            self.post_init()

    @classmethod
    def around(cls, decoder: PreTrainedModel, layers: int, **base: Any) -> "BidirectionalModel":
        """Wrap a decoder. `base` contains further arguments for BidirectionalConfig."""
        return cls(BidirectionalConfig(decoder.config, layers, **base), decoder)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the decoder's last hidden states, [batch, length, hidden_size].

        Args:
            input_ids: [batch, length] int64; or pass inputs_embeds, [batch, length, hidden_size], instead.
            attention_mask: [batch, length], 1 or True for a token, 0 for padding; by default, there is no padding.
            position_ids: [batch or 1, length]; by default, the positions that the decoder computes.
        """
        if past_key_values is not None or use_cache:
            raise ValueError("bidirectional layers have no key-value cache: remove past_key_values and use_cache")
        attention = self.decoder.config._attn_implementation
        if attention not in (*ATTENTION, PACKED, PADDED):
            raise ValueError(f"attn_implementation must be one of {', '.join(ATTENTION)}, got {attention!r}")
        inputs: Any = input_ids if inputs_embeds is None else inputs_embeds
        is_padded = attention_mask is None or attention_mask.shape == inputs.shape[:2]
        is_packed = attention == PACKED and "cu_seq_lens_q" in kwargs
        if not is_packed and (not is_padded or "cu_seq_lens_q" in kwargs):
            advice = f"to pack texts, set attn_implementation to {PACKED}"
            raise ValueError(f"attention_mask must have shape [batch, length]; {advice}")
        if self.config.bidirectional_layers:
            kwargs["lifted"] = self._masks(inputs, attention_mask)
        return self.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            **kwargs,
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.set_input_embeddings(value)

    def train(self, mode: bool = True) -> "BidirectionalModel":
        if mode and not self.training:
            self._unpack()
        return super().train(mode)

    def _unpack(self) -> None:
        # On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks 4-bit weights during evaluation, and products with
        # repacked weights have no gradient: training after an evaluation would use wrong gradients.
        if self.is_quantized and self.decoder.device.type == "cpu":
            self.decoder.state_dict()  # unpacks the weights

    @property
    def is_quantized(self) -> bool:
        return getattr(self.decoder, "hf_quantizer", None) is not None

    @property
    def has_adapter(self) -> bool:
        return bool(getattr(self.decoder, "_hf_peft_config_loaded", False))

    @classmethod
    def from_pretrained(  # type: ignore[override]  # its own arguments are among kwargs
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, config: Any = None, **kwargs: Any
    ) -> "BidirectionalModel":
        """Load a saved model as transformers does. If the saved model is an adapter, also load its base model by name.
        The base model is quantized as in training, unless quantization_config is set. With merge_adapter=True, the
        adapter is merged into the unquantized base model."""
        merge = kwargs.pop("merge_adapter", False)
        hub: dict[str, Any] = {key: kwargs.pop(key) for key in HUB if key in kwargs}
        source: dict[str, Any] = {key: kwargs.pop(key) for key in ("revision", "subfolder") if key in kwargs}
        if not isinstance(config, BidirectionalConfig):
            config = BidirectionalConfig.from_pretrained(pretrained_model_name_or_path, **hub, **source)
        quantization = kwargs.pop("quantization_config", None)
        if quantization is None and config.base_quantization and not merge:
            quantization = BitsAndBytesConfig(**config.base_quantization)
        if quantization:
            kwargs["quantization_config"] = quantization
        if config.base_model is None:
            whole: Any = super().from_pretrained(
                pretrained_model_name_or_path, *args, config=config, **hub, **source, **kwargs
            )
            for key in ("hf_quantizer", "is_loaded_in_4bit", "quantization_method"):  # copy to the decoder
                if hasattr(whole, key):
                    setattr(whole.decoder, key, getattr(whole, key))
            return whole
        options = {key: kwargs[key] for key in kwargs if key not in ("adapter_kwargs", "_from_auto", "_commit_hash")}
        name, model = str(pretrained_model_name_or_path), cls._on_base(config, hub | options)
        folder = os.path.join(source.pop("subfolder", "") or "", ADAPTER)
        from peft import PeftConfig

        at = {"subfolder": folder, **{key: value for key, value in (hub | source).items() if value is not None}}
        if merge:
            model.decoder = merged_adapter(model.decoder, name, at)
            model.config.forget_base()
        else:
            model.decoder.add_adapter(PeftConfig.from_pretrained(name, **at))
            set_adapter_weights(model.decoder, name, at)
            model.decoder.requires_grad_(False)
        return model.eval()

    @classmethod
    def _on_base(cls, config: BidirectionalConfig, options: dict[str, Any]) -> "BidirectionalModel":
        """Load the base model that `config` names, without the adapter, and wrap it if it is a plain decoder."""
        name, source = str(config.base_model), {"revision": config.base_revision}
        hub = {key: options[key] for key in HUB if key in options}
        base = AutoConfig.from_pretrained(name, **source, **hub)
        if isinstance(base, BidirectionalConfig):
            model = cls.from_pretrained(name, config=base, **source, **options)
            for key in ("base_model", "base_revision", "base_quantization"):
                setattr(model.config, key, getattr(config, key))
            return model
        return cls(config, AutoModel.from_pretrained(name, config=config.text_config, **source, **options))

    def save_pretrained(  # type: ignore[override]  # its own arguments are among kwargs
        self, save_directory: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Save the model as transformers does. If it has an adapter, save only the adapter and the configuration."""
        if not self.has_adapter:
            if self.is_quantized:
                raise ValueError("a quantized decoder has no trained weights to save: add a LoRA adapter")
            self.config.forget_base()
            super().save_pretrained(save_directory, **kwargs)
            return
        if not kwargs.get("is_main_process", True):
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.architectures = [type(self).__name__]
        custom_object_save(self, folder, config=self.config)  # type: ignore[arg-type]
        self.config.save_pretrained(folder)
        self.decoder.save_pretrained(folder / ADAPTER)

    def _masks(self, inputs: Tensor, padding: Tensor | None) -> dict[Any, Any]:
        """Return {size of a sliding window: mask for the layers with this window}."""
        decoder = self.decoder.config
        sizes = set(windows(decoder)[-self.config.bidirectional_layers :])
        # transformers reads only the batch size, length, dtype and device of these embeddings
        dtype: Any = self.get_input_embeddings().weight.dtype
        embeddings = torch.empty(*inputs.shape[:2], 0, dtype=dtype, device=inputs.device)
        mask = partial(create_bidirectional_mask, decoder, embeddings, padding)
        return {window: mask(and_mask_function=_within(window)) for window in sizes}


def _within(window: int | None) -> Any:
    """Return the mask function of a sliding window that has the causal window's size in both directions."""
    if window is None:
        return None
    return lambda b, h, q, k: (q - k < window) & (k - q < window)


def lift(layer: nn.Module, args: Any, kwargs: dict[str, Any], window: int | None) -> tuple[Any, dict[str, Any]]:
    """Replace the decoder's causal mask. This function is a forward pre-hook of each bidirectional layer."""
    if "lifted" not in kwargs:
        raise RuntimeError("call the BidirectionalModel, not its decoder: the decoder alone has no bidirectional masks")
    arguments = {key: value for key, value in kwargs.items() if key != "lifted"}
    # without is_causal=False, SDPA treats a missing mask as causal
    return args, {**arguments, "attention_mask": kwargs["lifted"][window], "is_causal": False}


# A trainer loads checkpoints with load_state_dict, which fails for quantized weights. If there is an adapter, quantized
# weights never change, so they are left out of the state dict.
def _quantized(model: BidirectionalModel) -> tuple[str, ...]:
    names = [name for name, weight in model.named_parameters() if hasattr(weight, "quant_state")]
    return tuple(names) if model.has_adapter else ()


def _leave_out_quantized(model: BidirectionalModel, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    left_out = tuple(prefix + name for name in _quantized(model))
    for key in [key for key in state if key.startswith(left_out)]:
        del state[key]


def _do_not_miss_quantized(model: BidirectionalModel, keys: Any) -> None:
    left_out = _quantized(model)
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(left_out)]


def merged_adapter(model: Any, name: str, at: dict[str, Any]) -> Any:
    """Return a transformers model with an adapter merged into its weights. For arguments, see set_adapter_weights."""
    from peft import PeftConfig, PeftModel

    adapted: Any = PeftModel(model, PeftConfig.from_pretrained(name, **at))
    set_adapter_weights(adapted.base_model.model, name, at)
    return adapted.merge_and_unload()


def set_adapter_weights(model: Any, name: str, at: dict[str, Any]) -> None:
    """Load an adapter's weights from peft's files into a transformers model, in float32, as in training. `name` is the
    folder or repository of these files, and `at` contains its revision and subfolder. In contrast, transformers'
    load_adapter rounds weights to the base model's dtype, and leaves out DoRA's magnitudes. Raise ValueError for
    missing or unknown weights."""
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    for key, parameter in model.named_parameters():
        if "lora_" in key:
            parameter.data = parameter.data.to(torch.float32)
    # an adapter of a model with a head, such as a causal LM, has the base model's name in front of its keys
    prefix = "" if hasattr(model, model.base_model_prefix) else f"{model.base_model_prefix}."
    files: dict[str, Tensor] = load_peft_weights(name, "cpu", **at)
    saved = {key.removeprefix("base_model.model.").removeprefix(prefix): weight for key, weight in files.items()}
    wrong = sorted(get_peft_model_state_dict(model, save_embedding_layers=False).keys() - saved.keys())
    if not wrong:
        result: Any = set_peft_model_state_dict(model, saved)
        wrong = result.unexpected_keys
    if wrong:
        raise ValueError(f"{name}: {len(wrong)} adapter weights are missing or unexpected: {', '.join(wrong[:3])}")

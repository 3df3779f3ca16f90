"""What a run would take, by arithmetic: the data is read, and the encoder made on the meta device, without weights."""

from __future__ import annotations

import math
import os
from typing import Any

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.encoders.named import SCRATCH, Model

SAMPLE = 500  # rows of each source that are counted in tokens, or up to twice as many
GB = 1e9
# GB, and operations a second in 16 bits (dense, tensor cores) and in 32, of an RTX 4090 and an A100
GPUS: dict[str, tuple[float, float, float]] = {"24 GB": (24, 165e12, 82.6e12), "80 GB": (80, 312e12, 19.5e12)}
REACHED = 1 / 3  # share of these rates that hours are reckoned with; short texts in small batches reach less
HALF = ("bfloat16", "float16")


def would_take(model: Model, datasets: Any, settings: dict[str, Any], loss: dict[str, Any]) -> dict[str, Any]:
    """{"rows": {source: rows}, "steps", "tokens": real ones in all epochs, "parameters", "trained", "memory_gb":
    {"weights", "gradients and optimizer", "activations", "sum"}, "hours": {GPU: hours}} of one process.

    Memory is 4 bytes a weight (2 in 16 bits, 1/2 in 4 bits), 12 a trained one (its gradient and Adam's two), and of
    activations s b h (34 + 5 a s / h) bytes a layer in 16 bits, twice that in 32 (Korthikanti et al. 2022, equation 2),
    with attention's square, which fused kernels do not keep, and without padding, logits or the libraries' own.
    Hours are 2 operations a token and weight outside the embeddings, and 4 s h a token and layer, for the forward pass,
    as much for gradients by inputs and by weights that are trained, for layers that are computed again (checkpointing)
    and for mini-batches, which are encoded twice, at a third of the rates of GPUS. Teachers and evaluation are not in
    it, neither is padding.

    ValueError for a model that is to be made from scratch; OSError where its config or tokenizer is not there.
    """
    from sentence_transformers import SentenceTransformerTrainingArguments
    from transformers import AutoTokenizer

    from raoe_train.encoders.load import transformer_of

    if model.name == SCRATCH:
        raise ValueError("dry_run is for a model with a config; model.name scratch makes one of the training sentences")
    if model.device_map is not None:
        raise ValueError("dry_run loads no weights, so no device has them: leave model.device_map out")
    config, parameters, trained, outside = sizes(model)
    tokenizer = AutoTokenizer.from_pretrained(
        transformer_of(model.name), revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    longest = min(model.max_seq_length or 1 << 30, config.max_position_embeddings, tokenizer.model_max_length)

    def counted(dataset: Any) -> tuple[float, float]:
        """(tokens, texts) of a row, on average."""
        rows = dataset[:: max(1, len(dataset) // SAMPLE)]
        columns = [values for name, values in rows.items() if name not in ("score", "label")]
        cells = [cell for values in columns for cell in values]
        texts = [text for cell in cells for text in ([cell] if isinstance(cell, str) else cell)]
        prompted = [(model.prompt or "{text}").replace("{text}", text) for text in texts]
        tokens = sum(min(len(ids), longest) for ids in tokenizer(prompted)["input_ids"])
        return tokens / len(columns[0]), len(texts) / len(columns[0])

    arguments = SentenceTransformerTrainingArguments(**settings)
    batch, epochs = arguments.per_device_train_batch_size, arguments.num_train_epochs
    batches = sum(math.ceil(len(dataset) / batch) for dataset in datasets.values())
    steps = math.ceil(math.ceil(batches / arguments.gradient_accumulation_steps) * epochs)
    share = 1.0
    if arguments.max_steps > 0:
        steps, share = arguments.max_steps, arguments.max_steps / steps
    rows = {source: counted(dataset) for source, dataset in datasets.items()}
    tokens = share * epochs * sum(rows[source][0] * len(dataset) for source, dataset in datasets.items())
    a_row, texts = max(rows.values())
    mini = loss.get("mini_batch_num_tokens") or (loss.get("mini_batch_size") or 0) * a_row
    text = a_row / texts
    width, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    half, again = arguments.bf16 or arguments.fp16 or model.dtype in HALF, arguments.gradient_checkpointing
    a_layer = (34 * width + 5 * heads * text) * (1 if half else 2)
    kept = layers * 2 * width * (1 if half else 2) + a_layer if again else layers * a_layer
    memory = held(model, config, parameters, trained)
    memory["activations"] = (mini or batch * a_row) * kept / GB
    forward = tokens * (2 * outside + 4 * layers * text * width)
    passes = 2 + (trained == parameters) + bool(again) + bool(mini)
    found: dict[str, Any] = {
        "rows": {source: len(dataset) for source, dataset in datasets.items()},
        "steps": steps,
        "tokens": round(tokens),
        "parameters": parameters,
        "trained": trained,
        "memory_gb": {**memory, "sum": sum(memory.values())},
        "hours": {gpu: forward * passes / (rates[not half] * REACHED) / 3600 for gpu, (_, *rates) in GPUS.items()},
    }
    listed = ", ".join(f"{name} {value:.2f}" for name, value in found["memory_gb"].items())
    print(f"{steps} steps, {tokens:.3g} tokens, {parameters:.3g} parameters ({trained:.3g} trained); GB: {listed}")
    for gpu, hours in found["hours"].items():
        fits = "" if found["memory_gb"]["sum"] < GPUS[gpu][0] else "; it does not fit (loss.mini_batch_size, bf16)"
        print(f"  {gpu}: {hours:.2g} hours, by arithmetic at a third of the GPU's rate{fits}")
    return found


def sizes(model: Model) -> tuple[Any, int, int, int]:
    """(config of an encoder, its weights, those of them that are trained, those outside its embeddings), on the meta
    device. OSError where there is no config."""
    import torch
    from transformers import AutoConfig, AutoModel

    from raoe_train.encoders.bidirectional import register
    from raoe_train.encoders.bidirectional.configuration import BidirectionalConfig
    from raoe_train.encoders.load import new_layers, transformer_of

    register()
    asked = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    config = AutoConfig.from_pretrained(transformer_of(model.name), **asked)
    changes = new_layers(config, model)
    if isinstance(config, BidirectionalConfig):
        config = config.text_config
    depth = config.num_hidden_layers
    config.update(changes)
    with torch.device("meta"):
        encoder = AutoModel.from_config(config, trust_remote_code=model.trust_remote_code)
    parameters = trained = sum(weight.numel() for weight in encoder.parameters())
    if model.lora:
        fresh = tuple(f"layers.{number}." for number in range(depth, config.num_hidden_layers))
        wanted, rank = model.lora.get("target_modules", "all-linear"), int(model.lora.get("r", 8))
        linear = {name: part for name, part in encoder.named_modules() if isinstance(part, torch.nn.Linear)}
        taken = [part for name, part in linear.items() if wanted == "all-linear" or name.split(".")[-1] in wanted]
        trained = sum(rank * (part.in_features + part.out_features) for part in taken)
        trained += sum(weight.numel() for name, weight in encoder.named_parameters() if name.startswith(fresh))
    tables = [part for part in encoder.modules() if isinstance(part, torch.nn.Embedding)]
    return config, parameters, trained, parameters - sum(part.weight.numel() for part in tables)


def held(model: Model, config: Any, parameters: int, trained: int) -> dict[str, float]:
    """GB of an encoder's weights, and of what is kept beside those that are trained."""
    saved = str(getattr(config, "dtype", None)).removeprefix("torch.")
    bytes_each = 0.5 if model.load_in_4bit else 2 if (model.dtype or saved) in HALF else 4
    return {"weights": parameters * bytes_each / GB, "gradients and optimizer": 12 * trained / GB}


def check_fits(model: Model) -> None:
    """ValueError where what `held` says of an encoder is more than the memory of its device: before it is loaded. What
    has no plain config is not looked at, nor what several devices share."""
    import torch

    if model.name == SCRATCH or model.device_map is not None or rank_and_world()[1] > 1:
        return
    try:
        config, parameters, trained, _ = sizes(model)
    except (OSError, ValueError, KeyError, AttributeError, ImportError):  # the loader says what is wrong, if it is
        return
    kind = torch.device(model.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if kind.type not in ("cuda", "cpu"):
        return
    has = device_memory(kind) / GB
    if (needed := sum(held(model, config, parameters, trained).values())) > has:
        raise ValueError(
            f"model.name {model.name} does not fit: its weights, gradients and Adam's moments take {needed:.1f} GB by "
            f"arithmetic, and the {kind.type} has {has:.1f}; model.lora trains fewer, load_in_4bit makes them small"
        )


def device_memory(device: Any) -> int:
    """Bytes of all memory of a GPU, or of this machine."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

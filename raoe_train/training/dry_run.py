"""What a run would take, by arithmetic: the data is read, and the encoder made on the meta device, without weights."""

from __future__ import annotations

import math
from typing import Any

from raoe_train.encoders.named import SCRATCH, Model

SAMPLE = 500  # rows of each source that are counted in tokens, or up to twice as many
GB = 1e9


def would_take(model: Model, datasets: Any, settings: dict[str, Any], loss: dict[str, Any]) -> dict[str, Any]:
    """{"rows": {source: rows}, "steps", "tokens": real ones in all epochs, "parameters", "trained", "memory_gb":
    {"weights", "gradients and optimizer", "activations", "sum"}} of one process.

    Memory is 4 bytes a weight (2 in 16 bits, 1/2 in 4 bits), 12 a trained one (its gradient and Adam's two), and of
    activations s b h (34 + 5 a s / h) bytes a layer in 16 bits, twice that in 32 (Korthikanti et al. 2022, equation 2),
    with attention's square, which fused kernels do not keep, and without padding, logits or the libraries' own.

    ValueError for a model that is to be made from scratch; OSError where its config or tokenizer is not there.
    """
    import torch
    from sentence_transformers import SentenceTransformerTrainingArguments
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    if model.name == SCRATCH:
        raise ValueError("dry_run is for a model with a config; model.name scratch makes one of the training sentences")
    if model.device_map is not None:
        raise ValueError("dry_run loads no weights, so no device has them: leave model.device_map out")
    asked = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    config = AutoConfig.from_pretrained(model.name, **asked)
    with torch.device("meta"):
        encoder = AutoModel.from_config(config, trust_remote_code=model.trust_remote_code)
    parameters = trained = sum(weight.numel() for weight in encoder.parameters())
    if model.lora:
        wanted, rank = model.lora.get("target_modules", "all-linear"), int(model.lora.get("r", 8))
        linear = {name: part for name, part in encoder.named_modules() if isinstance(part, torch.nn.Linear)}
        taken = [part for name, part in linear.items() if wanted == "all-linear" or name.split(".")[-1] in wanted]
        trained = sum(rank * (part.in_features + part.out_features) for part in taken)
    tokenizer = AutoTokenizer.from_pretrained(model.name, **asked)
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
    at_once = loss.get("mini_batch_num_tokens") or (loss.get("mini_batch_size") or batch) * a_row
    text = a_row / texts
    width, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    half = arguments.bf16 or arguments.fp16 or model.dtype in ("bfloat16", "float16")
    a_layer = (34 * width + 5 * heads * text) * (1 if half else 2)
    kept = layers * 2 * width * (1 if half else 2) + a_layer if arguments.gradient_checkpointing else layers * a_layer
    bytes_each = 0.5 if model.load_in_4bit else 2 if model.dtype in ("bfloat16", "float16") else 4
    memory = {
        "weights": parameters * bytes_each / GB,
        "gradients and optimizer": 12 * trained / GB,
        "activations": at_once * kept / GB,
    }
    found = {
        "rows": {source: len(dataset) for source, dataset in datasets.items()},
        "steps": steps,
        "tokens": round(tokens),
        "parameters": parameters,
        "trained": trained,
        "memory_gb": {**memory, "sum": sum(memory.values())},
    }
    listed = ", ".join(f"{name} {value:.2f}" for name, value in found["memory_gb"].items())
    print(f"{steps} steps, {tokens:.3g} tokens, {parameters:.3g} parameters ({trained:.3g} trained); GB: {listed}")
    return found

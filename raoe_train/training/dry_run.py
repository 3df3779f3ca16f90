"""Estimate the steps, tokens and memory of a run: reads the data, and builds the encoder without weights."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from raoe_train.encoders.preflight import GB, HALF, from_hub, held, kept, loading, sizes, without_weights
from raoe_train.encoders.settings import SCRATCH
from raoe_train.training.training_data import Teacher, enough_steps, read_training_data, with_dev

SAMPLE = 500  # rows of each source, or up to twice as many, whose tokens are counted


def would_take(config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Estimate what a TrainConfig would take in one process, with the trainer's settings.

    Returns {"rows": {source: rows}, "steps", "tokens": tokens in all epochs without padding, "parameters", "trained",
    "memory_gb": {"weights", "gradients and optimizer", "activations", "sum"}}. The memory is 4 bytes for each weight (2
    in 16 bits, 1/2 in 4 bits), 12 more for each trained one (gradient, Adam's two moments), and what autograd keeps of
    a forward of a batch at mean length. It leaves out padding, buffers of the backward, teachers and evaluation.

    ValueError for a model to make from scratch; OSError if the data, the model's config or its tokenizer is missing.
    """
    from sentence_transformers import SentenceTransformerTrainingArguments
    from transformers import AutoTokenizer

    # neither redrawing nor the teacher changes the number of rows
    config = replace(config, data=replace(config.data, redraw=False), teacher=Teacher(information="ranking"))
    model, loss = config.model, config.loss.init_args
    datasets, _ = read_training_data(config, Path())
    datasets, _ = with_dev(datasets, config.data, model.prompt, config.training.seed)
    if model.name == SCRATCH:
        raise ValueError("dry_run cannot estimate model.name scratch: its tokenizer is not trained yet")
    encoder = without_weights(model)
    (parameters, trained), shape = sizes(encoder), encoder.config
    with loading(model.name):
        tokenizer = AutoTokenizer.from_pretrained(**from_hub(model))
    longest = min(model.max_seq_length or 1 << 30, shape.max_position_embeddings, tokenizer.model_max_length)

    def counted(dataset: Any) -> tuple[float, float]:
        """Mean (tokens, texts) in a row."""
        rows = dataset[:: max(1, len(dataset) // SAMPLE)]
        cells = [cell for name, values in rows.items() if name not in ("score", "label") for cell in values]
        texts = [text for cell in cells for text in ([cell] if isinstance(cell, str) else cell)]
        prompted = [(model.prompt or "{text}").replace("{text}", text) for text in texts]
        tokens = sum(min(len(ids), longest) for ids in tokenizer(prompted)["input_ids"])
        count = len(next(iter(rows.values())))
        return tokens / count, len(texts) / count

    arguments = SentenceTransformerTrainingArguments(**enough_steps(settings, datasets, config))
    batch, epochs = arguments.per_device_train_batch_size, arguments.num_train_epochs
    batches = sum(math.ceil(len(dataset) / batch) for dataset in datasets.values())
    planned = math.ceil(math.ceil(batches / arguments.gradient_accumulation_steps) * epochs)
    steps = arguments.max_steps if arguments.max_steps > 0 else planned
    rows = {source: counted(dataset) for source, dataset in datasets.items()}
    tokens = steps / planned * epochs * sum(rows[source][0] * len(dataset) for source, dataset in datasets.items())
    a_row, texts = max(rows.values())
    text = a_row / texts
    mini = loss.get("mini_batch_num_tokens") or (loss.get("mini_batch_size") or 0) * a_row
    half = arguments.bf16 or arguments.fp16 or model.dtype in HALF
    each = kept(encoder, 8, math.ceil(text)) / 8 / (2 if half else 1)  # bytes for one text
    if config.training.gradient_checkpointing:  # the inputs of all layers, and the activations of one layer
        layers = shape.num_hidden_layers
        each = each / layers + layers * shape.hidden_size * math.ceil(text) * (2 if half else 4)
    memory = held(model, encoder) | {"activations": (mini or batch * a_row) / text * each / GB}
    memory["sum"] = sum(memory.values())
    listed = ", ".join(f"{name} {value:.2f}" for name, value in memory.items())
    print(f"{steps} steps, {tokens:.3g} tokens, {parameters:.3g} parameters ({trained:.3g} trained); GB: {listed}")
    return {
        "rows": {source: len(dataset) for source, dataset in datasets.items()},
        "steps": steps,
        "tokens": round(tokens),
        "parameters": parameters,
        "trained": trained,
        "memory_gb": memory,
    }

"""One training step on texts of real lengths: CoSENT with forward, backward and AdamW.

Lengths are drawn from benchmarks/token_lengths.json, histograms of MiniLM's tokens over the train rows of real data
(regenerate them with python -m benchmarks.train_step DATA); token ids are random, so no text occurs twice. MiniLM is
the model of benchmarks/equal_lengths.py; "BERT-base" has the shape of BERT-base and random weights. Batches are planned
before the step, because the processes of a DataLoader do this; "of it: the plan" is the time to plan a batch. "tokens"
is the number of computed tokens, including padding, per real token.

Contenders on a GPU, in bf16, TF32 and float32: a batch in one packed row (raoe_train.losses.ByLength), the same with
torch.compile, by length, sentence-transformers' plain step, and in bf16 its step on flattened columns, with the
FlashAttention of the package flash_attn, or else torch's. On a CPU: by length, sentence-transformers' plain step, its
caching with a token budget (for MultipleNegativesRankingLoss, the only one of these losses that it can cache), and the
ideal: equally many tokens in texts of equal length. "width 8" is MiniLM with hidden states of 8 columns, so most of its
time is the host's; its packed row is the only one on a CPU.
"captured" is torch.compile's mode reduce-overhead on rows of few sizes; it has never run on a GPU.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import timing
from benchmarks.case import Call, Case
from benchmarks.equal_lengths import MINILM, encoder, minilm, step

LENGTHS = Path(__file__).with_name("token_lengths.json")
SOURCES = {
    "SNLI": ("nli/snli", "train_sample", ("premise", "hypothesis")),
    "MNLI": ("nli/mnli", "train_sample", ("premise", "hypothesis")),
    "SICK": ("sts/sick", "train", ("sentence1", "sentence2")),
    "STS-B": ("sts/stsb", "train", ("sentence1", "sentence2")),
}
SIZES = {"cpu": [64, 256, 512, 4096], "cuda": [512, 64, 4096]}
BASE = {**MINILM, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072}
THIN = {
    **MINILM,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TOKENS = 4096  # tokens of a mini-batch
AT_ONCE = {"MiniLM": 60_000, "BERT-base": 15_000}  # most tokens whose activations comfortably fit into 24 GiB
TESTS = ["tests/losses/test_by_length.py"]
PRECISIONS = ("bf16", "TF32", "float32")
ST = "sentence-transformers"
WAYS = ("packed", "packed, compiled", "packed, compiled, captured", "by length", ST, f"{ST}, flattened")
FLATTENED = "flash_attention_2" if find_spec("flash_attn") else "flattened"


def cases(pairs: int, device: str) -> Iterator[Case]:
    if device == "cuda":
        models = {name: encoder(device, shape) for name, shape in {"MiniLM": MINILM, "BERT-base": BASE}.items()}
    else:
        models = {"MiniLM": minilm(device)[0]}
        if pairs == 64:
            models |= {"BERT-base": encoder(device, BASE), "width 8": encoder(device, THIN)}
    for name, model in models.items():
        few = device == "cuda" or pairs not in (64, 512) or name != "MiniLM"
        for source in [*SOURCES][: 2 if few else None]:
            yield case(source, name, model, pairs, device)


def case(source: str, name: str, model: Any, pairs: int, device: str) -> Case:
    lengths = drawn(source, pairs)
    columns, score = batch(lengths)
    missing: dict[str, str] = {}
    if device == "cuda":
        contenders: dict[str, Call] = {}
        for precision in PRECISIONS:
            for way in WAYS:
                title = f"{way}, {precision}"
                if "flattened" in way and precision != "bf16":
                    missing[title] = "FlashAttention needs 16 bits"
                # a compilation takes up to a minute
                elif "compiled" in way and (name == "MiniLM") + (source == "SNLI") + (precision == "bf16") < 2:
                    missing[title] = "not timed"
                else:
                    contenders[title] = contender(model, way, precision, columns, score)
    elif name == "width 8":
        contenders = {way: contender(model, way, "float32", columns, score) for way in ("packed", "by length", ST)}
    else:
        contenders, missing = on_cpu(name, model, lengths)
    plans = {way: plan(model, way, columns, score) for way in ("by length", "packed")}
    for way, (loss, _, attention) in plans.items():
        planning = lambda i, loss=loss: loss.plan(columns, score)  # noqa: E731
        contenders[f"of it: the plan, {way}"] = within(model, attention, "float32", planning)
    weights = sum(weight.numel() for weight in model.parameters())
    inner = sum(weight.numel() for key, weight in model.named_parameters() if "embeddings" not in key)
    real, padded = sum(int(each.sum()) for each in lengths), sum(each["input_ids"].numel() for each in columns)
    computed = sum(run["input_ids"].numel() for run in plans["by length"][1].runs)
    title = f"{source}, {pairs:,} pairs, {name}; tokens: by length {computed / real:.2f}, {ST} {padded / real:.2f}"
    details = partial(counted, contenders) if device == "cuda" or name == "width 8" else None
    return Case(title, contenders, 4 * 8 * weights, 6 * inner * real, missing, pairs > 512, rounds=8, details=details)


def on_cpu(name: str, model: Any, lengths: list[np.ndarray]) -> tuple[dict[str, Call], dict[str, str]]:
    """Return the contenders on a CPU, and why others are missing."""
    from sentence_transformers.sentence_transformer import losses as theirs

    from raoe_train import losses as ours

    columns, score = batch(lengths)
    real, padded = sum(int(each.sum()) for each in lengths), sum(each["input_ids"].numel() for each in columns)
    pairs, cached = len(score), {"mini_batch_num_tokens": TOKENS}
    shape = np.full(2 * pairs, round(real / (2 * pairs)))
    ideal, _ = batch([shape[:pairs], shape[pairs:]])
    plain, mnrl = theirs.CoSENTLoss(model), theirs.CachedMultipleNegativesRankingLoss(model, **cached)
    in_parts = ours.ByLength(ours.CoSENTLoss(model, **cached))

    def padded_step(*inputs: Any) -> Call:
        return within(model, "sdpa", "float32", step(model, *inputs))

    tokens_and_calls = {
        "by length": (real, contender(model, "by length", "float32", columns, score)),
        "by length, bf16": (real, contender(model, "by length", "bf16", columns, score)),
        f"by length, {TOKENS:,} tokens at a time": (0, padded_step(in_parts, in_parts.plan(columns, score))),
        ST: (padded, padded_step(plain, columns, score)),
        f"{ST}, {TOKENS:,} tokens at a time": (0, padded_step(mnrl, columns)),
        "the ideal: no padding": (real, padded_step(plain, ideal, score)),
    }
    calls = {title: call for title, (tokens, call) in tokens_and_calls.items() if tokens <= AT_ONCE[name]}
    why = "the activations of all texts do not fit into memory"
    return calls, {title: why for title in tokens_and_calls if title not in calls}


def plan(model: Any, way: str, columns: list[dict[str, Any]], score: Any, precision: str = "bf16") -> Any:
    """Return (loss, the inputs that it plans or gets, the model's attention) of one of WAYS."""
    from sentence_transformers.sentence_transformer import losses as theirs

    from raoe_train import losses as ours

    config = model[0].model.config
    config._attn_implementation = "sdpa"  # ByLength chooses another
    if way.startswith(ST):
        attention = FLATTENED if "flattened" in way else "sdpa"
        return theirs.CoSENTLoss(model), [*map(flattened, columns)] if "flattened" in way else columns, attention
    loss = ours.ByLength(theirs.CoSENTLoss(model), packed="packed" in way)
    loss.compiled, loss.captured, loss.tensor_cores = "compiled" in way, "captured" in way, precision != "float32"
    planned = loss.plan(columns, score)
    if loss.compiled:
        loss.model = loss.loss.model = torch.compile(model, mode="reduce-overhead" if loss.captured else None)
    return loss, planned, config._attn_implementation


def contender(model: Any, way: str, precision: str, columns: list[dict[str, Any]], score: torch.Tensor) -> Call:
    """Return a step in one of WAYS and PRECISIONS."""
    from sentence_transformers.util import batch_to_device

    device = model.device
    loss, inputs, attention = plan(model, way, columns, score, precision)
    if isinstance(inputs, list):
        call = step(model, loss, [batch_to_device(dict(each), device) for each in inputs], score.to(device))
    else:
        call = step(model, loss, inputs.to(device))
    return within(model, attention, precision, call)


def within(model: Any, attention: str, precision: str, call: Call) -> Call:
    """A call in one of PRECISIONS, for which the model, which all contenders share, has this attention."""
    device, config = model.device.type, model[0].model.config

    def result(i: int) -> None:
        config._attn_implementation = attention
        torch.backends.cuda.matmul.allow_tf32 = precision == "TF32"
        with torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext():
            call(i)

    return result


def counted(contenders: Mapping[str, Call], name: str) -> dict[str, int]:
    """Number of operations that a step dispatches; a compiled one, which is not compiled while they are counted, has
    none."""
    return {} if "compiled" in name else {"operations": timing.operations(contenders[name])}


def batch(lengths: list[np.ndarray]) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """Return two columns of texts on the CPU, and scores."""
    score = torch.rand(len(lengths[0]), generator=torch.Generator().manual_seed(0))
    return [rows_of(each, "cpu") for each in lengths], score


def flattened(column: dict[str, Any]) -> dict[str, Any]:
    """A column without padding in one row, as sentence-transformers makes it for FlashAttention."""
    from transformers import AttentionInterface, AttentionMaskInterface, DataCollatorWithFlattening

    AttentionInterface.register("flattened", flash)
    AttentionMaskInterface.register("flattened", lambda *_, **__: None)
    collate = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True, return_position_ids=True)
    real = zip(column["input_ids"], column["attention_mask"].bool(), strict=True)
    row = collate([{"input_ids": ids[mask].tolist()} for ids, mask in real])
    return {name: each for name, each in row.items() if name != "labels"}


def flash(
    module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, scaling: float | None = None,
    cu_seq_lens_q: Any = None, max_length_q: int = 0, **_: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Attention of a flattened column by the operator of torch's FlashAttention."""
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    ends, longest = cu_seq_lens_q, max_length_q
    options = ends, ends, longest, longest, dropout, False, False
    return torch.ops.aten._flash_attention_forward(q, k, v, *options, scale=scaling)[0][None], None


def drawn(source: str, pairs: int) -> list[np.ndarray]:
    """Draw the lengths of the texts of two columns."""
    generator = np.random.default_rng(pairs)
    result = []
    for counts in json.loads(LENGTHS.read_text())[source].values():
        shares = np.array(counts) / sum(counts)
        result.append(generator.choice(len(counts), pairs, p=shares))
    return result


def rows_of(lengths: np.ndarray, device: str) -> dict[str, Any]:
    """Return tokenized texts with random ids and these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(int(lengths.sum()))
    mask = torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]
    ids = torch.randint(1000, 30000, mask.shape, generator=generator) * mask
    rows = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": mask.long()}
    return {name: each.to(device) for name, each in rows.items()}


def write_lengths(data: Path) -> None:
    """Write token_lengths.json from the files of SOURCES: per column, the number of texts with 0, 1, 2 … tokens."""
    tokenizer = minilm("cpu")[0].tokenizer
    tables: dict[str, dict[str, list[int]]] = {}
    for source, (file, split, columns) in SOURCES.items():
        with gzip.open(data / f"{file}.tsv.gz", "rt", encoding="utf-8") as lines:
            rows = [
                row for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if row["split"] == split
            ]
        tables[source] = {}
        for column in columns:
            counts = Counter(map(len, tokenizer([row[column] for row in rows])["input_ids"]))
            tables[source][column] = [counts[length] for length in range(max(counts) + 1)]
    LENGTHS.write_text(json.dumps(tables, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    write_lengths(Path(sys.argv[1]))

"""Guided decoding with a decoder of random weights and a 128k vocabulary, against transformers' own guidance.

The contenders are GuidedDecoder and `generate` with guidance_scale and negative_prompt_ids. They decode greedily in
float32, with equally many tokens for each row (nothing ends early), and must produce the same tokens (`same_tokens`)
before they are timed. `generate` without guidance solves another task; it shows the cost of guidance. Times include
prefill. Tokens per second are rows x NEW / seconds. These are single answers that reuse no earlier step; for chains of
answers see benchmarks/chains.py.

The contexts of a batch differ in length, as in practice, so both contenders pad on the left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.case import COPIES, Call, Case
from raoe_train.generation import GuidedDecoder, Request

SIZES = {"cpu": [1, 8], "cuda": [8, 32]}
VOCABULARY = 128256
GUIDANCE = 1.5
NEW = 16
NEAR, FAR = 64, 60  # tokens of the longest contexts, about as many as the paper's prompt with a sentence
# width, layers, heads, key-value heads, width of the feed-forward part: Llama 3.2 1B on a GPU; half as wide and deep
# on a CPU, so that head and body have about equally many weights
SHAPE = {"cpu": (1024, 8, 16, 4, 4096), "cuda": (2048, 16, 32, 8, 8192)}
TESTS = ["tests/generation/test_guided.py"]


def case(rows: int, device: str) -> Case:
    model = language_model(device)
    inputs = [_contexts(rows, copy) for copy in range(COPIES)]
    result: dict[str, Call] = {}
    decoder = GuidedDecoder(model)
    result["GuidedDecoder"] = lambda i: _ours(decoder, *inputs[i % COPIES])
    result["transformers guidance_scale"] = lambda i: _theirs(model, *inputs[i % COPIES])
    for i in range(COPIES):
        outputs = {name: call(i) for name, call in result.items()}
        for name, tokens in outputs.items():
            same_tokens(name, tokens, outputs["transformers guidance_scale"])
    result["transformers without guidance"] = lambda i: _theirs(model, inputs[i % COPIES][0])
    return Case(f"{rows} rows, {NEW} tokens each, vocabulary {VOCABULARY:,}", result, bytes=read_bytes(model) * NEW)


def same_tokens(name: str, tokens: list[list[int]], expected: list[list[int]]) -> None:
    """Raise AssertionError if more than an eighth of the rows differ from transformers'. In float32, rounding can
    decide between two close tokens, and the rest of the row then differs. A wrong decoder differs in most rows."""
    wrong = sum(ours != theirs for ours, theirs in zip(tokens, expected, strict=True))
    if wrong > len(expected) / 8:
        raise AssertionError(f"{name}: {wrong} of {len(expected)} rows differ from transformers' tokens")


def language_model(device: str) -> Any:
    """A Llama with random float32 weights, the same at every call."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    width, layers, heads, key_heads, inner = SHAPE[device]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        max_position_embeddings=1024,
        # untied, because with tied random weights each token would predict itself
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).to(device).eval()


def read_bytes(model: Any) -> int:
    """Bytes that a forward pass reads: all weights except the input embeddings."""
    read = [*model.model.layers.parameters(), model.lm_head.weight]
    return sum(parameter.numel() * parameter.element_size() for parameter in read)


def _contexts(rows: int, copy: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the nearer and the farther contexts, with lengths that differ from row to row."""
    generator = torch.Generator().manual_seed(copy)

    def ids(longest: int) -> list[list[int]]:
        lengths = [longest - 3 * (row % 5) for row in range(rows)]
        return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]

    return ids(NEAR), ids(FAR)


def _ours(decoder: GuidedDecoder, near: list[list[int]], far: list[list[int]]) -> list[list[int]]:
    pairs = zip(near, far, strict=True)
    return [answer.ids for answer in decoder.answers([Request(a, b, GUIDANCE, NEW) for a, b in pairs])]


def _theirs(model: Any, near: list[list[int]], far: list[list[int]] | None = None) -> list[list[int]]:
    ids, mask = padded(near, model.device)
    options: dict[str, object] = {}
    if far is not None:
        negative, its_mask = padded(far, model.device)
        options = {"negative_prompt_ids": negative, "negative_prompt_attention_mask": its_mask}
        options["guidance_scale"] = GUIDANCE
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
    return tokens[:, ids.shape[1] :].tolist()


def padded(rows: list[list[int]], device: Any, after: int = 0) -> tuple[Tensor, Tensor]:
    """Return [R, W] ids and mask, with the padding after the first `after` tokens."""
    width = max(map(len, rows))
    ids = [row[:after] + [0] * (width - len(row)) + row[after:] for row in rows]
    mask = [[1] * after + [0] * (width - len(row)) + [1] * (len(row) - after) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

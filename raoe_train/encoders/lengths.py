"""Batches by length: the texts of a batch in runs of similar length, each padded to its own longest text, or packed.

On NLI data, half to nine tenths of a batch padded to its longest text are padding. Here the distinct texts of all
columns are sorted by length and cut into runs at the smallest total cost, or packed into one row without padding.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from raoe_train.encoders.packed import ENDS, Packing, packing_in_use

CPU_FORWARD = 128  # fixed cost of a forward in tokens, as measured on CPUs (docs/by-length.md)
# Of a GPU, by the H100 that was measured: seconds for which the host is busy with a layer, forward and backward, and
# floating-point operations that an encoder makes in a second, in float32 and on tensor cores
LAYER_SECONDS, GPU_RATES = 3e-3, (3e13, 1.3e14)


@dataclass(frozen=True)
class Runs:
    """A batch in runs of similar length, or in packed rows, on the CPU."""

    features: list[dict[str, Any]]  # of each run, in the format of the model's `preprocess`
    rows: list[Tensor]  # for each column (B,) int64: the places of its texts among the texts of all runs


def texts_of(runs: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of each text in runs."""
    texts: list[list[int]] = []
    for run in runs:
        if "cu_seq_lens_q" in run:
            run = padded(run)
        texts += [row[real].tolist() for row, real in zip(run["input_ids"], run["attention_mask"] != 0, strict=True)]
    return texts


def forward_cost(model: Any, tensor_cores: bool = False) -> int:
    """The fixed cost of a forward in tokens, for a SentenceTransformer on its device; on a GPU by prediction."""
    weight: Any = next(model.parameters(), None)
    if weight is None or weight.device.type == "cpu":
        return CPU_FORWARD
    transformer = getattr(model, "transformers_model", None)
    words: Any = transformer.get_input_embeddings() if transformer is not None else None
    inner = sum(each.numel() for each in model.parameters()) - (words.weight.numel() if words is not None else 0)
    layers = getattr(getattr(transformer, "config", None), "num_hidden_layers", 6)
    rate = GPU_RATES[tensor_cores or weight.dtype.itemsize == 2]
    return max(CPU_FORWARD, int(layers * LAYER_SECONDS * rate / (6 * max(1, inner))))


def padded(column: Mapping[str, Any]) -> dict[str, Any]:
    """A column on the CPU, in the format of `preprocess` with padding: FlashAttention gets texts in one row."""
    column = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in column.items()}
    ends = column.get("cu_seq_lens_q")
    if ends is None:
        return column
    lengths = ends.diff()
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    extra = {*ENDS, "seq_idx", "position_ids"}
    result: dict[str, Any] = {name: value for name, value in column.items() if name not in extra}
    for name, value in column.items():
        if name in result and isinstance(value, Tensor) and value.shape == column["input_ids"].shape:
            result[name] = value.new_zeros(mask.shape).masked_scatter(mask, value)
    return {**result, "attention_mask": mask.long()}


def by_length(
    columns: Sequence[Mapping[str, Any]],
    *,
    most: int | None = None,
    most_texts: int | None = None,
    multiple: int = 1,
    keep_leading: bool = False,
    packing: Packing | None = None,
    forward: int | None = None,
) -> Runs | None:
    """Cut tokenised columns into runs of similar length; None if they are not rows of tokens (images).

    Equal texts are encoded once. But copies within a row of the columns are kept: SimCSE needs two dropout views.

    Args:
        columns: output of `padded`: tensors (B, L), padded on either side; L may differ.
        most: maximum number of tokens in a run, with padding; a longer text is a run of its own.
        most_texts: the same limit, as a number of texts that are all as long as the longest.
        multiple: round the lengths of runs up to a multiple of it, so that few shapes are compiled.
        keep_leading: keep padding in front of texts, for a model whose positions count it; columns of different width
            then get separate runs.
        packing: pack the texts of each run into one row without padding; a single row unless there is a limit.
        forward: fixed cost of a forward in tokens; by default that of CPUs.
    """
    features_of = [_constants(column) for column in columns]
    if None in features_of:
        return None
    if packing is not None and not packing.fits([column["attention_mask"] for column in columns]):
        packing = None
    keep_leading = keep_leading and packing is None
    left_padded = [*map(_is_left_padded, columns)]
    widths = [keep_leading and left_padded[n] and column["input_ids"].shape[1] for n, column in enumerate(columns)]
    kinds = [*zip(features_of, widths, strict=True)]
    features: list[dict[str, Any]] = []
    rows: list[Tensor] = [torch.empty(0)] * len(columns)
    count = 0
    for kind in dict.fromkeys(kinds):  # columns with different prompts or tasks get separate runs
        common, fixed_width = kind
        numbers = [number for number, each in enumerate(kinds) if each == kind]
        step = 1 if fixed_width else multiple
        group = [columns[number] for number in numbers]
        table = _concatenate(group, step, any(left_padded[number] for number in numbers))
        tokens = np.stack([each.numpy() for each in table.values()], axis=1)
        mask = tokens[:, [*table].index("attention_mask")] != 0
        width = mask.shape[1]
        first = np.zeros(len(mask), dtype=np.int64) if keep_leading else mask.argmax(axis=1)
        end = np.maximum(width - mask[:, ::-1].argmax(axis=1), first + 1)
        heights = [len(columns[number]["input_ids"]) for number in numbers]
        distinct, text_of = _distinct(tokens, first, end, heights)
        lengths = (end - first)[distinct]
        lengths = -(-lengths // step) * step if packing is None else lengths
        order = np.argsort(lengths, kind="stable")
        room = most if most_texts is None else most_texts * int(lengths.max())
        if packing is None:
            cuts = cut(lengths[order], CPU_FORWARD if forward is None else forward, room)
        else:
            cuts = fill(lengths[order], room)
        for start, stop in cuts:
            texts = distinct[order[start:stop]]
            if packing is not None:
                index = torch.from_numpy(texts)
                rows_of_texts = {name: each[index] for name, each in table.items()}
                row = packing.row(rows_of_texts, first[texts], (end - first)[texts], multiple)
                features.append({**dict(common or ()), **row})
                continue
            left, right = int(first[texts].min()), int(end[texts].max())
            # round up to the multiple, on the padded side
            extra = -(right - left) % step
            left, right = (left - extra, right) if right == width else (left, right + extra)
            index = torch.from_numpy(texts)
            features.append({**dict(common or ()), **{name: each[index, left:right] for name, each in table.items()}})
        places = np.empty(len(distinct), dtype=np.int64)
        places[order] = np.arange(count, count + len(distinct))
        for number, each in zip(numbers, torch.from_numpy(places[text_of]).split(heights), strict=True):
            rows[number] = each
        count += len(distinct)
    return Runs(features, rows) if features else None


@contextmanager
def encoding_by_length(model: Any, batch_size: int) -> Iterator[None]:
    """In this block a SentenceTransformer's forward reads texts by length and returns only embeddings. A run has at
    most as many tokens as `batch_size` texts that are all as long as the longest."""
    forward, instance_forward = model.forward, vars(model).get("forward")  # accelerate may set one
    keywords: Any = {"keep_leading": counts_leading_padding(model), "packing": packing_in_use(model)}
    keywords["forward"] = forward_cost(model)

    def by_runs(features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        runs = by_length([padded(features)], most_texts=batch_size, **keywords)
        if runs is None:
            return forward(features, **kwargs)
        device = features["input_ids"].device
        moved = change(runs.features, lambda x: x.to(device))
        embeddings = [forward(run, **kwargs)["sentence_embedding"] for run in moved]
        return {"sentence_embedding": torch.cat(embeddings)[runs.rows[0].to(device)]}

    model.forward = by_runs
    try:
        yield
    finally:
        del model.forward
        if instance_forward is not None:
            model.forward = instance_forward


def change(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors in nested lists and mappings."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: change(each, function) for name, each in value.items()}
    return [change(each, function) for each in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def words_looked_up_once(model: Any, ids: Tensor | None) -> Iterator[None]:
    """In this block all runs of a batch share one look-up of word embeddings, whose gradient is as large as the
    vocabulary. `ids` are the distinct tokens of the runs, ascending; None: nothing is shared."""
    transformer = getattr(model, "transformers_model", None)
    words: Any = transformer.get_input_embeddings() if transformer is not None else None
    trains = torch.is_grad_enabled() and type(words) is nn.Embedding and words.weight.requires_grad
    if not trains or ids is None or "forward" in vars(words) or words.sparse or words.max_norm:
        yield
        return
    table = functional.embedding(ids, words.weight, words.padding_idx)
    words.forward = lambda tokens: functional.embedding(torch.searchsorted(ids, tokens), table)
    try:
        yield
    finally:
        del words.forward


def counts_leading_padding(model: Any) -> bool:
    """Whether a model's positions may count padding before a text; relative ones do not."""
    config = getattr(getattr(model, "transformers_model", None), "config", None)
    return config is None or getattr(config.get_text_config(), "rope_parameters", None) is None


def cut(lengths: np.ndarray, forward: int, most: int | None = None) -> list[tuple[int, int]]:
    """Cut ascending lengths into runs at the smallest total cost; returns [begin, end) of each run.

    A run of m texts costs m times its longest text, plus `forward`; dynamic programming over the distinct lengths finds
    the cheapest cuts. Runs with more than `most` tokens are then cut into equal parts.
    """
    widths, ends = np.unique(lengths[::-1], return_index=True)
    ends = len(lengths) - ends  # number of texts up to each width
    begins = np.concatenate([[0], ends])
    room = np.full(len(widths), len(lengths)) if most is None else np.maximum(most // widths, 1)
    cost, origins = np.zeros(len(widths) + 1), np.zeros(len(widths), dtype=np.int64)
    for number, width in enumerate(widths):
        texts = ends[number] - begins[: number + 1]
        costs = cost[: number + 1] + texts * width - (-texts // room[number]) * forward
        origins[number] = costs.argmin()
        cost[number + 1] = costs.min()
    runs: list[tuple[int, int]] = []
    place = len(widths)
    while place:
        begin, end = int(begins[origins[place - 1]]), int(begins[place])
        parts = -(-(end - begin) // int(room[place - 1]))
        edges = [begin + (end - begin) * part // parts for part in range(parts + 1)]
        runs += [*pairwise(edges)][::-1]
        place = int(origins[place - 1])
    return runs[::-1]


def fill(lengths: np.ndarray, most: int | None = None) -> list[tuple[int, int]]:
    """Cut texts into rows of at most `most` tokens, or of one longer text; returns [begin, end) of each row."""
    if most is None:
        return [(0, len(lengths))]
    ends, cuts, start = lengths.cumsum(), [], 0
    while start < len(lengths):
        room = most + (ends[start - 1] if start else 0)
        stop = max(int(np.searchsorted(ends, room, side="right")), start + 1)
        cuts.append((start, stop))
        start = stop
    return cuts


def _constants(column: Mapping[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """The features that all texts of a column share, sorted by name; None if it is not a column of tokens."""
    ids, mask = column.get("input_ids"), column.get("attention_mask")
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or ids.ndim != 2 or not ids.numel():
        return None
    constants: dict[str, Any] = {}
    for name, value in column.items():
        if name == "prompt_length" and isinstance(value, Tensor):
            value = int(value.flatten()[0])  # the same for all texts, as Pooling expects
        if isinstance(value, Tensor) and value.shape == ids.shape:
            value = value.dtype
        if not isinstance(value, (str, int, float, type(None), torch.dtype)):
            return None
        constants[name] = value
    return tuple(sorted(constants.items()))


def _concatenate(columns: Sequence[Mapping[str, Any]], multiple: int, left_padded: bool) -> dict[str, Tensor]:
    """Concatenate the tensors of columns; pad to the longest text, or the next multiple."""
    widest = max(column["input_ids"].shape[1] for column in columns)
    width = -(-widest // multiple) * multiple
    table = {}
    for name in columns[0]:
        if isinstance(columns[0][name], Tensor) and columns[0][name].ndim == 2:
            gaps = [width - column[name].shape[1] for column in columns]
            padded = [
                functional.pad(column[name], (gap, 0) if left_padded else (0, gap))
                for column, gap in zip(columns, gaps, strict=True)
            ]
            table[name] = torch.cat(padded)
    return table


def _is_left_padded(column: Mapping[str, Any]) -> bool:
    """Whether texts are padded in front; a text without any token does not count."""
    mask = column["attention_mask"]
    return bool(((mask[:, 0] == 0) & mask.any(dim=1)).any())


def _distinct(
    tokens: np.ndarray, first: np.ndarray, end: np.ndarray, heights: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Find equal texts. Returns (first row of each distinct text, index of it for each row)."""
    same_height = len(set(heights)) == 1
    numbers: dict[Any, int] = {}
    rows: list[int] = []
    copies: Counter[tuple[int, bytes]] = Counter()
    text_of = np.empty(len(tokens), dtype=np.int64)
    for row, (start, stop) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        text = tokens[row, :, start:stop].tobytes()
        place = row % heights[0], text
        copy = copies[place] if same_height else 0
        copies[place] += 1
        number = numbers.setdefault((text, copy), len(rows))
        if number == len(rows):
            rows.append(row)
        text_of[row] = number
    return np.array(rows), text_of

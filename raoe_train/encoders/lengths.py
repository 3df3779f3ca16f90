"""Divide batches by length: encode texts in groups of similar length, each padded to its longest text or packed.

If each batch of NLI data is padded to its longest text, 50 to 90 % of the tokens are padding. This module sorts the
distinct texts of all columns by length. It then divides them into groups ("runs") with the smallest total cost, or
packs them into one row without padding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional

from raoe_train.encoders.packed import OF_ROWS, Packing, add_texts, packing_of
from raoe_train.encoders.tokens import RowTokenizer, is_plain

CPU_FORWARD = 128  # fixed cost of a forward pass in tokens, measured on CPUs (docs/by-length.md)
# Estimates for an H100, from measured training steps: CPU seconds per layer for the forward and backward passes, and an
# encoder's operations per second, in float32 and on tensor cores (16-bit or TF32)
LAYER_SECONDS, GPU_RATES = 3e-3, (3e13, 1.3e14)


class Runs(NamedTuple):
    """A batch, on the CPU, as groups of texts of similar length or as packed rows."""

    features: list[dict[str, Any]]  # for each run, in the format of the model's `preprocess`
    rows: list[Tensor]  # for each column (B,) int64: indices of its texts among the texts of all runs


def device_of(model: Any) -> torch.device:
    """Return the device of a model's weights, or the CPU if the model has no weights."""
    return next(model.parameters(), torch.empty(0, device="cpu")).device


def forward_cost(model: Any, tensor_cores: bool = False) -> int:
    """Return the fixed cost of a forward pass, as an equivalent number of tokens. On a GPU, this is an estimate."""
    weight: Any = next(model.parameters(), None)
    if weight is None or weight.device.type == "cpu":
        return CPU_FORWARD
    inner = sum(each.numel() for name, each in model.named_parameters() if "embeddings" not in name)
    layers = getattr(getattr(getattr(model, "transformers_model", None), "config", None), "num_hidden_layers", 6)
    rate = GPU_RATES[tensor_cores or weight.dtype.itemsize == 2]
    return max(CPU_FORWARD, int(layers * LAYER_SECONDS * rate / (6 * max(1, inner))))


@dataclass(frozen=True)
class Grouping:
    """Options for how by_length divides texts into groups.

    Args:
        most: maximum number of tokens in a group, including padding. A longer text becomes a group of its own.
        most_texts: replaces `most`: a group has at most most_texts x (length of the longest text) tokens.
        multiple: round padded lengths up to a multiple of this number, so that torch.compile sees few shapes.
        packing: pack the texts into one row without padding, or several rows if `most` requires it; None pads texts.
        buckets: add texts to packed rows, so that CUDA graphs see few shapes. A run's feature "count" is
            its number of texts, not including the added texts.
        forward: fixed cost of a forward pass in tokens; by default, the cost on CPUs.
    """

    most: int | None = None
    most_texts: int | None = None
    multiple: int = 1
    packing: Packing | None = None
    buckets: bool = False
    forward: int | None = None


def grouping_for(model: Any, *, tensor_cores: bool = False, **limits: Any) -> Grouping:
    """Return the Grouping for a SentenceTransformer. `limits` may contain `most`, `most_texts` and `multiple`."""
    packing = packing_of(model)
    return Grouping(
        packing=packing if isinstance(packing, Packing) else None,
        forward=forward_cost(model, tensor_cores),
        **limits,
    )


def by_length(columns: Sequence[Mapping[str, Any]], grouping: Grouping) -> Runs | None:
    """Divide tokenized columns into groups of similar length. Return None for columns without tokens, such as images.

    Equal texts are encoded once. However, equal texts in one row of the data set are encoded separately, because SimCSE
    needs two dropout views of a text. Groups are padded on the right. `columns` are outputs of the model's
    `preprocess`: tensors (B, L) on any device, padded on either side. For FlashAttention, each column is one packed
    row, without padding. L may differ between columns.
    """
    kinds = [_constants(column) for column in columns]
    if None in kinds:
        return None
    features: list[dict[str, Any]] = []
    rows: list[Tensor] = [torch.empty(0, device="cpu")] * len(columns)
    count = 0
    for kind in dict.fromkeys(kinds):  # columns with different prompts or tasks need separate runs
        numbers = [number for number, each in enumerate(kinds) if each == kind]
        runs, places, heights = _runs_of([columns[number] for number in numbers], dict(kind or ()), grouping)
        features += runs
        for number, each in zip(numbers, torch.from_numpy(places + count).split(heights), strict=True):
            rows[number] = each
        count += int(places.max(initial=-1)) + 1
    return Runs(features, rows) if features else None


def _runs_of(
    columns: list[Mapping[str, Any]], kind: dict[str, Any], grouping: Grouping
) -> tuple[list[dict[str, Any]], np.ndarray, list[int]]:
    """Divide columns with the same prompt and task into runs of similar length. Return (features of each run, index of
    each input text among the texts of all runs, number of texts in each column)."""
    dtypes = {name: value for name, value in kind.items() if isinstance(value, torch.dtype)}
    common = {name: value for name, value in kind.items() if name not in dtypes}
    texts, packing = _texts(columns, [*dtypes]), grouping.packing
    packs = packing is not None and packing.fits(texts)
    step = 1 if packs else grouping.multiple
    distinct, text_of = _distinct(texts)
    lengths = -(-texts.lengths[distinct] // step) * step
    order = np.argsort(lengths, kind="stable")
    room = grouping.most if grouping.most_texts is None else grouping.most_texts * int(lengths.max())
    ordered = lengths[order]
    cuts = fill(ordered, room) if packs else cut(ordered, grouping.forward or CPU_FORWARD, room)
    features = []
    for start, stop in cuts:
        chosen = distinct[order[start:stop]]
        firsts, sizes = texts.starts[chosen], texts.lengths[chosen]
        extra: dict[str, Any] = {}
        if packing is not None and packs:
            if grouping.buckets:
                common["count"] = len(chosen)
                firsts, sizes = add_texts(firsts, sizes)
            places, extra = packing.row(firsts, sizes, grouping.multiple, common.get("prompt_length"))
        else:
            place = np.arange(ordered[stop - 1])
            places = np.where(place < sizes[:, None], firsts[:, None] + place, -1)
        block = np.where(places[..., None] < 0, 0, texts.tokens[places])
        arrays = {name: torch.from_numpy(block[..., n].copy()).to(dtypes[name]) for n, name in enumerate(dtypes)}
        features.append({**common, **arrays, **extra})
    of_text = np.empty(len(distinct), dtype=np.int64)
    of_text[order] = np.arange(len(distinct))
    return features, of_text[text_of], texts.heights


@contextmanager
def encoding_by_length(model: Any, batch_size: int) -> Iterator[None]:
    """Context manager in which a SentenceTransformer's forward encodes texts by length and returns only embeddings. A
    run contains at most batch_size x (length of the longest text) tokens."""
    forward, instance_forward = model.forward, vars(model).get("forward")  # accelerate may set an instance's forward
    grouping = grouping_for(model, most_texts=batch_size)

    def by_runs(features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        runs = by_length([features], grouping)
        if runs is None:
            return forward(features, **kwargs)
        device = features["input_ids"].device
        moved = send_to_device(runs.features, device)
        embeddings = [forward(run, **kwargs)["sentence_embedding"] for run in moved]
        return {"sentence_embedding": torch.cat(embeddings)[runs.rows[0].to(device)]}

    model.forward = by_runs
    if rows := is_plain(model):
        model.preprocess = RowTokenizer(model)
    try:
        yield
    finally:
        del model.forward
        if rows:
            del model.preprocess
        if instance_forward is not None:
            model.forward = instance_forward


@contextmanager
def words_looked_up_once(model: Any, ids: Tensor | None) -> Iterator[None]:
    """Context manager in which all runs of a batch share one look-up of word embeddings, because the gradient of each
    look-up is as large as the embedding table. `ids` contains the distinct token ids of the runs, in ascending order.
    If `ids` is None, each run looks up its own tokens."""
    transformer = getattr(model, "transformers_model", None)
    words: Any = transformer.get_input_embeddings() if transformer is not None else None
    trains = torch.is_grad_enabled() and type(words) is nn.Embedding and words.weight.requires_grad
    if not trains or ids is None or "forward" in vars(words) or words.sparse or words.max_norm:
        yield
        return
    table, plain, thread = functional.embedding(ids, words.weight, words.padding_idx), words.forward, get_ident()

    def look_up(tokens: Tensor) -> Tensor:
        if get_ident() != thread:  # other threads may encode other texts with the same encoder
            return plain(tokens)
        return functional.embedding(torch.searchsorted(ids, tokens), table)

    words.forward = look_up
    try:
        yield
    finally:
        del words.forward


def cut(lengths: np.ndarray, forward: int, most: int | None = None) -> list[tuple[int, int]]:
    """Divide texts, given their lengths in ascending order, into runs with the smallest total cost. Return the index
    range [begin, end) of each run. The cost of a run of m texts is m times the length of its longest text, plus
    `forward`. Dynamic programming over the distinct lengths finds the cheapest cuts. Runs with more than `most` tokens
    are then cut into equal parts."""
    widths, ends = np.unique(lengths[::-1], return_index=True)
    ends = len(lengths) - ends  # number of texts up to each distinct length
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
    """Divide texts into packed rows of up to `most` tokens, or of one longer text. Return each row's [begin, end)."""
    if most is None:
        return [(0, len(lengths))]
    ends, cuts, start = lengths.cumsum(), [], 0
    while start < len(lengths):
        room = most + (ends[start - 1] if start else 0)
        stop = max(int(np.searchsorted(ends, room, side="right")), start + 1)
        cuts.append((start, stop))
        start = stop
    return cuts


class _Texts(NamedTuple):
    """The tokens of all texts in all columns, one text after another."""

    tokens: np.ndarray  # (tokens, names): the values of each feature
    real: np.ndarray  # (tokens,): the attention mask
    lengths: np.ndarray
    starts: np.ndarray
    heights: list[int]  # number of texts in each column


def _texts(columns: Sequence[Mapping[str, Any]], names: list[str]) -> _Texts:
    """Return the texts of tokenized columns, without padding. A text without tokens becomes one padding token."""
    tokens, lengths = [], []
    for column in columns:
        if (ends := column.get("cu_seq_lens_q")) is not None:
            values = {"attention_mask": torch.ones_like(column["input_ids"]), **column}
            tokens.append(np.stack([values[name].flatten().cpu().numpy() for name in names], axis=-1))
            lengths.append(ends.diff().cpu().numpy().astype(np.int64))
            continue
        table = np.stack([column[name].cpu().numpy() for name in names], axis=-1)
        mask = table[..., names.index("attention_mask")] != 0
        place, has_tokens = np.arange(mask.shape[1]), mask.any(axis=1)
        first = mask.argmax(axis=1)
        end = np.where(has_tokens, len(place) - mask[:, ::-1].argmax(axis=1), 1)
        tokens.append(table[(place >= first[:, None]) & (place < end[:, None])])
        lengths.append(end - first)
    flat, sizes = np.concatenate(tokens), np.concatenate(lengths)
    starts = np.concatenate([[0], sizes.cumsum()[:-1]])
    return _Texts(flat, flat[:, names.index("attention_mask")], sizes, starts, [*map(len, lengths)])


def _constants(column: Mapping[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """Return the features that all texts of a column share, and the dtypes of the other features, sorted by name.
    Return None for a column that has no tokens."""
    ids, is_row = column.get("input_ids"), "cu_seq_lens_q" in column
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel() or not (is_row or "attention_mask" in column):
        return None
    constants: dict[str, Any] = {"attention_mask": torch.int64} if is_row else {}
    for name, value in column.items():
        if is_row and name in OF_ROWS:
            continue
        if name == "prompt_length" and isinstance(value, Tensor):
            value = int(value.flatten()[0])  # one value for all texts, as Pooling expects
        if isinstance(value, Tensor) and value.shape == ids.shape:
            value = value.dtype
        if not isinstance(value, (str, int, float, type(None), torch.dtype)):
            return None
        constants[name] = value
    return tuple(sorted(constants.items()))


def _distinct(texts: _Texts) -> tuple[np.ndarray, np.ndarray]:
    """Find equal texts. Return (index of each distinct text's first copy, index of each text among distinct texts)."""
    data, size = texts.tokens.tobytes(), texts.tokens.shape[1] * texts.tokens.itemsize  # of a token
    starts, ends = texts.starts * size, (texts.starts + texts.lengths) * size
    numbers: dict[bytes, int] = {}  # faster than comparing hashes in numpy
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    keys = np.array([numbers.setdefault(data[start:end], len(numbers)) for start, end in spans])
    if len(set(texts.heights)) == 1:
        columns = keys.reshape(len(texts.heights), -1)
        copies = [(columns[:number] == column).sum(axis=0) for number, column in enumerate(columns)]
        keys = keys + len(numbers) * np.concatenate(copies)
    _, firsts, text_of = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    return firsts[order], np.argsort(order)[text_of]


def texts_of(features: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Return the token ids of each text in tokenized columns or runs of any format."""
    texts: list[list[int]] = []
    for each in features:
        ids = each["input_ids"].cpu()
        if "offsets" in each or "cu_seq_lens_q" in each:  # all texts are in one row: packed, or for StaticEmbedding
            starts = each["offsets"] if "offsets" in each else each["cu_seq_lens_q"][:-1]
        else:
            real = each["attention_mask"].cpu() != 0 if "attention_mask" in each else torch.ones_like(ids) != 0
            ids, starts = ids[real], real.sum(1).cumsum(0) - real.sum(1)
        parts = ids.flatten().tensor_split(starts[1:].long().cpu())
        texts += [part.tolist() for part in parts[: each.get("count")]]
    return texts

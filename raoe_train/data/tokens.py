"""Tokens of texts, made once and kept: what an encoder's `preprocess` gives, from memory-mapped arrays.

The texts stay as they are, so that losses, teachers and messages see the same rows and the same features.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from raoe_train.artifacts.once import made_once
from raoe_train.artifacts.provenance import digest
from raoe_train.artifacts.writing import write_json
from raoe_train.data.tables import Texts, runs

SIZE = 1024  # texts that are tokenised together
META = "meta.json"
ARRAYS = {"ids": "<i4", "first": "<u8", "second": "<u8", "starts": "<i8", "lengths": "<i4"}


@dataclasses.dataclass
class TokenStore:
    """In the place of `model.preprocess`, for texts whose tokens are kept: the same features, bit for bit.

    Calls with another prompt, a task or other options, and batches with a text that is not kept, go to `preprocess`.

    `folder` has arrays as they lie in memory: `ids` (int32), of one text after the other; of each text, in the order of
    the first halves of the texts' 128-bit hashes, `first` and `second` (uint64), the halves, `starts` (int64) and
    `lengths` (int32) in ids; and meta.json: fill, side, prompt, what features there are.
    """

    folder: Path
    preprocess: Callable[..., dict[str, Any]]

    def __post_init__(self) -> None:
        self.meta = json.loads((self.folder / META).read_text(encoding="utf-8"))
        # as plain arrays: slices of a memmap cost more
        self.arrays = {name: np.asarray(np.memmap(self.folder / name, kind, "r")) for name, kind in ARRAYS.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder, self.preprocess)

    def __len__(self) -> int:
        return len(self.arrays["first"])

    def __call__(self, inputs: Sequence[Any], prompt: str | None = None, **options: Any) -> dict[str, Any]:
        if prompt == self.meta["prompt"] and all(option is None for option in options.values()):
            rows = self.rows(inputs)
            if rows is not None:
                return features(rows, self.meta)
        return self.preprocess(inputs, prompt=prompt, **options)

    def rows(self, texts: Sequence[Any]) -> list[np.ndarray] | None:
        """The ids of each text, int32; None where one of them is not kept, or is no text."""
        if not texts or not all(isinstance(text, str) for text in texts):
            return None
        halves = hashes(texts)
        places = np.minimum(np.searchsorted(self.arrays["first"], halves[:, 0]), len(self) - 1)
        found = {name: array[places] for name, array in self.arrays.items() if name != "ids"}
        if not np.array_equal(np.stack([found["first"], found["second"]], axis=1), halves):
            return None
        ends = found["starts"] + found["lengths"]
        ids = self.arrays["ids"]
        return [ids[start:end] for start, end in zip(found["starts"].tolist(), ends.tolist(), strict=True)]


def with_tokens(model: Any, datasets: Mapping[str, Any], cache: str | None, prompt: str | None) -> Any:
    """`model.preprocess`, or a TokenStore of all sentences of the datasets from the directory `cache`, which makes it
    the first time. A line is printed that says which."""
    if cache is None:
        return model.preprocess
    state = _state(model)
    why = "its first module has no fast tokenizer"
    if state is not None:
        texts = Texts(datasets)
        key = digest({"texts": _digest(texts), "prompt": prompt, **state})
        fixed = {"prompt": prompt, "fill": model.tokenizer.pad_token_id, "side": model.tokenizer.padding_side}
        folder = made_once(
            Path(cache).expanduser() / f"tokens-{key[:32]}",
            lambda unfinished: write_store(unfinished, texts, model.preprocess, fixed),
        )
        why = json.loads((folder / META).read_text(encoding="utf-8")).get("why")
        if why is None:
            store = TokenStore(folder, model.preprocess)
            print(f"tokens of {len(store)} different sentences: {folder}")
            return store
    print(f"the tokens of this encoder are not kept: {why}")
    return model.preprocess


def hashes(texts: Iterable[str]) -> np.ndarray:
    """[n, 2] uint64: 128 bits of each text."""
    found = bytearray()
    for text in texts:
        found += hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.frombuffer(found, dtype="<u8").reshape(-1, 2)


def features(rows: Sequence[np.ndarray], meta: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of rows of ids, padded: by meta["features"] int64 [rows, longest] tensors, or what all batches share."""
    import torch

    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = int(lengths.max())
    there = np.arange(width) < lengths[:, None]
    if meta["side"] == "left":
        there = there[:, ::-1]
    ids = np.full(there.shape, meta["fill"], dtype=np.int64)
    ids[there] = np.concatenate(rows)
    made = {"input_ids": ids, "attention_mask": there.astype(np.int64), "token_type_ids": np.zeros_like(ids)}
    return {name: torch.from_numpy(made[name]) if name in made else shared for name, shared in meta["features"].items()}


def write_store(folder: Path, texts: Texts, preprocess: Callable[..., Any], fixed: dict[str, Any]) -> None:
    """Fill the folder of a TokenStore; or, where features are not padded ids alone, meta.json with "why"."""
    halves = hashes(texts)
    places = np.lexsort(halves.T[::-1])  # stable, so that of equal texts the first comes first
    ordered = halves[places]
    new = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))
    ordered, places = ordered[new], places[new]
    chosen = np.zeros(len(halves), dtype=bool)
    chosen[places] = True
    distinct = (text for text, wanted in zip(texts, chosen, strict=True) if wanted)
    meta = {**fixed, "features": None}
    with open(folder / "ids", "wb") as file, tqdm(total=len(places), desc="tokens", unit="text", disable=None) as bar:
        try:
            lengths = np.fromiter(_tokenise(distinct, preprocess, meta, file, bar), dtype="<i4")
        except _NotKept as problem:
            write_json(folder / META, {"why": str(problem)})
            return
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]])
    number = np.cumsum(chosen)[places] - 1  # the texts' numbers in ids, by hash
    made = {"first": ordered[:, 0], "second": ordered[:, 1], "starts": starts[number], "lengths": lengths[number]}
    for name, array in made.items():
        (folder / name).write_bytes(array.astype(ARRAYS[name]).tobytes())  # NumPy's own files hide a full disk's error
    write_json(folder / META, meta)


class _NotKept(Exception):
    """Why features cannot be made of kept ids."""


def _tokenise(
    texts: Iterable[str], preprocess: Callable[..., Any], meta: dict[str, Any], file: IO[bytes], bar: Any
) -> Iterator[int]:
    """How many ids each text has; they are written to `file`. Every batch is put together again and compared."""
    import torch

    for some in runs(texts, SIZE):
        given = dict(preprocess(some, prompt=meta["prompt"]))
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if not (isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and ids.shape == mask.shape):
            raise _NotKept("it does not pad its batches")
        own = {name: None if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        if not all(isinstance(value, (str, int, type(None))) for value in own.values()):
            raise _NotKept(f"its features are {', '.join(given)}, and not all are tensors or plain")
        if meta["features"] is None:
            meta["features"] = own
        rows = [row[there.bool()].numpy().astype(ARRAYS["ids"]) for row, there in zip(ids, mask, strict=True)]
        if not same(given, features(rows, meta)):
            raise _NotKept(f"its features {', '.join(given)} are more than padded ids")
        file.write(np.concatenate(rows).tobytes())
        bar.update(len(some))
        yield from map(len, rows)


def same(features: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether two batches' features are equal: names in order, types, values."""
    return _plain(features) == _plain(others)


def _plain(features: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (name, value.dtype, value.shape, value.numpy().tobytes()) if hasattr(value, "numpy") else (name, value)
        for name, value in features.items()
    ]


def _state(model: Any) -> dict[str, Any] | None:
    """What of an encoder decides on its tokens; None of one that has no fast tokenizer of text."""
    from sentence_transformers.sentence_transformer.modules import Transformer
    from transformers import PreTrainedTokenizerFast

    first = model[0]
    if not isinstance(first, Transformer) or not isinstance(first.processor, PreTrainedTokenizerFast):
        return None
    tokenizer = first.processor
    # without what the last call set for truncation and padding
    backend = {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    names = ("padding_side", "truncation_side", "pad_token_id", "model_input_names", "chat_template")
    return {
        "tokenizer": backend,
        "settings": [getattr(tokenizer, name) for name in names],
        "max_seq_length": model.max_seq_length,
        "modalities": sorted(map(str, first.modality_config)),
        "processing": repr(first.processing_kwargs),
        "versions": [version(package) for package in ("tokenizers", "transformers", "sentence-transformers")],
    }


def _digest(texts: Texts) -> str:
    """SHA-256 of what the texts' columns hold, in order."""
    import pyarrow

    found = hashlib.sha256()
    for column in texts.columns():
        for chunk in column.chunks:
            found.update(pyarrow.record_batch([chunk], [""]).serialize())
    return found.hexdigest()

"""Tokenize a batch into one row without padding, directly with a fast tokenizer.

By default, sentence-transformers pads the texts in a column and converts nested lists to a tensor. These steps take
more time than tokenizing, and by_length then has to remove the padding.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import LARGE_INTEGER, TruncationStrategy
from transformers.utils import PaddingStrategy

CHUNK = 512  # number of texts to tokenize at a time; the Encoding objects are large
FEATURES = {"input_ids": "ids", "token_type_ids": "type_ids"}  # {feature: attribute of a fast tokenizer's Encoding}


class RowTokenizer:
    """Tokenizes texts as a SentenceTransformer's `preprocess` does (see `is_plain`), but returns the tokens of all
    texts in one row, (1, tokens). The feature cu_seq_lens_q contains the text boundaries, which by_length reads. If a
    text has no tokens, all texts are padded. The tokenizer keeps no reference to the model, so the model's weights are
    not sent to DataLoader workers."""

    def __init__(self, model: Any) -> None:
        self.tokenizer: Any = model[0].processor
        self.places = dict[str, int]()  # {text that `remember` has tokenized: its index}
        self.ends = np.zeros(1, np.int64)
        self.columns: dict[str, np.ndarray] = {}

    def __call__(self, inputs: Sequence[str], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Tokenize texts, each with the prompt prepended. Raise ValueError for inputs that are not texts."""
        if others := [each for each in inputs if type(each) is not str]:
            raise ValueError(f"the encoder's inputs must be strings, got {others[0]!r:.200}")
        if not inputs:
            return {}
        texts = [prompt + text for text in inputs] if prompt else list(inputs)
        ends, columns = self._remembered(texts) or self._tokens(texts)
        if (np.diff(ends) > 0).all():
            row: dict[str, Any] = {name: torch.from_numpy(each)[None].long() for name, each in columns.items()}
            row["cu_seq_lens_q"] = torch.from_numpy(ends).long()
        else:  # a text without tokens needs a padding token
            row = dict(self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))
        row["modality"] = "text"
        if prompt:  # pooling may leave out the prompt, but not the end of a text
            ids = self.tokenizer(prompt, truncation=True)["input_ids"]
            row["prompt_length"] = len(ids) - (ids[-1] in self.tokenizer.all_special_ids)
        return row

    def remember(self, texts: Iterable[str]) -> None:
        """Tokenize distinct texts, including prompts, in advance, so that later calls only copy their tokens. The texts
        and 4 bytes per token stay in memory."""
        self.places = {text: place for place, text in enumerate(texts)}
        self.ends, columns = self._tokens([*self.places])
        for name, values in columns.items():  # often, all type_ids are 0
            self.columns[name] = values if values.any() else np.broadcast_to(np.int32(0), values.shape)

    def _remembered(self, texts: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        """Return the result of `_tokens` if `remember` has tokenized all of the texts, else None."""
        places = [self.places.get(text, -1) for text in texts] if self.places else [-1]
        if min(places) < 0:
            return None
        starts, lengths = self.ends[places], np.diff(self.ends)[places]
        ends = np.concatenate([[0], lengths.cumsum()])
        index = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
        return ends, {name: values[index] for name, values in self.columns.items()}

    def _tokens(self, texts: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Tokenize n texts. Return (n + 1 text boundaries, starting at 0; features of all tokens)."""
        tokenizer = self.tokenizer
        limit = tokenizer.model_max_length
        strategy = TruncationStrategy.LONGEST_FIRST if limit < LARGE_INTEGER else TruncationStrategy.DO_NOT_TRUNCATE
        tokenizer.set_truncation_and_padding(PaddingStrategy.DO_NOT_PAD, strategy, limit, 0, None, None)
        columns = {name: array("i") for name in tokenizer.model_input_names if name in FEATURES}
        ends = array("q", [0])
        for start in range(0, len(texts), CHUNK):
            for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + CHUNK]):
                ends.append(ends[-1] + len(encoding))
                for name, values in columns.items():
                    values.extend(getattr(encoding, FEATURES[name]))
        return np.frombuffer(ends, np.int64), {name: np.frombuffer(each, np.int32) for name, each in columns.items()}


def is_plain(model: Any) -> bool:
    """Return whether a SentenceTransformer's `preprocess` only tokenizes texts, with its fast tokenizer's settings."""
    preprocess = getattr(getattr(model, "preprocess", None), "__func__", None)  # a subclass or user may replace it
    module: Any = model[0] if preprocess is SentenceTransformer.preprocess else None
    return (
        type(module) is Transformer
        and isinstance(module.processor, PreTrainedTokenizerFast)
        and {*module.processor.model_input_names} <= {*FEATURES, "attention_mask"}
        and module.transformer_task == "feature-extraction"
        and "text" in module.modality_config
        and "message" not in module.modality_config
        and not module.processing_kwargs
        and not getattr(module, "can_flatten_inputs", False)  # FlashAttention reads rows itself
        and not any(getattr(module, f"query_{name}", None) for name in ("length", "expansion"))
        and not getattr(module, "document_length", None)
    )

"""Tokens of a batch in one row without padding, straight from a fast tokenizer.

sentence-transformers pads the texts of a column and makes a tensor of nested lists, which takes more
time than tokenizing. by_length removes this padding again.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers.sentence_transformer.modules import Transformer
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import LARGE_INTEGER, TruncationStrategy
from transformers.utils import PaddingStrategy

CHUNK = 512  # number of texts to tokenize at a time; Encodings are large
FEATURES = {"input_ids": "ids", "token_type_ids": "type_ids"}  # {feature: attribute of a fast tokenizer's Encoding}


class RowTokenizer:
    """Replaces `preprocess` of a SentenceTransformer. It returns the tokens of all texts in one row,
    (1, tokens), with their boundaries in cu_seq_lens_q, as by_length reads them. Inputs that are no
    texts, and models that change tokens in other ways, are left to the model's own `preprocess`.
    """

    def __init__(self, model: Any) -> None:
        self.module: Any = model[0]
        self.preprocess = model.preprocess

    def __call__(self, inputs: Sequence[Any], prompt: str | None = None, **options: Any) -> dict[str, Any]:
        module = self.module
        tokenizer: Any = getattr(module, "processor", None)
        if not inputs or not all(type(text) is str for text in inputs) or not _is_plain(module, options):
            return self.preprocess(inputs, prompt=prompt, **options)
        limit = tokenizer.model_max_length
        strategy = TruncationStrategy.LONGEST_FIRST if limit < LARGE_INTEGER else TruncationStrategy.DO_NOT_TRUNCATE
        tokenizer.set_truncation_and_padding(PaddingStrategy.DO_NOT_PAD, strategy, limit, 0, None, None)
        texts = [prompt + text for text in inputs] if prompt else list(inputs)
        columns = {name: array("q") for name in tokenizer.model_input_names if name in FEATURES}
        ends = array("q", [0])
        for start in range(0, len(texts), CHUNK):
            for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + CHUNK]):
                if not len(encoding):  # a text without tokens needs a token of padding
                    return self.preprocess(inputs, prompt=prompt, **options)
                ends.append(ends[-1] + len(encoding))
                for name, values in columns.items():
                    values.extend(getattr(encoding, FEATURES[name]))
        row: dict[str, Any] = {name: _tensor(values)[None] for name, values in columns.items()}
        row["cu_seq_lens_q"] = _tensor(ends)
        row["modality"] = "text"
        if prompt:
            row["prompt_length"] = module._get_prompt_length(prompt, **options)
        return row


def _tensor(values: "array[int]") -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(values, np.int64))


def _is_plain(module: Any, options: dict[str, Any]) -> bool:
    """Whether a module only tokenizes texts, with the settings of its fast tokenizer."""
    return (
        type(module) is Transformer
        and isinstance(module.processor, PreTrainedTokenizerFast)
        and {*module.processor.model_input_names} <= {*FEATURES, "attention_mask"}
        and module.transformer_task == "feature-extraction"
        and "text" in module.modality_config
        and "message" not in module.modality_config
        and not module.processing_kwargs
        and not getattr(module, "can_flatten_inputs", False)  # FlashAttention reads rows itself
        and options.keys() <= {"task"}
        and not any(getattr(module, f"{options.get('task')}_{name}", None) for name in ("length", "expansion"))
    )

"""Prompts with text before and after the sentence, such as 'Summarize sentence {text} in one word:"'.

The text before the sentence, the prefix, becomes the model's default prompt. The text after it, the suffix, is added by
the tokenizer's post-processor, in the same way as [CLS] or BOS. Truncation therefore leaves room for the suffix. The
suffix is saved in tokenizer.json, so a saved model works without raoe_train.
"""

import json
import string
import tempfile
from typing import Any

from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from raoe_train.settings import PROMPTS

# Sample texts to test a suffix. They have no punctuation, which many tokenizers merge with the suffix's punctuation.
_PROBES = ("a", "7", "dog", "the cat", "Zürich")
_KEY = "raoe_suffix"  # key in tokenizer_config.json, and name of the suffix in the post-processor
_FIELDS = ("model_max_length", "padding_side", "truncation_side", "model_input_names", "clean_up_tokenization_spaces",
           "split_special_tokens", "extra_special_tokens", "chat_template")  # fmt: skip


def parse_template(template: str) -> tuple[str, str]:
    """Split a template into the text before and after {text}, its only field. Write literal braces as {{ or }}."""
    parts = [""]
    try:
        for literal, *field in string.Formatter().parse(template):
            parts[-1] += literal
            if field == ["text", "", None]:
                parts.append("")
            elif field[0] is not None:
                raise ValueError(f"the field {field[0]!r} must be {{text}}, without a conversion (!r) or format (:>9)")
    except ValueError as error:
        raise ValueError(f"prompt {template!r}: {error} (write {{{{ or }}}} for a literal brace)") from None
    if len(parts) != 2:
        raise ValueError(f"prompt {template!r} must contain {{text}} exactly once; it occurs {len(parts) - 1} times")
    return parts[0], parts[1]


def apply_template(model: Any, template: str) -> None:
    """Change a SentenceTransformer in place, so that it inserts each text into `template` (see parse_template).

    The prefix becomes the default prompt, and the prompt for queries and documents. The suffix tokens follow the text
    (in a pair, the second text) and come before special tokens at the end ([SEP], EOS). A new suffix replaces the
    suffix of an earlier template. With last-token pooling, special tokens at the end are left out, so that the suffix's
    last token is pooled. If a text ends in a word, the model receives the same tokens as for the filled-in template.

    The tokenizer becomes a plain PreTrainedTokenizerFast, because some tokenizer classes (such as BERT's) create their
    own post-processor when they are loaded. After this call, the tokenizer's chat template is not used. Set
    max_seq_length and pooling before this call. If the model does not support the template or would lose it when saved,
    raise ValueError and leave the model unchanged.
    """
    prefix, suffix = parse_template(template)
    tokenizer = getattr(model[0], "processor", None)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kinds = f"{type(model[0]).__name__} with {type(tokenizer).__name__}"
        raise ValueError(f"a prompt template needs a text model with a fast tokenizer, got {kinds}")
    if suffix or suffix_of(model):
        poolings = [module for module in model.modules() if isinstance(module, Pooling)]
        if suffix and not all(pooling.include_prompt for pooling in poolings):  # pooling would drop tokens at the start
            raise ValueError("a prompt with a suffix requires include_prompt=True in every Pooling module")
        # pooling_mode is a name or a tuple of names
        last = any("lasttoken" in pooling.pooling_mode for pooling in poolings)
        changed = _with_suffix(tokenizer, suffix, last)
        _check_reload(model[0].config, tokenizer, changed, prefix)
        tokenizer = changed
    if prefix and tokenizer.truncation_side != "right":
        raise ValueError("the tokenizer truncates on the left, which cuts off the prompt: set truncation_side to right")
    backend = _backend(tokenizer)
    length = max(len(backend.encode(prefix + probe).ids) for probe in _PROBES[:2]) - 1
    if tokenizer.model_max_length is not None and length >= tokenizer.model_max_length:
        problem = f"{length} tokens, including special tokens, and max_seq_length is {tokenizer.model_max_length}"
        raise ValueError(f"prompt {template!r} leaves no room for text: it takes {problem}")
    model[0].processor = tokenizer
    # with "message", a chat template would render every text and turn the prefix into a system message
    model[0].modality_config = {name: value for name, value in model[0].modality_config.items() if name != "message"}
    model[0]._prompt_length_mapping.clear()
    # encode_query and encode_document use other prompts, which also need the prefix
    replaced = (None, "", model.prompts.get("default"))
    of_texts = (*PROMPTS["query"], *PROMPTS["document"])
    changed = [name for name, prompt in model.prompts.items() if name in of_texts or prompt in replaced]
    model.prompts = {**model.prompts, **dict.fromkeys([*changed, "default"], prefix)}
    model.default_prompt_name = "default"


def suffix_of(model: Any) -> str:
    """Return the suffix that apply_template added to the model, or ''."""
    tokenizer = getattr(model[0], "tokenizer", None)
    return tokenizer.init_kwargs.get(_KEY, {}).get("text", "") if tokenizer is not None else ""


def _backend(tokenizer: Any, **changes: Any) -> Any:
    """Return a copy of the backend tokenizer with `changes`, without the last call's truncation or padding settings."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**state, "truncation": None, "padding": None, **changes}))


def _with_suffix(tokenizer: Any, suffix: str, last: bool) -> Any:
    backend = _backend(tokenizer)
    current = json.loads(backend.to_str())["post_processor"]
    # start from the original post-processor, so that a second template replaces the first
    processor = original = tokenizer.init_kwargs.get(_KEY, {}).get("post_processor", current)
    settings: dict[str, Any] = {}
    if suffix:
        processor = _template(_backend(tokenizer, post_processor=original), suffix_ids(backend, suffix), last)
        settings[_KEY] = {"text": suffix, "post_processor": original}
    settings.update(tokenizer.special_tokens_map)
    settings.update((name, getattr(tokenizer, name)) for name in _FIELDS)
    return PreTrainedTokenizerFast(tokenizer_object=_backend(tokenizer, post_processor=processor), **settings)


def suffix_ids(backend: Any, suffix: str) -> list[int]:
    """Return the token ids of a suffix that follows a word. Raise ValueError if the suffix adds no tokens, or if the
    ids depend on the preceding word."""
    endings = set()
    for probe in _PROBES:  # alone, the suffix would get SentencePiece's marker for the start of a text
        word = backend.encode(probe, add_special_tokens=False).ids
        ids = backend.encode(probe + suffix, add_special_tokens=False).ids
        endings.add(tuple(ids[len(word) :]) if ids[: len(word)] == word else ())
    if len(endings) > 1 or () in endings:
        rule = "must be tokenized in the same way after every word: start it with a space or with punctuation"
        raise ValueError(f"the prompt's suffix {suffix!r} {rule}")
    return list(endings.pop())


def _template(backend: Any, suffix: list[int], last: bool) -> dict[str, Any]:
    """Return the backend's post-processor with the suffix after the text. With `last`, no tokens follow the suffix."""
    special = {_KEY: {"id": _KEY, "ids": suffix, "tokens": [backend.id_to_token(number) for number in suffix]}}

    def pieces(*texts: str) -> list[dict[str, Any]]:
        row, parts = backend.encode(*texts), []
        for number, token, text, kind in zip(row.ids, row.tokens, row.sequence_ids, row.type_ids, strict=True):
            sequence = {"Sequence": {"id": "AB"[text or 0], "type_id": kind}}
            if text is None:
                special[token] = {"id": token, "ids": [number], "tokens": [token]}
                parts.append({"SpecialToken": {"id": token, "type_id": kind}})
            elif sequence not in parts:
                parts.append(sequence)
        end = max(place for place, part in enumerate(parts) if "Sequence" in part)
        token_part = {"SpecialToken": {"id": _KEY, "type_id": parts[end]["Sequence"]["type_id"]}}
        return [*parts[: end + 1], token_part, *([] if last else parts[end + 1 :])]

    single, pair = pieces("a"), pieces("a", "a")
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _check_reload(config: Any, old: Any, new: Any, prefix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)  # the tokenizer's class may depend on the config
        new.save_pretrained(folder)
        reloaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for text in (prefix + probe for probe in _PROBES):
        plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in (old, new)]
        if plain[0] != plain[1] or dict(reloaded(text)) != dict(new(text)):
            problem = f"after saving and loading, it tokenizes {text!r} differently"
            raise ValueError(f"{type(old).__name__} does not support a prompt with a suffix: {problem}")

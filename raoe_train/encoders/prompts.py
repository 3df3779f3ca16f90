"""Prompts with text before and after the sentence: 'Summarize sentence {text} in one word:"'.

The prefix is one of sentence-transformers' prompts. The suffix is added by the tokenizer's post-processor, as [CLS] or
BOS are: truncation leaves room for it, and tokenizer.json holds it, so a saved model needs nothing of ours.
"""

import json
import string
import tempfile
from typing import Any

from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

# What suffixes are tried after. No punctuation: many tokenizers join it with a suffix that starts with more.
_PROBES = ("a", "7", "dog", "the cat", "Zürich")
_KEY = "raoe_suffix"  # in tokenizer_config.json, and the name of the suffix in the post-processor
_KEPT = ("model_max_length", "padding_side", "truncation_side", "model_input_names", "clean_up_tokenization_spaces",
         "split_special_tokens", "extra_special_tokens", "chat_template")  # fmt: skip


def parse_template(template: str) -> tuple[str, str]:
    """The text before and after {text}, the only field there may be; a brace of the text is doubled: {{ or }}."""
    parts = [""]
    try:
        for literal, *field in string.Formatter().parse(template):
            parts[-1] += literal
            if field == ["text", "", None]:
                parts.append("")
            elif field[0] is not None:
                raise ValueError(f"{{{field[0]}}} must be filled in beforehand, only a plain {{text}} is the sentence")
    except ValueError as error:
        raise ValueError(f"prompt {template!r}: {error} (a brace of the text is doubled)") from None
    if len(parts) != 2:
        raise ValueError(
            f"prompt {template!r} must have {{text}} once, where the sentence goes; it has {len(parts) - 1}"
        )
    return parts[0], parts[1]


def apply_template(model: Any, template: str) -> None:
    """Make a SentenceTransformer put every text into `template`, see parse_template; in place.

    The prefix becomes the default prompt, and that of queries and documents where they have none. The suffix's tokens
    come after the text's (in a pair the second's), in place of those of an earlier template, and before special tokens
    at the end ([SEP], EOS). Where the last token is pooled, those are left out: a prompt like 'in one word:"' prepares
    the suffix's last token. For a text that ends in a word, the tokens are those of the filled-in template.

    The tokenizer becomes a plain PreTrainedTokenizerFast, since some classes (BERT's) make their own post-processor on
    loading; its chat template is no longer used. Set max_seq_length and the pooling before. ValueError for a model that
    cannot have the template, or would lose it when saved; it is then as before.
    """
    prefix, suffix = parse_template(template)
    tokenizer = getattr(model[0], "processor", None)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"a prompt template needs a model that starts with a fast tokenizer of text, not {type(model[0]).__name__}"
            f" with {type(tokenizer).__name__}"
        )
    if suffix or suffix_of(model):
        poolings = [module for module in model.modules() if isinstance(module, Pooling)]
        if suffix and not all(pooling.include_prompt for pooling in poolings):  # it would drop tokens at the start
            raise ValueError("a prompt with a suffix cannot be excluded from pooling: set include_prompt")
        # the mode is a name or a tuple of names
        last = any("lasttoken" in pooling.pooling_mode for pooling in poolings)
        changed = _with_suffix(tokenizer, suffix, last)
        _check_reload(model[0].config, tokenizer, changed, prefix)
        tokenizer = changed
    if prefix and tokenizer.truncation_side != "right":
        raise ValueError("the tokenizer truncates from the left, which would cut the prefix of the prompt")
    backend = _backend(tokenizer)
    used = max(len(backend.encode(prefix + probe).ids) for probe in _PROBES[:2]) - 1
    if tokenizer.model_max_length is not None and used >= tokenizer.model_max_length:
        raise ValueError(
            f"prompt {template!r} takes {used} tokens with the special ones, and max_seq_length is "
            f"{tokenizer.model_max_length}: there is no room for text"
        )
    model[0].processor = tokenizer
    # with "message" every text is rendered by the chat template, which makes the prefix a system message
    model[0].modality_config = {name: value for name, value in model[0].modality_config.items() if name != "message"}
    model[0]._prompt_length_mapping.clear()
    # encode_query and encode_document look for theirs, and would else use the suffix alone
    replaced = (None, "", model.prompts.get("default"))
    prompts = {name: prefix if prompt in replaced else prompt for name, prompt in model.prompts.items()}
    model.prompts = {**prompts, "default": prefix}
    model.default_prompt_name = "default"


def suffix_of(model: Any) -> str:
    """The suffix that apply_template gave the model, or ''."""
    saved = getattr(model[0], "tokenizer", None)
    return saved.init_kwargs.get(_KEY, {}).get("text", "") if saved is not None else ""


def _backend(tokenizer: Any, **changes: Any) -> Any:
    """A copy of the tokenizer inside, without the last call's truncation and padding."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**state, "truncation": None, "padding": None, **changes}))


def _with_suffix(tokenizer: Any, suffix: str, last: bool) -> Any:
    backend = _backend(tokenizer)
    there = json.loads(backend.to_str())["post_processor"]
    # of the model as it came, so that a second template does not build on the first
    processor = original = tokenizer.init_kwargs.get(_KEY, {}).get("post_processor", there)
    settings: dict[str, Any] = {}
    if suffix:
        processor = _template(_backend(tokenizer, post_processor=original), suffix_ids(backend, suffix), last)
        settings[_KEY] = {"text": suffix, "post_processor": original}
    settings.update(tokenizer.special_tokens_map)
    settings.update((name, getattr(tokenizer, name)) for name in _KEPT)
    return PreTrainedTokenizerFast(tokenizer_object=_backend(tokenizer, post_processor=processor), **settings)


def suffix_ids(backend: Any, suffix: str) -> list[int]:
    """The tokens of a suffix behind any word; ValueError where they depend on the word, or there are none."""
    endings = set()
    for probe in _PROBES:  # alone, the suffix would have SentencePiece's marker of a text's start
        before = backend.encode(probe, add_special_tokens=False).ids
        both = backend.encode(probe + suffix, add_special_tokens=False).ids
        endings.add(tuple(both[len(before) :]) if both[: len(before)] == before else ())
    if len(endings) > 1 or () in endings:
        raise ValueError(
            f"the suffix {suffix!r} of a prompt must have tokens of its own, the same ones after any word: start it "
            "with a space or with punctuation"
        )
    return list(endings.pop())


def _template(backend: Any, suffix: list[int], last: bool) -> dict[str, Any]:
    """A post-processor, as in tokenizer.json, that adds what `backend` adds, and the suffix; at the end if `last`."""
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
        behind = {"SpecialToken": {"id": _KEY, "type_id": parts[end]["Sequence"]["type_id"]}}
        return [*parts[: end + 1], behind, *([] if last else parts[end + 1 :])]

    single, pair = pieces("a"), pieces("a", "a")
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _check_reload(config: Any, old: Any, new: Any, prefix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)  # it has a say in the tokenizer's class
        new.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for text in (prefix + probe for probe in _PROBES):
        plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in (old, new)]
        if plain[0] != plain[1] or dict(loaded(text)) != dict(new(text)):
            raise ValueError(
                f"{type(old).__name__} cannot take a suffix: saved and loaded, it makes other tokens of {text!r}"
            )

"""Prompts with text before and after the sentence: 'Summarize sentence {text} in one word:"'.

sentence-transformers' prompts are prefixes. Here the prefix is such a prompt, and the suffix belongs to the
tokenizer: its post-processor, which adds [CLS] or BOS, adds the suffix's tokens too. Truncation leaves room for
what a post-processor adds, so a long sentence is cut and the suffix is not; and tokenizer.json holds it all, so a
saved model needs nothing of ours.
"""

from __future__ import annotations

import copy
import json
import string
import tempfile
from typing import Any

# What suffixes are tried after. No punctuation: many tokenizers join it with a suffix that starts with more.
_PROBES = ("a", "7", "dog", "the cat", "Zürich")
_KEY = "raoe_suffix"  # in tokenizer_config.json, and the name of the suffix in the post-processor
_KEPT = ("model_max_length", "padding_side", "truncation_side", "model_input_names", "clean_up_tokenization_spaces",
         "split_special_tokens", "extra_special_tokens", "chat_template")  # fmt: skip


def parse_template(template: str) -> tuple[str, str]:
    """The text before and after {text}; a brace of the text itself is doubled: {{ or }}.

    Raises:
        ValueError: {text} is missing, is there twice or has a format; another {field}; a single brace.
    """
    parts, others = [""], []
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"prompt {template!r}: {error} (a brace of the text is doubled)") from error
    for literal, field, format_spec, conversion in pieces:
        parts[-1] += literal
        if (field, format_spec, conversion) == ("text", "", None):
            parts.append("")
        elif field is not None:
            mark = f"!{conversion}" if conversion else ""
            others.append(f"{{{field}{mark}{':' if format_spec else ''}{format_spec}}}")
    if others:
        raise ValueError(
            f"prompt {template!r}: {', '.join(others)} must be filled in beforehand; only {{text}} stands for the "
            "sentence (a brace of the text is doubled)"
        )
    if len(parts) != 2:
        raise ValueError(
            f"prompt {template!r} must have {{text}} once, where the sentence goes; it has {len(parts) - 1}"
        )
    return parts[0], parts[1]


def apply_template(model: Any, template: str) -> None:
    """Make a SentenceTransformer put every text into `template`, see parse_template; in place.

    The prefix becomes the default prompt, and that of queries and documents where they have none. The suffix's
    tokens come after the text's, in place of those of an earlier template, and before the special tokens at the
    end ([SEP], EOS). Where the last token is pooled, those are left out: it is the suffix's last token that a
    prompt like 'in one word:"' prepares. In a pair of texts only the second has the suffix, as only the first has
    the prefix. For a text that ends in a word, the tokens are those of the filled-in template.

    The model's tokenizer is replaced by a plain PreTrainedTokenizerFast, as some classes (BERT's) make their own
    post-processor on loading. Texts are no longer put into the chat template of a tokenizer that has one. Set
    max_seq_length and the pooling before. Encoding with another prompt changes only the prefix.

    Raises:
        ValueError: see parse_template; a model or tokenizer that cannot have the prefix or the suffix, or would not
            have it after saving and loading. The model is then as before.
    """
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import PreTrainedTokenizerFast

    prefix, suffix = parse_template(template)
    tokenizer = getattr(model[0], "processor", None)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"a prompt template needs a model that starts with a fast tokenizer of text, not {type(model[0]).__name__}"
            f" with {type(tokenizer).__name__}"
        )
    if suffix or suffix_of(model):
        poolings = [module for module in model.modules() if isinstance(module, Pooling)]
        if suffix and not all(pooling.include_prompt for pooling in poolings):
            # sentence-transformers would take the suffix to be at the start
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
    """The suffix that apply_template gave the model, also before it was saved; '' if there is none."""
    saved = getattr(model[0], "tokenizer", None)
    return saved.init_kwargs.get(_KEY, {}).get("text", "") if saved is not None else ""


def _backend(tokenizer: Any, **changes: Any) -> Any:
    """A copy of the `tokenizers` tokenizer inside, without what the last call set for truncation and padding."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**state, "truncation": None, "padding": None, **changes}))


def _with_suffix(tokenizer: Any, suffix: str, last: bool) -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = _backend(tokenizer)
    # that of the model as it came, so that a second template does not build on the first
    there = json.loads(backend.to_str())["post_processor"]
    processor = original = tokenizer.init_kwargs.get(_KEY, {}).get("post_processor", there)
    settings: dict[str, Any] = {}
    if suffix:
        ids = suffix_ids(backend, suffix)
        added = {"id": _KEY, "ids": ids, "tokens": [backend.id_to_token(number) for number in ids]}
        processor = _insert(original, added, last)
        settings[_KEY] = {"text": suffix, "post_processor": original}
    settings.update(tokenizer.special_tokens_map)
    settings.update((name, getattr(tokenizer, name)) for name in _KEPT)
    return PreTrainedTokenizerFast(tokenizer_object=_backend(tokenizer, post_processor=processor), **settings)


def suffix_ids(backend: Any, suffix: str) -> list[int]:
    """The tokens of a suffix behind any word; ValueError where they depend on the word, or there are none."""
    # By itself the suffix would start with a marker of the start of a text (SentencePiece).
    found = set()
    for probe in _PROBES:
        before = backend.encode(probe, add_special_tokens=False).ids
        both = backend.encode(probe + suffix, add_special_tokens=False).ids
        found.add(tuple(both[len(before) :]) if both[: len(before)] == before else ())
    if len(found) > 1 or () in found:
        raise ValueError(
            f"the suffix {suffix!r} of a prompt must have tokens of its own, the same ones after any word: start it "
            "with a space or with punctuation"
        )
    return list(found.pop())


def _insert(processor: dict[str, Any] | None, added: dict[str, Any], last: bool) -> dict[str, Any]:
    """The post-processor (as in tokenizer.json) with `added` after the text; nothing follows it if `last`.

    A second TemplateProcessing behind the first would not do: it fails on three parts ([CLS] text [SEP]).
    """
    steps = [] if processor is None else copy.deepcopy(processor.get("processors", [processor]))
    steps = [step for found in steps for step in as_template(found)]
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    if not templates:
        pieces = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
        templates = [{"type": "TemplateProcessing", "single": pieces[:1], "pair": pieces, "special_tokens": {}}]
        steps += templates
    if len(templates) > 1:
        raise ValueError("the tokenizer adds special tokens in two steps; where a suffix goes is not known")
    for name in ("single", "pair"):
        pieces = templates[0][name]
        end = 1 + max(place for place, piece in enumerate(pieces) if "Sequence" in piece)
        suffix = {"SpecialToken": {"id": _KEY, "type_id": pieces[end - 1]["Sequence"]["type_id"]}}
        templates[0][name] = [*pieces[:end], suffix, *([] if last else pieces[end:])]
    templates[0]["special_tokens"][_KEY] = added
    return {"type": "Sequence", "processors": steps}


def as_template(step: dict[str, Any]) -> list[dict[str, Any]]:
    """The post-processors of BERT and RoBERTa, which are fixed, as a TemplateProcessing; others as they are."""
    from tokenizers import Tokenizer, models, processors

    kind = step["type"]
    if kind in ("TemplateProcessing", "ByteLevel"):
        return [step]
    if kind not in ("BertProcessing", "RobertaProcessing"):
        raise ValueError(f"the tokenizer's post-processor {kind} is not known; where a suffix goes in it is not either")
    (cls, first), (sep, second) = step["cls"], step["sep"]
    pair = f"{cls} $A {sep} $B:1 {sep}:1" if kind == "BertProcessing" else f"{cls} $A {sep} {sep} $B {sep}"
    made = Tokenizer(models.BPE())
    made.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=pair, special_tokens=[(cls, first), (sep, second)]
    )
    template = json.loads(made.to_str())["post_processor"]
    if kind == "BertProcessing":
        return [template]
    # RoBERTa's also trims offsets, as this does
    trimming = {name: step[name] for name in ("trim_offsets", "add_prefix_space")}
    return [{"type": "ByteLevel", "use_regex": True, **trimming}, template]


def _check_reload(config: Any, old: Any, new: Any, prefix: str) -> None:
    from transformers import AutoTokenizer

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

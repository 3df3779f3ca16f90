"""Prompts for a language model, as token ids, and the rules that its answers must follow.

The texts in instructions.yaml are from the ranking-sentences paper (Appendix A). The paper mentions a "rule-based
verification" without giving the rules, so the rules here are raoe's. Answers that break a rule are never repaired.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

FEW_SHOT = "few-shot"
REPEATS = 3  # a chain fails when a sentence occurs this often; one repetition is allowed
LONGER, SLACK, SHORTER = 4, 100, 20
"""A sentence has at most LONGER x n + SLACK characters and at least n / SHORTER, where n is the number of characters in
the source sentence. In the paper's chains, the sentences double in length."""

LETTER = re.compile(r"[^\W\d_]")
BREAKS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


@functools.cache
def texts() -> dict[str, Any]:
    """Return the prompt for each method, the "example" (32 sentences, for single-step) and the regex "boilerplate"."""
    texts = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {**texts, "boilerplate": re.compile(texts["boilerplate"], re.IGNORECASE | re.VERBOSE)}


class Instructions:
    """Creates the prompt for a sentence, as token ids.

    Args:
        tokenizer: a transformers tokenizer.
        method: guided, iterative or single-step.
        steps: number of sentences in a chain. The single-step prompt states this number, and contains an example
            with this many sentences (at most 32).
        template: a prompt with {sentence} and optionally {steps} and {example}, which replaces the paper's prompt; or
            FEW_SHOT, a prompt with examples that the model continues.
        chat: True requires a chat template, False ignores it, and None uses it if there is one (not for FEW_SHOT).
    """

    def __init__(
        self, tokenizer: Any, method: str, steps: int, template: str | None = None, chat: bool | None = None
    ) -> None:
        if template == FEW_SHOT:
            if method == "single-step":
                raise ValueError("generation.prompt 'few-shot' does not work with generation.method 'single-step'")
            template, chat = texts()[FEW_SHOT], bool(chat)
        template = texts()[method] if template is None else template
        if "{sentence}" not in template:
            raise ValueError(f"generation.prompt must contain the placeholder {{sentence}}, got {template!r}")
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_template:
            raise ValueError("the model's tokenizer has no chat template: set generation.chat to false")
        self.tokenizer, self.chat = tokenizer, has_template if chat is None else chat
        full = texts()["example"]
        count, last = min(steps, len(full)), len(full) - 1
        # evenly spaced sentences of the full example, including the first and the last
        example = numbered([full[round(place * last / max(count - 1, 1))] for place in range(count)])
        # replace instead of str.format, because sentences may contain braces
        self.template = template.replace("{steps}", str(steps)).replace("{example}", example)

    def copied(self, sentence: str) -> str | None:
        """Return "copied from the prompt" if a line in the prompt ends with the sentence, otherwise None."""
        return "copied from the prompt" if any(line.endswith(sentence) for line in self.template.splitlines()) else None

    def text(self, sentence: str) -> str:
        """Return the prompt for `sentence`, without the chat template."""
        return self.template.replace("{sentence}", sentence)

    def __call__(self, sentence: str) -> list[int]:
        """Return the token ids of the prompt for a sentence, up to the start of the answer."""
        text = self.text(sentence)
        if self.chat:
            message = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = list(self.tokenizer(text)["input_ids"])
        # remove the end token that some tokenizers append, because a model does not continue after it
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids


def numbered(sentences: Sequence[str]) -> str:
    """Format sentences as a numbered list ("1. …"), one sentence per line, as in the single-step prompt."""
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))


def parse_list(text: str, steps: int) -> list[str] | str:
    """Parse an answer to the single-step prompt. Return the sentences, or a message that says what is wrong.

    Items must be numbered from 1 without gaps, one per line. Blank lines, and lines before the first item that end with
    a colon, are ignored. A list without exactly `steps` items is rejected, because lists are never cut or extended.
    """
    items: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        item = re.fullmatch(r"(\d+)\s?[.):]\s*(.*)", line)
        if item is None:
            if not items and line.endswith(":"):
                continue
            return f"not a numbered list item: {line if len(line) <= 60 else line[:57] + '...'!r}"
        if int(item[1]) != len(items) + 1:
            return f"list out of order: item {item[1]} follows item {len(items)}"
        items.append(item[2].strip())
    return items if len(items) == steps else f"wrong list length: {len(items)} sentences instead of {steps}"


def verify_sentence(sentence: str, source: str, finish: str = "eos") -> str | None:
    """Return the problem with a generated sentence, or None if it is valid. `source` is the chain's source sentence."""
    if problem := unfinished(finish) or flaw(sentence):
        return problem
    if "\ufffd" in sentence:
        return "an incomplete character"
    if len(sentence) > LONGER * len(source) + SLACK:
        return f"too long: {len(sentence)} characters, but the source has {len(source)}"
    if len(sentence) * SHORTER < len(source):
        return f"too short: {len(sentence)} characters, but the source has {len(source)}"
    boilerplate = texts()["boilerplate"]
    if (words := boilerplate.search(sentence)) and not boilerplate.search(source):
        return f"boilerplate: {words[0].strip()!r}"
    return None


def flaw(sentence: str) -> str | None:
    """Return why a text cannot be a sentence in a chain (a source or generated sentence), or None if it can."""
    if not sentence:
        return "empty"
    if BREAKS.search(sentence):
        return "more than one line"
    return None if LETTER.search(sentence) else "no letters"


def unfinished(finish: str) -> str | None:
    """Return the problem with an answer that was cut off at max_new_tokens, or None for a complete answer."""
    return "not complete: cut off at max_new_tokens" if finish == "length" else None


def verify_chain(sentences: Sequence[str], steps: int | None = None) -> str | None:
    """Return the problem with a chain (the source sentence, then the generated sentences), or None if it is valid. For
    a finished chain, pass `steps`, the number of generated sentences that it must have."""
    if steps is not None and len(sentences) != steps + 1:
        return f"not complete: {len(sentences) - 1} of {steps} sentences"
    counts: Counter[str] = Counter()
    for number, sentence in enumerate(sentences):
        # sentences that differ only in case, spaces or outer punctuation count as equal
        key = re.sub(r"^\W+|\W+$", "", " ".join(sentence.split())).casefold()
        counts[key] += 1
        if counts[key] == REPEATS:
            return f"repeated: sentence {number} occurs for the {REPEATS}rd time"
    return None

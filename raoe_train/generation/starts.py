"""The sentences that chains begin with: which rows of a source can be used, and how many could not, by reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from raoe_train.data.settings import Input
from raoe_train.data.tables import each_sentence
from raoe_train.generation.rules import BREAKS, LETTER

# Llama's and Qwen's, DeepSeek's, Mistral's, Gemma's
SPECIAL = re.compile(r"<\|\w+\|>|<｜[^｜]+｜>|</?s>|\[/?INST\]|<\w+_of_\w+>")
Sentences = list[tuple[int, str]]
"""(number of the row in its source, from 1; the sentence without spaces around it)."""


def read_starts(data: Input, accept: Callable[[str], str | None]) -> tuple[Sentences, dict[str, int]]:
    """The usable sentences of data.input in order, data.max_rows at most, and how many rows were skipped by reason.

    Skipped and counted are empty rows, sentences that were there before, more than one line, no letters, and what
    `accept` has a reason against. A row that is no text at all (bytes that are not UTF-8, a missing field) is an error,
    unless data.on_error is skip; then it is counted, too. So is a source of which no sentence is left.
    """
    if not data.input:
        raise ValueError("data.input is missing: the sentences to begin with")
    skipped: Counter[str] = Counter()
    kept: Sentences = []
    seen: set[str] = set()
    for number, (where, text, problem) in enumerate(each_sentence(data.input, data.columns), 1):
        if problem is not None and problem != "blank line":
            if data.on_error == "raise":
                raise ValueError(f"{where}: {problem}; data.on_error skip leaves such rows out and counts them")
            skipped["not a text"] += 1
            continue
        sentence = text.strip()
        reason = (
            "empty" if not sentence
            else "duplicate" if sentence in seen
            else "more than one line" if BREAKS.search(sentence)
            else "no letters" if not LETTER.search(sentence)
            else accept(sentence)
        )  # fmt: skip
        seen.add(sentence)
        if reason is None:
            kept.append((number, sentence))
            if data.max_rows is not None and len(kept) >= data.max_rows:
                break
        else:
            skipped[reason] += 1
    if not kept:
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "it has no rows"
        raise ValueError(f"{data.input}: there are no sentences to begin with ({why})")
    return kept, dict(skipped)


def acceptable(tokenizer: Any, longest: int) -> Callable[[str], str | None]:
    """What read_starts asks of a sentence: none of the tokenizer's special tokens, and at most `longest` tokens.
    Without a tokenizer nothing that looks like a special token, and at most `longest` words."""
    if tokenizer is None:
        return lambda sentence: (
            "special token" if SPECIAL.search(sentence) else "too long" if len(sentence.split()) > longest else None
        )
    # a sentence with one would end the instruction, or speak for the model
    special = [token for token in tokenizer.all_special_tokens if token]

    def reason(sentence: str) -> str | None:
        if any(token in sentence for token in special):
            return "special token"
        # a token is a character at least, nearly always; this spares the tokenizer a whole book
        if len(sentence) > 20 * longest or len(tokenizer(sentence, add_special_tokens=False)["input_ids"]) > longest:
            return "too long"
        return None

    return reason

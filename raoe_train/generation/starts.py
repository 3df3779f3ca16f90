"""Source sentences of chains."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from raoe_train.data.columns import RowProblem
from raoe_train.data.tables import each_sentence
from raoe_train.generation.instructions import BREAKS, LETTER
from raoe_train.settings import Sentences


def read_starts(data: Sentences, accept: Callable[[str], str | None]) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Read at most data.max_rows sentences. Return ([(row number from 1, sentence)], {reason: number of skipped rows}).

    Empty rows, duplicates, texts of several lines or without letters, and texts for which `accept` returns a reason are
    skipped. Raises ValueError for a row that is not a text (invalid UTF-8, a missing field) unless data.on_error is
    skip.
    """
    skipped: Counter[str] = Counter()
    starts: list[tuple[int, str]] = []
    seen: set[str] = set()
    for number, (place, text) in enumerate(each_sentence(str(data.input), data.columns), 1):
        if isinstance(text, RowProblem) and text.malformed:
            if data.on_error == "raise":
                raise ValueError(f"{place}: {text}; to skip and count such rows, use data.on_error skip")
            skipped["not a text"] += 1
            continue
        sentence = "" if isinstance(text, RowProblem) else text.strip()
        reason = (
            "empty" if not sentence
            else "duplicate" if sentence in seen
            else "more than one line" if BREAKS.search(sentence)
            else "no letters" if not LETTER.search(sentence)
            else accept(sentence)
        )  # fmt: skip
        seen.add(sentence)
        if reason is not None:
            skipped[reason] += 1
            continue
        starts.append((number, sentence))
        if len(starts) == data.max_rows:
            break
    if not starts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "it has no rows"
        raise ValueError(f"{data.input} has no usable sentences to start chains from ({reasons})")
    return starts, dict(skipped)


def acceptable(tokenizer: Any, longest: int) -> Callable[[str], str | None]:
    """Create the function `accept` of read_starts. It rejects texts with more than `longest` tokens, and texts with a
    special token, because this token could end the instruction."""
    special = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens if token) or "(?!)")

    def reason(sentence: str) -> str | None:
        if special.search(sentence):
            return "special token"
        ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
        return "too long" if len(ids) > longest else None

    return reason

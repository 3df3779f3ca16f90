"""What a language model is asked, as token ids, and what it answers where that is a list.

The texts, of the ranking-sentences paper (Appendix A), are in instructions.yaml.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METHODS = ("guided", "iterative", "single-step")


@functools.cache
def texts() -> dict[str, Any]:
    """The prompt of each method, and the "example" of single-step's, 32 sentences."""
    import yaml

    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


class Instructions:
    """Token ids of the instruction that is about a sentence; without a tokenizer its text.

    Args:
        tokenizer: transformers'. Where it has a chat template the instruction is a user's message, else plain text.
            None is that of a server, which has a template and puts it around a message.
        method: one of METHODS.
        steps: sentences of a chain, as single-step's prompt says and as long as its example is (32 at most).
        template: in place of the paper's prompt; it has {sentence} in it, and may have {steps} and {example}.
        chat: True insists on a chat template, False leaves it out; None takes one where there is one.
    """

    def __init__(
        self, tokenizer: Any, method: str, steps: int, template: str | None = None, chat: bool | None = None
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"generation.method must be one of {', '.join(METHODS)}, got {method!r}")
        template = texts()[method] if template is None else template
        if "{sentence}" not in template:
            raise ValueError(f"generation.prompt must say where the sentence goes, {{sentence}}, got {template!r}")
        has_one = tokenizer is None or bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_one:
            raise ValueError("generation.chat is true, but the model's tokenizer has no chat template")
        self.tokenizer, self.chat = tokenizer, has_one if chat is None else chat
        all_of = texts()["example"]
        count, last = min(steps, len(all_of)), len(all_of) - 1
        # so many in their order, evenly, the first and the last among them
        example = numbered([all_of[round(place * last / max(count - 1, 1))] for place in range(count)])
        # sentences may have braces in them, so no str.format
        self.template = template.replace("{steps}", str(steps)).replace("{example}", example)

    def text(self, sentence: str) -> str:
        """The instruction about `sentence`, without what a chat template puts around it."""
        return self.template.replace("{sentence}", sentence)

    def __call__(self, sentence: str) -> Any:
        """Token ids of all of it, up to where the answer begins."""
        text = self.text(sentence)
        if self.tokenizer is None:
            return text
        if self.chat:
            message = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = list(self.tokenizer(text)["input_ids"])
        # some tokenizers end every text; then there would be nothing to go on with
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids


def numbered(sentences: Sequence[str]) -> str:
    """A list as the single-step prompt shows it: "1. …", a sentence a line."""
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))


def parse_list(text: str, steps: int) -> list[str] | str:
    """The sentences of an answer to the single-step prompt, or what is wrong with it.

    Items are numbered from 1 without a gap, a line each; blank lines do not count, nor lines that end in a colon before
    the first item. Anything else, and a list of more or fewer than `steps`, is refused: never cut, never filled up.
    """
    found: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        item = re.fullmatch(r"(\d+)\s?[.):]\s*(.*)", line)
        if item is None:
            if not found and line.endswith(":"):
                continue
            return f"a line of the list is no item: {line if len(line) <= 60 else line[:57] + '...'!r}"
        if int(item[1]) != len(found) + 1:
            return f"the list is out of order: item {item[1]} after {len(found)}"
        found.append(item[2].strip())
    return found if len(found) == steps else f"the list has another length: {len(found)} sentences instead of {steps}"

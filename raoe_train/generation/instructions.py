"""What a language model is asked, as token ids, and which of its answers are kept.

The texts, of the ranking-sentences paper (Appendix A), are in instructions.yaml. The rules stand for its "rule-based
verification", which it does not list. Nothing is repaired: half a sentence or a refusal is no ranking information.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

FEW_SHOT = "few-shot"
REPEATS = 3  # a sentence may come twice: a model may come back to one, but then it goes round in circles
LONGER, SLACK, SHORTER = 4, 100, 20
"""A sentence may have LONGER times the source's characters and SLACK more (the paper's own chains double in length),
and has at least one SHORTERth of them."""

LETTER = re.compile(r"[^\W\d_]")
BREAKS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


@functools.cache
def texts() -> dict[str, Any]:
    """The prompt of each method, the "example" of single-step's, 32 sentences, and a pattern of "boilerplate"."""
    texts = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {**texts, "boilerplate": re.compile(texts["boilerplate"], re.IGNORECASE | re.VERBOSE)}


class Instructions:
    """Token ids of the instruction that is about a sentence.

    Args:
        tokenizer: transformers'.
        method: guided, iterative or single-step.
        steps: sentences of a chain, as single-step's prompt says and as long as its example is (32 at most).
        template: in place of the paper's prompt; it has {sentence} in it, and may have {steps} and {example}. Or
            FEW_SHOT, a text of examples to go on with.
        chat: True insists on a chat template, False leaves it out; None takes one where there is one, but for FEW_SHOT.
    """

    def __init__(
        self, tokenizer: Any, method: str, steps: int, template: str | None = None, chat: bool | None = None
    ) -> None:
        if template == FEW_SHOT:
            if method == "single-step":
                raise ValueError("generation.prompt few-shot asks for one sentence: not for method single-step")
            template, chat = texts()[FEW_SHOT], bool(chat)
        template = texts()[method] if template is None else template
        if "{sentence}" not in template:
            raise ValueError(f"generation.prompt must say where the sentence goes, {{sentence}}, got {template!r}")
        has_one = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_one:
            raise ValueError("generation.chat is true, but the model's tokenizer has no chat template")
        self.tokenizer, self.chat = tokenizer, has_one if chat is None else chat
        all_of = texts()["example"]
        count, last = min(steps, len(all_of)), len(all_of) - 1
        # so many in their order, evenly, the first and the last among them
        example = numbered([all_of[round(place * last / max(count - 1, 1))] for place in range(count)])
        # sentences may have braces in them, so no str.format
        self.template = template.replace("{steps}", str(steps)).replace("{example}", example)

    def copied(self, sentence: str) -> str | None:
        """What is wrong with a sentence that a line of the prompt ends with, or None."""
        return "copied from the prompt" if any(line.endswith(sentence) for line in self.template.splitlines()) else None

    def text(self, sentence: str) -> str:
        """The instruction about `sentence`, without what a chat template puts around it."""
        return self.template.replace("{sentence}", sentence)

    def __call__(self, sentence: str) -> list[int]:
        """Token ids of all of it, up to where the answer begins."""
        text = self.text(sentence)
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
    the first item. A list of more or fewer than `steps` is refused: never cut, never filled up.
    """
    items: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        item = re.fullmatch(r"(\d+)\s?[.):]\s*(.*)", line)
        if item is None:
            if not items and line.endswith(":"):
                continue
            return f"a line of the list is no item: {line if len(line) <= 60 else line[:57] + '...'!r}"
        if int(item[1]) != len(items) + 1:
            return f"the list is out of order: item {item[1]} after {len(items)}"
        items.append(item[2].strip())
    return items if len(items) == steps else f"the list has another length: {len(items)} sentences instead of {steps}"


def verify_sentence(sentence: str, source: str, finish: str = "eos") -> str | None:
    """What is wrong with a generated sentence, or None; `source` is what its chain began with."""
    if why := unfinished(finish):
        return why
    if not sentence:
        return "empty"
    if BREAKS.search(sentence):
        return "more than one line"
    if "\ufffd" in sentence:
        return "half a character"
    if not LETTER.search(sentence):
        return "no letters"
    if len(sentence) > LONGER * len(source) + SLACK:
        return f"too long: {len(sentence)} characters from a source of {len(source)}"
    if len(sentence) * SHORTER < len(source):
        return f"too short: {len(sentence)} characters from a source of {len(source)}"
    boilerplate = texts()["boilerplate"]
    if (words := boilerplate.search(sentence)) and not boilerplate.search(source):
        return f"boilerplate: {words[0].strip()!r}"
    return None


def unfinished(finish: str) -> str | None:
    """Why an answer that ended so is not all of one, or None."""
    return "not complete: cut off at max_new_tokens" if finish == "length" else None


def verify_chain(sentences: Sequence[str], steps: int | None = None) -> str | None:
    """What is wrong with a chain, its source included, or None. A finished one has `steps` generated sentences."""
    if steps is not None and len(sentences) != steps + 1:
        return f"not complete: {len(sentences) - 1} of {steps} sentences"
    counts: Counter[str] = Counter()
    for number, sentence in enumerate(sentences):
        # case, spaces and punctuation at the ends make no other sentence
        key = re.sub(r"^\W+|\W+$", "", " ".join(sentence.split())).casefold()
        counts[key] += 1
        if counts[key] == REPEATS:
            return f"repeated: sentence {number} is there for the {REPEATS}rd time"
    return None

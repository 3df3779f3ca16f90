"""What a language model is asked: the three prompts of the ranking-sentences paper (Appendix A), as token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

METHODS = ("guided", "iterative", "single-step")

GUIDED = """\
Rewrite the following sentence or phrase using different words and sentence structure while preserving its original \
meaning. Directly answer with the rewritten sentence. Don't give any explanation or description other than the \
rewritten sentence.

Write a sentence that is entailment with:{sentence}.

Result:"""

ITERATIVE = """\
Rewrite the following sentence in a way that slightly changes the meaning while keeping it semantically close. The new \
sentence should not be an exact paraphrase but should introduce a subtle variation in meaning. Do not lose the core \
idea of the original sentence.

Here is the sentence: {sentence}

Your response should be similar in length to the original sentence. Do not explain yourself or output anything else."""

# The paper leaves out all but the first three sentences of its example "for conciseness". A list that breaks off would
# teach the model to break off; these are ours, from its third on.
EXAMPLE = (
    "The cat is resting on the cozy windowsill.",
    "The cat is lying on a soft cushion by the window.",
    "A small animal is curled up near the window.",
    "A small animal is looking out of the window.",
    "An animal is watching the birds outside.",
    "A dog is watching the birds in the garden.",
    "A dog is running through the garden.",
    "A boy is running through the garden with his dog.",
    "A boy is playing ball in the park.",
    "Some children are playing ball in the park.",
    "Some children are walking to school.",
    "A teacher is walking to school in the rain.",
    "A teacher is waiting for the bus in the rain.",
    "Many people are waiting for the bus.",
    "Many people are crossing a busy street.",
    "A car is stopping at a busy crossing.",
    "A car is being repaired in a workshop.",
    "A mechanic is cleaning his tools in a workshop.",
    "A carpenter is building a table in a workshop.",
    "A carpenter is selling tables at the market.",
    "A farmer is selling apples at the market.",
    "A farmer is driving a tractor across the field.",
    "A tractor is standing in an empty field.",
    "A plane is flying over the empty fields.",
    "A plane is landing at a large airport.",
    "The passengers are showing their passports.",
    "The tourists are visiting an old museum.",
    "The museum has bought a famous painting.",
    "The painter became famous after the war.",
    "The book about the war has many pages.",
    "The price of paper has doubled this year.",
    "The bank has raised its interest rates again.",
)

SINGLE_STEP = """\
Your task is to take an input sentence and generate a sequence of {steps} sentences that gradually and progressively \
diverge in meaning from the original sentence. The final sentence should be completely unrelated to the original \
sentence.

Example Input: The cat is sleeping on the warm windowsill.

Example Output:
{example}

Here is the sentence: {sentence}

Each sentence should be similar in length to the original sentence. Do not explain yourself or output anything else."""

TEMPLATES = dict(zip(METHODS, (GUIDED, ITERATIVE, SINGLE_STEP), strict=True))


class Prompts:
    """Token ids of the question about a sentence.

    Args:
        tokenizer: transformers'. Where it has a chat template the prompt is a user's message, else it is plain text.
        method: one of METHODS.
        steps: sentences of a chain, as single-step's prompt says and as long as its example is (32 at most).
        template: in place of the paper's prompt; it has {sentence} in it, and may have {steps} and {example}.
        chat: True insists on a chat template, False leaves it out; None takes one where there is one.

    Raises:
        ValueError: an unknown method, a template without {sentence}, or no chat template where one is insisted on.
    """

    def __init__(
        self, tokenizer: Any, method: str, steps: int, template: str | None = None, chat: bool | None = None
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"generation.method must be one of {', '.join(METHODS)}, got {method!r}")
        template = TEMPLATES[method] if template is None else template
        if "{sentence}" not in template:
            raise ValueError(f"generation.prompt must say where the sentence goes, {{sentence}}, got {template!r}")
        has_one = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_one:
            raise ValueError("generation.chat is true, but the model's tokenizer has no chat template")
        self.tokenizer, self.chat = tokenizer, has_one if chat is None else chat
        example = numbered(_spread(EXAMPLE, steps))
        # sentences may have braces in them, so no str.format
        self.template = template.replace("{steps}", str(steps)).replace("{example}", example)

    def text(self, sentence: str) -> str:
        """The question about `sentence`, without what a chat template puts around it."""
        return self.template.replace("{sentence}", sentence)

    def __call__(self, sentence: str) -> list[int]:
        """Token ids of the whole prompt, up to where the answer begins."""
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
    the first item. Anything else, and a list of more or fewer than `steps`, is refused: never cut, never filled up.
    """
    found: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        item = re.fullmatch(r"(\d+)\s?[.):]\s*(.*)", line)
        if item is None:
            if not found and line.endswith(":"):
                continue
            return f"a line of the list is no item: {_short(line)}"
        if int(item[1]) != len(found) + 1:
            return f"the list is out of order: item {item[1]} after {len(found)}"
        found.append(item[2].strip())
    return found if len(found) == steps else f"the list has another length: {len(found)} sentences instead of {steps}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _spread(sentences: Sequence[str], count: int) -> list[str]:
    """`count` of the sentences in their order, evenly, the first and the last among them."""
    count = min(count, len(sentences))
    last = len(sentences) - 1
    return [sentences[round(place * last / max(count - 1, 1))] for place in range(count)]

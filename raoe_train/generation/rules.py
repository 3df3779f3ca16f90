"""Which sentences, and which chains of them, are kept: the rules that stand for the paper's "rule-based verification"
(its Appendix A does not list them).

A chain that breaks a rule is kept apart with the reason. Nothing is repaired: half a sentence or a refusal is no
ranking information.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

REPEATS = 3  # a sentence may come twice: a model may come back to one, but then it goes round in circles
LONGER, SLACK, SHORTER = 4, 100, 20
"""A sentence may have LONGER times the source's characters and SLACK more (the paper's own chains double in length),
and has at least one SHORTERth of them."""

# What models say instead of a sentence, or around it. Not applied where the source says so itself.
BOILERPLATE = re.compile(
    r"""
      \b as \s an \s (ai|artificial|language \s model|assistant)
    | \b (i \s am|i['’]m) \s (just \s)? an? \s (ai|language \s model|artificial)
    | ^\W* (i['’]m \s sorry|i \s am \s sorry|sorry|my \s apologies|i \s apologi[sz]e) [,.!]? \s* (but \b|i \b|, \s*i \b)
    | ^\W* i \s (can['’]?t|cannot|can \s not|am \s (not \s able|unable) \s to|won['’]?t \s be \s able)
        \s (to \s)? (help|assist|provide|fulfil+|complete|comply|create|write|rewrite|generate|answer|do \s that)
    | ^\W* (sure|certainly|of \s course|okay|absolutely) [,.!:] \s* (here \b|i \s can \b|i['’](d|ll) \b)
    | ^\W* here \s (is|are|'s) \s (a|the|one|my|your|another|\d+)
        \s (\w+ \s){0,3} (rewritten|rewrite|rephrased|revised|sentences?|version|paraphrase|response|result|list)
    | ^\W* (result|output|answer|response|rewritten \s sentence|example \s (in|out)put) \s* :
    | here \s is \s the \s sentence \s*:
    | write \s a \s sentence \s that \s is \s entailment \s with
    | do \s not \s explain \s yourself
    | <\|? /? \w+ \|?>
    """,
    re.IGNORECASE | re.VERBOSE,
)
LETTER = re.compile(r"[^\W\d_]")
BREAKS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def verify_sentence(sentence: str, source: str, finish: str = "eos") -> str | None:
    """What is wrong with one generated sentence, without spaces around it, or None. `source` is what its chain began
    with, `finish` how its generation ended: see unfinished."""
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
    if (found := BOILERPLATE.search(sentence)) and not BOILERPLATE.search(source):
        return f"boilerplate: {found[0].strip()!r}"
    return None


def unfinished(finish: str) -> str | None:
    """Why an answer that ended so is not all of one, or None: "eos" and "stop" are its own end."""
    if finish in ("eos", "stop"):
        return None
    return "not complete: cut off at max_new_tokens" if finish == "length" else f"not complete: {finish}"


def verify_chain(sentences: Sequence[str], steps: int | None = None) -> str | None:
    """What is wrong with a chain as a whole, its source among the sentences, or None. `steps` sentences were to be
    generated; None for a chain that is not finished yet."""
    if steps is not None and len(sentences) != steps + 1:
        return f"not complete: {len(sentences) - 1} of {steps} sentences"
    counts: Counter[str] = Counter()
    for number, sentence in enumerate(sentences):
        key = normal(sentence)
        counts[key] += 1
        if counts[key] == REPEATS:
            return f"repeated: sentence {number} is there for the {REPEATS}rd time"
    return None


def normal(sentence: str) -> str:
    """A sentence without what does not make it another one: case, spaces and punctuation at its ends."""
    return re.sub(r"^\W+|\W+$", "", " ".join(sentence.split())).casefold()

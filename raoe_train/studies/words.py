"""The representative word: the token that a decoder's language model would write where its sentence embedding is read
(the BeLLM paper's Section 3.3 and Appendix A)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raoe_train.evaluation.tasks import Task
from raoe_train.studies.dependency import is_decoder, sentences_of, token_states

WORD = re.compile(r"\w+(?:['’]\w+)*")
TOP = 100  # words are frequent ones; the paper states no threshold
COMMON, EXAMPLES = 20, 10  # words, and sentences with theirs, that are shown


def analyse(model: Any, tasks: Mapping[str, Task], output: Path | None, batch_size: int) -> dict[str, Any]:
    """The analysis `words` of the job `evaluate`: representative words, and how common they are in the sentences.

    "rare_share" is Appendix A's number: 91.74 % of representative words in STS-B "are not high-frequency words".
    "wordless_share" is of tokens without a letter or digit, which are never frequent words.
    """
    return word_report(model, sentences_of(tasks), batch_size)


def word_report(model: Any, sentences: Sequence[str], batch_size: int = 64) -> dict[str, Any]:
    frequent = frequent_words(sentences, TOP)  # before the model runs, so that an error costs no time
    words = representative_words(model, sentences, batch_size)
    share = sum(word.lower() in frequent for word in words) / len(words)
    pairs = dict(zip(sentences, words, strict=True))
    return {
        "sentences": len(words),
        "top": TOP,
        "frequent_share": share,
        "rare_share": 1 - share,
        "wordless_share": sum(not WORD.search(word) for word in words) / len(words),
        "most_common": [[word, count] for word, count in Counter(words).most_common(COMMON)],
        "examples": [[sentence, word] for sentence, word in list(pairs.items())[:EXAMPLES]],
    }


def representative_words(model: Any, sentences: Sequence[str], batch_size: int = 64) -> list[str]:
    """Of each sentence the token that the language model finds most probable after its last real one, stripped of
    white space. With a prompt such as 'The representative word for {text} is:"' that is the representative word, or its
    first piece where the tokenizer has no token for the whole."""
    import torch

    write = language_head(model)
    tokenizer = model[0].tokenizer
    found: dict[str, str] = {}
    for texts, states in token_states(model, sentences, batch_size):
        with torch.inference_mode():
            ids = write(torch.stack([tokens[-1] for tokens in states])).argmax(dim=-1)
        found.update((text, tokenizer.decode([token]).strip()) for text, token in zip(texts, ids.tolist(), strict=True))
    return [found[text] for text in sentences]


def language_head(model: Any) -> Callable[[Any], Any]:
    """The head of the decoder's language model: last hidden states [batch, d] -> logits [batch, vocabulary].

    It is the decoder's own embedding where the two are tied. Else it comes with the language model that the decoder, or
    the base model of a BidirectionalModel, was loaded from, which is loaded for it; ValueError where that has none."""
    from torch.nn.functional import linear

    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel
    from raoe_train.generation.models import LanguageModel, load_language_model

    inner = model[0].model
    if not is_decoder(model):
        raise ValueError(f"a {inner.config.model_type!r} is no decoder, so no word comes after its last token")
    both_ways = isinstance(inner, BidirectionalModel)
    decoder = inner.decoder if both_ways else inner
    if getattr(decoder.config, "tie_word_embeddings", False):
        weight, bias = decoder.get_input_embeddings().weight, None
    else:
        name, revision = (inner.config.base_model, inner.config.base_revision) if both_ways else (None, None)
        name = name or decoder.config._name_or_path
        if not name:
            raise ValueError("it is not known where the head of the language model is")
        whole = load_language_model(LanguageModel(name, revision=revision, device="cpu"))
        head = whole.get_output_embeddings().to(inner.device)
        weight, bias = head.weight, head.bias
    return lambda states: linear(states.to(weight.dtype), weight, bias)


def frequent_words(corpus_sentences: Sequence[str], top: int) -> set[str]:
    """The `top` most frequent words, lower-cased; of equally frequent ones the first in the alphabet."""
    counts = Counter(word for sentence in corpus_sentences for word in WORD.findall(sentence.lower()))
    if not counts:
        raise ValueError("the sentences have no words")
    return set(sorted(counts, key=lambda word: (-counts[word], word))[:top])

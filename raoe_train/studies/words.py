"""The representative word: the token that a decoder's language model would write where its sentence embedding is read
(the BeLLM paper's Section 3.3 and Appendix A)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from raoe_train.studies.dependency import default_pivot, token_states

WORD = re.compile(r"\w+(?:['’]\w+)*")


def representative_words(
    model: Any, sentences: Sequence[str], *, head: Callable[[Any], Any] | str | None = None, batch_size: int = 64
) -> list[str]:
    """The token that the language model finds most probable after the last real one, stripped of white space.

    With a prompt such as 'The representative word for {text} is:"' that is the representative word, or its first
    piece where the tokenizer has no token for the whole.

    Args:
        model: a SentenceTransformer of a decoder; its prompt is used.
        sentences: n texts.
        head: last hidden states [batch, d] -> logits [batch, vocabulary]; or name of a checkpoint to take it from; by
            default language_head's choice.
        batch_size: sentences at a time.

    Returns:
        n words, in the order of `sentences`.

    Raises:
        ValueError: as language_head, or as token_states.
    """
    import torch

    write = head if callable(head) else language_head(model, head)
    tokenizer = model[0].tokenizer
    found: dict[str, str] = {}
    for texts, states in token_states(model, sentences, batch_size):
        with torch.inference_mode():
            ids = write(torch.stack([tokens[-1] for tokens in states])).argmax(dim=-1)
        found.update((text, tokenizer.decode([token]).strip()) for text, token in zip(texts, ids.tolist(), strict=True))
    return [found[text] for text in sentences]


def language_head(model: Any, name: str | None = None) -> Callable[[Any], Any]:
    """The head of the decoder's language model: last hidden states [batch, d] -> logits [batch, vocabulary].

    It is the decoder's own embedding where the two are tied. Else it comes from a checkpoint, which is loaded for it:
    `name`, or the base model of a BidirectionalModel, or where the decoder was loaded from.

    Raises:
        ValueError: the model is no decoder, or no checkpoint has its head.
    """
    from torch.nn.functional import linear

    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel

    inner = model[0].model
    if default_pivot(model) != "last":
        raise ValueError(f"a {inner.config.model_type!r} is no decoder, so no word comes after its last token")
    both_ways = isinstance(inner, BidirectionalModel)
    decoder = inner.decoder if both_ways else inner
    bias = None
    if name is None and getattr(decoder.config, "tie_word_embeddings", False):
        weight = decoder.get_input_embeddings().weight
    else:
        revision = inner.config.base_revision if both_ways and name is None else None
        name = name or (both_ways and inner.config.base_model) or decoder.config._name_or_path
        weight, bias = (part if part is None else part.to(inner.device) for part in _saved_head(name, revision))

    def head(states: Any) -> Any:
        return linear(states.to(weight.dtype), weight, bias)

    return head


def frequent_share(words: Sequence[str], corpus_sentences: Sequence[str], top: int = 100) -> float:
    """The share of `words` that are among the `top` most frequent words of a corpus; upper and lower case are one.

    1 minus it is Appendix A's number: 91.74 % of representative words in STS-B "are not high-frequency words". The
    paper states no threshold for that, so `top` is our choice.

    Raises:
        ValueError: no words, a corpus without words, or `top` below 1.
    """
    if not words:
        raise ValueError("words is empty")
    frequent = frequent_words(corpus_sentences, top)
    return sum(word.lower() in frequent for word in words) / len(words)


def frequent_words(corpus_sentences: Sequence[str], top: int = 100) -> set[str]:
    """The `top` most frequent words, lower-cased; of equally frequent ones the first in the alphabet."""
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    counts = Counter(word for sentence in corpus_sentences for word in WORD.findall(sentence.lower()))
    if not counts:
        raise ValueError("the corpus has no words")
    return set(sorted(counts, key=lambda word: (-counts[word], word))[:top])


def word_report(
    model: Any,
    sentences: Sequence[str],
    *,
    corpus: Sequence[str] | None = None,
    top: int = 100,
    head: Callable[[Any], Any] | str | None = None,
    batch_size: int = 64,
    examples: int = 10,
) -> dict[str, Any]:
    """Representative words of sentences, and how common they are in a corpus, by default the sentences themselves.

    Returns:
        {"sentences": n, "top", "frequent_share", "rare_share": 1 - frequent_share, "wordless_share": of tokens
        without a letter or digit, which are never frequent words, "most_common": the 20 most common
        [word, count], "examples": [sentence, word] of the first different sentences}.

    Raises:
        ValueError: as representative_words and frequent_share.
    """
    corpus = sentences if corpus is None else corpus
    # before the model runs, so that an error costs no time
    frequent_words(corpus, top)
    words = representative_words(model, sentences, head=head, batch_size=batch_size)
    share = frequent_share(words, corpus, top)
    pairs = dict(zip(sentences, words, strict=True))
    return {
        "sentences": len(words),
        "top": top,
        "frequent_share": share,
        "rare_share": 1 - share,
        "wordless_share": sum(not WORD.search(word) for word in words) / len(words),
        "most_common": [[word, count] for word, count in Counter(words).most_common(20)],
        "examples": [[sentence, word] for sentence, word in list(pairs.items())[:examples]],
    }


def _saved_head(name: str, revision: str | None) -> tuple[Any, Any]:
    """Weight [vocabulary, d] and bias, or None, of the head in a checkpoint of a causal language model."""
    from transformers import AutoModelForCausalLM

    hint = "; name a causal language model that has it: head=NAME"
    if not name:
        raise ValueError(f"it is not known where the head of the language model is{hint}")
    loader: Any = AutoModelForCausalLM  # whose annotations do not know output_loading_info
    try:
        whole, loaded = loader.from_pretrained(name, revision=revision, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be loaded for its head{hint}: {error}") from error
    head = whole.get_output_embeddings()
    (prefix,) = {place for place, module in whole.named_modules() if module is head}
    # transformers draws what a checkpoint lacks, and would give a random head
    if any(key.startswith(f"{prefix}.") for key in loaded["missing_keys"]):
        raise ValueError(f"{name} has no head{hint}")
    return head.weight.detach(), None if head.bias is None else head.bias.detach()

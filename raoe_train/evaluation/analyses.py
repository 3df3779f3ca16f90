"""The BeLLM paper's analyses for the job `evaluate`: scores by number of layers, token correlations, and words."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from raoe_train.artifacts import report
from raoe_train.encoders.bidirectional.modeling import BidirectionalModel
from raoe_train.evaluation.tasks import Task, evaluate_tasks, main_score

LISTS = ("layers", "encoder.layer", "transformer.layer")  # in decoders and ModernBERT, BERT and relatives, DistilBERT
WORD = re.compile(r"\w+(?:['’]\w+)*")
TOP = 100  # number of words that count as frequent; the paper states no threshold
COMMON, EXAMPLES = 20, 10  # number of words, and of sentences with their word, in a result


def degradation(model: Any, tasks: Mapping[str, Task], output: Path | None, batch_size: int = 64) -> dict[str, Any]:
    """Evaluate a model with its first 1, 2, … layers and its final norm (Section 3.1, Figure 4). Returns {"layers": [1,
    …, all], "tasks": {task: [main metric x100]}, "average": [mean of tasks]}, and writes a plot beside `output`."""
    owner, name = _layer_list(model[0].model)
    counts = list(range(1, len(getattr(owner, name)) + 1))
    results = []
    for count in counts:
        with first_layers(model, count):
            results.append(evaluate_tasks(model, tasks, batch_size))
    scores = {
        "layers": counts,
        "tasks": {word: [main_score(result["tasks"][word]) for result in results] for word in tasks},
        "average": [result["average"] for result in results],
    }
    if output:
        figure, axis = report.figure()
        axis.plot(counts, scores["average"], "o-", markersize=3, color=report.COLOURS[0])
        axis.set(title=output.stem, xlabel="layers kept", ylabel="average x 100")
        report.save(figure, output.with_name(f"{output.stem}-degradation.png"))
    return scores


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """In this block a model has only its first `count` layers and its final norm; each layer keeps its direction."""
    owner, name = _layer_list(model[0].model)
    layers = getattr(owner, name)
    try:
        # the configuration's num_hidden_layers must not change: a BidirectionalModel counts its last layers from it
        setattr(owner, name, layers[:count])
        yield
    finally:
        setattr(owner, name, layers)


def _layer_list(inner: Any) -> tuple[Any, str]:
    """Find the layers of a transformers model; returns (the module that has them, name of the list in it)."""
    whole = inner.decoder if isinstance(inner, BidirectionalModel) else inner
    modules = dict(whole.named_modules())  # `whole` itself has the name ""
    for place in LISTS:
        owner, _, name = place.rpartition(".")
        layers = modules.get(place)
        # a list of another length is something else, or does not have all layers
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == whole.config.num_hidden_layers:
            return modules[owner], name
    raise ValueError(f"cannot remove layers of a {whole.config.model_type!r}: it has none of {', '.join(LISTS)}")


def pivot_correlations(model: Any, sentences: Sequence[str], batch_size: int = 64) -> np.ndarray:
    """Mean Spearman correlation of the last hidden states of a sentence's tokens with that of its pivot token, [n]
    float64 (Sections 2 and 5.5, Figures 2 and 5). NaN if there is no other token, or all values of a state are equal.

    The pivot is the last token of a decoder and the first token, [CLS], of an encoder, whatever the pooling. All other
    tokens except padding count, also special tokens and the prompt's: compare models under the same prompt. The paper's
    means on STS-B's test set are about 0.17 (LLaMA 7B), 0.15 (ChatGLM 6B) and 0.35 (BERT base).
    """
    pivot = -1 if is_decoder(model) else 0
    means = dict.fromkeys(sentences, np.nan)
    for texts, states in token_states(model, sentences, batch_size):
        for text, tokens in zip(texts, states, strict=True):
            if len(tokens) > 1:
                with np.errstate(invalid="ignore"):
                    ranks = stats.rankdata(tokens.cpu().double().numpy(), axis=1)
                    means[text] = np.delete(np.corrcoef(ranks)[pivot], pivot).mean()
    return np.array([means[text] for text in sentences])


def summary(values: np.ndarray) -> dict[str, Any]:
    """Count, mean and quartiles of correlations; mean and quartiles are None if all are undefined."""
    defined = values[~np.isnan(values)]
    numbers = [float(defined.mean()), *map(float, np.percentile(defined, (25, 50, 75)))] if len(defined) else [None] * 4
    names = ("mean", "lower_quartile", "median", "upper_quartile")
    counts = {"sentences": len(values), "undefined": len(values) - len(defined)}
    return {**counts, **dict(zip(names, numbers, strict=True))}


def is_decoder(model: Any) -> bool:
    """Whether a SentenceTransformer has a decoder, with or without bidirectional layers."""
    # transformers sets is_causal on each attention module; hooks that replace masks do not change it
    return any(getattr(module, "is_causal", False) for module in model[0].model.modules())


def sentences_of(tasks: Mapping[str, Task]) -> list[str]:
    """The distinct sentences of tasks, except mteb's."""
    return list(dict.fromkeys(text for task in tasks.values() for text in task.sentences))


def token_states(model: Any, sentences: Sequence[str], batch_size: int = 64) -> Iterator[tuple[list[str], list[Any]]]:
    """Yield batches of distinct sentences, the longest first, with the last hidden states of their tokens, [tokens, d]
    each without padding, on the model's device, under its default prompt. ValueError for a state that is not finite."""
    if not sentences:
        raise ValueError("sentences must list at least one text")
    distinct = sorted(dict.fromkeys(sentences), key=len, reverse=True)
    training = model.training
    try:
        for start in range(0, len(distinct), batch_size):
            texts = distinct[start : start + batch_size]
            items = model.encode(texts, batch_size=batch_size, output_value=None, show_progress_bar=False)
            if "attention_mask" not in items[0]:
                raise ValueError("token states need padded batches: set model[0].unpad_inputs to False")
            states = [item["token_embeddings"][item["attention_mask"].bool()] for item in items]
            for text, tokens in zip(texts, states, strict=True):
                if not tokens.isfinite().all():
                    raise ValueError(f"the encoder returns NaN or infinity for {text!r}")
            yield texts, states
    finally:
        model.train(training)


def word_report(model: Any, sentences: Sequence[str], batch_size: int = 64) -> dict[str, Any]:
    """Representative words (Section 3.3 and Appendix A), and how common they are in the sentences. "rare_share" is the
    number in Appendix A (91.74 % for STS-B). "wordless_share" is the share of tokens without a letter or digit."""
    frequent = frequent_words(sentences, TOP)  # before the model runs, so that an error costs no time
    words = representative_words(model, sentences, batch_size)
    share = sum(word.lower() in frequent for word in words) / len(words)
    return {
        "sentences": len(words),
        "top": TOP,
        "frequent_share": share,
        "rare_share": 1 - share,
        "wordless_share": sum(not WORD.search(word) for word in words) / len(words),
        "most_common": [[word, count] for word, count in Counter(words).most_common(COMMON)],
        "examples": [list(pair) for pair in dict(zip(sentences, words, strict=True)).items()][:EXAMPLES],
    }


def representative_words(model: Any, sentences: Sequence[str], batch_size: int = 64) -> list[str]:
    """The token that is most probable after each sentence for the language model, without spaces. With a prompt such as
    'The representative word for {text} is:"' it is the representative word, or the first piece of it."""
    head = language_head(model)
    words: dict[str, str] = {}
    for texts, states in token_states(model, sentences, batch_size):
        with torch.inference_mode():
            ids = head(torch.stack([tokens[-1] for tokens in states])).argmax(dim=-1)
        tokens = (model[0].tokenizer.decode([token]).strip() for token in ids.tolist())
        words.update(zip(texts, tokens, strict=True))
    return [words[text] for text in sentences]


def language_head(model: Any) -> Callable[[Any], Any]:
    """The head of the decoder's language model: last hidden states [batch, d] -> logits [batch, vocabulary]. If it is
    not tied to the embeddings, it comes from the language model that the decoder was loaded from, which is loaded."""
    from raoe_train.generation.models import LanguageModel, load_language_model

    inner = model[0].model
    if not is_decoder(model):
        raise ValueError(f"a {inner.config.model_type!r} is not a decoder, so it cannot predict a next word")
    decoder = inner.decoder if isinstance(inner, BidirectionalModel) else inner
    if getattr(decoder.config, "tie_word_embeddings", False):
        weight, bias = decoder.get_input_embeddings().weight, None
    else:
        name = getattr(inner.config, "base_model", None) or decoder.config._name_or_path
        if not name:
            raise ValueError("the language model's head cannot be found: the decoder's config does not name its origin")
        revision = getattr(inner.config, "base_revision", None)
        whole = load_language_model(LanguageModel(name, revision=revision, device="cpu"))
        head = whole.get_output_embeddings().to(inner.device)
        weight, bias = head.weight, head.bias
    return lambda states: torch.nn.functional.linear(states.to(weight.dtype), weight, bias)


def frequent_words(corpus_sentences: Sequence[str], top: int) -> set[str]:
    """The `top` most frequent words, lower-cased; ties are broken by the alphabet."""
    words = sorted(word for sentence in corpus_sentences for word in WORD.findall(sentence.lower()))
    if not words:
        raise ValueError("the sentences have no words")
    return {word for word, _ in Counter(words).most_common(top)}


# {name in the job evaluate: (model, tasks, output, batch size) -> plain values}
ANALYSES: dict[str, Callable[..., dict[str, Any]]] = {
    "degradation": degradation,
    "dependency": lambda model, tasks, _, size: summary(pivot_correlations(model, sentences_of(tasks), size)),
    "words": lambda model, tasks, _, size: word_report(model, sentences_of(tasks), size),
}

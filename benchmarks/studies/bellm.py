"""The BeLLM paper's analyses of a decoder or encoder: scores and token correlations by layer, representative words, and
predictions for C-STS."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from benchmarks.studies.jobs import conditional_rows, load_encoder, read_tasks
from benchmarks.studies.plots import plot_lines

NORMS = ("norm", "final_layernorm", "final_norm")  # names of a model's last norm, which follows its last layer
WORD = re.compile(r"\w+(?:['’]\w+)*")
TOP = 100  # number of words that count as frequent; the paper states no threshold
COMMON, EXAMPLES = 20, 10  # number of words, and of sentences with their word, in a result
NEW_TOKENS = 8  # enough for a word


class EveryLayer(nn.Module):
    """The modules of a SentenceTransformer after its first, applied to the hidden states after each layer.

    `sentence_embedding` is (B, layers x d). `correlations` collects, for each text and layer, the mean Spearman
    correlation of the hidden states of its tokens with that of its pivot token (Sections 2 and 5.5, Figures 2 and 5),
    NaN if there is no other token or a state has equal values. The pivot is the last token of a decoder and the first
    token, [CLS], of an encoder, whatever the pooling. All other tokens except padding count, also those of the prompt.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        inner = model[0].model
        decoder = getattr(inner, "decoder", inner)
        for config in (inner.config, decoder.config):
            config.output_hidden_states = True
        self.rest = nn.ModuleList(list(model)[1:])
        self.norm: Any = next((getattr(decoder, name) for name in NORMS if hasattr(decoder, name)), nn.Identity())
        self.pivot = -1 if any(getattr(module, "is_causal", False) for module in inner.modules()) else 0
        self.correlations: list[list[float]] = []

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        _, *inner, last = features.pop("all_layer_embeddings")  # the first are the words' embeddings
        layers = [*map(self.norm, inner), last]
        embeddings = []
        for tokens in layers:
            out = {**features, "token_embeddings": tokens}
            for module in self.rest:
                out = module(out)
            embeddings.append(out["sentence_embedding"])
        for row, mask in enumerate(features["attention_mask"].bool()):
            self.correlations.append([dependency(tokens[row][mask], self.pivot) for tokens in layers])
        return {**features, "sentence_embedding": torch.cat(embeddings, dim=1)}


def dependency(tokens: Tensor, pivot: int) -> float:
    """The mean Spearman correlation of the pivot's hidden state with those of the other tokens, [tokens, d]."""
    if len(tokens) < 2:
        return np.nan
    with np.errstate(invalid="ignore"):
        ranks = stats.rankdata(tokens.cpu().double().numpy(), axis=1)
        return float(np.delete(np.corrcoef(ranks)[pivot], pivot).mean())


def encode_by_layer(model: Any, texts: Sequence[str], batch_size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Encode distinct texts once: ([layers, texts, d] embeddings after each layer and the last norm, [texts, layers]
    correlations of EveryLayer)."""
    from sentence_transformers import SentenceTransformer

    every = EveryLayer(model)
    prompts: Any = {"prompts": model.prompts, "default_prompt_name": model.default_prompt_name}
    whole = SentenceTransformer(modules=[model[0], every], device=str(model.device), **prompts)
    order = np.argsort([-len(text) for text in texts], kind="stable")
    encoded = whole.encode([texts[row] for row in order], batch_size=batch_size, convert_to_tensor=True)
    correlations = np.array(every.correlations)[order.argsort()]
    embeddings = encoded.cpu().double().numpy()[order.argsort()]
    return np.stack(np.split(embeddings, correlations.shape[1], axis=1)), correlations


def by_layer(model: Any, tasks: Mapping[str, Any], batch_size: int = 64) -> dict[str, Any]:
    """Evaluate a SentenceTransformer with its first 1, 2, … layers and its last norm (Section 3.1, Figure 4).

    Each sentence is encoded once. Returns {"layers": [1, …, all], "tasks": {task: [main metric x100]}, "average": [mean
    of tasks], "dependency": [mean over sentences], "quartiles": [lower, median, upper] of the dependency in the last
    layer}.
    """
    texts = list(dict.fromkeys(text for task in tasks.values() for text in task.sentences))
    layers, correlations = encode_by_layer(model, texts, batch_size)
    place = {text: row for row, text in enumerate(texts)}
    scores = {}
    for word, task in tasks.items():
        rows = [place[text] for text in task.sentences]
        scores[word] = [task.score(embeddings[rows].astype(np.float32))[0][task.main] for embeddings in layers]
    return {
        "layers": list(range(1, len(layers) + 1)),
        "tasks": scores,
        "average": np.mean([*scores.values()], axis=0).tolist(),
        "dependency": np.nanmean(correlations, axis=0).tolist(),
        "quartiles": np.nanpercentile(correlations[:, -1], (25, 50, 75)).tolist(),
    }


def word_report(words: Sequence[str], sentences: Sequence[str]) -> dict[str, Any]:
    """How common representative words are in their sentences (Section 3.3 and Appendix A). "rare_share" is the number
    in Appendix A (91.74 % for STS-B): the share of words that are not among the TOP most frequent of the sentences. An
    empty word, of an answer without a letter or digit, is not counted; "wordless" is the number of these."""
    corpus = sorted(word for sentence in sentences for word in WORD.findall(sentence.lower()))
    frequent = {word for word, _ in Counter(corpus).most_common(TOP)}
    found = [word for word in words if word]
    return {
        "sentences": len(words),
        "wordless": len(words) - len(found),
        "rare_share": float(np.mean([word.lower() not in frequent for word in found])) if found else None,
        "most_common": Counter(map(str.lower, found)).most_common(COMMON),
        "examples": [*zip(sentences, words, strict=True)][:EXAMPLES],
    }


@torch.inference_mode()
def representative_words(name: str, prompt: str, sentences: Sequence[str], batch_size: int = 64) -> list[str]:
    """The first word that a causal language model writes after each sentence in the prompt, "" if it writes none."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    words: dict[str, str] = {}
    order = sorted(set(sentences), key=len, reverse=True)
    for start in range(0, len(order), batch_size):
        texts = order[start : start + batch_size]
        inputs = tokenizer([prompt.replace("{text}", text) for text in texts], padding=True, return_tensors="pt")
        answers = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False,
            max_new_tokens=NEW_TOKENS, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        written = tokenizer.batch_decode(answers[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        words |= {text: (WORD.findall(answer) or [""])[0] for text, answer in zip(texts, written, strict=True)}
    return [words[text] for text in sentences]


def analyse(
    model: Mapping[str, Any], tasks: Sequence[str], data_dir: str | None, output: str, words: bool, batch_size: int
) -> dict[str, Any]:
    """Write OUTPUT/bellm.json and OUTPUT/layers.png about an encoder; returns the content of the former."""
    prompt = str(model.get("prompt"))
    if words and "{text}" not in prompt:
        raise ValueError("--words needs --model.prompt with {text}")
    found = by_layer(load_encoder(**model), chosen := read_tasks(tasks, data_dir), batch_size)
    if words:
        sentences = list(dict.fromkeys(text for task in chosen.values() for text in task.sentences))
        found["words"] = word_report(representative_words(model["name"], prompt, sentences, batch_size), sentences)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bellm.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = {"average x 100": found["average"], "dependency x 100": [100 * value for value in found["dependency"]]}
    points = {name: [*zip(found["layers"], values, strict=True)] for name, values in lines.items()}
    plot_lines({model["name"]: points}, "layers kept", [""], folder / "layers.png")
    for layer, score, correlation in zip(found["layers"], found["average"], found["dependency"], strict=True):
        print(f"{layer} layers: {score:.2f}, dependency {correlation:.3f}")
    return found


def submit(model: Mapping[str, Any], data: str, output: str, batch_size: int) -> int:
    """Write predictions for the C-STS rows in the file `data`; returns their number.

    The file is for `python make_test_submission.py YOUR_EMAIL PATH` of https://github.com/princeton-nlp/c-sts (commit
    3bacafa): one JSON object {"0": 1.0, "1": 0.0, ...} whose keys are the row numbers of csts_test.csv, 4732 rows.
    """
    encoder = load_encoder(**model)
    first, second = conditional_rows(data, encoder)
    a, b = (encoder.encode(texts, batch_size=batch_size, normalize_embeddings=True) for texts in (first, second))
    predictions = (a.astype(np.float64) * b).sum(axis=1)
    if not np.isfinite(predictions).all():
        raise ValueError("the encoder returns NaN or infinity")
    Path(output).write_text(json.dumps({str(row): value for row, value in enumerate(predictions.tolist())}))
    return len(first)

"""Choose the encoder that a run saves, based on scores on the dev set and on the guard (other texts). Candidates are
checkpoints, and mixtures of a checkpoint and the start (the encoder before training). A paired bootstrap over the
dev examples compares each candidate with the start. A certificate lists all candidates (docs/adapt.md)."""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from scipy import stats

from raoe_train.data.pairs import TEXTS, read_scored
from raoe_train.data.sources import columns_in, read_sentences, roles_in
from raoe_train.encoders.embed import cosines, encode_sentences
from raoe_train.evaluation.sts import of_pairs
from raoe_train.evaluation.tasks import Outcomes, Task, evaluate_tasks, main_score
from raoe_train.settings import Data

CERTIFICATE = "certificate.json"
PHRASES = 1000  # number of random phrases in the guard, if data.guard is not set
RESAMPLES = 2000
SIGNIFICANT = 0.05
LEVEL = 95  # confidence level of intervals, in percent
DRAWS = 2**20  # number of indices that the bootstrap draws at a time
LORA_A = re.compile(r"\blora_(embedding_)?A\b")
Weights = Mapping[str, torch.Tensor]
Tried = Mapping[str, Sequence[Path]]  # {name: a checkpoint, or a checkpoint of each fold}


def weights_of(encoder: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the trained parameters on the CPU."""
    return {name: w.detach().to("cpu", copy=True) for name, w in encoder.named_parameters() if w.requires_grad}


def mix(encoder: Any, start: Weights, trained: Weights, share: float) -> None:
    """Set the encoder's trained parameters to share x trained + (1 - share) x start. In a LoRA adapter, only the matrix
    B is mixed, because the adapter adds the product B A to the encoder's weights."""
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            if name in start:
                first = trained[name] if share and LORA_A.search(name) else start[name]
                weight.copy_(torch.lerp(first.float(), trained[name].float(), share))


def guard_of(data: Data, encoder: Any, seed: int) -> Task:
    """Return the guard, a task that correlates the cosines of pairs with their scores. The texts come from data.guard
    or, by default, are random phrases. Texts without scores are paired at random, and their cosines before
    training are used as scores."""
    sources = {source: columns_in(source, data.columns) for source in data.guard}
    generator = np.random.default_rng(seed)
    if scored := ["score" in roles_in(source, columns) for source, columns in sources.items()]:
        if all(scored):
            parts = [read_scored(source, None, columns=columns) for source, columns in sources.items()]
            return of_pairs(concatenate_datasets([part.select_columns([*TEXTS, "score"]) for part in parts]))
        if any(scored):
            raise ValueError("data.guard mixes scored pairs and texts: use only one kind")
    texts = [text for source, columns in sources.items() for text in read_sentences(source, columns)["sentence"][:]]
    first = [*dict.fromkeys(texts or random_phrases(encoder.tokenizer, generator))]
    generator.shuffle(first)
    second = [*first[1:], *first[:1]]
    scores = cosines(*np.split(encode_sentences(encoder, [*first, *second]), 2))
    return of_pairs(Dataset.from_dict({"sentence1": first, "sentence2": second, "score": scores}))


def random_phrases(tokenizer: Any, generator: np.random.Generator) -> list[str]:
    """Return the guard's default texts: phrases of four random words from the vocabulary (docs/lab/adapt.md)."""
    vocabulary = tokenizer.get_vocab()
    starts = [token for token in vocabulary if token.startswith(("Ġ", "▁"))]  # tokens that start a word, if marked
    words = sorted({token.lstrip("Ġ▁") for token in starts or vocabulary})
    if not (words := [word for word in words if len(word) > 3 and word.isalpha()]):
        raise ValueError("the tokenizer's vocabulary has no words for random guard texts: set data.guard")
    return [" ".join(row) for row in generator.choice(words, (PHRASES, 4))]


def choose(
    trainer: Any, start: Weights, tried: Tried, dev: Sequence[Task], guard: Task, evaluation: Any
) -> dict[str, Any]:
    """Choose the weights to save, and print a table of the candidates. The function `put` then loads these weights.

    The candidates are the start, the weights of each entry in `tried` and, for each share in evaluation.mixtures, the
    mixture share x weights + (1 - share) x start. The function `winner` chooses one of them. With folds, the weights
    are the mean of the folds' checkpoints, but each checkpoint is evaluated on its own held-out fold. The dev scores
    therefore measure these checkpoints, not their mean (docs/adapt/proof.md compares the two).

    Returns:
        The certificate: {"saved": name of the winner, "accepted": False if the start won, "rejected": in this case, the
        best other candidate, "reason": a sentence, "metric": dev metric, "folds": number of folds or 1, "examples":
        number of dev examples, "missing_examples": how many more examples could make the rejected candidate's gain
        significant, if the candidate has a gain and is within the guard's budget, "guard_budget", "candidates": {name:
        {"step", "share", "dev", "guard" and, except for the start, "change" on dev, "low" and "high" of its 95 %
        interval, "p"}}}, with scores x 100. A candidate's one-sided p is the probability that, if no candidate is truly
        better than the start, the best candidate gains at least as many standard errors as this candidate.
    """
    encoder: Any = trainer.model
    before, outcomes = _evaluate(encoder, start, start, 0.0, [*dev, guard], evaluation.batch_size)
    rows: dict[str, dict[str, Any]] = {"start": {"step": 0, "share": 0.0}}
    rows["start"] |= {"dev": float(np.mean(before[:-1])), "guard": before[-1]}
    samples = dict[str, np.ndarray]()
    for name, paths in tried.items():
        weights = [_load(trainer, path) for path in paths]
        judged: list[tuple[Weights, Sequence[Task]]] = [(weights[0], [*dev, guard])]
        if len(paths) > 1:
            judged = [(trained, [task]) for trained, task in zip(weights, dev, strict=True)]
            judged.append((mean_of(weights), [guard]))
        for share in (1.0, *evaluation.mixtures):
            values, others = list[float](), list[Outcomes]()
            for trained, tasks in judged:
                more = _evaluate(encoder, start, trained, share, tasks, evaluation.batch_size)
                values.extend(more[0])
                others.extend(more[1])
            pairs = zip(outcomes[:-1], others[:-1], strict=True)
            candidate = name + ("" if share == 1 else f", mixed {share:g}")
            step = int(paths[0].name.rpartition("-")[2])
            rows[candidate] = {"step": step, "share": share, "dev": float(np.mean(values[:-1])), "guard": values[-1]}
            samples[candidate] = np.mean([differences(*pair, RESAMPLES, trainer.args.seed) for pair in pairs], axis=0)
    factors = add_evidence(rows, samples)
    lowest = rows["start"]["guard"] - evaluation.guard_budget
    inside = {name: row for name, row in rows.items() if name != "start" and row["guard"] >= lowest}
    saved = winner(inside, rows["start"]["dev"], evaluation.min_gain)
    examples = sum(len(outcome.values) for outcome in outcomes[:-1])
    folds = max(map(len, tried.values()), default=1)
    kind = f"examples in {folds} folds" if folds > 1 else "dev examples"
    rejected = min(inside or samples, key=lambda name: rows[name]["p"], default=None) if saved == "start" else None
    factor = factors.get(rejected or "") if rejected in inside else None
    certificate = {
        "saved": saved,
        "accepted": saved != "start",
        "rejected": rejected,
        "reason": _reason(saved, rows, inside, f"{examples} {kind}", evaluation.guard_budget),
        "metric": dev[0].main,
        "folds": folds,
        "examples": examples,
        "missing_examples": None if factor is None else math.ceil(examples * (factor - 1)),
        "guard_budget": evaluation.guard_budget,
        "candidates": {
            name: {key: None if math.isnan(value) else value for key, value in row.items()}
            for name, row in rows.items()
        },
    }
    print(table_of(certificate))
    return certificate


def put(trainer: Any, start: Weights, tried: Tried, certificate: Mapping[str, Any], name: str) -> None:
    """Load a candidate's weights into the trainer's encoder. `tried` is the same as for `choose`."""
    share = certificate["candidates"][name]["share"]
    paths = tried[name.partition(", ")[0]] if share else []
    mix(trainer.model, start, mean_of([_load(trainer, path) for path in paths]) if share else start, share)


def mean_of(weights: Sequence[Weights]) -> Weights:
    """Return the mean of the weights of several encoders that have the same dtypes."""
    if len(weights) == 1:
        return weights[0]
    return {name: torch.stack([each[name].float() for each in weights]).mean(0) for name in weights[0]}


def _load(trainer: Any, path: Path) -> dict[str, torch.Tensor]:
    trainer._load_from_checkpoint(str(path))
    return weights_of(trainer.model)


def _evaluate(
    encoder: Any, start: Weights, trained: Weights, share: float, tasks: Sequence[Task], batch_size: int
) -> tuple[list[float], list[Outcomes]]:
    """Evaluate a mixture. Return each task's main metric x 100 (NaN if undefined) and its results for each example."""
    mix(encoder, start, trained, share)
    outcomes = dict[str, Outcomes]()
    by_number = {str(number): task for number, task in enumerate(tasks)}
    results = evaluate_tasks(encoder, by_number, batch_size, outcomes)["tasks"]
    scores = [main_score(result) for result in results.values()]
    return [math.nan if score is None else score for score in scores], [*outcomes.values()]


def add_evidence(rows: Mapping[str, dict[str, Any]], samples: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Compute "change", "low", "high" and "p" from bootstrap samples of each candidate's change, and add them to its
    row. The max-t method of Westfall and Young (1993, section 2.5) corrects the p-values for the number of candidates.

    For each candidate with a gain, return the factor by which the number of examples would have to grow to make this
    gain significant. (Standard errors fall with the square root of the number of examples.)"""
    largest, ts = np.full(RESAMPLES, -np.inf), dict[str, float]()
    for name, values in samples.items():
        row = rows[name]
        row |= {"change": row["dev"] - rows["start"]["dev"], "low": math.nan, "high": math.nan, "p": 1.0}
        spread = float(np.nanstd(values)) if np.isfinite(values).mean() > 0.5 else 0.0
        if spread > 0 and math.isfinite(row["change"]):
            row["low"], row["high"] = interval(values)
            ts[name] = row["change"] / spread
            largest = np.fmax(largest, (values - row["change"]) / spread)
    for name, t in ts.items():
        rows[name]["p"] = float((1 + (largest >= t).sum()) / (1 + RESAMPLES))
    critical = np.quantile(largest, 1 - SIGNIFICANT) if ts else math.nan
    return {name: float(critical / t) ** 2 for name, t in ts.items() if t > 0}


def resample(data: Sequence[np.ndarray], statistic: Callable[..., np.ndarray], resamples: int, seed: int) -> np.ndarray:
    """Return a statistic's values [resamples] on paired bootstrap samples, with NaN where the statistic is undefined.

    Args:
        data: arrays [n]. A bootstrap sample draws the same indices from each array.
        statistic: a function of arrays [batch, n] and `axis`, which returns [batch].
    """
    if len(data[0]) == 1:  # scipy raises an error for one example
        return np.repeat(statistic(*data, axis=-1), resamples)
    with warnings.catch_warnings():  # scipy warns of NaN and constant values in its own interval, which is not used
        warnings.simplefilter("ignore")
        return stats.bootstrap(
            data, statistic, paired=True, vectorized=True, n_resamples=resamples, method="percentile",
            batch=max(1, DRAWS // len(data[0])), random_state=np.random.default_rng(seed),
        ).bootstrap_distribution  # fmt: skip


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return (low, high), the LEVEL % percentile interval of bootstrap values. NaN values are ignored."""
    tail = (100 - LEVEL) / 2
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return float(low), float(high)


def spearman(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return Spearman's correlation x 100 along an axis, or NaN where all values of `a`, or all of `b`, are equal."""
    x, y = (ranks - ranks.mean(axis, keepdims=True) for ranks in (stats.rankdata(of, axis=axis) for of in (a, b)))
    spread = np.sqrt((x * x).sum(axis) * (y * y).sum(axis))
    return np.divide(100 * (x * y).sum(axis), spread, out=np.full(np.shape(spread), np.nan), where=spread > 0)


def differences(first: Outcomes, second: Outcomes, resamples: int, seed: int) -> np.ndarray:
    """Return the bootstrap values [resamples] of a difference: the main metric x 100 of `second` minus that of
    `first`."""
    if len(first.values) != len(second.values) or not np.array_equal(np.asarray(first.gold), np.asarray(second.gold)):
        raise ValueError("the two results are for different examples: evaluate both encoders on the same data")
    if first.gold is None:
        means = lambda a, b, axis: b.mean(axis) - a.mean(axis)  # noqa: E731
        return resample([first.values, second.values], means, resamples, seed)

    def correlations(a: np.ndarray, b: np.ndarray, gold: np.ndarray, axis: int) -> np.ndarray:
        return spearman(b, gold, axis) - spearman(a, gold, axis)

    return resample([first.values, second.values, first.gold], correlations, resamples, seed)


def winner(candidates: Mapping[str, Any], start: float, min_gain: float) -> str:
    """Return the name of the candidate to save, or "start" if no candidate is significantly better than the start.

    A candidate's gain is its dev score minus `start`, the dev score before training. Among the candidates with a gain
    of at least min_gain x the largest gain, the candidate with the highest guard score is saved, because it changes the
    scores of other texts least.
    """
    gains = {name: row["dev"] - start for name, row in candidates.items() if row["p"] < SIGNIFICANT}
    enough = [name for name, gain in gains.items() if gain >= min_gain * max(gains.values())]
    return max(enough, key=lambda name: candidates[name]["guard"], default="start")


def _reason(saved: str, rows: Mapping[str, Any], inside: Mapping[str, Any], examples: str, budget: float) -> str:
    if saved != "start":
        p = "p < 0.001" if rows[saved]["p"] < 0.001 else f"p = {rows[saved]['p']:.3f}"
        return f"better than the start on {examples} ({p}, paired bootstrap), guard within its budget of {budget:g}"
    if math.isnan(rows["start"]["guard"]):
        return "the guard is undefined, because the start gives all of its pairs the same cosine: the start is saved"
    if not inside:
        return f"every candidate lowers the guard by more than its budget of {budget:g}: the start is saved"
    best = min(inside.values(), key=lambda row: row["p"])
    outside = "" if len(inside) == len(rows) - 1 else f" within the guard's budget of {budget:g}"
    evidence = f"{best['change']:+.2f}, p = {best['p']:.2f} by the paired bootstrap, {examples}"
    return f"no candidate{outside} is significantly better than the start ({evidence}): the start is saved"


def table_of(certificate: Mapping[str, Any]) -> str:
    """Format the candidates as a text table, one line per candidate."""
    width = max(len(name) for name in certificate["candidates"]) + 2
    lines = [f"{'candidate':<{width}}{certificate['metric'] + ' on dev':<16}{'95 % interval':<18}guard"]
    for name, row in certificate["candidates"].items():
        between = f"({row['low']:+.2f} … {row['high']:+.2f})" if row.get("low") is not None else ""
        dev, guard = ("undefined" if row[key] is None else f"{row[key]:.2f}" for key in ("dev", "guard"))
        mark = "   <- saved" if name == certificate["saved"] else ""
        lines.append(f"{name:<{width}}{dev:<16}{between:<18}{guard}{mark}")
    return "\n".join([*lines, certificate["reason"]])

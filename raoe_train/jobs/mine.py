"""The job `mine`: use a frozen encoder to mine examples from labelled texts, or hard negatives for queries."""

import random
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from sentence_transformers import CrossEncoder
from sentence_transformers.util import dot_score, mine_hard_negatives, pairwise_dot_score

from raoe_train.data.files import known_kind, write_rows
from raoe_train.data.mining import (
    COLUMNS,
    Neighbours,
    distinct,
    example_rows,
    labelled_table,
    make_draw,
    pairs,
    random_pairs,
    triplets,
)
from raoe_train.data.rows import row_table
from raoe_train.data.sources import Texts, roles_in
from raoe_train.encoders.embed import CHUNK, embedding_parts, nearest_by_class, unit_rows
from raoe_train.evaluation.retrieval import read_passages
from raoe_train.jobs.settings import MineConfig
from raoe_train.jobs.shared import job, require
from raoe_train.outputs import Output
from raoe_train.parts import read_parts
from raoe_train.processes import print_on_rank_zero, rank_and_world
from raoe_train.settings import Mining

LABELLED = ("k", "threshold", "drop", "count")  # settings for labelled texts; all others except seed are for rows
FOR_ROWS = ("range_min", "range_max", "max_score", "absolute_margin", "relative_margin", "num_negatives",
            "sampling_strategy", "cross_encoder", "use_faiss")  # fmt: skip


@job(together=True)
@print_on_rank_zero()
def mine(config: MineConfig, output: Output) -> dict[str, Any]:
    """Make examples for contrastive losses from labelled texts, or mine negatives for rows of queries and passages.

    For labelled texts, each sentence is combined with its k nearest sentences of the same class and its k nearest
    sentences of other classes (section 3.4 of the margins paper). Only neighbours with cosines above mining.threshold
    are used. Each row of OUTPUT is an example for the loss. With mining.drop or mining.count, OUTPUT contains a random
    subset of all examples. For rows of queries and passages, the sentence-transformers function mine_hard_negatives
    selects negatives from the passages of all rows and of mining.corpus. OUTPUT also contains rows without negatives.
    Embeddings are stored in model.cache or, if it is not set, in OUTPUT.parts/ until the job ends. Under torchrun, each
    process encodes its share of the texts, and rank 0 does the rest of the work. An interrupted job can resume with a
    different number of processes.

    Returns:
        For rows: {"output", "rows", "negatives": count, "fewer": rows with fewer than num_negatives, "passages",
        "read": row counts, "settings", "versions"}. For labelled texts: {"output", "examples", "available": examples
        before the random choice, "labels": {"1": pairs of the same class, "0": other pairs} (if the loss uses labels),
        "anchors": distinct first sentences, "classes": {class: sentences}, "read": row counts, "settings", "versions"}.
        For all losses except mse, the second dict also contains "neighbours": {"own", "others"} (mean number per text)
        and "without": number of sentences without neighbours. The result is also written to OUTPUT.json.
    """
    data, model, mining = config.data, config.model, config.mining
    source = require(data.input, "data.input", "the labelled texts, or rows of queries and passages")
    path = Path(require(config.output, "output", "the file to write"))
    known_kind(path)
    loss, roles = config.loss, roles_in(source, data.columns)
    is_labelled = "anchor" not in roles and ("label" in roles or "sentence1" not in roles)
    given = {key for key, value in asdict(mining).items() if value != getattr(Mining(), key)} - {"seed"}
    if useless := sorted(given - {*LABELLED} if is_labelled else given & {*LABELLED}):
        kind = "labelled texts" if is_labelled else "rows of queries and passages"
        raise ValueError(f"mining.{useless[0]} has no effect on {kind} ({source}): remove the setting")
    if loss != "mse" or not is_labelled:
        require(model.name, "model.name", "the encoder whose embeddings decide which texts are near each other")
    elif mining.count is None:
        raise ValueError("--mining.count is missing: set it to the number of random pairs for --loss mse")
    return _make_examples(config, output) if is_labelled else _mine_negatives(config, output)


def _make_examples(config: MineConfig, output: Output) -> dict[str, Any]:
    data, model, mining, loss = config.data, config.model, config.mining, config.loss
    options: Any = {"columns": data.columns or None, "on_error": data.on_error}
    texts, counts = distinct(*labelled_table(str(data.input), **options))
    if "second" in texts.column_names:
        raise ValueError(f"{data.input} has pairs of sentences: mining needs a single text and a label in each row")
    sentences, labels = texts["text"][:], texts["label"][:]
    sizes = dict(sorted(Counter(labels).items()))
    if not sentences:
        raise ValueError(f"{data.input}: every text occurs with different labels, so no text can be used")
    if len(sizes) < 2:
        raise ValueError(f"{data.input}: all texts belong to class {labels[0]!r}; mining needs two or more classes")
    columns = COLUMNS[loss]
    classes = np.unique(labels, return_inverse=True)[1]
    result: dict[str, Any] = {}
    if loss != "mse":
        paths = embedding_parts(model, sentences, "reference", model.cache or output.parts)
    if rank_and_world()[0] > 0:
        return {}
    if loss == "mse":
        examples, available = random_pairs(classes, int(mining.count or 0), mining.seed)
    else:
        unit = read_parts(paths)
        table = neighbours(unit_rows(unit, out=unit), classes, mining, loss)
        draw = make_draw(mining.drop, mining.count, mining.seed)
        if loss == "triplet":
            examples, available = triplets(table, draw)
        else:
            examples, available = pairs(table, draw, others=loss != "multiple_negatives")
        result["neighbours"] = {"own": float(table.own_count.mean()), "others": float(table.others_count.mean())}
        result["without"] = int(((table.own_count == 0) & (table.others_count == 0)).sum())
    output.begin()
    write_rows(output.path, columns, example_rows(columns, examples, sentences))
    kinds = (1, 0) if columns[-1] in ("label", "score") else ()
    result |= {
        "examples": len(examples),
        "available": available,
        "labels": {str(label): int((examples[:, 2] == label).sum()) for label in kinds},
        "anchors": len(np.unique(examples[:, 0])),
        "classes": sizes,
        "read": counts,
    }
    _print(result, str(config.output), mining.count)
    return result


def neighbours(unit: np.ndarray, classes: np.ndarray, mining: Mining, loss: str) -> Neighbours:
    """For each text, find the neighbours with cosines above mining.threshold, given unit embeddings [n, d] and classes
    [n]. Raise ValueError if no text has the neighbours that an example for the loss needs."""
    (own, near), (others, near_others) = nearest_by_class(unit, classes, min(mining.k, len(unit)))
    own_count, others_count = ((cosines > mining.threshold).sum(axis=1) for cosines in (near, near_others))
    first, second = near[:, 0], near_others[:, 0]  # the highest cosines
    usable = {"triplet": np.minimum(first, second), "multiple_negatives": first}
    highest = usable.get(loss, np.maximum(first, second)).max()
    if highest <= mining.threshold:
        advice = f"set it below {highest:.4f}" if np.isfinite(highest) else "no class has two texts"
        raise ValueError(f"no {loss} example has cosines above mining.threshold {mining.threshold:g}: {advice}")
    return Neighbours(own, others, own_count, others_count)


def _print(result: dict[str, Any], path: str, count: int | None) -> None:
    labels = result["labels"]
    kinds = f" ({labels['1']} pairs of the same class, {labels['0']} of different classes)" if labels else ""
    print(f"wrote {result['examples']} of {result['available']} available examples{kinds} to {path}")
    if count is not None and result["examples"] < count:
        print(f"too few examples for mining.count {count}: lower mining.threshold or mining.drop, or raise mining.k")
    if result.get("without"):
        print(f"{result['without']} sentences have no neighbour with a cosine above mining.threshold")


class _Embedded:
    """Encoder substitute that returns precomputed embeddings to mine_hard_negatives. Both constructor arguments are
    pairs (n texts, their unit embeddings [n, d])."""

    device = "cpu"
    similarity, similarity_pairwise = staticmethod(dot_score), staticmethod(pairwise_dot_score)  # for unit rows

    def __init__(self, queries: tuple[list[str], np.ndarray], passages: tuple[list[str], np.ndarray]) -> None:
        self.queries, self.passages = queries, passages
        self.get_embedding_dimension = lambda: passages[1].shape[1]  # for FAISS

    def encode_query(self, texts: list[str], **_: Any) -> np.ndarray:
        return _look_up(*self.queries, texts)

    def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
        return _look_up(*self.passages, texts)


def _look_up(known: list[str], rows: np.ndarray, texts: list[str]) -> np.ndarray:
    if texts == known:  # no copy of a large corpus
        return rows
    places = {text: place for place, text in enumerate(known)}
    return rows[[places[text] for text in texts]]


def _mine_negatives(config: MineConfig, output: Output) -> dict[str, Any]:
    """Mine negatives for each row from the passages of all rows and of mining.corpus. Write OUTPUT."""
    data, model, mining = config.data, config.model, config.mining
    table, counts = row_table(data.input, columns=data.columns or None, on_error=data.on_error)
    labelled: dict[tuple[str, str], list[str]] = {}
    for query, positive, *negatives in zip(*(table[name][:] for name in table.column_names), strict=True):
        labelled.setdefault((query, positive), []).extend(filter(None, negatives))
    pairs, keeps = [*labelled], mining.keep_negatives
    if not keeps and any(labelled.values()):
        print("the input's negatives are replaced; to keep them, set --mining.keep_negatives true")
    more = read_passages(mining.corpus, data.on_error).values() if mining.corpus else ()
    corpus = [*dict.fromkeys([*Texts({"": table.remove_columns("anchor")}), *more])]
    keywords, cross = {key: getattr(mining, key) for key in FOR_ROWS}, mining.cross_encoder
    if cross and all(value is None for value in (mining.max_score, mining.absolute_margin, mining.relative_margin)):
        needed = "mining.max_score, mining.absolute_margin or mining.relative_margin"
        raise ValueError(f"mining.cross_encoder has no effect without {needed}")
    if mining.use_faiss and find_spec("faiss") is None:
        raise ValueError("mining.use_faiss needs the package faiss: pip install faiss-cpu, or faiss-gpu on a GPU")
    queries, cache = [*dict.fromkeys(query for query, _ in pairs)], model.cache or output.parts
    kinds = {"query": queries, "document": corpus}
    parts = [embedding_parts(model, texts, "reference", cache, kind) for kind, texts in kinds.items()]
    if rank_and_world()[0] > 0:
        return {}
    units = [unit_rows(rows, out=rows) for rows in map(read_parts, parts)]
    random.seed(mining.seed)
    # sentence-transformers masks only positives, so a query that is also a passage counts as its own positive
    passages = {*corpus}
    own = {query: query for query, _ in pairs if query in passages}
    anchors, positives = zip(*pairs, *own.items(), strict=True)
    lists = mine_hard_negatives(
        Dataset.from_dict({"anchor": anchors, "positive": positives}),
        _Embedded((queries, units[0]), (corpus, units[1])),  # type: ignore[arg-type]
        corpus=corpus,
        output_format="labeled-list",  # [positive, negatives …], the only row format that allows fewer negatives
        faiss_batch_size=max(1, CHUNK // len(corpus)),  # queries at a time, also without FAISS
        verbose=False,
        **keywords | {"cross_encoder": CrossEncoder(cross, device=model.device) if cross else None},
    )
    mined = {(query, texts[0]): texts[1:] for query, texts in zip(lists["anchor"], lists["positive"], strict=True)}
    kept = labelled if keeps else {}
    rows = [[*pair, *dict.fromkeys([*kept.get(pair, []), *mined.get(pair, [])])] for pair in pairs]
    numbers = [len(row) - 2 for row in rows]
    if not any(numbers):
        advice = "lower mining.absolute_margin or mining.relative_margin, or raise mining.max_score"
        raise ValueError(f"{data.input}: no passage is a valid negative: {advice}")
    columns = ["anchor", "positive", "negative", *(f"negative_{number}" for number in range(2, max(numbers) + 1))]
    output.begin()
    write_rows(output.path, columns, (dict(zip(columns, row, strict=False)) for row in rows))
    fewer, total = sum(number < mining.num_negatives for number in numbers), sum(numbers)
    is_limited = fewer and mining.range_max is None and len(corpus) > mining.num_negatives * 10
    advice = "; to find more, set a larger mining.range_max" if is_limited else ""
    found = f"wrote {len(rows)} rows with {total} negatives to {config.output}"
    print(f"{found}; {fewer} rows have fewer than {mining.num_negatives} negatives{advice}")
    counted = {"rows": len(rows), "negatives": total, "fewer": fewer, "passages": len(corpus)}
    return {**counted, "read": counts}

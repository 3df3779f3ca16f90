"""Retrieval: rank all passages in a corpus by their cosine similarity to each query. As in sentence-transformers'
InformationRetrievalEvaluator, relevance is binary, and passages with equal cosines are ranked by id. As in BEIR, a
passage with the same id as a query is left out of that query's ranking. Unlike in BEIR, the passage is left out only
if it also contains the query's text, because many data sets number queries and passages independently."""

import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from raoe_train.data.columns import Row, RowProblem, parse_score, parse_sentence, parse_word
from raoe_train.data.files import text_lines
from raoe_train.data.rows import row_table
from raoe_train.data.sources import Source, Texts
from raoe_train.encoders.embed import NONE, nearest, unit_rows
from raoe_train.evaluation.tasks import TEST, Outcomes, Reading, Task, find_task

logger = logging.getLogger(__name__)
K = 10  # number of top-ranked passages that the metrics use


def read_retrieval(name: str, reading: Reading) -> Task:
    """Read a task from rows of queries and passages, or FOLDER#SPLIT in BEIR's layout. The default split is test."""
    folder, _, split = name.partition("#")
    if (path := Path(folder).expanduser()).is_dir():
        return _read_folder(path, split, reading.on_error)
    source = find_task(name, reading.data_dir, "retrieval")
    return of_rows(row_table(source, **reading.rows, keep_all=True)[0], source)


def of_rows(rows: Any, source: str, others: Iterable[str] = ()) -> Task:
    """Create a retrieval task from a Dataset that row_table returned. The corpus contains all passages in the rows and
    the texts `others`. The positives of a query are its relevant passages. The id of each text is the text itself."""
    relevant: dict[str, set[str]] = {}
    for query, positive in zip(rows["anchor"][:], rows["positive"][:], strict=True):
        if positive is not None:
            relevant.setdefault(query, set()).add(positive)
    passages = {text: text for text in itertools.chain(Texts({"": rows.remove_columns("anchor")}), others)}
    return _task({query: query for query in rows["anchor"][:]}, passages, relevant, source)


def relevant_pairs(task: Task) -> Dataset:
    """Return all (query, relevant passage) pairs in a retrieval task, with the columns anchor and positive."""
    score: Any = task.score
    passages, anchors, positives = task.sentences[task.n_queries :], list[str](), list[str]()
    for query, targets in zip(task.sentences, score.keywords["targets"], strict=False):
        for target in targets:
            anchors.append(query)
            positives.append(passages[score.keywords["row_of"][target]])
    return Dataset.from_dict({"anchor": anchors, "positive": positives})


def _read_folder(folder: Path, split: str, on_error: str) -> Task:
    queries, corpus = (read_passages(_file(folder, f"{name}.jsonl"), on_error) for name in ("queries", "corpus"))
    relevant: dict[str, set[str]] = {}

    def parse(fields: dict[str, Any]) -> dict[str, str]:
        fields = {name.replace("_", "-"): value for name, value in fields.items()}  # query_id in some files
        names = [parse_word(column, fields.get(column)) for column in ("query-id", "corpus-id")]
        for name, texts, file in zip(names, (queries, corpus), ("queries", "corpus"), strict=True):
            if name not in texts:
                raise RowProblem(f"{name!r} is not an _id in {file}.jsonl", reason="unknown id")
        if parse_score("score", fields.get("score")) > 0:
            relevant.setdefault(names[0], set()).add(names[1])
        return {"id": names[0]}

    source = _file(folder, f"qrels/{split or TEST}.tsv", *([] if split else ["qrels.tsv"]))
    Source(_judgements(source), on_error=on_error).table(parse, "judgement")
    return _task(queries, corpus, relevant, str(source))


def _judgements(path: Path) -> Any:
    """Return a file of relevance judgements (qrels) as a data source. The file has a header or is in TREC's format:
    each line contains query id, iteration, passage id and relevance, separated by tabs or spaces."""
    names = ("query-id", "iteration", "corpus-id", "score")

    def row(line: str | None) -> Row:
        cells = (line or "").split()
        if len(cells) != len(names):
            return RowProblem(f"a line must have {len(names)} fields")
        return dict(zip(names, cells, strict=True))

    _, first = next(text_lines(path), (1, None))
    fields = row(first)
    if isinstance(fields, RowProblem) or not fields["score"].lstrip("-").isdecimal():
        return path
    return ((f"{path}, line {number}", row(line)) for number, line in text_lines(path))


def _file(folder: Path, *names: str) -> Path:
    for path in (folder / f"{name}{suffix}" for name in names for suffix in ("", ".gz")):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder} has no {' or '.join(names)} (or .gz), which BEIR's layout requires")


def read_passages(source: str | os.PathLike[str], on_error: str = "raise") -> dict[str, str]:
    """Read a corpus as {_id: text}. Prepend each title to its text. A row without _id gets an id such as "line 1"."""
    opened, texts = Source(source, on_error=on_error), dict[str, str]()

    def passage(fields: dict[str, Any]) -> dict[str, str]:
        name = parse_word("_id", fields.get("_id", opened.place.rpartition(", ")[2]))
        if name in texts:
            raise RowProblem(f"_id {name!r} is already used in an earlier row", reason="duplicate id")
        filled = [column for column in ("title", "text") if str(fields.get(column) or "").strip()]
        if not filled:  # as in some public corpora
            raise RowProblem("title and text are empty", reason="no text")
        texts[name] = " ".join(parse_sentence(column, fields[column]) for column in filled)
        return {"id": name}

    opened.table(passage, "text")
    return texts


def _task(queries: Mapping[str, str], corpus: Mapping[str, str], relevant: Mapping[str, set[str]], source: str) -> Task:
    """Create a task from queries {id: text}, passages {id: text}, and relevant passages {query id: passage ids}."""
    if not relevant:
        raise ValueError(f"{source}: no query has a relevant passage")
    place = {name: number for number, name in enumerate(sorted(corpus))}
    texts = {text: number for number, text in enumerate(dict.fromkeys(corpus[name] for name in place))}
    own = [place[query] if queries[query] in corpus.get(query, "") else NONE for query in relevant]
    n_own = len(own) - own.count(NONE)
    for count, problem in (
        (n_own, f"of {len(own)} queries are also passages; each is excluded from its own ranking"),
        (len(queries) - len(relevant), f"of {len(queries)} queries have no relevant passage and are left out"),
        (len(place) - len(texts), f"of {len(place)} passages repeat the text of another passage"),
    ):
        if count:
            logger.warning("%s: %d %s", source, count, problem)
    row_of = [texts[corpus[name]] for name in place]
    targets = [sorted(place[name] for name in relevant[query]) for query in relevant]
    sentences = [*(queries[query] for query in relevant), *texts]
    score = partial(measure, targets=targets, row_of=np.array(row_of), own=np.array(own))
    return Task("retrieval", "ndcg@10", sentences, score, n_queries=len(targets))


def measure(
    embeddings: np.ndarray, targets: Sequence[Sequence[int]], row_of: np.ndarray, own: np.ndarray
) -> tuple[dict[str, Any], Outcomes]:
    """Return (metrics, Outcomes with the nDCG@10 of each query). The metrics are "ndcg@10", "recall@10", "mrr@10" and
    "accuracy@1", all x100, and the numbers of "queries" and "passages". `embeddings` contains a row for each query,
    then a row for each distinct text. The rows of `embeddings` are scaled to norm 1 in place. Passage i is the distinct
    text with index row_of[i]. The passages targets[j] are relevant to query j. Unless own[j] is NONE, passage own[j] is
    excluded from the ranking of query j."""
    queries, texts = np.split(unit_rows(embeddings, out=embeddings), [len(targets)])
    ranked, _ = nearest(queries, texts, K + 1, row_of if len(row_of) > len(texts) else None)
    own_last = (ranked == own[:, None]).argsort(axis=1, kind="stable")  # NONE is last already
    ranked = np.take_along_axis(ranked, own_last, axis=1)[:, :K]
    hits = np.array([np.isin(row, target) for row, target in zip(ranked, targets, strict=True)])
    relevant, ranks = np.array([*map(len, targets)]), np.arange(1, K + 1)
    gains = 1 / np.log2(ranks + 1)
    ndcg = 100 * (hits @ gains) / gains.cumsum()[np.minimum(relevant, K) - 1]
    recall, reciprocal = 100 * hits.sum(axis=1) / relevant, 100 * (hits / ranks).max(axis=1)
    metrics = {"ndcg@10": ndcg, "recall@10": recall, "mrr@10": reciprocal, "accuracy@1": 100 * hits[:, 0]}
    means = {name: float(values.mean()) for name, values in metrics.items()}
    return {**means, "queries": len(targets), "passages": len(row_of)}, Outcomes(ndcg)

"""Hard negatives for rows of queries and passages, by sentence-transformers' mine_hard_negatives."""

import random
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import CrossEncoder
from sentence_transformers.util import dot_score, mine_hard_negatives, pairwise_dot_score

from raoe_train.artifacts.provenance import digest, fingerprint
from raoe_train.artifacts.resume import Output
from raoe_train.data.files import write_rows
from raoe_train.data.rows import row_table
from raoe_train.data.tables import Texts
from raoe_train.encoders.embed import CHUNK, embeddings, unit_rows
from raoe_train.encoders.settings import FrozenEncoder, identity
from raoe_train.evaluation.retrieval import read_passages

KEYS = ("range_min", "range_max", "max_score", "absolute_margin", "relative_margin", "num_negatives",
        "sampling_strategy", "cross_encoder")  # fmt: skip


class _Resumable:
    """An encoder for mine_hard_negatives whose embeddings are kept as shards, so that an interrupted job resumes."""

    device = "cpu"
    similarity, similarity_pairwise = staticmethod(dot_score), staticmethod(pairwise_dot_score)  # of unit rows

    def __init__(self, encoder: FrozenEncoder, cache: str | Path) -> None:
        self.encoder, self.cache = encoder, cache

    def encode_query(self, texts: list[str], *, kind: str = "query", **_: Any) -> np.ndarray:
        return unit_rows(embeddings(self.encoder, texts, "reference", self.cache, kind))

    def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
        return self.encode_query(texts, kind="document")


def mine_negatives(config: Any, path: Path) -> dict[str, Any]:
    """Mine negatives for the rows of data.input from its passages and those of mining.corpus; see the job `mine`."""
    data, model, mining = config.data, config.model, config.mining
    table, counts = row_table(data.input, columns=data.columns or None, on_error=data.on_error)
    pairs = [*dict.fromkeys(zip(table["anchor"][:], table["positive"][:], strict=True))]
    more = read_passages(mining.corpus, data.on_error).values() if mining.corpus else ()
    corpus = [*dict.fromkeys([*Texts({"": table.remove_columns("anchor")}), *more])]
    keywords, cross = {key: getattr(mining, key) for key in KEYS}, mining.cross_encoder
    if cross and all(value is None for value in (mining.max_score, mining.absolute_margin, mining.relative_margin)):
        raise ValueError("mining.cross_encoder has no effect without max_score, absolute_margin or relative_margin")
    settings = {"model": identity(model), "input": digest([pairs, corpus]), "mining": {**keywords, "seed": mining.seed},
                "cross_encoder": fingerprint(cross or "")}  # fmt: skip
    output = Output(path, settings, config.overwrite)
    if finished := output.finished():
        print(f"{path} is already finished, from the same texts and settings")
        return finished
    random.seed(mining.seed)
    lists = mine_hard_negatives(
        table.select_columns(["anchor", "positive"]),
        _Resumable(model, model.cache or output.parts),  # type: ignore[arg-type]
        corpus=corpus,
        output_format="labeled-list",  # [positive, negatives …], the only format of one row that may have fewer
        faiss_batch_size=max(1, CHUNK // len(corpus)),  # queries at a time, also without FAISS
        verbose=False,
        **keywords | {"cross_encoder": CrossEncoder(cross, device=model.device) if cross else None},
    )
    mined = {(query, texts[0]): texts[1:] for query, texts in zip(lists["anchor"], lists["positive"], strict=True)}
    if not mined:
        raise ValueError(f"{data.input}: no passage qualifies as a negative: lower the margins or raise max_score")
    rows = [[*pair, *mined.get(pair, [])] for pair in pairs]
    numbers = [len(row) - 2 for row in rows]
    columns = ["anchor", "positive", "negative", *(f"negative_{number}" for number in range(2, max(numbers) + 1))]
    output.begin()
    write_rows(output.path, columns, (dict(zip(columns, row, strict=False)) for row in rows))
    fewer, total = sum(number < mining.num_negatives for number in numbers), sum(numbers)
    print(f"{len(rows)} rows with {total} negatives, {fewer} with fewer than {mining.num_negatives} -> {path}")
    counted = {"rows": len(rows), "negatives": total, "fewer": fewer, "passages": len(corpus)}
    return output.finish({**counted, "read": counts})

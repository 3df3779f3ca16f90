"""Measure the memory of a job that grows with its data (scale.md): `python docs/lab/memory.py JOB ROWS [WIDTH]`.

JOB is encode (ROWS texts), mine or retrieval (ROWS passages, 1,000 queries), pairs (ROWS scored pairs) or rows (ROWS
rows of a query, a passage and a negative). The encoder is a StaticEmbedding of WIDTH numbers (384 by default) with
random weights. Prints the peak memory of the process above its peak after the same job with 2,000 rows, in MB, and the
CPU time in seconds."""

import itertools
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

import raoe_train as rt
from raoe_train.data.rows import row_table

WARM_UP, QUERIES = 2_000, 1_000


def text(number):
    return f"text number {number} of {number % 977}"


def write(path, lines):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    return str(path)


def rows_of(path, numbers):
    rows = ({"_id": str(number), "text": text(number)} for number in numbers)
    return write(path, map(json.dumps, rows))


def run(job, count, folder, encoder):
    folder.mkdir()
    model = {"model.name": encoder, "model.device": "cpu"}
    if job == "encode":
        source = write(folder / "texts.txt", map(text, range(count)))
        rt.encode(None, **model, **{"data.input": source}, output=str(folder / "out.npy"))
    elif job == "mine":
        pairs = (json.dumps({"query": f"query {number}", "positive": text(number)}) for number in range(QUERIES))
        settings = {"data.input": write(folder / "rows.jsonl", pairs)}
        settings["mining.corpus"] = rows_of(folder / "corpus.jsonl", range(count))
        rt.mine(None, **model, **settings, output=str(folder / "out.jsonl"))
    elif job == "retrieval":
        rows_of(folder / "corpus.jsonl", range(count))
        rows_of(folder / "queries.jsonl", range(QUERIES))
        write(folder / "qrels.tsv", ["query-id\tcorpus-id\tscore", *(f"{n}\t{n + 1}\t1" for n in range(QUERIES))])
        settings = {"tasks": [f"retrieval:{folder}"]}
        rt.evaluate(None, **model, **settings, output=str(folder / "out.json"))
    elif job == "rows":
        rows = ({"query": f"query {n}", "positive": text(n), "negative": text(7 * n + 1)} for n in range(count))
        assert len(row_table(write(folder / "rows.jsonl", map(json.dumps, rows)))[0]) == count
    else:
        pairs = (f"{text(number)}\t{text(7 * number)}\t{number % 6}" for number in range(count))
        source = write(folder / "pairs.tsv", itertools.chain(["sentence1\tsentence2\tscore"], pairs))
        assert len(rt.read_pairs(source)) == count


if __name__ == "__main__":
    job, count, *width = sys.argv[1:]
    with tempfile.TemporaryDirectory() as made:
        words = ["[UNK]", "text", "number", "of", "query", *map(str, range(1_000))]
        tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        encoder = str(Path(made, "encoder"))
        embedding = StaticEmbedding(tokenizer, embedding_dim=int(*width or [384]))
        SentenceTransformer(modules=[embedding], device="cpu").save_pretrained(encoder)
        run(job, WARM_UP, Path(made, "small"), encoder)
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        run(job, int(count), Path(made, "large"), encoder)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"{job} {count}: {peak:.0f} MB, {time.process_time() - started:.0f} s")

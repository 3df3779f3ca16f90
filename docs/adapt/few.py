"""Run a draw of the proof with few labels (proof.md): `python docs/adapt/few.py headlines 300 0 MODEL rows.jsonl`.

A row has, for each rule, what is saved, the lowest p, the seconds of CPU time, and the score of the saved encoder on
unseen rows of the target and on SICK. With a sixth argument, `shuffled`, the labels are in random order and only the
folds are tried."""

import csv
import gzip
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import raoe_train as rt

DATA = Path(__file__).parents[3] / "shared/data"
SCORED, LABELLED = ("sentence1", "sentence2", "score"), ("premise", "hypothesis", "label")
CLASSES = {"entailment": 1.0, "neutral": 0.5, "contradiction": 0.0}
RULES = {
    "today": {"data.dev_share": 0.3},
    "folds": {"data.dev_share": "auto"},
    "all": {"data.dev_share": 0, "evaluation.certificate": False},
}


def read(source, keep, columns):
    """The rows of a gzipped TSV file that `keep` selects: (text, text, score)."""
    with gzip.open(DATA / source, "rt", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if keep(row)]
    triples = [tuple(row[name] for name in columns) for row in rows]
    return [(first, second, float(CLASSES.get(score, score))) for first, second, score in triples if score != "-"]


def split(source, columns, train="train", test="test"):
    return [read(source, lambda row, part=part: row["split"] == part, columns) for part in (train, test)]


def target(name):
    """(rows to draw from, test rows in random order)."""
    if name == "headlines":
        sources = ("sts/sts14.tsv.gz", "sts/sts15.tsv.gz")
        pool, test = (read(source, lambda row: row["subset"] == name, SCORED) for source in sources)
    elif name == "snli":
        pool, test = split("nli/snli.tsv.gz", LABELLED, "train_sample")
    elif name == "mrpc":
        pool, test = split("transfer/mrpc.tsv.gz", (*SCORED[:2], "label"))
    else:
        pool, test = split(f"sts/{name}.tsv.gz", SCORED)
    random.Random(0).shuffle(test)
    return pool, test


def write(path, rows):
    lines = ["\t".join(SCORED), *("\t".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def draw(name, count, number, model, shuffled):
    """A row of the proof."""
    pool, test = target(name)
    generator = random.Random(1000 * number + count)
    rows, result = generator.sample(pool, count), {"target": name, "rows": count, "draw": number, "shuffled": shuffled}
    if shuffled:
        scores = [score for *_, score in rows]
        generator.shuffle(scores)
        rows = [(first, second, score) for (first, second, _), score in zip(rows, scores, strict=True)]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tasks = [write(folder / "unseen.tsv", test[:600]), write(folder / "sick.tsv", target("sick")[1][:500])]
        settings = {"model.name": model, "data.train": [write(folder / "train.tsv", rows)], "training.seed": 42}
        for rule in ["folds"] if shuffled else RULES:
            started = time.process_time()
            own = {**RULES[rule], "output": str(folder / rule), "evaluation.before": rule == "today"}
            metrics = rt.train("adapt", **settings, **own, **({} if shuffled else {"evaluation.tasks": tasks}))
            scores = {when: [each["spearman"] for each in metrics[when].get("tasks", {}).values()]
                      for when in ("before", "after")}  # fmt: skip
            result["start"] = result.get("start") or scores["before"]
            result[rule] = {"seconds": round(time.process_time() - started), "unseen": scores["after"]}
            if certificate := metrics.get("certificate"):
                candidates = certificate["candidates"]
                least = min(row["p"] for candidate, row in candidates.items() if candidate != "start")
                result[rule] |= {"saved": certificate["saved"], "p": least, "candidates": candidates}
    return result


if __name__ == "__main__":
    name, count, number, model, rows, *shuffled = sys.argv[1:]
    made = draw(name, int(count), int(number), model, bool(shuffled))
    with open(rows, "a", encoding="utf-8") as out:
        out.write(json.dumps(made) + "\n")

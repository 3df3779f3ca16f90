"""Run a trial of proof.md, "Search: protocol": `python docs/adapt/search.py keep-0.3 42 MODEL rows.jsonl`.

A row has nDCG@10 x 100 on WikiQA's test set and on Cranfield before and after training, the certificate, and for each
encoder of the run a guard: nDCG@10 of a search for the second halves of training passages with their first halves."""

import gzip
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from proof import commit
from torch.nn import functional

import raoe_train as rt
from raoe_train.losses.keep import Keep

DATA = Path(__file__).parents[3] / "shared/data/retrieval"
TRIALS = {  # settings that a trial adds to the recipe
    "adapt": {},
    "keep-0": {"training.keep": 0},
    "scores-0.1": {"training.keep": 0.1},
    "scores-0.3": {"training.keep": 0.3},
    "scores-1": {"training.keep": 1},
    "folds": {"data.dev": []},
    "negatives-0": {"data.num_negatives": 0},
    "lora-16": {"model.lora": {"r": 16, "lora_alpha": 32}},
    "lora-16-2e-4": {"model.lora": {"r": 16, "lora_alpha": 32}, "training.learning_rate": 2e-4},
}


def keep_scores(self, now, before):
    """The regularizer of the trials `scores-…`, for Keep.__call__: the mean over the texts of a batch of the divergence
    KL(before || now) between the distributions softmax(20 cos) over the other texts of the batch."""

    def others(embeddings):
        unit = functional.normalize(embeddings.float(), dim=-1)
        cosines = 20 * unit @ unit.T
        eye = torch.eye(len(cosines), dtype=torch.bool, device=cosines.device)
        return cosines.masked_fill(eye, -1e4).log_softmax(-1)

    return self.weight * functional.kl_div(others(now), others(before), log_target=True, reduction="batchmean")


def guard_task(folder):
    """Write a BEIR folder whose queries are the first halves of 500 training passages, and its corpus the others."""
    with gzip.open(DATA / "wikiqa.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if row["split"] == "train"]
    passages = dict.fromkeys(text for row in rows for text in (*row["pos"], *row["neg"]) if len(text.split()) > 15)
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for words in map(str.split, [*passages][:500])]
    folder.mkdir()
    for name, side in (("queries", 0), ("corpus", 1)):
        texts = (json.dumps({"_id": str(row), "text": " ".join(half[side])}) for row, half in enumerate(halves))
        (folder / f"{name}.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    judged = [f"{row}\t{row}\t1" for row in range(len(halves))]
    (folder / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n", encoding="utf-8")
    return f"retrieval:{folder}"


def scores(results):
    return [round(each[each["main"]], 3) for each in results["tasks"].values()]


def trial(name, seed, model):
    """A row."""
    started = time.process_time()
    if name.startswith("scores"):
        Keep.__call__ = keep_scores
    with tempfile.TemporaryDirectory() as made:
        output, tasks = Path(made, "encoder"), [f"retrieval:{DATA}/wikiqa.jsonl.gz#test", f"retrieval:{DATA}/cranfield"]
        tasks.append(guard_task(Path(made, "guard")))
        settings = {
            "model.name": model,
            "data.train": [f"{DATA}/wikiqa.jsonl.gz#train"],
            "data.dev": [f"{DATA}/wikiqa.jsonl.gz#dev"],
            "training.seed": seed,
            "evaluation.tasks": tasks,
            "output": str(output),
        }
        result = rt.train("adapt", **settings | TRIALS[name])
        row = {"trial": name, "seed": seed, "commit": commit(), "tasks": ["wikiqa", "cranfield", "halves"]}
        row |= {"before": scores(result["before"]), "after": scores(result["after"]), "dev": result.get("dev")}
        return row | {"seconds": round(time.process_time() - started), "certificate": result["certificate"]}


if __name__ == "__main__":
    name, seed, model, rows = sys.argv[1:]
    row = trial(name, int(seed), model)
    with open(rows, "a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")

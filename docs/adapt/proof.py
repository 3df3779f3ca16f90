"""Run a cell of proof.md and append its row to a file: `python docs/adapt/proof.py sick adapt mpnet 43 rows.jsonl`.

For a control, a sixth argument sets the peak learning rate (default 5e-5)."""

import csv
import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import raoe_train as rt

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY.parent / "shared/data"
STS = ("sick", "stsb", "sts12", "sts14", "sts15")
OTHERS = {"headlines": ("sick", "sts12")}  # the other sets have headlines
STEPS = {"sick": 142, "stsb": 180, "sts12": 100, "headlines": 100, "snli": 282, "mrpc": 116}  # of adapt
CONTROLS = {  # cosent-5 since 2026-11-29: with its default scale of 20, CoSENTLoss harms pretrained encoders
    "mse": {"loss": "CosineSimilarityLoss"},
    "cosent": {"loss": "CoSENTLoss"},
    "cosent-5": {"loss": "CoSENTLoss", "loss.scale": 5.0},
}
COLUMNS = {"snli": ("premise", "hypothesis", "label"), "mrpc": ("sentence1", "sentence2", "label")}


def part(source, target, keep, most=None):
    """Write the rows of a gzipped TSV file that `keep` selects as sentence1, sentence2 and score or label."""
    with gzip.open(DATA / source, "rt", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if keep(row)][:most]
    names = COLUMNS.get(target.stem.split("-")[0], ("sentence1", "sentence2", "score"))
    header = "sentence1", "sentence2", "score" if target.stem.startswith("mrpc") else names[2]
    text = "\n".join("\t".join(row) for row in [header, *([row[name] for name in names] for row in rows)])
    target.write_text(text + "\n", encoding="utf-8")
    return target


def files(name, folder):
    """The training file of a target, its dev file or None, and its test file."""
    train, test = folder / f"{name}-train.tsv", folder / f"{name}-test.tsv"
    if name == "headlines":
        sources, splits = ("sts/sts14.tsv.gz", "sts/sts15.tsv.gz"), None
    elif name == "snli":
        sources, splits = ("nli/snli.tsv.gz",) * 2, ("train_sample", "test")
    elif name == "mrpc":
        sources, splits = ("transfer/mrpc.tsv.gz",) * 2, ("train", "test")
    else:
        source = DATA / f"sts/{name}.tsv.gz"
        return f"{source}#train", f"{source}#dev" if name != "sts12" else None, name
    for source, path, split in zip(sources, (train, test), splits or (None, None), strict=True):
        most = 3000 if path.stem == "snli-test" else None
        part(source, path, lambda row, split=split: row["split"] == split if split else row["subset"] == name, most)
    return str(train), None, f"sts:{test}"


def commit():
    words = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()


def cell(name, method, model, seed, rate):
    """A row: the target's test score and those of the STS sets after training."""
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        train, dev, test = files(name, Path(folder))
        settings = {
            "model.name": model,
            "data.train": [train],
            "data.dir": str(DATA),
            "training.seed": seed,
            "evaluation.before": False,
            "evaluation.tasks": [*([test] if test not in STS else []), *OTHERS.get(name, STS)],
            "output": f"{folder}/encoder",
        }
        if name == "snli" and method in CONTROLS:  # `adapt` reads such labels as scores, which the losses do not
            text = Path(train).read_text(encoding="utf-8")
            for label, score in (("entailment", 1), ("neutral", 0.5), ("contradiction", 0), ("label", "score")):
                text = text.replace(f"\t{label}\n", f"\t{score}\n")
            Path(train).write_text(text, encoding="utf-8")
        if dev and method == "adapt":
            settings["data.dev"] = [dev]
        if method in CONTROLS:
            settings |= {
                **CONTROLS[method],
                "data.score_scale": [0, 5] if name in (*STS, "headlines") else [],
                "data.dev_share": 0,
                "training.keep": 0,
                "training.learning_rate": rate,
                "training.max_steps": STEPS[name],
                "training.eval_strategy": "no",
                "evaluation.certificate": False,
            }
        result = rt.train("adapt", **settings)
    tasks = {task.rpartition("/")[2]: scores[scores["main"]] for task, scores in result["after"]["tasks"].items()}
    row = {"target": name, "model": Path(model).name, "seed": seed, "run": method, "commit": commit()}
    row |= {"lr": rate} if method in CONTROLS else {}
    row |= {"seconds": round(time.time() - started), "tasks": tasks}
    return row | ({"certificate": result["certificate"]} if "certificate" in result else {})


if __name__ == "__main__":
    name, method, model, seed, rows, *rate = sys.argv[1:]
    row = cell(name, method, model, int(seed), float(*rate or [5e-5]))
    with open(rows, "a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")

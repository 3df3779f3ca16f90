"""SentEval's folders: valid files of each layout, and the naive reading of them."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from raoe_train.data.columns import Columns
from raoe_train.data.mining import labelled_table
from raoe_train.data.pairs import pair_table
from raoe_train.data.public import senteval_splits
from raoe_train.data.sources import pooled
from tests.fuzz.mutations import spoilt_bytes
from tests.fuzz.naive import lines, number, text, word
from tests.fuzz.tables import say

SUBSETS = ("FNWN", "headlines", "OnWN")
LAYOUTS = {
    "mr": {"MR/rt-polarity.pos": "", "MR/rt-polarity.neg": ""},
    "trec": {"TREC/train_5500.label": "train", "TREC/TREC_10.label": "test"},
    "mrpc": {f"MRPC/msr_paraphrase_{split}.txt": split for split in ("train", "test")},
    "sst2": {f"SST/binary/sentiment-{split}": split for split in ("train", "dev", "test")},
    "stsb": {f"STS/STSBenchmark/sts-{split}.csv": split for split in ("train", "dev", "test")},
    "sick": {"SICK/SICK_train.txt": "train", "SICK/SICK_trial.txt": "dev", "SICK/SICK_test_annotated.txt": "test"},
    "sts13": {f"STS/STS13-en-test/STS.input.{subset}.txt": "test" for subset in SUBSETS},
}
HEADED = {
    "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n",
    "sick": "pair_ID\tsentence_A\tsentence_B\tscore\tjudgment\n",
}


def _gold(file: str) -> str:
    return file.replace("STS.input.", "STS.gs.")


def _line(name: str, rng: Random, n: int) -> str:
    a, b = say(rng, n), say(rng, -n)
    return {
        "mr": a, "trec": f"DESC:def {a}", "mrpc": f"{n % 2}\t1\t2\t{a}\t{b}", "sst2": f"{a}\t{n % 2}",
        "stsb": f"main\tfile\t2012\t{n}\t{n / 7:.3f}\t{a}\t{b}", "sick": f"{n}\t{a}\t{b}\t{1 + n % 4}.5\tNEUTRAL",
        "sts13": f"{a}\t{b}",
    }[name]  # fmt: skip


def made(name: str, rng: Random) -> dict[str, bytes]:
    """A valid set in SentEval's layout: {file: content}."""
    files = {}
    encoding = "latin-1" if name in ("mr", "trec") else "utf-8"
    for file in LAYOUTS[name]:
        count = rng.randrange(1, 5)
        body = "".join(_line(name, rng, n) + "\n" for n in range(count))
        files[file] = (HEADED.get(name, "") + body).encode(encoding, "replace")
        if name == "sts13":
            files[_gold(file)] = "".join(rng.choice(("", f"{n}.25")) + "\n" for n in range(count)).encode()
    return files


def right(name: str, files: dict[str, bytes]) -> list[dict[str, Any]]:
    """The naive reading."""
    found = []
    for file, split in LAYOUTS[name].items():
        every = lines(files[file], "latin-1" if name in ("mr", "trec") else "utf-8")
        scores = lines(files[_gold(file)]) if name == "sts13" else []
        for place, line in enumerate(every):
            if line is None or (name in HEADED and place == 0):
                continue
            parts = line.split("\t")
            row: dict[str, Any]
            if name == "mr":
                row = {"text": _tokens(line), "label": "01"[file.endswith("pos")]}
            elif name == "trec":
                head, colon, rest = line.partition(":")
                row = {"text": _tokens(rest.partition(" ")[2]) if colon else None, "label": word(head)}
            elif name == "sst2":
                both = len(parts) > 1
                row = {"text": _tokens(parts[0]), "label": word(_tokens(parts[1]) if both else None)}
            elif name == "mrpc":
                first, second = (_tokens(part) for part in parts[3:5]) if len(parts) > 4 else (None, None)
                row = {"text": first, "second": second, "label": word(_tokens(parts[0]))}
            elif name == "sts13":
                score = scores[place] if place < len(scores) else ""
                first, second = (_tokens(part) for part in parts[:2]) if len(parts) > 1 else (None, None)
                subset = file.split(".")[2]
                row = {"sentence1": first, "sentence2": second, "score": number(score), "subset": subset}
            else:
                at = (4, 5, 6) if name == "stsb" else (3, 1, 2)
                its = [_tokens(parts[place]) for place in at] if len(parts) > max(at) else [None] * 3
                row = {"sentence1": its[1], "sentence2": its[2], "score": number(its[0])}
            if None not in row.values() and all(text(row[column]) for column in row if column != "score"):
                found.append(row | ({"split": split} if "label" in row else {}))
    return found


def _tokens(said: str) -> str:
    return " ".join(said.split())


def read(rng: Random, folder: Path) -> tuple[Any, Any, bool, tuple[str, ...]]:
    """(what is read of a set of which a file may be spoilt, or the error; the naive reading; whether every row has to
    be there; names that a message may have)."""
    name = rng.choice(list(LAYOUTS))
    files = made(name, rng)
    for _ in range(rng.choice((0, 1, 1, 2))):
        file = rng.choice(list(files))
        files[file] = spoilt_bytes(files[file], rng)
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    how = rng.choice(("raise", "skip"))
    try:
        sources = pooled(name, list((senteval_splits(folder, name) or {}).values()), Columns())
        if "score" in next(iter(right(name, made(name, Random(0))))):
            table = pair_table(sources, require=("score",), any_labels=True, on_error=how)[0]
        else:
            table = labelled_table(sources, on_error=how)[0]
        found: Any = table.to_list()
    except BaseException as error:
        found = error
    return found, right(name, files), how == "raise", tuple(Path(file).name for file in files)
